"""Which activation a model was trained with shows when it runs with each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gguf_flash.calibrate.probe import probe
from gguf_flash.cli.inspect import command
from gguf_flash.errors import ArgumentError

DATA = Path(__file__).parents[1] / "data"
SMALL_OPT = DATA / "small-opt" / "dense-f16.gguf"
TEXT = (DATA / "english.txt").read_text()


def test_a_relu_model_is_told_from_the_others() -> None:
    found = probe(SMALL_OPT, TEXT, activations=("silu", "relu", "gelu"), ctx=128, chunks=2)
    assert found[0].activation == "relu"
    assert found[0].zeros > 0.9 and len(found[0].layer_zeros) == 6
    for other in found[1:]:
        assert other.perplexity > 1.2 * found[0].perplexity
        assert other.zeros < 0.01


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(ArgumentError, match="one window takes 256"):
        probe(SMALL_OPT, "Call me Ishmael.")


def test_the_verb(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT[:4000])
    done = CliRunner().invoke(command, [str(SMALL_OPT), "--probe", str(text), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)["activations"]
    assert rows[0]["activation"] == "relu"
    assert {r["activation"] for r in rows} == {"relu", "relu_sqr", "silu", "gelu", "gelu_erf"}
    shown = CliRunner().invoke(command, [str(SMALL_OPT), "--probe", str(text)])
    assert "the likeliest is relu" in shown.output
