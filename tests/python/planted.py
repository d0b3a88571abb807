"""Small planted models for the tests of the benchmarks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT_KEYS = {
    "time", "machine", "cores", "usable_cores", "kernel", "memory_bytes", "load", "disk", "simd",
    "io_uring", "direct_io", "dio_align", "versions", "variables", "commit",
}  # fmt: skip


def needs_cgroup() -> None:
    """Skip where no memory limit can be set."""
    from gguf_flash.bench.cgroup import MemoryCgroup
    from gguf_flash.errors import ToolError

    if os.geteuid() != 0:
        pytest.skip("a cgroup memory limit needs root")
    try:
        with MemoryCgroup(1 << 30):
            pass
    except ToolError as error:
        pytest.skip(str(error))


def check_arm(arm: dict[str, Any]) -> None:
    """An arm that ran has figures that can be true."""
    assert arm["error"] == ""
    rate = arm["tokens_per_s"]
    assert 0 < rate["min"] <= rate["median"] <= rate["max"]
    assert arm["token_ms"] > 0
    assert arm["peak_rss_bytes"] > 1 << 20
    for run in arm["runs"]:
        assert run["tokens_per_s"] > 0
        assert run["distinct_tokens"] > 1  # a text that repeats one token would flatter every cache


def check_head(report: dict[str, Any], bench: str) -> None:
    assert report["bench"] == bench
    assert set(report["environment"]) == ENVIRONMENT_KEYS
    assert report["threads"] == 1  # as given, whatever the machine has
    assert re.match(r"\d{4}-\d\d-\d\dT", report["environment"]["time"])
    assert "planted custom f16" in report["planted"]


def pair(folder: Path) -> tuple[Path, Path]:
    return folder / "dense.gguf", folder / "flash.gguf"
