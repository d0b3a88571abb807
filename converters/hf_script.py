"""Upstream's convert_hf_to_gguf.py with our classes beside its own.

``python -m gguf_flash.converters.hf_script convert_hf_to_gguf.py ARGUMENTS``, with the script's
folder on the module path.  An architecture that upstream knows stays upstream's, but for those
that it gets wrong.  Whatever upstream asks for, no code of the checkpoint runs: transformers is
kept from it, and from pickles torch takes tensors only.
"""

from __future__ import annotations

import runpy
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError  # the exception; nothing is unpickled here
from typing import Any, NoReturn

# What config.json calls an architecture, and the module of this folder that registers its class.
OWN_CLASSES = {
    "BambooForCausalLM": "bamboo",
    "OPTForCausalLM": "opt",
    "PersimmonForCausalLM": "persimmon",
}
# The same, in place of upstream's class, on which they are built.
CORRECTED_CLASSES = {"BitNetForCausalLM": "bitnet_hf", "FalconForCausalLM": "falcon_hf"}
_SAFE_TORCH = (2, 6)  # before it, weights_only let code through (CVE-2025-32434)


def _add_own_classes() -> None:
    try:
        import conversion
    except ModuleNotFoundError as error:
        if error.name != "conversion":
            raise
        return  # a script from before upstream's classes were a package: it runs without ours
    # Upstream imports `conversion.<module>` on demand; ours are found after its own.
    conversion.__path__.append(str(Path(__file__).parent))
    for architecture, module in OWN_CLASSES.items():
        conversion.TEXT_MODEL_MAP.setdefault(architecture, module)
    conversion.TEXT_MODEL_MAP.update(CORRECTED_CLASSES)


def forbid_code() -> None:
    """Make ``trust_remote_code=True``, which some of upstream's classes pass, mean nothing."""
    if find_spec("transformers") is None:
        return
    from transformers import dynamic_module_utils as dynamic

    def resolve(
        trust: object, name: object, has_local: bool, has_remote: bool, *more: Any, **others: Any
    ) -> bool:
        if has_remote and not has_local:
            refuse()
        return False

    def refuse(*words: object, **named: object) -> NoReturn:
        raise ValueError(
            "the checkpoint needs Python code that it brings along (auto_map), and code from a"
            " checkpoint is never run; convert it with a llama.cpp that you trust it with, and give"
            " the GGUF"
        )

    for name, replacement in (
        ("resolve_trust_remote_code", resolve),
        ("get_class_in_module", refuse),
        ("get_class_from_dynamic_module", refuse),
    ):
        if not hasattr(dynamic, name):
            raise SystemExit(f"ERROR:hf_script:this transformers has no {name} to forbid code by")
        setattr(dynamic, name, replacement)


def forbid_pickles() -> None:
    """Make ``torch.load`` take tensors only, whoever calls it, and say so in one sentence."""
    if find_spec("torch") is None:
        return
    import torch

    load = torch.load

    def load_tensors(*words: Any, **options: Any) -> Any:
        options["weights_only"] = True
        if tuple(int(n) for n in torch.__version__.split(".")[:2]) < _SAFE_TORCH:
            raise ValueError(
                f"weights in a .bin file need torch {_SAFE_TORCH[0]}.{_SAFE_TORCH[1]} or newer,"
                f" found {torch.__version__}, whose check of pickles can be evaded; update torch,"
                " or give safetensors"
            )
        try:
            if options.get("mmap") and not zipfile.is_zipfile(words[0]):
                options["mmap"] = False  # torch.save before 1.6 wrote what cannot be mapped
            return load(*words, **options)
        except UnpicklingError as error:
            name = Path(str(words[0])).name
            raise ValueError(
                f"'{name}' holds something other than tensors, and pickles are never run; give"
                " safetensors"
            ) from error

    torch.load = load_tensors


def main() -> None:
    """Run the script that the first argument names."""
    forbid_code()
    forbid_pickles()
    _add_own_classes()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
