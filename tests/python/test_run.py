"""Running from flash: one text whatever the settings, within the RAM limit, and after mishaps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli, Models

import gguf_flash
from gguf_flash import _core
from gguf_flash.converters import verify_checksums
from gguf_flash.errors import FlashError, IoError
from gguf_flash.memory import BASE_BYTES
from gguf_flash.runtime import tool_path

PROMPT = "Call me Ishmael. Some years ago"
VARIATIONS = (
    *(("--ram", ram) for ram in ("30%", "60%", "100%")),
    *(("--threads", n) for n in ("1", "2", "4")),
    *(("--reader", reader) for reader in ("io_uring", "pread")),
    *(("--policy", "window", "--window", k) for k in ("1", "5", "50")),
)
KEYS = {
    "text", "tokens", "tokens_per_s", "bytes_per_token", "requests_per_token", "hit_rate",
    "ahead_per_token", "foreseen_per_token",
    "predictor_ms", "io_ms", "mem_ms", "compute_ms", "peak_rss_bytes", "kv_bytes", "compute_bytes",
    "prompt_tokens", "prompt_s", "prompt_bytes", "ram_bytes", "flash_bytes", "memory", "settings",
    "reader",
}  # fmt: skip


@pytest.fixture(scope="module")
def reference(cli: Cli, tiny: tuple[Path, Path]) -> dict[tuple[str, ...], str]:
    """The text of the tiny model for each way of sampling, with default settings."""
    return {how: _text(cli, tiny[1], *how) for how in ((), ("--temperature", "0.9", "--seed", "7"))}


def _text(cli: Cli, model: Path, *words: str) -> str:
    text = cli.json("run", model, "--prompt", PROMPT, "--tokens", 24, *words)["text"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("words", VARIATIONS, ids=" ".join)
def test_text_does_not_depend_on(
    cli: Cli,
    tiny: tuple[Path, Path],
    reference: dict[tuple[str, ...], str],
    words: tuple[str, ...],
) -> None:
    if "io_uring" in words and not _core.machine()["io_uring"]:
        pytest.skip("this kernel or container has no io_uring")
    for how, expected in reference.items():
        assert _text(cli, tiny[1], *words, *how) == expected


def test_nucleus(cli: Cli, tiny: tuple[Path, Path], reference: dict[tuple[str, ...], str]) -> None:
    """The smallest nucleus is the likeliest token; a larger one lets the seed choose."""
    hot = ("--temperature", "5", "--seed", "7")
    texts = {p: _text(cli, tiny[1], *hot, "--top-p", p) for p in ("0.000001", "0.3", "0.95", "1")}
    assert texts["0.000001"] == reference[()]
    assert len({texts["0.000001"], texts["0.3"], texts["1"]}) == 3
    assert texts["0.95"] == _text(cli, tiny[1], *hot)
    assert texts["0.3"] == _text(cli, tiny[0], *hot, "--top-p", "0.3")  # the dense model's


def test_nucleus_without_temperature(cli: Cli, tiny: tuple[Path, Path]) -> None:
    done = cli("run", tiny[1], "--prompt", PROMPT, "--top-p", "0.5", code=2)
    assert done.stderr.count("\n") == 1 and "--temperature" in done.stderr


def test_text_is_the_dense_text(
    cli: Cli, tiny: tuple[Path, Path], reference: dict[tuple[str, ...], str]
) -> None:
    assert reference[()] == _text(cli, tiny[0])


@pytest.mark.slow
def test_text_of_a_real_model(cli: Cli, models: Models) -> None:
    flash = models.flash("Q8_0")
    settings = (
        ("--ram", "60%", "--threads", "1"),
        ("--ram", "100%", "--threads", "4", "--reader", "pread"),
        ("--ram", "60%", "--threads", "2", "--policy", "window", "--window", "1"),
    )
    assert len({_text(cli, flash, *words) for words in settings}) == 1


def test_figures(cli: Cli, tiny: tuple[Path, Path]) -> None:
    ram = tiny[1].stat().st_size * 6 // 10 + 6 * 2**20
    figures = cli.json("run", tiny[1], "--prompt", PROMPT, "--tokens", 8, "--ram", ram)
    assert set(figures) == KEYS
    assert figures["tokens"] == 8 and figures["prompt_tokens"] == len(PROMPT)
    assert figures["ram_bytes"] == ram
    assert figures["memory"]["floor_bytes"] < figures["memory"]["total_bytes"] <= ram
    assert figures["bytes_per_token"] > 0 and figures["requests_per_token"] > 0
    assert 0 <= figures["hit_rate"] < 1
    assert figures["kv_bytes"] > 0 and figures["compute_bytes"] > 0
    assert figures["peak_rss_bytes"] > figures["kv_bytes"]


def test_the_last_line_has_the_figures(cli: Cli, tiny: tuple[Path, Path]) -> None:
    *_, last = cli("run", tiny[1], "--prompt", PROMPT, "--tokens", 4).stdout.splitlines()
    for word in ("tokens/s", "requests/token", "hit rate", "I/O", "management", "compute", "RSS"):
        assert word in last


def test_a_dense_model_runs_too(cli: Cli, tiny: tuple[Path, Path]) -> None:
    figures = cli.json("run", tiny[0], "--prompt", PROMPT, "--tokens", 4)
    assert figures["memory"] == {} and figures["bytes_per_token"] == 0


# --- through llama-cpp-python ---------------------------------------------------------------------


def test_flash_llama(cli: Cli, models: Models) -> None:
    model = models.flash("Q8_0")
    llm = gguf_flash.FlashLlama(model, ram="60%", window=5, n_ctx=256, threads=2)
    done = llm.create_completion(PROMPT, max_tokens=24, temperature=0)
    assert done["choices"][0]["text"] == _text(cli, model)
    stats = llm.flash_stats()
    assert stats["total"]["bytes_read"] > 0 and len(stats["layers"]) == 30
    llm.reset_flash_stats()
    assert llm.flash_stats()["total"]["bytes_read"] == 0
    llm.close()


def test_flash_llama_with_a_dense_model(tiny: tuple[Path, Path]) -> None:
    llm = gguf_flash.FlashLlama(tiny[0], n_ctx=128)
    assert llm.create_completion("x", max_tokens=2)["usage"]["completion_tokens"] > 0
    assert llm.flash_stats() == {}
    llm.close()


def test_flash_llama_says_why_it_cannot_load(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(tiny[1].read_bytes()[:-4096])
    with pytest.raises(FlashError, match=r"short\.gguf"):
        gguf_flash.FlashLlama(short)
    with pytest.raises(FlashError, match="no such file"):
        gguf_flash.FlashLlama(tmp_path / "missing.gguf")
    with pytest.raises(FlashError, match=r"(?i)\bram\b"):
        gguf_flash.FlashLlama(tiny[1], ram=4096)


def test_a_file_truncated_while_it_runs(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """The decode fails with a FlashError, and with the file whole again it asks to load it anew."""
    model = tmp_path / "model.gguf"
    shutil.copy(tiny[1], model)
    llm = gguf_flash.FlashLlama(model, ram="40%", n_ctx=128)
    expected = llm.create_completion(PROMPT, max_tokens=4, temperature=0)["choices"][0]["text"]
    whole = model.read_bytes()
    os.truncate(model, 8192)
    llm.reset()
    with pytest.raises(IoError, match=r"model\.gguf"):
        llm.eval(llm.tokenize(PROMPT.encode()))
    with model.open("r+b") as file:
        file.write(whole)
    llm.reset()
    with pytest.raises(IoError, match=r"written to since it was opened.*load the model again"):
        llm.eval(llm.tokenize(PROMPT.encode()))
    llm.close()
    again = gguf_flash.FlashLlama(model, ram="40%", n_ctx=128)
    found = again.create_completion(PROMPT, max_tokens=4, temperature=0)["choices"][0]["text"]
    assert found == expected
    again.close()


def test_a_file_deleted_while_it_runs(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """An open file outlives its name."""
    model = tmp_path / "model.gguf"
    shutil.copy(tiny[1], model)
    llm = gguf_flash.FlashLlama(model, ram="40%", n_ctx=128)
    model.unlink()
    assert llm.create_completion(PROMPT, max_tokens=4)["usage"]["completion_tokens"] > 0
    llm.close()


def test_open_model(tiny: tuple[Path, Path]) -> None:
    model = gguf_flash.open_model(tiny[1], ram="60%")
    x = np.random.default_rng(0).standard_normal((3, model.n_embd), dtype=np.float32)
    one, two = model.ffn(0, x), model.ffn(0, x, threads=2)
    assert one.shape == x.shape and one.dtype == np.float32
    assert np.array_equal(one, two)
    assert model.stats()["total"]["bytes_read"] > 0


def test_open_model_takes_the_environment(
    tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model inside llama.cpp does; an argument is stronger."""
    monkeypatch.setenv("GGUF_FLASH_POLICY", "window")
    monkeypatch.setenv("GGUF_FLASH_WINDOW", "3")
    settings = gguf_flash.open_model(tiny[1], window=7).stats()["settings"]
    assert settings["policy"] == "window" and settings["window"] == 7


def test_open_model_from_several_threads(tiny: tuple[Path, Path]) -> None:
    model = gguf_flash.open_model(tiny[1], ram="60%")
    x = np.random.default_rng(0).standard_normal((3, model.n_embd), dtype=np.float32)
    alone = [model.ffn(layer, x) for layer in model.layers]

    def work(number: int) -> bool:
        layer = number % len(model.layers)
        return np.array_equal(model.ffn(layer, x, threads=1 + number % 2), alone[layer])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(60)))


# --- disk errors, injected beneath the readers' retry logic ---------------------------------------


@pytest.mark.parametrize("reader", ["io_uring", "pread"])
def test_short_and_interrupted_reads_change_nothing(
    cli: Cli, tiny: tuple[Path, Path], reference: dict[tuple[str, ...], str], reader: str
) -> None:
    words = ("run", tiny[1], "--prompt", PROMPT, "--tokens", 24, "--ram", "60%", "--reader", reader)
    figures = cli.json(*words, env={"GGUF_FLASH_FAULTS": "short:3,again:5"})
    assert figures["text"] == reference[()]


@pytest.mark.parametrize("reader", ["io_uring", "pread"])
def test_a_disk_error_is_one_sentence(cli: Cli, tiny: tuple[Path, Path], reader: str) -> None:
    words = ("run", tiny[1], "--prompt", PROMPT, "--tokens", 24, "--ram", "40%", "--reader", reader)
    done = cli(*words, env={"GGUF_FLASH_FAULTS": "eio:40"}, code=2)
    assert done.stderr.count("\n") == 1
    assert "cannot read" in done.stderr and "Input/output error" in done.stderr
    assert "layer" in done.stderr and str(tiny[1]) in done.stderr


def test_a_disk_error_leaves_the_model_usable(tiny: tuple[Path, Path]) -> None:
    """One read fails; the same call made again gives what it would have given."""
    x = np.random.default_rng(0).standard_normal((1, 64), dtype=np.float32)
    expected = gguf_flash.open_model(tiny[1], ram="60%").ffn(1, x)
    model = _core.open_model(str(tiny[1]), ram="60%", faults="eio:3")
    with pytest.raises(IoError, match="layer 1"):
        model.ffn(1, x)
    assert np.array_equal(model.ffn(1, x), expected)


# --- llama.cpp's own tools ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("llama-bench", "-p", "16", "-n", "4", "-r", "1", "-t", "2", "-m"),
        ("llama-completion", "-p", "Call me", "-n", "4", "-no-cnv", "-m"),
    ],
    ids=lambda words: words[0],
)
def test_bundled_tool(cli: Cli, tiny: tuple[Path, Path], words: tuple[str, ...]) -> None:
    assert cli("exec", "--", *words, tiny[1]).stdout.strip()


def test_llama_perplexity(cli: Cli, tiny: tuple[Path, Path], tmp_path: Path, english: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(english.read_bytes()[:1600])
    words = ("-f", text, "-c", "128", "-b", "128", "--chunks", "2")
    done = cli("exec", "--", "llama-perplexity", "-m", tiny[1], *words)
    # The estimate after one window: on a busy machine the tool ends before its last lines are out.
    printed = (done.stdout + done.stderr).split("[1]")[1].split(",")[0]
    ours = cli.json("perplexity", tiny[1], "--text", text, "--ctx", 128, "--chunks", 1)
    assert ours["perplexity"] == pytest.approx(float(printed), rel=1e-5)


def test_upstream_split(
    cli: Cli, tiny: tuple[Path, Path], tmp_path: Path, reference: dict[tuple[str, ...], str]
) -> None:
    command = [tool_path("llama-gguf-split"), "--split-max-tensors", "7", tiny[1], tmp_path / "s"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    first, *others = sorted(tmp_path.glob("s-*.gguf"))
    assert others
    assert _text(cli, first) == reference[()]
    assert verify_checksums(first).ok
    others[-1].unlink()
    assert cli("run", first, "--prompt", "x", code=2).stderr.count("\n") == 1


def test_upstream_requantized(cli: Cli, tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """llama-quantize changes the resident part and leaves the bundles."""
    out = tmp_path / "requantized.gguf"
    command = [tool_path("llama-quantize"), "--allow-requantize", tiny[1], out, "Q8_0"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    figures = cli.json("run", out, "--prompt", PROMPT, "--tokens", 4)
    assert figures["tokens"] == 4 and figures["flash_bytes"] > 0
    assert verify_checksums(out).ok


# --- under a memory limit -------------------------------------------------------------------------


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup (version 1) of this test's own."""
    parent = Path("/sys/fs/cgroup/memory")
    group = parent / f"gguf_flash_test_{uuid.uuid4().hex}"
    if not (parent / "memory.limit_in_bytes").exists():
        pytest.skip("no cgroup version 1 memory controller")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup: {error}")
    yield group
    group.rmdir()


@pytest.mark.root
@pytest.mark.slow
def test_memory_limit(cli: Cli, models: Models, memory_cgroup: Path) -> None:
    """--ram and what it says the program itself takes are enough; the whole file is larger."""
    model, ram = models.flash("F16"), 150 * 2**20
    words = ["run", model, "--prompt", PROMPT, "--tokens", 16, "--ram", ram]
    free: dict[str, Any] = cli.json(*words)
    limit = ram + BASE_BYTES
    assert limit < model.stat().st_size
    (memory_cgroup / "memory.limit_in_bytes").write_text(str(limit))
    done = subprocess.run(
        [sys.executable, "-m", "gguf_flash", *map(str, words), "--json"],
        cwd=cli.folder,
        preexec_fn=lambda: (memory_cgroup / "cgroup.procs").write_text(str(os.getpid())),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f'"text": {json.dumps(free["text"])}' in done.stdout
