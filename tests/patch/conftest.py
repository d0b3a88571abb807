"""A copy of the pinned llama.cpp source for each test."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from build_step import cache_dir, read_pin
from fetch_source import ENV, fetch


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpatched llama.cpp tree. Skips if neither the cache nor the variable has it."""
    if not os.environ.get(ENV) and not (cache_dir() / read_pin().sdist).exists():
        pytest.skip(f"no llama.cpp source: build the package once, or set {ENV}")
    dest = tmp_path_factory.mktemp("upstream") / "source"
    fetch(dest)
    return dest / "llama.cpp"


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    """A private copy of the files that patches may touch."""
    copy = tmp_path / "llama.cpp"
    shutil.copytree(pristine / "src", copy / "src")
    return copy
