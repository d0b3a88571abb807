"""Which tokens of a window are scored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Cli
from predictors import load, logits
from tiny_models import make_dense

from gguf_flash.errors import ArgumentError
from gguf_flash.perplexity import log_softmax, perplexity

CTX = 32
WORDS = bytes(np.random.default_rng(1).integers(97, 123, 3 * CTX).astype(np.uint8)).decode()


def test_a_file_that_is_no_text(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"abc\xff" + bytes(range(32, 127)) * 20)
    done = cli("perplexity", model, "--text", tmp_path / "x.txt", code=2)
    assert "x.txt' is not UTF-8 text: found 0xff at byte 3; give" in done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dense(tmp_path_factory.mktemp("model") / "m.gguf")


def by_hand(model: Path, first: int) -> float:
    """exp of the mean of -log p of each window's tokens after `first`; a token is a byte."""
    llm, found = load(model), []
    for start in range(0, len(WORDS), CTX):
        tokens = llm.tokenize(WORDS[start : start + CTX].encode(), add_bos=False)
        assert len(tokens) == CTX
        log_p = log_softmax(logits(llm, tokens))
        found += [-log_p[i, tokens[i + 1]] for i in range(first, CTX - 1)]
    return float(np.exp(np.mean(found)))


@pytest.mark.parametrize("batch", [CTX, 7])
@pytest.mark.parametrize(("score", "first"), [("second-half", CTX // 2), ("all", 0)])
def test_scored_tokens(cli: Cli, model: Path, tmp_path: Path, score: str, first: int, batch: int):
    (tmp_path / "a.txt").write_text(WORDS)
    found = cli.json(
        "perplexity", model, "--text", tmp_path / "a.txt", "--ctx", CTX, "--batch", batch,
        "--score", score, "--threads", 1, "--against", model,
    )  # fmt: skip
    assert found["tokens"] == 3 * (CTX - 1 - first)
    # llama.cpp keeps keys and values in halves unless told otherwise.
    assert found["perplexity"] == pytest.approx(by_hand(model, first), rel=2e-3)
    assert found["mean_kl"] == pytest.approx(0, abs=1e-9)


def test_one_window_is_enough_for_all_of_it(model: Path) -> None:
    assert perplexity(model, WORDS[:CTX], ctx=CTX, score="all", threads=1)["tokens"] == CTX - 1
    with pytest.raises(ArgumentError, match="2 windows"):
        perplexity(model, WORDS[:CTX], ctx=CTX, threads=1)
    with pytest.raises(ArgumentError, match="second-half or all"):
        perplexity(model, WORDS, ctx=CTX, score="none")
