"""Thresholds that make a dense model sparse without training, and what they cost.

Every layer gets the threshold that zeroes a given share of its activations on a text. The text is
read twice: the thresholds of the first pass change what later layers are given, and the second
pass, with them in force, corrects for it. What they cost is measured on the rest of the text,
which was not used to choose them. Nothing is written: a `Meter` cuts the dense model's activations.

Small is an activation |act(gate x)| up to t, one t for each layer (`magnitude`, as in CATS,
arXiv 2404.08763), or |act(gate x)| times the norm of the neuron's down row (`weighted`): then a
neuron's threshold is t divided by that norm. For the ReLUs it is the activation's input.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.calibrate.collector import check_environment
from gguf_flash.calibrate.ffns import Ffn, down_norm
from gguf_flash.errors import ArgumentError, UnsupportedError
from gguf_flash.format.container import Value, encode_value
from gguf_flash.format.thresholds import CRITERIA, LARGEST_THRESHOLD, Sparsity
from gguf_flash.perplexity import perplexity, token_windows
from gguf_flash.progress import Progress
from gguf_flash.session import Session
from gguf_flash.settings import Settings

if TYPE_CHECKING:
    from gguf_flash._core import Meter
    from gguf_flash.converters.dense import DenseModel, FfnLayer

__all__ = ["FoundThresholds", "find_thresholds", "parse_share", "split_text"]

_BATCH = 128  # as in `collector`
_HELD_OUT = 0.25  # of the text's characters, at its end
_LARGEST = np.float32(LARGEST_THRESHOLD)
_PASSES = 2


@dataclass(frozen=True)
class FoundThresholds:
    """What `find_thresholds` found: `layers`, one float for each block (magnitude), or `neurons`,
    float32 (n_ff) for each (weighted); and what they cost."""

    layers: dict[int, float]
    neurons: dict[int, NDArray[np.float32]]
    sparsity: Sparsity

    def keys(self) -> dict[str, Value]:
        """The keys of a file that has the thresholds, but `flash_ffn.threshold`."""
        s = self.sparsity
        kinds: dict[str, tuple[str, Any]] = {
            **{n: ("f32", getattr(s, n)) for n in ("target", "perplexity", "dense_perplexity")},
            "mean_kl": ("f32", max(0.0, s.mean_kl)),  # a sum of rounded terms may fall below
            **{n: ("str", getattr(s, n)) for n in ("criterion", "text")},
            **{n: ("u32", getattr(s, n)) for n in ("tokens", "held_out")},
            "zeros": ("arr:f32", s.zeros),
        }
        return {f"flash_ffn.sparsity.{n}": encode_value(*v) for n, v in kinds.items()}


def parse_share(text: str) -> float:
    """A share from "50%" or "0.5", at least 0 and less than 1. Raises ArgumentError."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ArgumentError(f"a share such as 50% or 0.5, less than 100%, expected, found '{text}'")
    return share


def split_text(text: str) -> tuple[str, str]:
    """What thresholds are chosen on, and the last quarter, held out; cut after a line if it may."""
    at = int(len(text) * (1 - _HELD_OUT))
    line = text.find("\n", at, at + 10_000)
    at = line + 1 if line >= 0 else at
    return text[:at], text[at:]


def find_thresholds(
    model: str | os.PathLike[str],
    share: float,
    text: str,
    *,
    text_name: str = "",
    shown: str | os.PathLike[str] | None = None,
    criterion: str = "magnitude",
    tokens: int = 4096,
    ctx: int = 512,
    chunks: int = 8,
    activation: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> FoundThresholds:
    """Thresholds by which `share` of the activations of every FFN of the dense `model` are zero.

    Args:
        text: its first three quarters choose (the first `tokens` of them), of the last quarter
            `chunks` windows measure; both are read in windows of `ctx` tokens.
        shown: what messages call the model, when `model` was made from something else.
        criterion: "magnitude" or "weighted".
        activation: in place of the model's own.

    A layer with more zeros than that already, as ReLU gives, gets the threshold 0. Memory beside
    the model, twice open while measuring: 128 KiB and 12 bytes a neuron for each layer.

    Raises:
        ArgumentError: an argument, a text that is too short, a model that has thresholds already,
            GGUF_FLASH_ACTIVATION, GGUF_FLASH_THRESHOLD or GGUF_FLASH_DISABLE=1 set.
        UnsupportedError: a model that cannot be served from flash or whose graph makes itself
            sparse (Gemma 3n), an unknown activation.
        CorruptFileError, IoError: the model.
    """
    _check_arguments(share, criterion, tokens, ctx, chunks)
    check_environment()
    work = _Work(Path(model), Path(shown or model), share, criterion, activation)
    report = progress or (lambda done, total, what: None)
    held_out = split_text(text)[1]
    with Session(work.path, work.settings, shown=work.shown) as session:
        windows = _windows(session, text, ctx, tokens)
        work.choose(session, windows, threads, report)
    steps = _PASSES * len(windows)
    report(steps, steps + 1, "measuring")
    figures = perplexity(
        work.path, held_out, against=work.path, settings=work.settings,
        against_settings=work.settings, ctx=ctx, batch=ctx, chunks=chunks,
        threads=threads, watcher=work.metered(),
    )  # fmt: skip
    sparsity = work.cost(figures, text_name, len(windows) * ctx)
    report(steps + 1, steps + 1, "measuring")
    return FoundThresholds(work.of_layers, work.of_neurons, sparsity)


def _check_arguments(share: float, criterion: str, tokens: int, ctx: int, chunks: int) -> None:
    if criterion not in CRITERIA:
        raise ArgumentError(f"criterion {' or '.join(CRITERIA)} expected, found '{criterion}'")
    if not 0 <= share < 1 or min(tokens, chunks) < 1 or ctx < 4:
        raise ArgumentError(
            "a share from 0 to less than 1, at least one token and window, and windows of at least"
            f" 4 tokens expected, found {share}, {tokens}, {chunks} and {ctx}"
        )


def _windows(session: Session, text: str, ctx: int, tokens: int) -> list[list[int]]:
    """What to choose on; ArgumentError if that or the held-out part is too short."""
    chosen_on, held_out = split_text(text)
    windows, found = token_windows(session, chosen_on, ctx, -(-tokens // ctx))
    measured = len(session.tokenize(held_out))
    if not windows or measured < 2 * ctx:
        raise ArgumentError(
            f"the text is too short: its first three quarters have {found} tokens, at least {ctx}"
            f" expected, its last quarter {measured}, at least {2 * ctx} expected; give a longer"
            " text"
        )
    return windows


class _Work:
    """A dense model, the meter on it, and the thresholds so far."""

    def __init__(
        self, path: Path, shown: Path, share: float, criterion: str, activation: str | None
    ) -> None:
        from gguf_flash._core import Meter
        from gguf_flash.converters.activations import activation_of
        from gguf_flash.converters.dense import DenseModel, find_layers
        from gguf_flash.converters.thresholds import check_without

        self.path, self.shown, self.share, self.criterion = path, shown, share, criterion
        self.of_layers: dict[int, float] = {}
        self.of_neurons: dict[int, NDArray[np.float32]] = {}
        with DenseModel(path, shown=shown) as dense:
            check_without(dense)
            _check_graph(dense)
            own = dense.text(f"{dense.arch}.hidden_activation")
            name = activation_of(dense.arch, own, activation)
            if not name:
                raise UnsupportedError(
                    f"cannot choose thresholds for '{shown}': the activation of architecture"
                    f" '{dense.arch}' is not known; give --activation"
                )
            self.settings = Settings(activation=name if activation else None)
            layers = find_layers(dense)
            self.weights = {x.layer: self._weights(dense, x, name) for x in layers}
            watched = [
                (x.layer, x.gate is not None, self.weights[x.layer], _bias(dense, x))
                for x in layers
            ]
        self.meter: Meter = Meter(str(shown), name, watched)

    def _weights(self, dense: DenseModel, ffn: FfnLayer, activation: str) -> NDArray[np.float32]:
        if self.criterion == "magnitude":
            return np.ones(ffn.n_ff, np.float32)
        norm = down_norm(dense, Ffn(ffn.layer, ffn.n_ff, ffn.down.shape[1], ffn.down))
        # The threshold of relu_sqr is of what is squared.
        return np.sqrt(norm) if activation == "relu_sqr" else norm

    def choose(
        self, session: Session, windows: list[list[int]], threads: int | None, report: Progress
    ) -> None:
        batch = min(len(windows[0]), _BATCH)
        session.open_context(
            n_ctx=len(windows[0]), n_batch=batch, n_ubatch=batch, n_outputs=batch, threads=threads,
            watcher=self.meter,
        )  # fmt: skip
        for number in range(_PASSES):
            self.meter.clear()
            for i, window in enumerate(windows):
                done = number * len(windows) + i
                report(done, _PASSES * len(windows) + 1, "thresholds")
                session.clear()
                for start in range(0, len(window), batch):
                    part = window[start : start + batch]
                    session.decode(part, start, len(part))
                    self.meter.check()
            self._set_thresholds()

    def _set_thresholds(self) -> None:
        """From the scores counted since the last clear."""
        for layer, weights in self.weights.items():
            t = threshold_for(self.meter.buckets(layer), self.share)
            if self.criterion == "magnitude":
                self.of_layers[layer] = t
                cuts = np.full(len(weights), t, np.float32)
            else:
                with np.errstate(divide="ignore", invalid="ignore"):
                    cuts = np.float32(t) / weights
                cuts = np.where(weights > 0, np.minimum(cuts, _LARGEST), _LARGEST)
                cuts = (cuts if t > 0 else np.zeros_like(cuts)).astype(np.float32)
                self.of_neurons[layer] = cuts
            self.meter.set_thresholds(layer, cuts)

    def metered(self) -> Meter:
        """The meter, with the thresholds in force and nothing counted."""
        self.meter.clear()
        return self.meter

    def cost(self, figures: dict[str, Any], text_name: str, tokens: int) -> Sparsity:
        """What `perplexity` found with the meter watching."""
        self.meter.check()
        zeros = [self.meter.zeros(n) / max(1, self.meter.values(n)) for n in self.weights]
        return Sparsity(
            target=self.share,
            criterion=self.criterion,
            text=text_name,
            tokens=tokens,
            held_out=figures["tokens"],
            perplexity=figures["perplexity"],
            dense_perplexity=figures["against_perplexity"],
            mean_kl=figures["mean_kl"],
            zeros=tuple(zeros),
        )


def threshold_for(buckets: NDArray[np.uint64], share: float) -> float:
    """The score up to which `share` of the scores lie, to the next end of a bucket of a `Meter`."""
    total = int(buckets.sum())
    below = np.cumsum(buckets)
    at = int(np.abs(below / max(1, total) - share).argmin())
    if at == 0:  # zeros alone
        return 0.0
    largest = np.array([((at + 1) << 17) - 1], np.uint32).view(np.float32)[0]
    return min(float(largest), float(_LARGEST))


def _bias(dense: DenseModel, ffn: FfnLayer) -> NDArray[np.float32] | None:
    """float32 (n_ff): what is added to the deciding product; of a fused tensor the gate's half."""
    name = f"blk.{ffn.layer}.ffn_{'gate' if ffn.gate is not None else 'up'}.bias"
    tensor = dense.tensors.get(name)
    if tensor is None:
        return None
    from gguf_flash.converters.rows import dequantize_rows

    data = np.concatenate([block.ravel() for block in dense.blocks(tensor)])
    values = dequantize_rows(tensor.type, data.reshape(1, -1), tensor.n_values)
    return np.ascontiguousarray(values.ravel()[: ffn.n_ff])


def _check_graph(dense: DenseModel) -> None:
    """Raise UnsupportedError where the meter, which cuts the product itself, sees other values than
    a threshold in the file: between them the graph compares them."""
    from gguf_flash.converters.architectures import needs_gate

    if needs_gate(dense.arch):
        raise UnsupportedError(
            f"cannot choose thresholds for '{dense.path}': the graph of architecture"
            f" '{dense.arch}' zeroes most activations of its first layers itself, so what"
            " thresholds would cost cannot be measured; convert it without a target"
        )
