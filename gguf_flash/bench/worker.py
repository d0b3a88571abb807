"""One arm of a benchmark in a process of its own: python -m gguf_flash.bench.worker < WORK.json

Joins its cgroup before anything is loaded, runs the model, prints its figures as one JSON object.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import click

from gguf_flash import runtime
from gguf_flash.bench.arms import Work
from gguf_flash.errors import FlashError
from gguf_flash.measure import difference, peak_rss, per_token


class _Run:
    """A model under measurement."""

    def __init__(self, work: Work) -> None:
        from gguf_flash.generate import make_sampler
        from gguf_flash.session import Session
        from gguf_flash.settings import Settings

        self.work = work
        begin = time.perf_counter()
        self.session = Session(work.model, Settings(**work.settings), repack=work.repack)
        self.load_s = time.perf_counter() - begin
        self.prompt = self._prompt()
        batch = min(512, len(self.prompt))
        self.session.open_context(
            n_ctx=len(self.prompt) + work.warmup + work.tokens + 1, n_batch=batch, n_ubatch=batch,
            n_outputs=1, threads=work.threads, flash_attention=False,
        )  # fmt: skip
        self.batch, self.position = batch, 0
        self.generated: list[int] = []
        self.sampler = make_sampler(self.session.api, work.temperature, work.seed, work.top_p)

    def _prompt(self) -> list[int]:
        from gguf_flash.bench.measure import random_tokens

        if self.work.prompt:
            return self.session.tokenize(self.work.prompt)
        return random_tokens(self.session, self.work.prompt_tokens, self.work.seed)

    def stats(self) -> dict[str, Any]:
        engine = self.session.engine
        return engine.stats() if engine else {"total": {}, "memory": {}, "settings": {}}

    def read_prompt(self) -> float:
        begin = time.perf_counter()
        for start in range(0, len(self.prompt), self.batch):
            part = self.prompt[start : start + self.batch]
            self.session.decode(part, start, 1 if start + len(part) == len(self.prompt) else 0)
        self.position = len(self.prompt)
        return time.perf_counter() - begin

    def step(self) -> float:
        """Choose a token, whatever it is, and decode it."""
        begin = time.perf_counter()
        token = self.session.sample(self.sampler)
        self.generated.append(token)
        self.session.decode([token], self.position, 1)
        self.position += 1
        return time.perf_counter() - begin

    def steps(self, count: int, seconds: float, least: int) -> list[float]:
        times: list[float] = []
        while len(times) < count and (len(times) < least or sum(times) < seconds):
            times.append(self.step())
        return times

    def close(self) -> None:
        self.session.api.llama_sampler_free(self.sampler)
        self.session.close()


def _device_bytes() -> int:
    """Bytes this process has made the disk deliver, page faults included."""
    try:
        for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def run(work: Work) -> dict[str, Any]:
    """The figures of one arm; see README.md for the keys."""
    if work.stock:
        runtime.use_libraries(work.stock)
    one = _Run(work)
    try:
        start, bytes_start = one.stats()["total"], _device_bytes()
        prompt_s = one.read_prompt()
        prompted, bytes_prompted = one.stats()["total"], _device_bytes()
        warmup = one.steps(work.warmup, work.seconds, 1) if work.warmup else []
        figures = _timed(one, work) if work.tokens else {}
        figures["prompt"] = {
            "tokens": len(one.prompt),
            "seconds": prompt_s,
            "tokens_per_s": len(one.prompt) / prompt_s,
            "bytes": difference(start, prompted)["bytes_read"],
            "requests": difference(start, prompted)["requests"],
            "device_bytes": bytes_prompted - bytes_start,
        }
        stats = one.stats()
        figures |= {
            "load_s": one.load_s,
            "warmup_tokens": len(warmup),
            "peak_rss_bytes": peak_rss(),
            "memory": stats["memory"],
            "settings": stats["settings"],
            "reader": stats.get("reader", ""),
        }
        return figures
    finally:
        one.close()


def _timed(one: _Run, work: Work) -> dict[str, Any]:
    before, io_before, faults = one.stats()["total"], _device_bytes(), _faults()
    each: list[dict[str, float]] = []
    if work.per_token:
        last = before
        times = []
        for _ in range(work.tokens):
            times.append(one.step())
            now = one.stats()["total"]
            gain = difference(last, now)
            each.append({k: gain[k] for k in ("bytes_read", "requests", "misses", "selected")})
            last = now
    else:
        times = one.steps(work.tokens, work.seconds, 2)
    after, n = one.stats()["total"], len(times)
    gain = difference(before, after)
    total_ms = 1000 * sum(times) / n
    figures: dict[str, Any] = {
        "tokens": n,
        "tokens_per_s": n / sum(times),
        "token_ms": total_ms,
        **per_token(gain, n),
        "selected_per_token": gain["selected"] / n,
        "misses_per_token": gain["misses"] / n,
        "device_bytes_per_token": (_device_bytes() - io_before) / n,
        "major_faults_per_token": (_faults() - faults) / n,
        "distinct_tokens": len(set(one.generated[-n:])),
        "generated": one.generated[-n:][:64],
    }
    engine = sum(figures[k] for k in ("predictor_ms", "io_ms", "mem_ms", "compute_ms"))
    figures["other_ms"] = total_ms - engine  # attention, norms, output head, sampling
    if each:
        figures["each"] = [
            {"ms": round(1000 * t, 3), **gained} for t, gained in zip(times, each, strict=True)
        ]
    return figures


def main() -> None:
    """Exit code 2 for a FlashError, whose sentence is the last line of stderr."""
    given = json.load(sys.stdin)
    if given["procs"]:
        Path(given["procs"]).write_text(str(os.getpid()), encoding="utf-8")
    try:
        print(json.dumps(run(Work(**given["work"]))))
    except FlashError as error:
        click.echo(str(error), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
