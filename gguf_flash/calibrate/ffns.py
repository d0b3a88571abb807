"""The FFNs of a dense GGUF that can be recorded, whatever the architecture, and their norms."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gguf_flash.errors import UnsupportedError

if TYPE_CHECKING:
    from gguf_flash.converters.dense import DenseModel
    from gguf_flash.format.container import Tensor

__all__ = ["Ffn", "down_norm", "find_ffns"]

_PART = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.weight")
_EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)(_(ch|sh)?exps?|\.\d+)\.")
_BLOCK_BYTES = 8 << 20  # of decoded rows


@dataclass(frozen=True)
class Ffn:
    """The FFN of block `layer`: its neurons, and its down matrix of `n_embd` rows of `n_ff`."""

    layer: int
    n_ff: int
    n_embd: int
    down: Tensor


def find_ffns(dense: DenseModel) -> list[Ffn]:
    """The blocks of `dense` with an up or gate and a down matrix, ascending.

    Raises UnsupportedError, in one sentence, for a mixture of experts and a file without FFNs.
    """
    where = f"cannot record '{dense.path}'"
    parts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in dense.tensors.items():
        if _EXPERTS.search(name):
            raise UnsupportedError(
                f"{where}: it is a mixture of experts ('{name}'); give a model with one dense FFN"
                " in each layer"
            )
        if match := _PART.fullmatch(name):
            parts.setdefault(int(match[1]), {})[match[2]] = tensor
    found = [_ffn(where, n, p) for n, p in sorted(parts.items()) if "down" in p and len(p) > 1]
    if not found:
        raise UnsupportedError(
            f"{where}: no block has 'ffn_down' and 'ffn_up' or 'ffn_gate' matrices; give a language"
            " model with dense FFN layers"
        )
    for ffn in found:
        if ffn.n_embd != found[0].n_embd:
            raise UnsupportedError(
                f"{where}: the FFN of block {ffn.layer} is {ffn.n_embd} wide and that of block"
                f" {found[0].layer} {found[0].n_embd}; a recording holds one width"
            )
    return found


def _ffn(where: str, layer: int, parts: dict[str, Tensor]) -> Ffn:
    down = parts["down"]
    if len(down.shape) != 2 or not down.type.weight:
        raise UnsupportedError(
            f"{where}: '{down.name}' must be a matrix of weights, found shape {list(down.shape)} of"
            f" type {down.type.name}"
        )
    return Ffn(layer, down.shape[0], down.shape[1], down)


def down_norm(dense: DenseModel, ffn: Ffn) -> NDArray[np.float32]:
    """float32 (n_ff): the Euclidean norm of each column of ffn_down, one per neuron.

    Reads the matrix in pieces of a few MiB; sums are float64.
    """
    from gguf_flash.converters.rows import dequantize_rows

    squares = np.zeros(ffn.n_ff, np.float64)
    step = max(1, _BLOCK_BYTES // (4 * ffn.n_ff))
    for begin in range(0, ffn.n_embd, step):
        encoded = dense.rows(ffn.down, begin, min(begin + step, ffn.n_embd))
        rows = dequantize_rows(ffn.down.type, encoded, ffn.n_ff)
        squares += np.square(rows, dtype=np.float64).sum(axis=0)
    return np.sqrt(squares).astype(np.float32)
