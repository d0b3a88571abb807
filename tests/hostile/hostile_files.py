"""Malformed flash-GGUF files, each named after the rule of SPEC.md that it breaks.

Bytes are laid out in hostile_model from SPEC.md alone, without gguf_flash, so these files also
check that the specification suffices.  ``python hostile_files.py FOLDER`` writes all of them, and
``good`` ones, for readers in other languages.
"""

from __future__ import annotations

import sys
from pathlib import Path

import container_cases  # noqa: F401  (adds its cases to the list, as the others do)
import key_cases  # noqa: F401
import predictor_cases  # noqa: F401
import tensor_cases  # noqa: F401
import threshold_cases  # noqa: F401
from cases import CASES
from good_cases import GOOD, good_model
from hostile_model import good
from split_cases import SPLIT_CASES, split_set

__all__ = ["ALL_CASES", "GOOD_CASES", "write_case"]


def write_case(folder: Path, name: str) -> Path:
    """Write the files of one case to ``folder`` and return the one to open."""
    if name in SPLIT_CASES:
        return split_set(folder, name, SPLIT_CASES[name])
    if name == "good_split":
        return split_set(folder, name)
    if name in GOOD:
        model = good_model(name)
    else:
        form, edit = CASES[name]
        model = good(form)
        edit(model)
    # Named like a file of a set, and none: the keys decide.
    end = "-00001-of-00002" if name == "good_ungated" else ""
    path = folder / f"{name}{end}.gguf"
    path.write_bytes(model.encode())
    return path


ALL_CASES = sorted([*CASES, *SPLIT_CASES])
GOOD_CASES = sorted([*GOOD, "good_split"])


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for case_name in [*GOOD_CASES, *ALL_CASES]:
        print(write_case(target, case_name))
