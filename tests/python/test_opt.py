"""OPT on the patched llama.cpp: both forms, dense and from flash, and the end of the positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli
from tiny_models import make_dense

from gguf_flash import FlashLlama
from gguf_flash.converters import convert
from gguf_flash.errors import ArgumentError, FlashError
from gguf_flash.format import read_layout
from gguf_flash.session import Session, decode_error

N_CTX = 48  # positions that the tiny models have learned
FORMS: dict[str, int | None] = {"before": None, "after": 32}  # norms; the latter with projections
F32 = 0  # of ggml_type: else the KV cache is F16
# Sums of n_ff F32 products in another order, relative to the largest logit.
F32_ROUNDING = 1e-5

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=FORMS)
def files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A tiny OPT, dense and flash."""
    folder = tmp_path_factory.mktemp(f"opt-{request.param}")
    dense = make_dense(
        folder / "dense.gguf", arch="opt", n_ff=512, n_ctx=N_CTX, n_word=FORMS[request.param]
    )
    made = {"dense": dense, "all": folder / "all.gguf", "gate": folder / "gate.gguf"}
    for select in ("all", "gate"):
        convert(dense, made[select], select=select)
    return made


def load(model: Path, **options: Any) -> FlashLlama:
    settings: dict[str, Any] = {"n_ctx": N_CTX, "threads": 1, **options}
    return FlashLlama(model, logits_all=True, type_k=F32, type_v=F32, flash_attn=False, **settings)


def logits(llm: FlashLlama, tokens: list[int], *pieces: int) -> Array:
    """Logits of `tokens`, decoded in batches of the given sizes, the last of them repeated."""
    llm.reset()
    begin = 0
    for size in itertools.chain(pieces or (len(tokens),), itertools.repeat(1)):
        if begin >= len(tokens):
            break
        llm.eval(tokens[begin : begin + size])
        begin += size
    return llm.scores[: len(tokens)].copy()


def tokens_of(seed: int, count: int = N_CTX) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, count)]


@pytest.mark.parametrize("select", ["all", "gate"])
def test_flash_equals_dense(files: dict[str, Path], select: str) -> None:
    dense, flash = load(files["dense"]), load(files[select])
    wanted = logits(dense, tokens_of(1))
    found = logits(flash, tokens_of(1), 20)
    assert np.abs(wanted).max() > 1
    assert np.abs(found - wanted).max() < F32_ROUNDING * np.abs(wanted).max()
    selected = flash.flash_stats()["total"]["selected"] / (2 * 512 * N_CTX)
    assert select == "all" or 0.2 < selected < 0.8
    assert read_layout(files[select]).activation == "relu"


@pytest.mark.parametrize("activation", ["relu_sqr", "silu", "gelu", "gelu_erf"])
def test_other_activations(tmp_path: Path, activation: str) -> None:
    """ggml looks GELU up in a table from F16 to F16, hence its other bound."""
    dense, flash = tmp_path / "dense.gguf", tmp_path / "flash.gguf"
    make_dense(dense, arch="opt", n_ctx=N_CTX, activation=activation)
    convert(dense, flash, select="all")
    wanted = logits(load(dense), tokens_of(2))
    apart = np.abs(logits(load(flash), tokens_of(2)) - wanted).max() / np.abs(wanted).max()
    assert apart < (1e-3 if activation == "gelu" else F32_ROUNDING)
    relu = logits(load(make_dense(tmp_path / "relu.gguf", arch="opt", n_ctx=N_CTX)), tokens_of(2))
    assert np.abs(relu - wanted).max() > 0.1


def test_an_activation_that_the_graph_lacks(tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "dense.gguf", arch="opt", n_ctx=N_CTX, activation="tanh")
    with pytest.raises(
        FlashError, match="'tanh', expected relu, relu_sqr, silu, gelu, gelu_erf or drelu"
    ):
        load(dense)


def test_a_token_depends_on_its_position(files: dict[str, Path]) -> None:
    """However the tokens are cut into batches; graphs of one size are used again."""
    llm = load(files["dense"])
    same = [7] * N_CTX
    whole = logits(llm, same)
    assert np.abs(whole[5:] - whole[4:-1]).max(axis=1).min() > 1e-3
    for pieces in ((1,), (5, 5, 5, 20, 5), (47,)):
        assert np.allclose(logits(llm, same, *pieces), whole, atol=2e-5 * np.abs(whole).max())


@pytest.mark.parametrize("kind", ["dense", "all", "gate"])
def test_a_position_beyond_the_table_fails_the_decode(files: dict[str, Path], kind: str) -> None:
    """Then the context is as it was before."""
    text, begun = tokens_of(1, N_CTX + 1), 32
    with Session(files[kind]) as session:
        session.open_context(n_ctx=4 * N_CTX, n_batch=32, n_ubatch=32, n_outputs=32, threads=1)

        def refused(tokens: list[int], position: int) -> None:
            with pytest.raises(ArgumentError) as caught:
                session.decode(tokens, position, 1)
            last = position + len(tokens) - 1
            assert f"cannot decode position {last}: the model has learned" in str(caught.value)
            assert f"{N_CTX} positions, 0 to {N_CTX - 1}; shorten the text" in str(caught.value)

        def rest() -> Array:
            session.decode(text[begun:N_CTX], begun, N_CTX - begun)
            found: Array = session.logits(N_CTX - begun).copy()
            return found

        session.decode(text[:begun], 0, 1)
        refused(text[begun:], begun)
        after = rest()
        refused([1], N_CTX)
        session.clear()
        refused([1] * 32, 10 * N_CTX)
        session.decode(text[:begun], 0, 1)
        assert np.array_equal(after, rest())


@pytest.mark.parametrize("kind", ["dense", "gate"])
def test_the_reason_reaches_flash_llama(files: dict[str, Path], kind: str) -> None:
    llm = load(files[kind], n_ctx=4 * N_CTX)
    whole = logits(llm, tokens_of(3))
    with pytest.raises(ArgumentError, match=rf"position {N_CTX}: the model has learned {N_CTX} "):
        llm.eval([1])
    assert np.allclose(logits(llm, tokens_of(3)), whole, atol=1e-6)


def test_the_command_line_says_it_in_one_line(files: dict[str, Path], cli: Cli) -> None:
    done = cli("run", files["gate"], "--prompt", "a" * 30, "--tokens", 40, "--ctx", 100, code=None)
    assert done.returncode not in (0, -6, -11)
    assert f"the model has learned {N_CTX} positions" in done.stderr


class Sequences:
    """A context for several sequences at positions of the caller's choice."""

    def __init__(self, session: Session) -> None:
        self.session, self.api = session, session.api
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max, params.kv_unified = 128, 64, 2, True
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = F32
        params.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = self.api.llama_init_from_model(session._model, params)
        self.batch = self.api.llama_batch_init(64, 0, 1)

    @property
    def memory(self) -> Any:
        return self.api.llama_get_memory(self.context)

    def decode(self, *rows: tuple[int, int, int]) -> Array:
        """Logits of rows (token, position, sequence)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = self.api.llama_decode(self.context, batch)
        if status != 0:
            raise decode_error(self.session._model or 0, status)
        pointer = self.api.llama_get_logits(self.context)
        shape = (len(rows), self.session.n_vocab)
        return np.ctypeslib.as_array(pointer, shape=shape).copy()

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.context)


@pytest.fixture
def sequences(files: dict[str, Path]) -> Iterator[Sequences]:
    with Session(files["dense"]) as session:
        made = Sequences(session)
        yield made
        made.close()


def test_sequences_of_one_batch_have_their_own_positions(sequences: Sequences) -> None:
    texts = [tokens_of(4, 20), tokens_of(5, 12)]
    alone = []
    for i, text in enumerate(texts):
        alone.append(sequences.decode(*((t, p, i) for p, t in enumerate(text))))
        sequences.api.llama_memory_clear(sequences.memory, True)
    rows = [(t, p, i) for i, text in enumerate(texts) for p, t in enumerate(text)]
    mixed = [row for pair in itertools.zip_longest(rows[:20], rows[20:]) for row in pair if row]
    found = sequences.decode(*mixed)
    for i, wanted in enumerate(alone):
        own = found[[k for k, row in enumerate(mixed) if row[2] == i]]
        assert np.abs(own - wanted).max() < F32_ROUNDING * np.abs(wanted).max()
    sequences.api.llama_memory_seq_rm(sequences.memory, 1, -1, -1)
    with pytest.raises(ArgumentError, match=f"position {N_CTX}:"):
        sequences.decode((1, 20, 0), (1, N_CTX, 1))
    with pytest.raises(ArgumentError, match=f"position {N_CTX + 1}:"):
        sequences.decode((1, N_CTX + 1, 1), (1, 20, 0))


def test_a_shifted_cache_makes_room(sequences: Sequences) -> None:
    """Keys hold no position, so moving the cells moves nothing else."""
    api, text = sequences.api, tokens_of(6)
    sequences.decode(*((t, p, 0) for p, t in enumerate(text)))
    with pytest.raises(ArgumentError):
        sequences.decode((9, N_CTX, 0))
    api.llama_memory_seq_rm(sequences.memory, 0, 0, 16)
    kept = sequences.decode((9, N_CTX - 1, 1))  # the other sequence sees none of the first
    api.llama_memory_seq_add(sequences.memory, 0, 16, N_CTX, -16)
    moved = sequences.decode((9, N_CTX - 16, 0))
    again = sequences.decode((9, N_CTX - 15, 0))
    assert np.isfinite(kept).all() and np.isfinite(moved).all()
    assert np.abs(moved - again).max() > 1e-3 and np.abs(moved - kept).max() > 1e-3
