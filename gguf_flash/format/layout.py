"""What a flash-GGUF says about its bundles, and the one check that both sides make.

``validate`` turns keys and tensor infos into a :class:`FlashLayout` or raises the exception of
the first rejection rule of SPEC.md that is broken.  The reader calls it on what it parsed, the
writer on what it is about to write, so neither can accept what the other refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gguf_flash.errors import CorruptFileError, NotFlashError, UnsupportedError, VersionError
from gguf_flash.format.checksums import check_checksums
from gguf_flash.format.container import Tensor, Value, reject
from gguf_flash.format.down_scale import check_down_scales
from gguf_flash.format.extents import FileExtent, check_extents
from gguf_flash.format.ggml_types import GgmlType, type_by_id
from gguf_flash.format.keys import Keys
from gguf_flash.format.model_keys import ACTIVATIONS, check_activation, check_blocks
from gguf_flash.format.predictor import (
    Calibration,
    LayerPredictor,
    check_calibration,
    check_predictor_tensors,
    check_predictors,
)
from gguf_flash.format.thresholds import Sparsity, check_sparsity, check_threshold_tensors

__all__ = [
    "ACTIVATIONS",
    "FORMAT_VERSION",
    "PART_NAMES",
    "FlashLayout",
    "LayerBundle",
    "Part",
    "bundle_name",
    "bundle_parts",
    "legal_parts",
    "round_up",
    "validate",
]

FORMAT_VERSION = 1
PART_NAMES = ("gate", "up", "down")
PART_ALIGN = 32
MAX_N_EMBD = 1 << 24
MAX_N_FF = (1 << 32) - 1
MAX_LAYERS = 1 << 16
SELECTS = ("all", "gate", "predictor")
_BUNDLE = re.compile(r"blk\.(0|[1-9][0-9]*)\.ffn_bundle")


@dataclass(frozen=True)
class Part:
    """One part of a bundle: ``offset`` and ``nbytes`` in bytes from the start of a neuron's row."""

    name: str
    type: GgmlType
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte after the part."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class LayerBundle:
    """The bundles of one layer: ``n_ff`` rows of ``stride`` bytes at ``offset`` of ``file``.

    ``file`` indexes ``FlashLayout.files``; ``offset`` counts bytes from the start of that file.
    ``block`` begins the names of the layer's dense tensors, such as ``blk.0`` or ``dec.blk.0``.
    """

    layer: int
    n_ff: int
    stride: int
    file: int
    offset: int
    parts: tuple[Part, ...]
    block: str

    @property
    def nbytes(self) -> int:
        """Bytes of all rows of the layer."""
        return self.n_ff * self.stride

    @property
    def has_codes(self) -> bool:
        """True when the down rows are codes of Q8_0 blocks."""
        return self.parts[-1].type.name == "I8"

    def part(self, name: str) -> Part | None:
        """The part called ``name``, or None when bundles do not hold it."""
        return next((p for p in self.parts if p.name == name), None)


@dataclass(frozen=True)
class FlashLayout:
    """A validated flash-GGUF: settings, bundles and the resident tensors."""

    files: tuple[FileExtent, ...]
    version: int
    select: str
    gated: bool
    fused: bool
    n_embd: int
    align: int
    part_names: tuple[str, ...]
    layers: tuple[LayerBundle, ...]
    activation: str
    thresholds: tuple[float, ...]
    neuron_thresholds: tuple[int, ...]  # layers with a threshold for each neuron
    sparsity: Sparsity | None
    predictors: tuple[LayerPredictor, ...]
    calibration: Calibration | None
    checksums: tuple[str, ...]  # hex digests of the layers' bundles, if the file has them
    kv: Mapping[str, Value]
    resident: tuple[Tensor, ...]

    @property
    def path(self) -> Path:
        """The file that was given (the first of a split set)."""
        return self.files[0].path

    @property
    def bundle_bytes(self) -> int:
        """Bytes of all bundles, padding included."""
        return sum(b.nbytes for b in self.layers)

    @property
    def resident_bytes(self) -> int:
        """Bytes of all other tensors."""
        return sum(t.nbytes for t in self.resident)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file, or of all files of a split set."""
        return sum(f.size for f in self.files)

    def bundle(self, layer: int) -> LayerBundle:
        """The bundle of block ``layer``; KeyError when that block is not bundled."""
        for b in self.layers:
            if b.layer == layer:
                return b
        raise KeyError(layer)

    def text(self, key: str) -> str:
        """The string under ``key``, or "" when there is none."""
        value = self.kv.get(key)
        return value.decode() if value is not None and value.type == "str" else ""


def bundle_name(layer: int) -> str:
    """The name of the tensor that holds the bundles of block ``layer``."""
    return f"blk.{layer}.ffn_bundle"


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def legal_parts(select: str, gated: bool, fused: bool) -> tuple[str, ...] | None:
    """The parts a bundle must have, or None when the combination is not allowed."""
    if fused and not gated:
        return None
    if select != "gate":
        return ("gate", "up", "down") if gated else ("up", "down")
    return ("up", "down") if gated else ("down",)


def bundle_parts(
    names: Sequence[str], types: Sequence[GgmlType], n_embd: int, align: int
) -> tuple[tuple[Part, ...], int]:
    """Place the parts of one neuron; returns them and the smallest legal stride in bytes."""
    parts, end = [], 0
    for name, kind in zip(names, types, strict=True):
        start = round_up(end, PART_ALIGN)
        parts.append(Part(name, kind, start, kind.row_bytes(n_embd)))
        end = parts[-1].end
    return tuple(parts), round_up(end, align)


def _check_version(keys: Keys) -> None:
    if "flash_ffn.version" not in keys.kv:
        raise reject(
            4,
            keys.path,
            "it is an ordinary GGUF without 'flash_ffn.version'; make a flash-GGUF of it with "
            "'gguf-flash convert'",
            NotFlashError,
        )
    version = keys.get("version", "u32")
    if version != FORMAT_VERSION:
        raise reject(
            5,
            keys.path,
            f"flash-GGUF version {FORMAT_VERSION} expected, found {version}; convert the model "
            "again or use a newer gguf_flash",
            VersionError,
        )


def _check_parts(keys: Keys) -> tuple[str, bool, bool, tuple[str, ...]]:
    select = keys.get("select", "str")
    if select not in SELECTS:
        raise reject(
            7,
            keys.path,
            f"select mode 'all', 'gate' or 'predictor' expected, found '{select}'",
            UnsupportedError,
        )
    gated, fused = keys.get("gated", "bool"), keys.get("fused", "bool")
    value = keys.find("bundle.parts", "arr of str")
    assert value is not None
    legal = legal_parts(select, gated, fused)
    names = tuple(value.decode()) if value.count <= len(PART_NAMES) else ()
    if legal is None or names != legal:
        expected = "no parts (fused needs gated)" if legal is None else legal
        found = names or f"{value.count} of them"
        raise reject(
            9,
            keys.path,
            f"parts {expected} expected for select '{select}', gated {gated}, fused {fused}, "
            f"found {found}",
        )
    return select, gated, fused, legal


def _check_layers(keys: Keys) -> list[int]:
    found = keys.get("layers", "arr of u32")
    if not 0 < len(found) <= MAX_LAYERS:
        raise reject(
            8,
            keys.path,
            f"'flash_ffn.layers' lists {len(found)} layers, from 1 to {MAX_LAYERS} expected",
        )
    layers = [int(v) for v in found]
    if any(a >= b for a, b in pairwise(layers)):
        raise reject(8, keys.path, "'flash_ffn.layers' is not strictly ascending")
    return layers


def _check_types(keys: Keys, n_layers: int, names: Sequence[str], n_embd: int) -> list[GgmlType]:
    ids, n_parts = keys.get("bundle.types", "arr of u32"), len(names)
    if len(ids) != n_layers * n_parts:
        raise reject(
            10,
            keys.path,
            f"'flash_ffn.bundle.types' must have {n_layers} x {n_parts} values, found {len(ids)}",
        )
    if not 0 < n_embd <= MAX_N_EMBD:
        raise reject(
            10, keys.path, f"'flash_ffn.n_embd' is {n_embd}, from 1 to {MAX_N_EMBD} expected"
        )
    types = []
    for i, type_id in enumerate(int(v) for v in ids):
        kind = type_by_id(type_id)
        codes = kind is not None and kind.name == "I8" and names[i % n_parts] == "down"
        if kind is None or not (kind.weight or codes):
            raise reject(
                10, keys.path, f"'flash_ffn.bundle.types'[{i}] is {type_id}, not a weight type"
            )
        if n_embd % kind.block:
            raise reject(
                10,
                keys.path,
                f"rows of {n_embd} values do not fill whole {kind.name} blocks of {kind.block}",
            )
        types.append(kind)
    return types


def _check_align(keys: Keys) -> int:
    align = int(keys.get("bundle.align", "u32"))
    if not 32 <= align <= 65536 or align & (align - 1):
        raise reject(
            11, keys.path, f"'flash_ffn.bundle.align' {align} is not a power of two in 32..65536"
        )
    return align


def _bundle_tensors(path: Path, tensors: Sequence[Tensor], layers: list[int]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for t in tensors:
        match = _BUNDLE.fullmatch(t.name)
        if match:
            found[int(match[1])] = t
    extra = sorted(set(found) - set(layers))
    if extra:
        raise reject(12, path, f"layer {extra[0]} has a bundle but is not in 'flash_ffn.layers'")
    for n in layers:
        if n not in found:
            raise reject(12, path, f"layer {n} is listed, but has no '{bundle_name(n)}'")
    return [found[n] for n in layers]


def _check_bundle(
    path: Path, t: Tensor, layer: tuple[int, str], names: Sequence[str],
    types: Sequence[GgmlType], n_embd: int, align: int,
) -> LayerBundle:  # fmt: skip
    if t.type.name != "I8" or len(t.shape) != 2 or 0 in t.shape:
        raise reject(
            13, path, f"'{t.name}' must be 2-D I8 {{stride, n_ff}}, found {t.type.name} {t.shape}"
        )
    stride, n_ff = t.shape
    if n_ff > MAX_N_FF:
        raise reject(13, path, f"'{t.name}' claims {n_ff} neurons, at most {MAX_N_FF} expected")
    parts, least = bundle_parts(names, types, n_embd, align)
    if stride < parts[-1].end or stride % align:
        raise reject(
            14,
            path,
            f"'{t.name}' has a stride of {stride} bytes, expected a multiple of {align} of at "
            f"least {least}",
        )
    return LayerBundle(layer[0], n_ff, stride, t.file, t.offset, parts, layer[1])


def _check_residents(
    path: Path, tensors: Mapping[str, Tensor], bundles: Sequence[LayerBundle],
    select: str, gated: bool, n_embd: int,
) -> None:  # fmt: skip
    deciding = ("gate" if gated else "up") if select == "gate" else ""
    for b in bundles:
        for part in PART_NAMES:
            name = f"{b.block}.ffn_{part}.weight"
            t = tensors.get(name)
            if part != deciding:
                if t is not None:
                    raise reject(17, path, f"'{name}' is present although it is bundled")
            elif t is None or t.shape != (n_embd, b.n_ff) or not t.type.weight:
                found = "none" if t is None else f"{t.type.name} {t.shape}"
                raise reject(
                    17,
                    path,
                    f"resident weights '{name}' of shape ({n_embd}, {b.n_ff}) expected in select "
                    f"'gate', found {found}",
                )


def validate(
    kv: Mapping[str, Value], tensors: Sequence[Tensor], files: Sequence[FileExtent]
) -> FlashLayout:
    """Check rules R4 to R18 and R21 to R27, and describe the file.

    ``kv`` are the keys of the first file, ``tensors`` those of all files with absolute offsets.
    Raises NotFlashError (R4), VersionError (R5), UnsupportedError (R7, R18, R27) or
    CorruptFileError.
    """
    path = files[0].path
    keys = Keys(path, kv)
    _check_version(keys)
    select, gated, fused, names = _check_parts(keys)
    layers = _check_layers(keys)
    blocks = check_blocks(keys, layers)
    n_embd = int(keys.get("n_embd", "u32"))
    types = _check_types(keys, len(layers), names, n_embd)
    align = _check_align(keys)
    activation, thresholds = check_activation(keys, len(layers), gated)
    predictors = check_predictors(keys, layers) if select == "predictor" else ()
    calibration = check_calibration(keys, len(layers))
    sparsity = check_sparsity(keys, len(layers))
    checksums = check_checksums(keys, len(layers))
    by_name = {t.name: t for t in tensors}
    if len(by_name) != len(tensors):
        raise reject(20, path, "a tensor name appears in two files of the set", CorruptFileError)
    bundles = []
    for i, t in enumerate(_bundle_tensors(path, tensors, layers)):
        own = types[i * len(names) : (i + 1) * len(names)]
        bundles.append(_check_bundle(path, t, (layers[i], blocks[i]), names, own, n_embd, align))
    check_extents(tensors, files)
    _check_residents(path, by_name, bundles, select, gated, n_embd)
    check_predictor_tensors(path, by_name, predictors, [b.n_ff for b in bundles], n_embd)
    neurons = check_threshold_tensors(path, by_name, {b.layer: b.n_ff for b in bundles})
    check_down_scales(path, by_name, bundles, n_embd)
    bundled = {bundle_name(n) for n in layers}
    resident = tuple(t for t in tensors if t.name not in bundled)
    return FlashLayout(
        tuple(files), FORMAT_VERSION, select, gated, fused, n_embd, align, names, tuple(bundles),
        activation, thresholds, neurons, sparsity, predictors, calibration, checksums, kv,
        resident,
    )  # fmt: skip
