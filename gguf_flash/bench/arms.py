"""Arms of a benchmark: each run of one is a process of its own under a memory limit of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gguf_flash import runtime
from gguf_flash.bench.cgroup import MemoryCgroup
from gguf_flash.bench.device import drop_cache
from gguf_flash.errors import FlashError, ToolError
from gguf_flash.format.reader import read_set
from gguf_flash.memory import ContextSize
from gguf_flash.progress import Progress

__all__ = ["Arm", "Work", "alternate", "run_arm", "stock_folder", "summary"]

STOCK_VARIABLE = "GGUF_FLASH_STOCK"
# What one run gives and its arm reports as a median over runs.
_MEDIANS = """
token_ms bytes_per_token requests_per_token device_bytes_per_token major_faults_per_token hit_rate
selected_per_token misses_per_token predictor_ms io_ms mem_ms compute_ms other_ms
""".split()


@dataclass(frozen=True)
class Work:
    """What a worker does with a model.

    stock: folder of unpatched libraries, "" for ours. prompt: a text, or "" for `prompt_tokens`
    random tokens drawn with `seed`. warmup and tokens: decoded one by one, untimed and timed, both
    for `seconds` at most. per_token: report what each token read. repack: let llama.cpp copy
    quantized weights into a faster order, which no file backs.
    """

    model: str
    stock: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    prompt_tokens: int = 16
    warmup: int = 16
    tokens: int = 32
    seconds: float = 60.0
    threads: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0
    per_token: bool = False
    repack: bool = True

    @property
    def context(self) -> ContextSize:
        """What it takes at most: a text has no more tokens than bytes."""
        prompt = len(self.prompt.encode()) + 1 if self.prompt else self.prompt_tokens
        n_ctx = prompt + self.warmup + self.tokens + 1
        return ContextSize(n_ctx, min(512, prompt), threads=self.threads)


@dataclass(frozen=True)
class Arm:
    """A named way of running a model. limit: of its cgroup in bytes, None for none."""

    name: str
    what: str
    work: Work
    limit: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def stock_folder(given: str | None) -> str:
    """The folder of unpatched libraries: `given`, or $GGUF_FLASH_STOCK. Raises ToolError."""
    folder = given or os.environ.get(STOCK_VARIABLE, "")
    if not folder:
        raise ToolError(
            "there is no unpatched llama.cpp to compare with: give --stock DIR or set"
            f" {STOCK_VARIABLE}; gguf-flash bench build-stock --out DIR builds one"
        )
    if not Path(folder, "libllama.so").is_file():
        raise ToolError(
            f"'{folder}' holds no libllama.so: give the folder that gguf-flash bench build-stock"
            " names"
        )
    return str(Path(folder).resolve())


def run_arm(arm: Arm, *, cgroup: bool = True) -> dict[str, Any]:
    """Run it once, its files out of the page cache first; the worker's figures, cgroup_peak_bytes.

    Raises a FlashError with the arm's name and the worker's sentence, ToolError for a cgroup.
    """
    for file in read_set(arm.work.model, versions=(2, 3)):
        drop_cache(file.path)
    with ExitStack() as stack:
        group = stack.enter_context(MemoryCgroup(arm.limit)) if cgroup else None
        given = {"procs": str(group.procs) if group else "", "work": asdict(arm.work)}
        done = subprocess.run(
            [sys.executable, "-m", "gguf_flash.bench.worker"],
            input=json.dumps(given),
            cwd="/",  # in a checkout, -m would find the sources, which are not compiled
            env={**os.environ, **runtime.environment(), **arm.environment},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise FlashError(f"arm '{arm.name}': {_reason(done, arm.limit)}")
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        figures["cgroup_peak_bytes"] = group.peak() if group else None
        return figures


def _reason(done: subprocess.CompletedProcess[str], limit: int | None) -> str:
    if done.returncode == -9 and limit is not None:
        return f"the kernel ended it: it needs more than its limit of {limit} bytes"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"its process ended with code {done.returncode}"


def alternate(
    arms: Sequence[Arm], rounds: int, *, cgroup: bool = True, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Every arm once per round, in turn, so that a busy minute hits all; a summary of each arm.

    An arm that fails is reported with its error, beside what it gave before, and not run again.
    Raises ToolError, of which no arm would run, as long as none has.
    """
    report = progress or (lambda done, total, what: None)
    runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    errors: dict[str, str] = {}
    for i in range(rounds):
        for j, arm in enumerate(arms):
            report(i * len(arms) + j, rounds * len(arms), arm.name)
            if arm.name in errors:
                continue
            load = os.getloadavg()[0]
            try:
                runs[arm.name].append({**run_arm(arm, cgroup=cgroup), "load": round(load, 2)})
            except FlashError as error:
                if isinstance(error, ToolError) and not any(runs.values()):
                    raise
                errors[arm.name] = str(error)
    return [summary(arm, runs[arm.name], errors.get(arm.name, "")) for arm in arms]


def summary(arm: Arm, runs: list[dict[str, Any]], error: str = "") -> dict[str, Any]:
    """Medians over the runs, the spread of tokens/s, the largest peaks, and the runs themselves."""
    rates = [r["tokens_per_s"] for r in runs if "tokens_per_s" in r]
    figures: dict[str, Any] = {
        "name": arm.name,
        "what": arm.what,
        "limit_bytes": arm.limit,
        "error": error,
        "tokens_per_s": _spread(rates),
        "prompt_tokens_per_s": _spread([r["prompt"]["tokens_per_s"] for r in runs]),
    }
    for name in _MEDIANS:
        values = [r[name] for r in runs if r.get(name) is not None]
        figures[name] = statistics.median(values) if values else None
    for name in ("peak_rss_bytes", "cgroup_peak_bytes"):
        values = [r[name] for r in runs if r.get(name) is not None]
        figures[name] = max(values) if values else None
    figures["memory"] = runs[-1]["memory"] if runs else {}
    figures["runs"] = runs
    return figures


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
