"""llama-cpp-python's own server on a flash-GGUF, with only the variables of `gguf-flash env`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli, Models

from gguf_flash.runtime import environment

for _module in ("uvicorn", "fastapi", "pydantic_settings", "sse_starlette", "starlette_context"):
    pytest.importorskip(_module, reason="the extra 'server' is not installed")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _post(port: int, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _wait(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"the server did not answer in a minute:\n{log.read_text()}")


def test_completion(cli: Cli, models: Models, tmp_path: Path) -> None:
    model = models.flash("Q8_0")
    expected = cli.json("run", model, "--prompt", "Call me", "--tokens", 12)["text"]
    port, log = _free_port(), tmp_path / "server.log"
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(model)]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--n_ctx", "256"],
            cwd=tmp_path,
            env={**os.environ, **environment(), "GGUF_FLASH_RAM": "60%"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(port, server, log)
        done = _post(port, {"prompt": "Call me", "max_tokens": 12, "temperature": 0})
    finally:
        server.terminate()
        server.wait(30)
    assert done["choices"][0]["text"] == expected
