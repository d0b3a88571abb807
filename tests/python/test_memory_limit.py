"""The RAM limit is a limit: for everything, named when too small, changed while a model runs."""

from __future__ import annotations

import ctypes
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli, Models, SmallOpt
from test_plan import report

from gguf_flash.bench.cgroup import MemoryCgroup
from gguf_flash.errors import ArgumentError, RamTooSmallError, ToolError
from gguf_flash.memory import BASE_BYTES, ContextSize, memory_needs
from gguf_flash.runtime import tool_path
from gguf_flash.session import Session
from gguf_flash.settings import Settings

MIB = 1 << 20
PROMPT = "Call me Ishmael. Some years ago"
CONTEXT = ContextSize(n_ctx=256, n_batch=32, threads=2)


def resident() -> int:
    with open("/proc/self/status", encoding="utf-8") as lines:
        (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
    return int(kib) * 1024


def logits_of(session: Session, tokens: list[int], position: int = 0) -> Any:
    session.decode(tokens, position, 1)
    return session.logits(1).copy()


def test_run_and_plan_name_the_same_floor(
    cli: Cli, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    words = ("run", tiny[1], "--prompt", PROMPT, "--tokens", 4, "--ctx", 100, "--threads", 2)
    batch = len(PROMPT)  # a token a byte, without a begin token
    floor = memory_needs(tiny[1], ContextSize(100, batch, threads=2))["memory"]["floor_bytes"]
    for ram in (4096, floor - 1):  # refused while it loads, and when the context is made
        refused = cli(*words, "--ram", ram, code=2)
        assert f"it needs {floor} bytes (" in refused.stderr
        assert "of KV cache" in refused.stderr and "at least" in refused.stderr
    figures = cli.json(*words, "--ram", floor)
    assert figures["memory"]["floor_bytes"] == figures["ram_bytes"] == floor
    profile = tmp_path / "disk.json"
    profile.write_text(json.dumps(report()))
    context = ("--ctx", 100, "--batch", batch, "--threads", 2, "--profile", profile)
    planned = cli("plan", tiny[1], "--ram", floor - 1, *context, code=2)
    assert f"need {floor} bytes" in planned.stderr
    assert cli.json("plan", tiny[1], "--ram", floor, *context)["floor_bytes"] == floor


def test_the_parts_are_what_is_there(tiny: tuple[Path, Path]) -> None:
    """A larger context takes more; what was foreseen is what llama.cpp then has."""
    small, large = (
        memory_needs(tiny[1], ContextSize(n, 32, threads=2))["memory"] for n in (256, 1024)
    )
    assert large["kv_bytes"] == 4 * small["kv_bytes"]
    with Session(tiny[1], Settings(ram="50%")) as session:
        CONTEXT.open(session)
        assert session.engine is not None
        found = session.engine.stats()["memory"]
    for part in ("weights", "vocabulary", "engine", "kv", "compute", "context", "least_cache"):
        assert found[f"{part}_bytes"] == small[f"{part}_bytes"], part
    assert found["total_bytes"] <= found["ram_bytes"]


@pytest.mark.parametrize("above", [0, 24])
def test_peak_memory_stays_below_the_limit(cli: Cli, models: Models, above: int) -> None:
    """RSS less what the command says the program itself takes; no other tolerance."""
    model = models.flash("Q8_0")
    words = ("run", model, "--prompt", PROMPT, "--tokens", 3, "--ctx", 512, "--threads", 2)
    (line,) = cli(*words, "--ram", "1MiB", code=2).stderr.splitlines()
    floor = int(line.split("it needs ")[1].split()[0])
    ram = floor + above * MIB
    figures = cli.json(*words, "--ram", ram)
    assert figures["peak_rss_bytes"] <= ram + BASE_BYTES
    assert figures["peak_rss_bytes"] > ram // 2  # the limit is no fancy figure either


@pytest.mark.parametrize("reader", ["io_uring", "pread"])
@pytest.mark.parametrize("select", ["all", "gate", "predictor"])
def test_the_text_does_not_change_with_the_limit(
    small_opt: SmallOpt, select: str, reader: str
) -> None:
    """Another thread changes it all the time; one attempt in four is below the floor."""
    path = small_opt.flash(select)
    with Session(path, Settings(ram="100%")) as session:
        CONTEXT.open(session)
        expected = [logits_of(session, [i * 7 % 500 + 1], i) for i in range(120)]
    with Session(path, Settings(ram="50%", reader=reader)) as session:
        CONTEXT.open(session)
        engine = session.engine
        assert engine is not None
        floor = engine.stats()["memory"]["floor_bytes"]
        whole = floor + sum(x["n_ff"] * x["slot_bytes"] for x in engine.stats()["layers"])
        done, changes, refused = threading.Event(), [0], [0]

        def change() -> None:
            rng = random.Random(3)
            while not done.is_set():
                if rng.random() < 0.25:
                    before = engine.stats()["memory"]
                    with pytest.raises(RamTooSmallError, match=f"it needs {floor} bytes"):
                        session.set_ram(rng.randrange(1, floor))
                    assert engine.stats()["memory"] == before
                    refused[0] += 1
                else:
                    session.set_ram(rng.randrange(floor, whole))
                    changes[0] += 1
                time.sleep(0.002)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            found = [logits_of(session, [i * 7 % 500 + 1], i) for i in range(120)]
        finally:
            done.set()
            thread.join()
        assert changes[0] > 3 and refused[0] > 0
        session.set_ram(floor)
        assert slots_of(engine) == [min(64, x["n_ff"]) for x in engine.stats()["layers"]]
        session.set_ram("100%")
        assert slots_of(engine) == [x["n_ff"] for x in engine.stats()["layers"]]
        with pytest.raises(ArgumentError):
            session.set_ram("much")
    for a, b in zip(expected, found, strict=True):
        assert np.array_equal(a, b)


def slots_of(engine: Any) -> list[int]:
    return [x["slots"] for x in engine.stats()["layers"]]


@pytest.mark.parametrize("reader", ["io_uring", "pread"])
def test_memory_goes_back_to_the_system(models: Models, reader: str) -> None:
    with Session(models.flash("Q8_0"), Settings(ram="100%", reader=reader)) as session:
        CONTEXT.open(session)
        logits = logits_of(session, session.tokenize(PROMPT)[:8])
        full = resident()
        assert session.engine is not None
        before = session.engine.stats()["memory"]
        session.set_ram(before["floor_bytes"])
        freed = before["slots_bytes"] - session.engine.stats()["memory"]["slots_bytes"]
        assert freed > 50 * MIB
        assert full - resident() > 0.95 * freed
        session.clear()
        assert np.array_equal(logits, logits_of(session, session.tokenize(PROMPT)[:8]))


def test_contexts_share_one_limit(tiny: tuple[Path, Path]) -> None:
    """The second's KV cache comes out of the neuron cache, and goes back when it is freed."""
    with Session(tiny[1], Settings(ram=64 * MIB)) as session:
        CONTEXT.open(session)
        engine, api = session.engine, session.api
        assert engine is not None
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 2048, 32, 32
        api.llama_free(api.llama_init_from_model(session._model, params))
        two = memory_needs(tiny[1], ContextSize(2048, 32, 0, threads=4))["memory"]
        ram = engine.stats()["memory"]["floor_bytes"] + two["kv_bytes"] + 7 * MIB
        session.set_ram(ram)
        one = engine.stats()["memory"]
        second = api.llama_init_from_model(session._model, params)
        assert second
        both = engine.stats()["memory"]
        assert both["kv_bytes"] > 2 * one["kv_bytes"]
        assert both["slots_bytes"] < one["slots_bytes"] and both["total_bytes"] <= ram
        params.n_ctx = 1 << 16
        with session.log:
            assert not api.llama_init_from_model(session._model, params)
        assert engine.stats()["memory"] == both
        api.llama_free(second)
        assert engine.stats()["memory"] == one


def test_the_cache_stays_warm_for_the_next_context(small_opt: SmallOpt) -> None:
    """A program that makes its only context again reads nothing that it had."""
    with Session(small_opt.flash("all"), Settings(ram="100%")) as session:
        engine, api = session.engine, session.api
        assert engine is not None
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 64, 8, 8
        tokens = (api.llama_token * 1)(1)
        read = []
        for _ in range(2):
            context = api.llama_init_from_model(session._model, params)
            assert api.llama_decode(context, api.llama_batch_get_one(tokens, 1)) == 0
            read.append(engine.stats()["total"]["bytes_read"])
            api.llama_free(context)
        assert read[0] > 0 and read[1] == read[0]


def test_a_context_with_samplers(small_opt: SmallOpt) -> None:
    """llama.cpp prepares a chain for one context only, and ends the process at a second."""
    with Session(small_opt.flash("all"), Settings(ram="100%")) as session:
        api = session.api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 64, 8, 8
        held = ctypes.cast(chain, ctypes.c_void_p)
        params.samplers = (api.llama_sampler_seq_config * 1)((0, held))
        params.n_samplers = 1
        context = api.llama_init_from_model(session._model, params)
        assert context
        tokens = (api.llama_token * 1)(1)
        assert api.llama_decode(context, api.llama_batch_get_one(tokens, 1)) == 0
        api.llama_free(context)
        api.llama_sampler_free(chain)


def test_more_rows_of_logits_come_out_of_the_cache(small_opt: SmallOpt) -> None:
    with Session(small_opt.flash("all"), Settings(ram="100%")) as session:
        ContextSize(256, 64, n_outputs=0, threads=1).open(session)
        assert session.engine is not None
        before = session.engine.stats()["memory"]
        session.decode(list(range(1, 65)), 0, 64)
        after = session.engine.stats()["memory"]
        assert after["compute_bytes"] - before["compute_bytes"] == 63 * session.n_vocab * 4
        session.set_ram(after["floor_bytes"])
        session.clear()
        session.decode(list(range(1, 65)), 0, 64)


def test_a_tool_of_llama_cpp_is_held_to_the_limit(tiny: tuple[Path, Path]) -> None:
    words = [str(tool_path("llama-bench")), "-m", str(tiny[1]), "-p", "8", "-n", "4", "-r", "1"]
    for ram, works in (("4MiB", False), ("64MiB", True)):
        done = subprocess.run(
            words, env={**os.environ, "GGUF_FLASH_RAM": ram},
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert (done.returncode == 0) == works, done.stderr


_WATCHED = """
import json, sys, time
from gguf_flash.memory import ContextSize
from gguf_flash.session import Session
from gguf_flash.settings import Settings
with Session(sys.argv[1], Settings(ram="100%", watch="on")) as session:
    ContextSize(n_ctx=256, n_batch=32, threads=1).open(session)
    session.decode([1, 2, 3], 0, 1)
    print(json.dumps(session.engine.stats()["memory"]), flush=True)
    for line in sys.stdin:
        session.clear()
        session.decode([1, 2, 3], 0, 1)
        print(json.dumps(session.engine.stats()["memory"]), flush=True)
"""

_BALLAST = """
import sys
kept = []
for line in sys.stdin:
    kept.append(b"x" * (int(line) << 20))
    print(len(kept), flush=True)
"""


@pytest.mark.root
def test_the_cache_yields_to_others_in_the_cgroup(models: Models) -> None:
    """Another process of the group takes memory step by step, which only the cache can give."""
    model = models.flash("Q8_0")
    needs = memory_needs(model, ContextSize(256, 32, threads=1))
    cache = sum(x["n_ff"] * x["slot_bytes"] for x in needs["layers"])
    limit = needs["memory"]["floor_bytes"] + cache + BASE_BYTES + 40 * MIB
    try:
        with (
            MemoryCgroup(limit) as group,
            _in(group, _WATCHED, model) as run,
            _in(group, _BALLAST) as other,
        ):
            full = json.loads(run.stdout.readline())["slots_bytes"]
            for _ in range(9):
                _say(other, "10")
                time.sleep(0.4)
            less = json.loads(_say(run, ""))["slots_bytes"]
            assert less < full - 30 * MIB
            other.stdin.close()
            other.wait(timeout=30)
            again, deadline = less, time.monotonic() + 60
            while again < less + 20 * MIB and time.monotonic() < deadline:
                time.sleep(0.5)
                again = json.loads(_say(run, ""))["slots_bytes"]
            assert again >= less + 20 * MIB
            run.stdin.close()
            assert run.wait(timeout=30) == 0
    except ToolError as error:
        pytest.skip(str(error))


def _in(group: MemoryCgroup, code: str, *words: object) -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, cwd="/",
        preexec_fn=lambda: group.procs.write_text(str(os.getpid()), encoding="utf-8") and None,
    )  # fmt: skip


def _say(process: Any, text: str) -> str:
    process.stdin.write(text + "\n")
    process.stdin.flush()
    answer: str = process.stdout.readline()
    return answer
