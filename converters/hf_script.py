"""Upstream's convert_hf_to_gguf.py with our classes beside its own.

``python -m gguf_flash.converters.hf_script convert_hf_to_gguf.py ARGUMENTS``, with the script's
folder on the module path.  An architecture that upstream knows stays upstream's, but for those
that it gets wrong.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

# What config.json calls an architecture, and the module of this folder that registers its class.
OWN_CLASSES = {
    "BambooForCausalLM": "bamboo",
    "OPTForCausalLM": "opt",
    "PersimmonForCausalLM": "persimmon",
}
# The same, in place of upstream's class, on which they are built.
CORRECTED_CLASSES = {"BitNetForCausalLM": "bitnet_hf", "FalconForCausalLM": "falcon_hf"}


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


def main() -> None:
    """Run the script that the first argument names."""
    _add_own_classes()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
