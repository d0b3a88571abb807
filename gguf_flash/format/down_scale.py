"""The scales of down codes: what a Q8_0 down matrix keeps resident (SPEC section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gguf_flash.format.container import Tensor, reject

if TYPE_CHECKING:
    from gguf_flash.format.layout import LayerBundle

__all__ = ["CODE_BLOCK", "check_down_scales", "down_scale_name"]

# Neurons that share a scale for each column.
CODE_BLOCK = 32


def down_scale_name(layer: int) -> str:
    """The tensor of block ``layer``'s scales, F16 {n_embd, n_ff / CODE_BLOCK}."""
    return f"blk.{layer}.ffn_down_scale"


def check_down_scales(
    path: Path, tensors: Mapping[str, Tensor], bundles: Sequence[LayerBundle], n_embd: int
) -> None:
    """R25: every layer whose down part is codes has whole blocks of neurons, and their scales."""
    for b in bundles:
        if not b.has_codes:
            continue
        if b.n_ff % CODE_BLOCK or b.n_ff < 2 * CODE_BLOCK:
            raise reject(
                25,
                path,
                f"layer {b.layer} has down codes for {b.n_ff} neurons, a multiple of {CODE_BLOCK}"
                f" from {2 * CODE_BLOCK} expected",
            )
        name, shape = down_scale_name(b.layer), (n_embd, b.n_ff // CODE_BLOCK)
        t = tensors.get(name)
        if t is None or t.type.name != "F16" or t.shape != shape:
            found = "none" if t is None else f"{t.type.name} {t.shape}"
            raise reject(
                25, path, f"scales '{name}' of shape {shape} in F16 expected, found {found}"
            )
