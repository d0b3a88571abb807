"""A recording: a folder with what every FFN of a model was given on a text, and what was active.

    recording.json            what was recorded and how much of it is valid; the last thing written
    tokens.i32                int32 token ids, window by window
    layer-000.x.f16           float16 (tokens, n_embd), the FFN's input
    layer-000.active.bits     uint8 (tokens, ceil(n_ff / 8)), bit i % 8 of byte i / 8 is neuron i
    layer-000.magnitude.u8    uint8 (tokens, n_ff), optional, see `decode_magnitudes`
    layer-000.down_norm.f32   float32 (n_ff), Euclidean norm of each column of ffn_down

All numbers are little-endian. `tokens` in recording.json counts the tokens that are valid; data
files may be longer when a collect was killed, and are then cut when it is resumed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_flash.errors import ArgumentError, CorruptFileError, IoError, VersionError

__all__ = [
    "RecordedLayer",
    "Recording",
    "RecordingInfo",
    "data_files",
    "decode_magnitudes",
    "layer_path",
]

FORMAT = 1
INFO_NAME = "recording.json"
TOKENS_NAME = "tokens.i32"
DOWN_NORM = "down_norm.f32"


def decode_magnitudes(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """|h| in the middle of each code's range: float32 of the shape of the uint8 `codes`.

    The code of a hidden value h is 0 if h is 0 (not active), else 8 * log2|h| + 161 rounded and cut
    to 1..255: steps of an eighth of an octave from 2^-20 (code 1, also for less) to 2^11.75 (code
    255, also for more). In between, the decoded value is within a sixteenth of an octave (4.5 %).
    """
    table = np.exp2((np.arange(256, dtype=np.float32) - 161) / 8)
    table[0] = 0
    decoded: NDArray[np.float32] = table[codes]
    return decoded


@dataclass(frozen=True)
class RecordingInfo:
    """What recording.json says. `layers` are (layer, n_ff), ascending."""

    model_name: str
    model_sha256: str
    arch: str
    n_embd: int
    text_name: str
    text_sha256: str
    text_bytes: int
    n_vocab: int
    ctx: int
    tokens_wanted: int
    tokens: int
    magnitudes: bool
    layers: tuple[tuple[int, int], ...]

    def to_json(self) -> str:
        """The text of recording.json."""
        described = {
            "format": FORMAT,
            "model": {
                "name": self.model_name,
                "sha256": self.model_sha256,
                "arch": self.arch,
                "n_embd": self.n_embd,
            },
            "text": {
                "name": self.text_name,
                "sha256": self.text_sha256,
                "bytes": self.text_bytes,
            },
            "n_vocab": self.n_vocab,
            "ctx": self.ctx,
            "tokens_wanted": self.tokens_wanted,
            "tokens": self.tokens,
            "magnitudes": self.magnitudes,
            "layers": [{"layer": layer, "n_ff": n_ff} for layer, n_ff in self.layers],
        }
        return json.dumps(described, indent=1) + "\n"


def read_info(folder: Path) -> RecordingInfo:
    """Read and judge `folder`/recording.json. Raises the FlashErrors of `Recording.open`."""
    path = folder / INFO_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ArgumentError(
            f"'{folder}' is no recording: it has no '{INFO_NAME}'; make one with gguf-flash collect"
        ) from None
    except OSError as e:
        raise IoError(f"cannot read '{path}': {e.strerror or e}") from e
    try:
        found = json.loads(data)
    except ValueError as e:
        raise CorruptFileError(f"cannot read '{path}': it is no JSON ({e})") from e
    version = found.get("format") if isinstance(found, dict) else None
    if version != FORMAT:
        raise VersionError(
            f"cannot read '{path}': format {FORMAT} expected, found {version!r}; use the gguf_flash"
            " that made it, or collect again"
        )
    info = _parse(path, found)
    problem = _problem(info)
    if problem:
        raise CorruptFileError(f"cannot read '{path}': {problem}; collect again with --force")
    return info


def _parse(path: Path, found: dict[str, Any]) -> RecordingInfo:
    def take(owner: Any, key: str, kind: type) -> Any:
        value = owner.get(key) if isinstance(owner, dict) else None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CorruptFileError(
                f"cannot read '{path}': '{key}' of type {kind.__name__} expected, found {value!r};"
                " collect again with --force"
            )
        return value

    model, text = take(found, "model", dict), take(found, "text", dict)
    return RecordingInfo(
        model_name=take(model, "name", str),
        model_sha256=take(model, "sha256", str),
        arch=take(model, "arch", str),
        n_embd=take(model, "n_embd", int),
        text_name=take(text, "name", str),
        text_sha256=take(text, "sha256", str),
        text_bytes=take(text, "bytes", int),
        **{k: take(found, k, int) for k in ("n_vocab", "ctx", "tokens_wanted", "tokens")},
        magnitudes=take(found, "magnitudes", bool),
        layers=tuple(
            (take(x, "layer", int), take(x, "n_ff", int)) for x in take(found, "layers", list)
        ),
    )


def _problem(info: RecordingInfo) -> str:
    """What is impossible about `info`, "" if nothing."""
    for name in ("n_embd", "n_vocab", "ctx"):
        if asdict(info)[name] < 1:
            return f"'{name}' must be at least 1, found {asdict(info)[name]}"
    if info.tokens < 0 or info.tokens % info.ctx:
        return f"'tokens' must be a multiple of 'ctx' ({info.ctx}), found {info.tokens}"
    numbers = [layer for layer, _ in info.layers]
    if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 0:
        return f"layers in ascending order expected, found {numbers}"
    if min(n_ff for _, n_ff in info.layers) < 1:
        return "every layer must have at least one neuron"
    return ""


def layer_path(folder: Path, layer: int, what: str) -> Path:
    """Path of a layer's file; `what` is its name after the layer's number."""
    return folder / f"layer-{layer:03d}.{what}"


def data_files(folder: Path, info: RecordingInfo) -> dict[Path, int]:
    """The files that grow with each token, and the bytes a token takes in each."""
    files = {folder / TOKENS_NAME: 4}
    for layer, n_ff in info.layers:
        files[layer_path(folder, layer, "x.f16")] = 2 * info.n_embd
        files[layer_path(folder, layer, "active.bits")] = (n_ff + 7) // 8
        if info.magnitudes:
            files[layer_path(folder, layer, "magnitude.u8")] = n_ff
    return files


def check_files(folder: Path, info: RecordingInfo) -> None:
    """Raise CorruptFileError if a file is missing, or shorter than `info` says."""
    expected = {path: size * info.tokens for path, size in data_files(folder, info).items()}
    norms = {layer_path(folder, layer, DOWN_NORM): 4 * n_ff for layer, n_ff in info.layers}
    for path, size in {**expected, **norms}.items():
        found = path.stat().st_size if path.is_file() else 0
        if found < size or (path in norms and found != size):
            raise CorruptFileError(
                f"cannot read '{path}': {size} bytes expected for {info.tokens} tokens, found"
                f" {found}; copy the recording again, or collect it again with --force"
            )


@dataclass(frozen=True)
class RecordedLayer:
    """One layer of a recording. Arrays are views of files, read when they are used."""

    folder: Path
    layer: int
    n_ff: int
    n_embd: int
    tokens: int
    has_magnitudes: bool

    def _map(self, what: str, dtype: str, columns: int) -> np.memmap[Any, Any]:
        path = layer_path(self.folder, self.layer, what)
        return np.memmap(path, dtype, "r", shape=(self.tokens, columns))

    def x(self) -> np.memmap[Any, Any]:
        """float16 (tokens, n_embd): the FFN's input, after the norm."""
        return self._map("x.f16", "<f2", self.n_embd)

    def active_bits(self) -> np.memmap[Any, Any]:
        """uint8 (tokens, ceil(n_ff / 8)): bit i % 8 of byte i // 8 is set if neuron i is active."""
        return self._map("active.bits", "u1", (self.n_ff + 7) // 8)

    def active(self, begin: int, end: int) -> NDArray[np.bool_]:
        """bool (end - begin, n_ff): which neurons are active, for tokens `begin` to `end`."""
        bits = np.asarray(self.active_bits()[begin:end])
        return np.unpackbits(bits, axis=1, count=self.n_ff, bitorder="little").view(np.bool_)

    def magnitudes(self) -> np.memmap[Any, Any] | None:
        """uint8 (tokens, n_ff) codes for `decode_magnitudes`; None if they were not recorded."""
        return self._map("magnitude.u8", "u1", self.n_ff) if self.has_magnitudes else None

    def down_norm(self) -> NDArray[np.float32]:
        """float32 (n_ff): the Euclidean norm of each neuron's column of ffn_down."""
        return np.fromfile(layer_path(self.folder, self.layer, DOWN_NORM), "<f4")


class Recording:
    """An opened recording. Make one with `Recording.open`; there is nothing to close.

    tokens: valid tokens, a multiple of `ctx`, the length of a window in tokens.
    layers: the recorded layers, ascending.
    """

    def __init__(self, path: Path, info: RecordingInfo) -> None:
        self.path = path
        self.info = info
        self.tokens = info.tokens
        self.ctx = info.ctx
        self.n_embd = info.n_embd
        self.n_vocab = info.n_vocab
        self.model_name = info.model_name
        self.model_sha256 = info.model_sha256
        self.arch = info.arch
        self.text_name = info.text_name
        self.layers = tuple(
            RecordedLayer(path, layer, n_ff, info.n_embd, info.tokens, info.magnitudes)
            for layer, n_ff in info.layers
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Recording:
        """Open the folder `path` after a look at its description and the sizes of its files.

        Raises ArgumentError (no recording, or an empty one), VersionError (of another format),
        CorruptFileError (damaged description, files too short) or IoError.
        """
        folder = Path(path)
        info = read_info(folder)
        if info.tokens == 0:
            raise ArgumentError(
                f"the recording '{folder}' is empty; run gguf-flash collect again to fill it"
            )
        check_files(folder, info)
        return cls(folder, info)

    def layer(self, number: int) -> RecordedLayer:
        """The layer with this block index. Raises ArgumentError if it was not recorded."""
        for layer in self.layers:
            if layer.layer == number:
                return layer
        raise ArgumentError(
            f"the recording '{self.path}' has no layer {number}, it has"
            f" {', '.join(str(x.layer) for x in self.layers)}"
        )

    def files(self) -> list[Path]:
        """Paths of all files of the recording."""
        norms = [layer_path(self.path, x.layer, DOWN_NORM) for x in self.layers]
        return [self.path / INFO_NAME, *data_files(self.path, self.info), *norms]

    def token_ids(self) -> np.memmap[Any, Any]:
        """int32 (tokens): the tokens, each window of `ctx` with its begin token."""
        return np.memmap(self.path / TOKENS_NAME, "<i4", "r", shape=(self.tokens,))

    def split(self, share: float = 0.1) -> int:
        """How many leading tokens train; the rest is held out: about `share`, in whole windows.

        At least one window is on each side. Raises ArgumentError for a recording of one window, or
        a share outside 0 to 1.
        """
        windows = self.tokens // self.ctx
        if not 0 <= share <= 1:
            raise ArgumentError(f"the share held out must be from 0 to 1, found {share}")
        if windows < 2:
            raise ArgumentError(
                f"the recording '{self.path}' has one window of {self.ctx} tokens, and two are"
                " needed to train and to hold out; collect more tokens, or use a smaller --ctx"
            )
        held_out = min(max(1, round(share * windows)), windows - 1)
        return (windows - held_out) * self.ctx
