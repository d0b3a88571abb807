"""Which activation a model runs between its FFN's matrices: asked for, its own, or its graph's."""

from __future__ import annotations

from gguf_flash.converters.architectures import usual_activation
from gguf_flash.errors import ArgumentError
from gguf_flash.format.layout import ACTIVATIONS

__all__ = ["activation_of", "differs_from_table"]

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


def _canonical(name: str) -> str:
    return _SPELLINGS.get(name.lower(), name.lower())


def differs_from_table(arch: str, hidden: str, gated: bool = True) -> bool:
    """True when a checkpoint's activation ``hidden`` is not what llama.cpp runs for ``arch``."""
    return bool(hidden) and usual_activation(arch, gated) not in ("", _canonical(hidden))


def activation_of(arch: str, hidden: str | None, asked: str | None, gated: bool = True) -> str:
    """The activation to record: ``asked`` wins, then the model's own key, then the table; or "".

    Raises ArgumentError when ``asked`` or ``hidden`` names none that the engine has, or when one
    for gates is given to an FFN that is not ``gated``.
    """
    for given, where in ((asked, "--activation"), (hidden, f"'{arch}.hidden_activation'")):
        if given:
            name = _canonical(given)
            if name not in ACTIVATIONS:
                raise ArgumentError(
                    f"activation '{given}' from {where} is unknown to the engine, which has "
                    f"{', '.join(ACTIVATIONS)}; give --activation with the one that the model was "
                    "trained with"
                )
            if name == "drelu" and not gated:
                raise ArgumentError(
                    f"activation 'drelu' from {where} is ReLU of gate and up, and this model's FFN "
                    "has no gate; give another --activation"
                )
            return name
    return usual_activation(arch, gated)
