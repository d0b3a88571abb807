"""Shapes of planted models, and which coordinates of the residual stream mean what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gguf_flash.errors import ArgumentError

__all__ = ["LEAD", "SHAPES", "TYPES", "Shape", "Targets", "custom_shape", "least_tokens"]

TYPES = ("f16", "q8_0", "q4_0")
LEAD = 32  # tokens that only fill the context: the first of a text are all there is to attend to
BLOCK = 32  # values in a block of Q8_0 and Q4_0: parts of the stream begin and end on blocks


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes. gated: Llama's FFN, else squared ReLU without a gate (arcee).

    rank: of a layer's deciding matrix; its predictor has twice as many hidden units, for each
    direction one with its sign and one against it.
    """

    name: str
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    n_vocab: int
    rank: int = 64
    gated: bool = False
    n_ctx: int = 4096

    @property
    def arch(self) -> str:
        """What unpatched llama.cpp runs it as."""
        return "llama" if self.gated else "arcee"

    @property
    def head_dim(self) -> int:
        """Values in a head."""
        return self.n_embd // self.n_head

    @property
    def constant(self) -> slice:
        """Coordinates that are the same in every embedding and that no layer writes."""
        return slice(0, BLOCK)

    @property
    def token(self) -> slice:
        """Coordinates of the current token, that no layer writes."""
        return slice(BLOCK, BLOCK + self._part)

    @property
    def context(self) -> slice:
        """Coordinates that the first layer's attention fills with a mean of the last tokens."""
        return slice(self.token.stop, self.token.stop + self._part)

    @property
    def output(self) -> slice:
        """Coordinates that the FFNs write and that the logits are read from."""
        return slice(self.context.stop, self.n_embd)

    @property
    def _part(self) -> int:
        return (self.n_embd - BLOCK) * 3 // 8 // BLOCK * BLOCK

    def check(self) -> None:
        """Raise ArgumentError for a shape that cannot be planted."""
        wrong = ""
        if self.n_embd % BLOCK or self.n_embd < 128:
            wrong = f"n_embd must be a multiple of {BLOCK}, at least 128, found {self.n_embd}"
        elif self.n_ff % BLOCK or self.n_ff < 128:
            wrong = f"n_ff must be a multiple of {BLOCK}, at least 128, found {self.n_ff}"
        elif self.n_head < 1 or self.n_embd % self.n_head or self.head_dim % 16:
            wrong = (
                f"n_embd {self.n_embd} in {self.n_head} heads gives no head width that is a"
                " multiple of 16; choose another n_head"
            )
        elif self.n_vocab < 320 or self.n_layer < 1:
            wrong = (
                "a vocabulary of 320 tokens and one layer at least, found"
                f" {self.n_vocab} and {self.n_layer}"
            )
        elif not 1 <= self.rank <= self._part:
            wrong = f"the rank must be in 1..{self._part}, found {self.rank}"
        if wrong:
            raise ArgumentError(f"cannot plant this shape: {wrong}")

    def stream(self) -> NDArray[np.float32]:
        """A zero vector of the residual stream: float32 [n_embd]."""
        return np.zeros(self.n_embd, np.float32)


SHAPES = {
    s.name: s
    for s in (
        Shape("opt-6.7b", 4096, 16384, 32, 32, 50272),
        Shape("opt-1.3b", 2048, 8192, 24, 32, 50272),
        Shape("llama-7b", 4096, 11008, 32, 32, 32000, gated=True),
    )
}


def custom_shape(
    n_embd: int, n_ff: int, n_layer: int, n_vocab: int, *, gated: bool = False, n_head: int = 0
) -> Shape:
    """A checked shape of one's own; heads of 32 values unless `n_head` says how many."""
    rank = min(64, max(8, n_embd // 16))
    heads = n_head or n_embd // BLOCK
    shape = Shape("custom", n_embd, n_ff, n_layer, heads, n_vocab, rank, gated)
    shape.check()
    return shape


@dataclass(frozen=True)
class Targets:
    """What is planted, as shares of a layer's neurons; the defaults are the paper's OPT.

    active: not zero for a token. predicted: selected for a token. false_negatives: share of the
    active that are not selected. used: selected by `window` tokens together. new: selected by a
    token and by none of the `window` before it.
    """

    active: float = 0.03
    predicted: float = 0.10
    false_negatives: float = 0.05
    used: float = 0.24
    new: float = 0.024
    window: int = 5

    @classmethod
    def of_active(cls, active: float) -> Targets:
        """The paper's proportions at another share of active neurons."""
        by = active / cls.active
        return cls(active, by * cls.predicted, cls.false_negatives, by * cls.used, by * cls.new)

    def check(self) -> None:
        """Raise ArgumentError unless a process can have these shares."""
        ordered = 0 < self.active < self.predicted < self.used < 1
        steps = self.window - 1
        # A window's union grows by less and less with each token, from `predicted` on.
        grows = self.predicted + steps * self.new < self.used < self.predicted * self.window
        if not (ordered and 0 < self.new < self.predicted and grows):
            raise ArgumentError(
                "active < predicted < used < 1 expected, with new at most the mean growth"
                f" (used - predicted) / {steps}, found active {self.active:g}, predicted"
                f" {self.predicted:g}, used {self.used:g}, new {self.new:g}"
            )
        if not 0 < self.false_negatives < 1:
            raise ArgumentError(f"false negatives in 0..1 expected, found {self.false_negatives:g}")


def least_tokens(window: int) -> int:
    """So many must be run for the shares of a window to be measured."""
    return LEAD + 2 * window
