"""Which activation each llama.cpp architecture runs between the FFN's matrices.

Taken from the ``build_ffn`` calls in the pinned ``src/models/*.cpp`` and in ``cpp_patch/models``.
``LLM_FFN_GELU`` is ggml's tanh form, here called ``gelu``; the fused operations SWIGLU and GEGLU
are ``silu`` and ``gelu`` of the first half.  An architecture whose activation depends on more than
its name is not listed.
"""

from __future__ import annotations

from gguf_flash.errors import ArgumentError
from gguf_flash.format.layout import ACTIVATIONS

__all__ = ["activation_of", "bypasses_build_ffn", "differs_from_table"]

_SILU = """
afmoe arwkv7 baichuan chameleon chatglm command-r cohere2 deci dream ernie4_5 eurobert exaone
exaone4 falcon-h1 glm4 granite granitehybrid hunyuan-dense hunyuan_vl internlm2 jais lfm2 llada
llama llama4 llama-embed maincoder minicpm minicpm3 mistral3 muse-glimmer nanbeige neo-bert
nomic-bert olmo olmo2 openelm orion paddleocr pangu-embedded phi3 plamo plamo2 plamo3 qwen qwen2
qwen2vl qwen3 qwen35 qwen3vl refact rwkv6qwen2 seed_oss smollm3 stablelm talkie xverse
"""
_GELU = """
bert bloom codeshell falcon gemma gemma2 gemma3 gemma4 gemma-embedding gpt2 gptneox jina-bert-v2
jina-bert-v3 modern-bert mpt phi2 spark2_5 starcoder starcoder2
"""
_RELU = "opt"
_RELU_SQR = "arcee jais2 nemotron nemotron_h persimmon plm"

_BY_ARCH = {
    arch: name
    for name, archs in (("silu", _SILU), ("gelu", _GELU), ("relu", _RELU), ("relu_sqr", _RELU_SQR))
    for arch in archs.split()
}

# What checkpoints call the same functions. Upstream's graphs run the tanh form for "gelu".
_SPELLINGS = {
    "swish": "silu",
    "swiglu": "silu",
    "geglu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu2": "relu_sqr",
    "relu_squared": "relu_sqr",
}

# Their graphs multiply the FFN matrices themselves, so no engine behind build_ffn can serve them.
_OWN_FFN = frozenset(("apertus", "bitnet", "gemma3n", "rwkv6", "rwkv7"))


def bypasses_build_ffn(arch: str) -> bool:
    """True for architectures whose FFN does not run through llama.cpp's ``build_ffn`` alone."""
    return arch in _OWN_FFN


def _canonical(name: str) -> str:
    return _SPELLINGS.get(name.lower(), name.lower())


def differs_from_table(arch: str, hidden: str) -> bool:
    """True when a checkpoint's activation ``hidden`` is not what llama.cpp runs for ``arch``."""
    return bool(hidden) and _BY_ARCH.get(arch, "") not in ("", _canonical(hidden))


def activation_of(arch: str, hidden: str | None, asked: str | None) -> str:
    """The activation to record: ``asked`` wins, then the model's own key, then the table; or "".

    Raises ArgumentError when ``asked`` or ``hidden`` names none that the engine has.
    """
    for given, where in ((asked, "--activation"), (hidden, f"'{arch}.hidden_activation'")):
        if given:
            name = _canonical(given)
            if name not in ACTIVATIONS:
                raise ArgumentError(
                    f"activation '{given}' from {where} is unknown, expected one of "
                    f"{', '.join(ACTIVATIONS)}; give --activation"
                )
            return name
    return _BY_ARCH.get(arch, "")
