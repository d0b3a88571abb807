"""Threads, contexts, interrupts: the text is that of an undisturbed run, or the call is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import make_dense

from gguf_flash import FlashLlama
from gguf_flash.converters import convert
from gguf_flash.errors import ArgumentError, FlashError
from gguf_flash.generate import Generation
from gguf_flash.llama_api import low_level
from gguf_flash.session import Session, decode_error
from gguf_flash.settings import Settings
from gguf_flash.turns import Turns

PROMPT = "Call me Ishmael. Some years ago"
WAYS: tuple[dict[str, Any], ...] = (
    {"ram": "100%", "threads": 1},
    {"ram": "40%", "threads": 2, "reader": "pread"},
    {"ram": "60%", "threads": 1, "policy": "window", "window": 1},
    {"ram": "40%", "threads": 2},
)
STEPS = 12


def text_of(llm: FlashLlama, prompt: str = PROMPT) -> str:
    done = llm.create_completion(prompt, max_tokens=STEPS, temperature=0)
    return str(done["choices"][0]["text"])


@pytest.fixture(scope="module")
def undisturbed(tiny: tuple[Path, Path]) -> str:
    llm = FlashLlama(tiny[1], n_ctx=128, threads=1)
    found = text_of(llm)
    llm.close()
    return found


# --- models, contexts, sequences ------------------------------------------------------------------


def test_several_models_at_once(tiny: tuple[Path, Path], undisturbed: str) -> None:
    """Some are freed while others run."""

    def run(n: int) -> list[str]:
        found = []
        for i in range(3):
            llm = FlashLlama(tiny[1], n_ctx=128, **WAYS[(n + i) % len(WAYS)])
            found.append(text_of(llm))
            llm.close()
        return found

    with ThreadPoolExecutor(len(WAYS)) as pool:
        assert list(pool.map(run, range(len(WAYS)))) == [[undisturbed] * 3] * len(WAYS)


class Contexts:
    """One model, and contexts of it, in llama.cpp's own functions."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.session = Session(path, Settings(**settings))
        self.api = self.session.api

    def open(self, n_seq: int = 1, threads: int = 1) -> Any:
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 256 * n_seq, 64, 64
        params.n_seq_max, params.kv_unified = n_seq, True
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = self.api.llama_init_from_model(self.session._model, params)
        assert context
        return context

    def decode(self, context: Any, rows: list[tuple[int, int, int]]) -> np.ndarray:
        """float32 (rows, n_vocab): logits of each (token, position, sequence) of a batch."""
        api = self.api
        batch = api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, 1
        status = api.llama_decode(context, batch)
        api.llama_batch_free(batch)
        if status:
            raise decode_error(self.session._model or 0, status)
        shape = (len(rows), self.session.n_vocab)
        return np.ctypeslib.as_array(api.llama_get_logits(context), shape=shape).copy()

    def follow(self, context: Any, tokens: list[int]) -> np.ndarray:
        """Logits of one text, token by token after its first eight."""
        found = [self.decode(context, [(t, i, 0) for i, t in enumerate(tokens[:8])])]
        found += [self.decode(context, [(t, i, 0)]) for i, t in enumerate(tokens[8:], 8)]
        return np.concatenate(found)


@contextmanager
def contexts(path: Path, **settings: Any) -> Iterator[Contexts]:
    found = Contexts(path, **settings)
    with found.session:
        yield found


def test_contexts_of_one_model_on_threads(tiny: tuple[Path, Path]) -> None:
    """Each has a text of its own, whose bits do not depend on the others."""
    texts = [[(7 * i + 3 * k) % 256 for i in range(24)] for k in range(4)]
    with contexts(tiny[1], ram="100%") as alone:
        wanted = []
        for text in texts:
            context = alone.open()
            wanted.append(alone.follow(context, text))
            alone.api.llama_free(context)
    for settings in ({"ram": "40%"}, {"ram": "60%", "reader": "pread", "depth": 4}):
        with contexts(tiny[1], **settings) as shared, ThreadPoolExecutor(len(texts)) as pool:
            opened = [shared.open(threads=1 + k % 2) for k in range(len(texts))]
            found = list(pool.map(shared.follow, opened, texts))
            for context in opened:
                shared.api.llama_free(context)
            assert shared.session.engine is not None
            assert shared.session.engine.stats()["total"]["misses"] > 0
        for a, b in zip(found, wanted, strict=True):
            assert np.array_equal(a, b)


def test_parallel_sequences_in_one_batch(tiny: tuple[Path, Path]) -> None:
    """The same bits however the weights come, and each sequence's tokens are those of it alone."""
    starts, n_seq = [[72, 101, 108], [67, 97, 108], [84, 104, 101], [65, 32, 97]], 4

    def greedy(model: Contexts, rows: list[list[int]], threads: int) -> tuple[Any, np.ndarray]:
        context = model.open(n_seq, threads)
        texts, logits = [list(r) for r in rows], []
        batch = [(t, i, s) for s, row in enumerate(rows) for i, t in enumerate(row)]
        for _ in range(STEPS):
            found = model.decode(context, batch)
            logits.append(found)
            last = {s: i for i, (_, _, s) in enumerate(batch)}
            for s, text in enumerate(texts):
                text.append(int(found[last[s]].argmax()))
            batch = [(text[-1], len(text) - 1, s) for s, text in enumerate(texts)]
        model.api.llama_free(context)
        return texts, np.concatenate(logits)

    with contexts(tiny[1], ram="100%") as model:
        texts, wanted = greedy(model, starts, 1)
        assert texts == [greedy(model, [row], 1)[0][0] for row in starts]
    for settings in ({"ram": "40%"}, {"ram": "40%", "reader": "pread", "prefill": "stream"}):
        with contexts(tiny[1], **settings) as model:
            assert np.array_equal(greedy(model, starts, 2)[1], wanted)


def test_one_object_on_many_threads(tiny: tuple[Path, Path], undisturbed: str) -> None:
    """Completions take turns, and counters may be read and reset meanwhile."""
    llm = FlashLlama(tiny[1], n_ctx=128, ram="40%", threads=1)
    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(text_of, llm) for _ in range(4)]
        while not all(r.done() for r in running):
            assert len(llm.flash_stats()["layers"]) == 3
            llm.reset_flash_stats()
        assert [r.result() for r in running] == [undisturbed] * 4
    llm.close()


# --- closing --------------------------------------------------------------------------------------


def started(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that does `work`, and what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("stream", [False, True])
def test_closing_while_another_thread_generates(tiny: tuple[Path, Path], stream: bool) -> None:
    for wait in (0.0, 0.01, 0.05, 0.2):
        llm = FlashLlama(tiny[1], n_ctx=512, ram="40%", threads=2)

        def work(llm: FlashLlama = llm) -> None:
            while True:
                done: Any = llm.create_completion(PROMPT, max_tokens=400, stream=stream)
                for _ in done if stream else ():
                    pass

        thread, raised = started(work)
        time.sleep(wait)
        llm.close()
        thread.join(30)
        assert not thread.is_alive()
        assert isinstance(raised[0], FlashError) and "was closed" in str(raised[0]), raised


def test_closing_a_generation_of_another_thread(tiny: tuple[Path, Path]) -> None:
    for wait in (0.0, 0.02, 0.1):
        generation = Generation(tiny[1], PROMPT, tokens=400, settings=Settings(ram="40%"))
        thread, raised = started(lambda g=generation: "".join(g))  # type: ignore[misc]
        time.sleep(wait)
        generation.close()
        thread.join(30)
        assert not thread.is_alive()
        assert all("closed" in str(e) or "interrupted" in str(e) for e in raised), raised
        assert all(isinstance(e, FlashError) for e in raised)


def test_a_closed_model_says_so(tiny: tuple[Path, Path]) -> None:
    llm = FlashLlama(tiny[1], n_ctx=128)
    stream = llm.create_completion(PROMPT, max_tokens=8, stream=True)
    next(iter(stream))  # type: ignore[call-overload]
    llm.close()
    llm.close()
    calls: tuple[Callable[[], object], ...] = (
        lambda: text_of(llm), lambda: llm.eval([1]), lambda: llm.tokenize(b"x"), llm.token_eos,
        llm.n_ctx, lambda: llm.model, lambda: list(stream), llm.save_state,
    )  # fmt: skip
    for call in calls:
        with pytest.raises(FlashError, match="was closed; load it again"):
            call()
    assert llm.flash_stats() == {}


def test_closing_within_a_call(tiny: tuple[Path, Path], undisturbed: str) -> None:
    """A callback that frees the model it is called by would pull the ground away."""
    llm = FlashLlama(tiny[1], n_ctx=128, threads=1)

    def stop(tokens: Any, logits: Any) -> bool:
        llm.close()
        return True

    from llama_cpp import StoppingCriteriaList

    with pytest.raises(ArgumentError, match="from within one of its own calls"):
        llm.create_completion(PROMPT, stopping_criteria=StoppingCriteriaList([stop]))
    assert text_of(llm) == undisturbed
    llm.close()


# --- interrupts -----------------------------------------------------------------------------------


def test_an_abort_callback(tiny: tuple[Path, Path]) -> None:
    """llama.cpp's own; what comes afterwards is right."""
    tokens = list(range(40))
    api = low_level()
    with contexts(tiny[1], ram="40%") as model:
        context = model.open(threads=2)
        wanted = model.follow(context, tokens)
        for allowed in (0, 20):
            left = [allowed]

            def abort(data: Any, left: list[int] = left) -> bool:
                left[0] -= 1
                return left[0] < 0

            callback = api.ggml_abort_callback(abort)
            api.llama_set_abort_callback(context, callback, None)
            api.llama_memory_clear(api.llama_get_memory(context), True)
            with pytest.raises(FlashError, match="was interrupted; the model may be used again"):
                model.follow(context, tokens)
            api.llama_set_abort_callback(context, api.ggml_abort_callback(0), None)
            api.llama_memory_clear(api.llama_get_memory(context), True)
            assert np.array_equal(model.follow(context, tokens), wanted)
        api.llama_free(context)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many layers, so that much of a decode is left when a layer has ended."""
    folder = tmp_path_factory.mktemp("deep")
    dense = make_dense(folder / "dense.gguf", n_ff=256, n_layer=64, type="F16")
    convert(dense, folder / "flash.gguf")
    return folder / "flash.gguf"


def slow(seconds: float) -> dict[str, str]:
    """Settings under which a token takes about so long: four reads, one by one, in each layer."""
    return {
        "GGUF_FLASH_FAULTS": f"delay:{int(1e6 * seconds / 256)}",
        "GGUF_FLASH_RAM": "1%",
        "GGUF_FLASH_PREFILL": "select",
        "GGUF_FLASH_DEPTH": "1",
    }


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_decode(deep: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "gguf_flash", "run", str(deep), "--prompt", "x"]
    running = subprocess.Popen(
        command, cwd=deep.parent, env={**os.environ, **slow(60)}, stderr=subprocess.PIPE, text=True,
        # A shell's background jobs ignore interrupts, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert running.stderr is not None
    time.sleep(4)
    assert running.poll() is None
    begin = time.monotonic()
    running.send_signal(number)
    said = running.stderr.read()
    assert running.wait(60) == code
    assert time.monotonic() - begin < 15, "it decoded to the end of the token"
    assert said.strip() == ""


def test_interrupting_a_session(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(deep) as session:
        session.open_context(n_ctx=32, n_batch=8, n_ubatch=8, n_outputs=1)
        session.decode([1, 2, 3], 0, 1)
        wanted = session.logits(1).copy()
    for name, value in slow(4).items():
        monkeypatch.setenv(name, value)
    with Session(deep) as session:
        session.open_context(n_ctx=32, n_batch=8, n_ubatch=8, n_outputs=1)
        thread, raised = started(lambda: session.decode([1, 2, 3], 0, 1))
        time.sleep(1)
        begin = time.monotonic()
        session.interrupt()
        thread.join(60)
        assert time.monotonic() - begin < 2
        assert "was interrupted" in str(raised[0])
        session.clear()
        session.decode([1, 2, 3], 0, 1)
        assert np.array_equal(session.logits(1), wanted)


# --- a fork ---------------------------------------------------------------------------------------


def test_a_fork_while_another_thread_runs() -> None:
    """The child cannot have the turn that was under way."""
    turns, begun, end = Turns("m.gguf"), threading.Event(), threading.Event()

    def hold() -> None:
        with turns.turn():
            begun.set()
            end.wait()

    thread, _ = started(hold)
    begun.wait()
    child = os.fork()
    if child == 0:
        try:
            with turns.turn():
                os._exit(1)
        except FlashError as error:
            os._exit(0 if "load it again in this process" in str(error) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    end.set()
    thread.join()
    with turns.turn():
        pass
