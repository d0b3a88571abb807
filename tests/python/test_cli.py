"""The command line: every verb is there, is imported alone, and fails with one sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import Cli

from gguf_flash.cli import VERBS

HEAVY = ("torch", "transformers", "llama_cpp", "numpy", "rich", "tqdm", "gguf", "pydantic")


def test_help_lists_every_verb(cli: Cli) -> None:
    listed = re.findall(r"^  (\w+) ", cli("--help").stdout.partition("Commands:")[2], re.M)
    assert tuple(listed) == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_help(cli: Cli, verb: str) -> None:
    assert cli(verb, "--help").stdout.startswith("Usage: ")


def test_version(cli: Cli) -> None:
    import gguf_flash

    assert cli("--version").stdout.split()[-1] == gguf_flash.__version__


@pytest.mark.parametrize("module", ["gguf_flash", "gguf_flash.cli", "gguf_flash.cli.run"])
def test_imports_are_light(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(*(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_run_does_without_numpy(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """A RAM limit leaves no room for it: see gguf_flash/llama_api.py."""
    words = ["gguf-flash", "run", str(tiny[1]), "--prompt", "x", "--tokens", "2"]
    code = (
        f"import sys; sys.argv = {words!r}\n"
        "from gguf_flash.cli import main\n"
        "main(standalone_mode=False)\n"
        f"print('heavy:', *(m for m in {HEAVY} if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    *_, figures, heavy = done.stdout.splitlines()
    assert "requests/token" in figures
    assert heavy.split() == ["heavy:"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"not a gguf at all", "SPEC R1"), (b"GGUF", "SPEC R3"), (b"", "SPEC R1")],
)
def test_one_sentence(cli: Cli, tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    done = cli("run", path, "--prompt", "x", code=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gguf-flash: ") and expected in line and str(path) in line


def test_a_size_that_is_none(cli: Cli, tiny: tuple[Path, Path]) -> None:
    done = cli("run", tiny[1], "--prompt", "x", "--ram", "3X", code=2)
    assert "200MiB" in done.stderr


def test_ram_below_one_working_set(cli: Cli, tiny: tuple[Path, Path]) -> None:
    done = cli("run", tiny[1], "--prompt", "x", "--ram", "4KiB", code=2)
    (line,) = done.stderr.splitlines()
    assert "ram" in line.lower()


def test_a_context_that_is_too_small(cli: Cli, tiny: tuple[Path, Path]) -> None:
    done = cli("run", tiny[1], "--prompt", "abcdef", "--ctx", "4", code=2)
    assert "--ctx" in done.stderr


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_a_hugging_face_folder_without_torch(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    done = cli("convert", folder, "--out", tmp_path / "out.gguf", code=2)
    (line,) = done.stderr.splitlines()
    assert "torch" in line and line.endswith("run pip install 'gguf_flash[hf]'")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("run", "--help"), ("doctor",), ("inspect", "MODEL")]
)
def test_output_onto_a_full_disk(tiny: tuple[Path, Path], words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "gguf_flash", *words]
    command = [str(tiny[1]) if word == "MODEL" else word for word in command]
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    for environment in (buffered, {**buffered, "PYTHONUNBUFFERED": "1"}):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tiny[1].parent,
                env=environment, check=False,
            )  # fmt: skip
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith("gguf-flash: ") and "No space left on device" in line
