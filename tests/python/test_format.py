"""The format: what the writer writes, the reader reads; golden files stay readable for ever."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_flash import _core
from gguf_flash.errors import ArgumentError, CorruptFileError, IoError
from gguf_flash.format import FlashWriter, read_bundle, read_layout, read_part
from gguf_flash.format.container import Value, encode_value, read_container
from gguf_flash.format.ggml_types import TYPES, type_by_name
from gguf_flash.format.layout import bundle_parts, legal_parts
from gguf_flash.format.writer import PlannedTensor

GOLDEN = Path(__file__).parent / "golden"


def test_type_table_agrees_with_gguf() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name == "Q8_1":  # some releases of gguf have it with two f32 scales, ggml never
            continue
        ours = TYPES[int(kind)]
        assert (ours.name, ours.block, ours.size) == (kind.name, block, size)
    assert type_by_name("q8_0") is TYPES[8] and type_by_name("q8") is None


@given(
    st.sampled_from([n for n in TYPES.values() if n.weight]),
    st.sampled_from([n for n in TYPES.values() if n.weight]),
    st.integers(1, 8),
    st.sampled_from([32, 512, 4096]),
)
def test_parts_do_not_overlap(a: Any, b: Any, blocks: int, align: int) -> None:
    parts, stride = bundle_parts(["up", "down"], [a, b], 256 * blocks, align)
    assert parts[0].offset == 0 and parts[0].end <= parts[1].offset
    assert parts[1].offset % 32 == 0 and parts[1].end <= stride < parts[1].end + align
    assert stride % align == 0


def test_legal_parts() -> None:
    assert legal_parts("all", True, False) == legal_parts("all", True, True)
    assert legal_parts("gate", True, False) == ("up", "down")
    assert legal_parts("gate", False, False) == ("down",)
    assert legal_parts("gate", True, True) == ("up", "down")
    assert legal_parts("all", False, True) is None


def _kv(types: list[int], n_layers: int = 1) -> dict[str, Value]:
    values = {
        "general.architecture": ("str", "llama"),
        "flash_ffn.version": ("u32", 1),
        "flash_ffn.select": ("str", "all"),
        "flash_ffn.layers": ("arr:u32", range(n_layers)),
        "flash_ffn.n_embd": ("u32", 32),
        "flash_ffn.gated": ("bool", False),
        "flash_ffn.fused": ("bool", False),
        "flash_ffn.bundle.parts": ("arr:str", ["up", "down"]),
        "flash_ffn.bundle.types": ("arr:u32", types),
        "flash_ffn.bundle.align": ("u32", 512),
    }
    return {k: encode_value(t, v) for k, (t, v) in values.items()}


def _tensors() -> list[PlannedTensor]:
    return [
        PlannedTensor("blk.0.ffn_bundle", (512, 3), TYPES[24]),
        PlannedTensor("token_embd.weight", (5, 3), TYPES[0]),
    ]


@pytest.mark.parametrize("nameless", [True, False])
def test_write_then_read(nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    rows = np.random.default_rng(0).integers(0, 256, (3, 512), np.uint8)
    embedding = np.arange(15, dtype=np.float32).reshape(3, 5)
    path = tmp_path / "x.gguf"
    with FlashWriter(path, _kv([0, 1]), _tensors()) as w:
        for piece in (rows[:1], rows[1:], embedding):
            w.write(piece)
    layout = read_layout(path)
    assert layout == w.layout
    assert layout.files[0].data_offset % 4096 == 0 and layout.bundle(0).offset % 4096 == 0
    assert [(p.name, p.type.name, p.offset) for p in layout.bundle(0).parts] == [
        ("up", "F32", 0),
        ("down", "F16", 128),
    ]
    assert np.array_equal(read_bundle(layout, 0), rows)
    assert np.array_equal(read_part(layout, 0, "down"), rows[:, 128:192])
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert np.array_equal(tensors["token_embd.weight"].data, embedding)
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
    with pytest.raises(ArgumentError):
        read_bundle(layout, 1)
    with pytest.raises(ArgumentError):
        read_part(layout, 0, "gate")


def test_writer_refuses_what_the_reader_would(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=r"\(SPEC R10\)"):
        FlashWriter(tmp_path / "x.gguf", _kv([0]), _tensors())
    with pytest.raises(CorruptFileError, match=r"\(SPEC R12\)"):
        FlashWriter(tmp_path / "x.gguf", _kv([0, 1]), _tensors()[1:])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [3 * 512 - 1, 3 * 512 + 61])
def test_wrong_amount_of_data(size: int, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="bytes"),
        FlashWriter(tmp_path / "x.gguf", _kv([0, 1]), _tensors()) as w,
    ):
        w.write(b"\1" * size)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("nameless", [True, False])
def test_no_partial_file(
    error: BaseException,
    call: int,
    nameless: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path = tmp_path / "x.gguf"
    path.write_bytes(b"what was there before")
    calls, write = 0, os.write

    def failing(fd: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return write(fd, data)

    monkeypatch.setattr(os, "write", failing)
    expected = IoError if isinstance(error, OSError) else KeyboardInterrupt
    with (
        pytest.raises(expected) as info,
        FlashWriter(path, _kv([0, 1]), _tensors()) as w,
    ):
        w.write(b"\1" * 1536)
        w.write(b"\1" * 60)
    monkeypatch.undo()
    if expected is IoError:
        assert "No space left" in str(info.value) and "x.gguf" in str(info.value)
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
    assert path.read_bytes() == b"what was there before"


def test_disk_without_room_is_told_first(tmp_path: Path) -> None:
    huge = [PlannedTensor("blk.0.ffn_bundle", (1 << 30, 1 << 30), TYPES[24])]
    with pytest.raises(IoError, match="make room"), FlashWriter(tmp_path / "x", _kv([0, 1]), huge):
        pass
    assert not list(tmp_path.iterdir())


KINDS = {
    "u8": 7, "i8": -7, "u16": 70, "i16": -70, "u32": 1 << 31, "i32": -5, "f32": 0.5, "bool": True,
    "str": "ünï", "u64": 1 << 63, "i64": -(1 << 62), "f64": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_every_type(kind: str) -> None:
    value = encode_value(kind, KINDS[kind])
    assert value.type == kind and value.decode() == KINDS[kind]
    array = encode_value(f"arr:{kind}", [KINDS[kind]] * 3)
    assert array.described == f"arr of {kind}"
    assert list(array.decode()) == [KINDS[kind]] * 3
    assert list(encode_value(f"arr:{kind}", []).decode()) == []


def test_header_matches_gguf_reader(tmp_path: Path) -> None:
    path = tmp_path / "k.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_array("x.strings", ["a", "", "ccc"])
    w.add_array("x.floats", [0.5, 1.5])
    w.add_array("x.bools", [True, False])
    w.add_tensor("t", np.zeros((3, 4), np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    c, theirs = read_container(path), gguf.GGUFReader(path)
    assert c.data_offset == theirs.data_offset
    assert [(t.name, t.shape, t.offset) for t in c.tensors] == [
        (t.name, tuple(int(d) for d in t.shape), t.data_offset) for t in theirs.tensors
    ]
    for key, value in c.kv.items():
        assert list(np.atleast_1d(value.decode())) == list(
            np.atleast_1d(theirs.fields[key].contents())
        )


def test_spec_example() -> None:
    f16, q4_1 = TYPES[1], TYPES[3]
    parts, stride = bundle_parts(["gate", "up", "down"], [f16, f16, f16], 576, 512)
    assert ([p.offset for p in parts], stride) == ([0, 1152, 2304], 3584)
    parts, stride = bundle_parts(["gate", "up", "down"], [q4_1, q4_1, f16], 576, 512)
    assert ([p.offset for p in parts], stride) == ([0, 384, 768], 2048)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda p: p.stem)
def test_golden_files(path: Path) -> None:
    expected = json.loads(path.with_suffix(".json").read_text())
    layout = read_layout(path)
    assert path.stat().st_size < 50_000
    for key in ("version", "select", "activation", "gated", "fused", "n_embd", "align"):
        assert getattr(layout, key) == expected[key]
    assert list(layout.part_names) == expected["parts"]
    for b, want in zip(layout.layers, expected["layers"], strict=True):
        found = {
            "layer": b.layer,
            "n_ff": b.n_ff,
            "stride": b.stride,
            "file": b.file,
            "offset": b.offset,
            "types": [p.type.name for p in b.parts],
            "crc32": _crc(read_bundle(layout, b.layer)),
        }
        assert found == want


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda p: p.stem)
def test_the_engine_reads_golden_files_alike(path: Path) -> None:
    expected = json.loads(path.with_suffix(".json").read_text())
    found = _core.read_layout(str(path))
    for key in ("version", "select", "activation", "gated", "fused", "n_embd", "align", "parts"):
        assert found[key] == expected[key]
    for layer, want in zip(found["layers"], expected["layers"], strict=True):
        assert Path(layer["file"]) == path and want["file"] == 0
        for key in ("layer", "n_ff", "stride", "offset", "types"):
            assert layer[key] == want[key]


def test_golden_thresholds() -> None:
    """Of one layer's neurons, and what they cost, as both readers see it."""
    path = GOLDEN / "v1-gate-thresholds.gguf"
    expected = json.loads(path.with_suffix(".json").read_text())
    layout = read_layout(path)
    assert layout.sparsity is not None
    found = {**dataclasses.asdict(layout.sparsity), "zeros": list(layout.sparsity.zeros)}
    assert found == expected["sparsity"]
    tensors = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    crcs = [
        {"layer": n, "crc32": _crc(tensors[f"blk.{n}.ffn_threshold"])}
        for n in layout.neuron_thresholds
    ]
    assert crcs == expected["neuron_thresholds"] and [c["layer"] for c in crcs] == [1]
    seen = _core.read_layout(str(path))["layers"]
    assert [x["neuron_thresholds"] for x in seen] == [False, True]


def test_there_are_golden_files() -> None:
    assert len(list(GOLDEN.glob("*.gguf"))) >= 3


def _crc(rows: np.ndarray) -> int:
    import zlib

    return zlib.crc32(rows.tobytes())


def test_golden_bytes_are_pinned() -> None:
    """The first bytes of the header, as SPEC.md lays them out."""
    data = (GOLDEN / "v1-all-gated.gguf").read_bytes()
    magic, version, n_tensors, n_kv = struct.unpack_from("<4sIQQ", data)
    assert (magic, version) == (b"GGUF", 3)
    c = read_container(GOLDEN / "v1-all-gated.gguf")
    assert (n_tensors, n_kv) == (len(c.tensors), len(c.kv))
    assert next(iter(c.kv)) == "general.architecture" and list(c.kv)[-1] == "flash_ffn.pad"
