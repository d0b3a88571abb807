"""T5's two stacks of blocks: bundles numbered through, dense tensors under their own names."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Cli
from families import mean_kl
from family_models import N_FF, N_LAYER, make_family
from test_families import logits_of

from gguf_flash import _core
from gguf_flash.converters import convert, convert_dense, verify
from gguf_flash.errors import ArgumentError
from gguf_flash.format import read_layout
from gguf_flash.runtime import lib_dir

BLOCKS = [f"{stack}.blk.{i}" for stack in ("dec", "enc") for i in range(N_LAYER)]


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("t5") / "t5.gguf", "t5", gated=False)


@pytest.mark.parametrize("select", ["all", "gate"])
def test_the_file(t5: Path, tmp_path: Path, select: str) -> None:
    layout = convert(t5, tmp_path / "f.gguf", select=select)
    assert layout == read_layout(tmp_path / "f.gguf")
    assert [(b.layer, b.block) for b in layout.layers] == list(enumerate(BLOCKS))
    kept = {t.name for t in layout.resident if ".ffn_up" in t.name or ".ffn_down" in t.name}
    assert kept == ({f"{b}.ffn_up.weight" for b in BLOCKS} if select == "gate" else set())
    assert verify(tmp_path / "f.gguf", t5).neurons == 2 * N_LAYER * N_FF
    engine = _core.read_layout(str(tmp_path / "f.gguf"))
    assert [x["block"] for x in engine["layers"]] == BLOCKS


def test_inspect_names_the_blocks(t5: Path, tmp_path: Path, cli: Cli) -> None:
    convert(t5, tmp_path / "f.gguf")
    shown = cli.json("inspect", tmp_path / "f.gguf")["layers"]
    assert [(x["layer"], x["block"]) for x in shown] == list(enumerate(BLOCKS))
    said = cli("inspect", tmp_path / "f.gguf").stdout
    assert "block" in said and all(b in said for b in BLOCKS)


def test_other_models_have_no_such_key(tmp_path: Path, cli: Cli) -> None:
    make_family(tmp_path / "d.gguf", "llama")
    layout = convert(tmp_path / "d.gguf", tmp_path / "f.gguf")
    assert "block" not in cli("inspect", tmp_path / "f.gguf").stdout
    assert "flash_ffn.blocks" not in layout.kv
    assert [b.block for b in layout.layers] == ["blk.0", "blk.1"]


def test_verify_finds_a_bundle_of_another_block(t5: Path, tmp_path: Path) -> None:
    convert(t5, tmp_path / "f.gguf")
    data = (tmp_path / "f.gguf").read_bytes()
    key = data.index(b"flash_ffn.blocks")
    first, second = data.index(b"dec.blk.0", key), data.index(b"dec.blk.1", key)
    swapped = bytearray(data)
    swapped[first : first + 9], swapped[second : second + 9] = b"dec.blk.1", b"dec.blk.0"
    (tmp_path / "f.gguf").write_bytes(swapped)
    assert not verify(tmp_path / "f.gguf", t5).ok


def test_thresholds(t5: Path, tmp_path: Path) -> None:
    """A flash file has one for each layer, a dense one for all."""
    with pytest.raises(ArgumentError, match="two stacks of blocks"):
        convert_dense(t5, tmp_path / "d.gguf", threshold=[0.1, 0.2, 0.1, 0.1])
    convert_dense(t5, tmp_path / "d.gguf", threshold=[0.3])
    layout = convert(tmp_path / "d.gguf", tmp_path / "f.gguf", select="gate")
    assert layout.thresholds == (pytest.approx(0.3),) * 4
    plain, dense, flash = logits_of([t5, tmp_path / "d.gguf", tmp_path / "f.gguf"], lib_dir())
    assert mean_kl(dense, flash) < 1e-10
    assert mean_kl(dense, plain) > 1e-4
