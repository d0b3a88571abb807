"""The predictor file: safetensors, with each layer's tensors and a JSON account of the training.

    blk.N.ffn_pred_a.weight   F16 [rank, n_embd]    A
    blk.N.ffn_pred_b.weight   F16 [n_ff, rank]      B
    blk.N.ffn_pred_b.bias     F32 [n_ff]            b

Metadata: format, version, model_sha256, arch, n_embd, and training: a JSON object whose `layers`
hold one entry per layer with its threshold and its error rates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.errors import IoError, PredictorError, VersionError
from gguf_flash.predictor.account import calibration_fault
from gguf_flash.predictor.publish import check_target, publish
from gguf_flash.predictor.rates import score_cut

__all__ = ["FORMAT", "Predictor", "PredictorLayer"]

FORMAT = "gguf_flash.predictor"
VERSION = "1"

_PARTS = {"ffn_pred_a.weight": "F16", "ffn_pred_b.weight": "F16", "ffn_pred_b.bias": "F32"}
_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(ffn_pred_a\.weight|ffn_pred_b\.(?:weight|bias))")


@dataclass
class PredictorLayer:
    """The predictor of one layer.

    a: float16 [rank, n_embd]. b: float16 [n_ff, rank]. bias: float32 [n_ff]. threshold: in [0, 1),
    a neuron is selected where sigmoid(score) is above it. stats: false_negatives, false_positives,
    active, predicted (shares in [0, 1] on held-out tokens, at the threshold) and epochs.
    """

    layer: int
    a: NDArray[np.float16]
    b: NDArray[np.float16]
    bias: NDArray[np.float32]
    threshold: float
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Rows of A and columns of B."""
        return int(self.a.shape[0])

    @property
    def n_embd(self) -> int:
        """Values in an input."""
        return int(self.a.shape[1])

    @property
    def n_ff(self) -> int:
        """Neurons scored."""
        return int(self.b.shape[0])

    def scores(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """B relu(A x) + b in float32: x [tokens, n_embd] gives [tokens, n_ff]."""
        hidden = np.maximum(x.astype(np.float32) @ self.a.astype(np.float32).T, np.float32(0))
        scores: NDArray[np.float32] = hidden @ self.b.astype(np.float32).T + self.bias
        return scores

    def selected(self, x: NDArray[Any]) -> NDArray[np.bool_]:
        """Which neurons are selected: x [tokens, n_embd] gives bool [tokens, n_ff]."""
        above: NDArray[np.bool_] = self.scores(x) > score_cut(self.threshold)
        return above

    def check(self) -> str:
        """What is wrong with shapes, dtypes, values or threshold, as a clause; "" if nothing is."""
        for name, tensor, dims in (("A", self.a, 2), ("B", self.b, 2), ("b", self.bias, 1)):
            if tensor.ndim != dims or 0 in tensor.shape:
                return f"{name} must have {dims} dimensions and no empty one, found {tensor.shape}"
            if not np.isfinite(tensor).all():
                return f"{name} has values that are NaN or infinite"
        if self.b.shape[1] != self.rank:
            return f"A has rank {self.rank} and B {self.b.shape[1]}"
        if self.bias.shape[0] != self.n_ff:
            return f"B scores {self.n_ff} neurons and b has {self.bias.shape[0]} values"
        value = self.threshold
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            return f"its threshold must be in [0, 1), found {value!r}"
        return ""

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Name, as in the file, to array."""
        arrays: tuple[NDArray[Any], ...] = (self.a, self.b, self.bias)
        return {
            f"blk.{self.layer}.{part}": np.ascontiguousarray(array, _DTYPES[kind])
            for (part, kind), array in zip(_PARTS.items(), arrays, strict=True)
        }


@dataclass
class Predictor:
    """The predictors of a model's layers, and what they were trained on.

    training: corpus, tokens, train_tokens, seed, loss, settings, and calibration (see `account`) if
    it was calibrated; the entries per layer are made from `layers` when the file is written.
    """

    layers: dict[int, PredictorLayer]
    model_sha256: str
    arch: str
    n_embd: int
    training: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> Predictor:
        """Read and check a whole file. Raises IoError, PredictorError or VersionError."""
        path = Path(path)
        metadata, tensors = _read(path)
        where = f"predictor '{path}'"
        head = _head(metadata, where)
        entries = _entries(head["training"], where)
        layers = _layers(tensors, entries, where)
        predictor = cls(layers=layers, **head)
        predictor._check(where)
        return predictor

    def save(self, path: Path | str) -> None:
        """Write the file, the same bytes for the same content. Raises IoError or PredictorError."""
        path = Path(path)
        self._check(f"cannot write predictor '{path}'")
        publish(check_target(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """The content of the file."""
        from safetensors.numpy import save

        entries = [
            {"layer": n, "rank": p.rank, "threshold": float(p.threshold), **p.stats}
            for n, p in sorted(self.layers.items())
        ]
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "model_sha256": self.model_sha256,
            "arch": self.arch,
            "n_embd": str(self.n_embd),
            "training": json.dumps({**self.training, "layers": entries}, sort_keys=True),
        }
        tensors: dict[str, NDArray[Any]] = {}
        for layer in self.layers.values():
            tensors.update(layer.tensors())
        return _with_sorted_header(save(tensors, metadata))

    def check_fits(self, model_sha256: str, layers: Mapping[int, int], n_embd: int) -> None:
        """Raise PredictorError unless this predicts for that model.

        `layers`: number to n_ff of every layer that needs a predictor, and of no other.
        """
        if self.model_sha256 != model_sha256:
            raise PredictorError(
                "the predictor was trained on another model: its sha256 is expected to be "
                f"{model_sha256[:16]}..., found {self.model_sha256[:16]}...; "
                "collect and train again"
            )
        if self.n_embd != n_embd:
            raise PredictorError(
                f"the predictor takes inputs of {self.n_embd} values and the model's have {n_embd}"
            )
        if odd := sorted(layers.keys() - self.layers.keys()):
            raise PredictorError(
                f"the predictor lacks {_names(odd)} of the model; collect and train with all layers"
            )
        if odd := sorted(self.layers.keys() - layers.keys()):
            raise PredictorError(f"the predictor has {_names(odd)} that the model does not have")
        for number, n_ff in layers.items():
            if self.layers[number].n_ff != n_ff:
                raise PredictorError(
                    f"the predictor scores {self.layers[number].n_ff} neurons in layer {number} "
                    f"and the model has {n_ff}"
                )

    def _check(self, where: str) -> None:
        if not self.layers:
            raise PredictorError(f"{where}: it has no layer")
        for number, layer in self.layers.items():
            fault = layer.check()
            if not fault and layer.n_embd != self.n_embd:
                fault = f"A takes {layer.n_embd} values and the file says n_embd is {self.n_embd}"
            if fault:
                raise PredictorError(f"{where}, layer {number}: {fault}")
        if fault := calibration_fault(self.training.get("calibration"), len(self.layers)):
            raise PredictorError(
                f"{where}, its calibration: {fault}; run gguf-flash calibrate again"
            )


def _names(layers: list[int]) -> str:
    shown = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
    return f"layer{'s' if len(layers) > 1 else ''} {shown}"


def _read(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors; each tensor's name, dtype and place are checked before it is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with open(path, "rb"):
            pass  # safetensors' own error has neither the reason nor, always, the type
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            _check_format(metadata, path)
            tensors = {}
            for name in list(file.keys()):  # it is no mapping
                match = _NAME.fullmatch(name)
                kind = file.get_slice(name).get_dtype()
                if not match or kind != _PARTS[match[2]]:
                    raise PredictorError(
                        f"predictor '{path}': tensor '{name}' of type {kind} does not belong there"
                    )
                tensors[name] = file.get_tensor(name)
    except SafetensorError as error:
        raise PredictorError(
            f"'{path}' is no predictor: it is no safetensors file, or truncated ({error})"
        ) from error
    except OSError as error:
        raise IoError(f"cannot read predictor '{path}': {error.strerror or error}") from error
    return metadata, tensors


def _check_format(metadata: Mapping[str, str], path: Path) -> None:
    found = metadata.get("format")
    if found != FORMAT:
        what = f"its format is '{found}'" if found else "it names no format"
        raise PredictorError(
            f"'{path}' is a safetensors file, but no predictor: expected the format '{FORMAT}', "
            f"and {what}; give a file that 'gguf-flash train' wrote"
        )
    if metadata.get("version") != VERSION:
        raise VersionError(
            f"predictor '{path}' is of version {metadata.get('version')!r}, and this release reads "
            f"version {VERSION!r}; train it again or update gguf_flash"
        )


def _head(metadata: Mapping[str, str], where: str) -> dict[str, Any]:
    for key in ("model_sha256", "arch", "n_embd", "training"):
        if key not in metadata:
            raise PredictorError(f"{where}: its metadata lack '{key}'")
    if not re.fullmatch(r"[1-9]\d{0,8}", metadata["n_embd"]):
        raise PredictorError(f"{where}: n_embd must be a number, found '{metadata['n_embd']}'")
    try:
        training = json.loads(metadata["training"])
    except (ValueError, RecursionError) as error:
        raise PredictorError(f"{where}: the metadata 'training' are no JSON") from error
    if not isinstance(training, dict) or not isinstance(training.get("layers"), list):
        raise PredictorError(f"{where}: the metadata 'training' must have a list 'layers'")
    return {
        "model_sha256": metadata["model_sha256"],
        "arch": metadata["arch"],
        "n_embd": int(metadata["n_embd"]),
        "training": training,
    }


def _entries(training: dict[str, Any], where: str) -> dict[int, dict[str, Any]]:
    """Take the entries per layer out of `training`."""
    entries: dict[int, dict[str, Any]] = {}
    for entry in training.pop("layers"):
        number = entry.get("layer") if isinstance(entry, dict) else None
        if type(number) is not int or number in entries:
            raise PredictorError(f"{where}: each entry of 'layers' must have a layer of its own")
        entries[number] = entry
    return entries


def _layers(
    tensors: dict[str, NDArray[Any]], entries: dict[int, dict[str, Any]], where: str
) -> dict[int, PredictorLayer]:
    numbers = {int(name.split(".")[1]) for name in tensors}
    if odd := sorted(numbers ^ entries.keys()):
        raise PredictorError(f"{where}: {_names(odd)} must have both tensors and an entry")
    layers = {}
    for number in sorted(numbers):
        names = [f"blk.{number}.{part}" for part in _PARTS]
        if lacking := [n for n in names if n not in tensors]:
            raise PredictorError(f"{where}: tensor '{lacking[0]}' is missing")
        a, b, bias = (tensors[n] for n in names)
        stats = dict(entries[number])
        del stats["layer"]
        rank = stats.pop("rank", None)
        threshold = stats.pop("threshold", None)
        layer = PredictorLayer(number, a, b, bias, threshold, stats)
        if layer.a.ndim == 2 and rank != layer.rank:
            raise PredictorError(
                f"{where}, layer {number}: its entry says rank {rank}, A has {layer.rank}"
            )
        layers[number] = layer
    return layers


def _with_sorted_header(data: bytes) -> bytes:
    """The same file with its header's keys sorted: safetensors writes metadata in random order."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]
