"""Gate and up in one tensor: the converter splits them, and the gate, resident, decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy_model import silu
from predictors import load, logits, same_bits, tokens_of
from tiny_models import make_dense

import gguf_flash
from gguf_flash.converters import convert, verify
from gguf_flash.errors import FlashError
from gguf_flash.format import read_layout

N_FF = 192


def dense_model(path: Path, **options: Any) -> Path:
    return make_dense(path, arch="phi3", n_ff=N_FF, **options)


def tensors(path: Path) -> dict[str, Any]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("type", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_file(tmp_path: Path, type: str, shuffle: bool) -> None:
    dense, flash = dense_model(tmp_path / "d.gguf", type=type), tmp_path / "f.gguf"
    order = np.random.default_rng(3).permutation(N_FF) if shuffle else np.arange(N_FF)
    layout = convert(dense, flash, select="gate", orders={0: order} if shuffle else None)
    assert layout == read_layout(flash)
    assert layout.fused and layout.gated and layout.part_names == ("up", "down")
    theirs, ours = tensors(dense), tensors(flash)
    up = theirs["blk.0.ffn_up.weight"].data
    gate = ours["blk.0.ffn_gate.weight"]
    assert gate.tensor_type == theirs["blk.0.ffn_up.weight"].tensor_type
    assert np.array_equal(gate.data, up[:N_FF][order])
    bundle = ours["blk.0.ffn_bundle"].data.view(np.uint8)
    part = layout.bundle(0).part("up")
    assert part is not None
    raw = np.ascontiguousarray(up[N_FF:][order]).view(np.uint8)
    assert np.array_equal(bundle[:, part.offset : part.end], raw)
    assert "blk.0.ffn_up.weight" not in ours
    report = verify(flash, dense)
    assert report.ok and report.permuted_layers == int(shuffle)


def test_verify_finds_a_wrong_gate(tmp_path: Path) -> None:
    dense, flash = dense_model(tmp_path / "d.gguf"), tmp_path / "f.gguf"
    layout = convert(dense, flash, select="gate")
    (gate,) = (t for t in layout.resident if t.name == "blk.1.ffn_gate.weight")
    with flash.open("r+b") as f:
        f.seek(gate.offset + 77)
        f.write(b"\x55")
    assert "blk.1.ffn_gate.weight" in verify(flash, dense).summary()


@pytest.mark.parametrize("activation", [None, "relu", "drelu"])
def test_bits_do_not_depend_on_memory(tmp_path: Path, activation: str | None) -> None:
    """Nor on the select mode where no neuron is left out, as of any other gated model."""
    dense, flash = dense_model(tmp_path / "d.gguf", n_ctx=64), tmp_path / "f.gguf"
    convert(dense, flash, select="gate", activation=activation)
    wanted = logits(load(flash), tokens_of(1), 30)
    for options in ({"ram": "60%"}, {"prefill": "stream"}, {"window": 1, "policy": "window"}):
        assert same_bits(logits(load(flash, **options), tokens_of(1), 30), wanted)
    convert(dense, tmp_path / "all.gguf", activation=activation)
    other = logits(load(tmp_path / "all.gguf"), tokens_of(1), 30)
    assert np.abs(other - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("select", ["all", "gate"])
def test_biases(tmp_path: Path, select: str) -> None:
    """One tensor, too: the gate's half, then up's. The engine alone computes the layer."""
    dense, flash = dense_model(tmp_path / "d.gguf", biases=True), tmp_path / "f.gguf"
    order = np.random.default_rng(3).permutation(N_FF)
    convert(dense, flash, select=select, orders={1: order})
    assert verify(flash, dense).ok
    w = {name: t.data.astype(np.float64) for name, t in tensors(dense).items() if "ffn_" in name}
    x = np.random.default_rng(5).standard_normal((3, 64)).astype(np.float32)
    model = gguf_flash.open_model(flash)
    for layer in (0, 1):
        both = x @ w[f"blk.{layer}.ffn_up.weight"].T + w[f"blk.{layer}.ffn_up.bias"]
        gate, up = np.split(both, 2, axis=1)
        expected = (silu(gate) * up) @ w[f"blk.{layer}.ffn_down.weight"].T
        expected += w[f"blk.{layer}.ffn_down.bias"]
        np.testing.assert_allclose(model.ffn(layer, x), expected, rtol=0, atol=1e-4)


def test_a_gate_that_is_missing(tmp_path: Path) -> None:
    dense, flash = dense_model(tmp_path / "d.gguf"), tmp_path / "f.gguf"
    convert(dense, flash, select="gate")
    data = flash.read_bytes()
    assert data.count(b"blk.1.ffn_gate.weight") == 1
    flash.write_bytes(data.replace(b"blk.1.ffn_gate.weight", b"blk.1.xxx_gate.weight"))
    with pytest.raises(FlashError, match=r"blk\.1\.ffn_gate\.weight.*\(SPEC R17\)"):
        load(flash)
    with pytest.raises(FlashError, match=r"\(SPEC R17\)"):
        read_layout(flash)
