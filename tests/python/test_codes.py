"""Down codes: a Q8_0 down matrix taken apart, proved by verify, run by the engine."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from bundles import down_values
from tiny_models import make_dense

from gguf_flash.converters import convert, verify
from gguf_flash.engine import open_model
from gguf_flash.errors import ArgumentError


def _down(path: Path) -> np.ndarray:
    """The dense down matrix of block 1, float32 (n_embd, n_ff)."""
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    values: np.ndarray = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return values


@pytest.mark.parametrize("select", ["all", "gate"])
def test_codes_times_scales_are_the_dense_matrix(select: str, tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf", type="Q8_0", n_ff=320)
    layout = convert(dense, tmp_path / "f.gguf", select=select)
    assert layout.bundle(1).parts[-1].type.name == "I8"
    assert np.array_equal(down_values(layout, 1).T, _down(dense))
    report = verify(tmp_path / "f.gguf", dense)
    assert report.ok and report.down_max_abs_error == 0, report.summary()


def test_verify_finds_a_wrong_scale(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf", type="Q8_0", n_ff=64)
    layout = convert(dense, tmp_path / "f.gguf")
    scales = next(t for t in layout.resident if t.name == "blk.1.ffn_down_scale")
    with open(tmp_path / "f.gguf", "r+b") as f:
        f.seek(scales.offset + scales.nbytes - 1)
        f.write(b"\x55")
    report = verify(tmp_path / "f.gguf", dense)
    assert report.differences == ["layer 1, the scales of the down codes differ"]


def test_verify_against_another_type(tmp_path: Path) -> None:
    make_dense(tmp_path / "q8.gguf", type="Q8_0", n_ff=64)
    types = [{"gate": "Q8_0", "up": "Q8_0", "down": "F16"}] * 2
    other = make_dense(tmp_path / "f16.gguf", type=types, n_ff=64)
    convert(tmp_path / "q8.gguf", tmp_path / "f.gguf")
    report = verify(tmp_path / "f.gguf", other)
    assert report.differences[0] == "layer 0 has down codes of Q8_0, the source F16"


def test_where_codes_do_not_fit(tmp_path: Path) -> None:
    """Too few neurons for whole blocks, another order, another type: floats, or a refusal."""
    small = make_dense(tmp_path / "s.gguf", type="Q8_0", n_ff=32)
    assert convert(small, tmp_path / "f.gguf").bundle(0).parts[-1].type.name == "F16"
    dense = make_dense(tmp_path / "d.gguf", type="Q8_0", n_ff=64)
    orders = {1: np.arange(64)[::-1].copy()}
    layout = convert(dense, tmp_path / "f.gguf", orders=orders)
    assert [layout.bundle(i).parts[-1].type.name for i in (0, 1)] == ["I8", "F16"]
    assert verify(tmp_path / "f.gguf", dense).ok
    with pytest.raises(ArgumentError, match="Q8_0, and its neurons get another order"):
        convert(dense, tmp_path / "g.gguf", orders=orders, down_type="i8")
    halves = make_dense(tmp_path / "h.gguf", type="F16", n_ff=64)
    with pytest.raises(ArgumentError, match="has F16; use --outtype q8_0"):
        convert(halves, tmp_path / "g.gguf", down_type="i8")
    assert not (tmp_path / "g.gguf").exists()


def test_the_op_is_close_to_floats(tmp_path: Path) -> None:
    """h is rounded to 8 bits as ggml does it: about 1/256 of its largest value, no more."""
    dense = make_dense(tmp_path / "d.gguf", type="Q8_0", n_ff=320)
    convert(dense, tmp_path / "codes.gguf")
    convert(dense, tmp_path / "floats.gguf", down_type="f32")
    x = np.random.default_rng(2).standard_normal((5, 64), np.float32)
    codes = open_model(tmp_path / "codes.gguf", ram="60%").ffn(1, x)
    floats = open_model(tmp_path / "floats.gguf").ffn(1, x)
    error = np.linalg.norm(codes - floats) / np.linalg.norm(floats)
    assert 0 < error < 0.01
