"""Probing models that overflow, that are not all in the graph, or that no setting reaches."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import DATA
from tiny_models import make_dense

from gguf_flash.calibrate import probe as module
from gguf_flash.calibrate.probe import probe
from gguf_flash.cli.inspect import command
from gguf_flash.errors import UnsupportedError
from gguf_flash.session import Session

SMALL_OPT = DATA / "small-opt" / "dense-f16.gguf"
TEXT = (DATA / "english.txt").read_text(encoding="utf-8")
SHORT: dict[str, Any] = {"ctx": 32, "chunks": 2, "threads": 1}


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hidden values around 1e25: finite, unless they are squared."""
    path = tmp_path_factory.mktemp("overflowing") / "model.gguf"
    return make_dense(path, arch="opt", up_scale=1e25)


def test_an_activation_that_overflows(overflowing: Path) -> None:
    found = probe(overflowing, TEXT, activations=("relu_sqr", "relu"), **SHORT)
    assert [p.activation for p in found] == ["relu", "relu_sqr"]
    assert 0.3 < found[0].zeros < 0.7 and math.isfinite(found[0].perplexity)
    assert math.isnan(found[1].zeros) and math.isnan(found[1].perplexity)
    assert found[1].layer_zeros == ()


def test_an_overflow_as_json(overflowing: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT[:600])
    done = CliRunner().invoke(command, [str(overflowing), "--probe", str(text), "--json"])
    assert done.exit_code == 0, done.output

    def fail(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    rows = json.loads(done.output, parse_constant=fail)["activations"]
    (square,) = (r for r in rows if r["activation"] == "relu_sqr")
    assert square["zeros"] is None and square["perplexity"] is None


def test_a_block_that_is_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no zero: as without it."""
    options = {"activations": ("relu",), **SHORT}
    (wanted,) = probe(SMALL_OPT, TEXT, **options)
    find = module.find_ffns
    monkeypatch.setattr(module, "find_ffns", lambda d: [*find(d), replace(find(d)[-1], layer=99)])
    assert probe(SMALL_OPT, TEXT, **options) == [wanted]


def test_a_graph_that_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder's other errors are no figures either."""
    find = module.find_ffns
    monkeypatch.setattr(module, "find_ffns", lambda d: [replace(f, n_ff=8) for f in find(d)])
    with pytest.raises(UnsupportedError, match="layer 0"):
        probe(SMALL_OPT, TEXT, activations=("relu",), **SHORT)


def test_a_perplexity_beyond_all_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Session.logits
    monkeypatch.setattr(Session, "logits", lambda s, rows: logits(s, rows) * np.float32(1e4))
    (found,) = probe(SMALL_OPT, TEXT, activations=("relu",), **SHORT)
    assert not math.isfinite(found.perplexity) and found.zeros > 0.9


def test_an_architecture_with_an_ffn_of_its_own(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "apertus")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((8, 32), np.float32))
    writer.add_tensor("blk.0.ffn_down.weight", np.zeros((32, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"'apertus'.*no effect") as refused:
        probe(tmp_path / "model.gguf", TEXT, **SHORT)
    assert "\n" not in str(refused.value)
