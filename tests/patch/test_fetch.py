"""Fetching the source: local trees are copied, archives are checked, failures say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from build_step import StepError, read_pin
from fetch_source import ENV, fetch

SCRIPT = Path(__file__).resolve().parents[2] / "cpp_patch" / "cmake" / "fetch_source.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A miniature of an unpacked llama-cpp-python source distribution."""
    root = tmp_path / "sdist"
    for name in (
        "vendor/llama.cpp/include/llama.h",
        "vendor/llama.cpp/src/models/a.cpp",
        "vendor/llama.cpp/models/big.gguf",
        "llama_cpp/__init__.py",
        "llama_cpp/lib/libllama.so",
        "LICENSE.md",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def content(dest: Path) -> set[str]:
    files = (p.relative_to(dest) for p in dest.rglob("*") if p.is_file())
    return {str(p) for p in files if not p.name.startswith(".")}


def test_copies_the_wanted_parts_of_an_unpacked_sdist(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, str(tree))
    fetch(tmp_path / "dest")
    assert content(tmp_path / "dest") == {
        "llama.cpp/include/llama.h",
        "llama.cpp/src/models/a.cpp",
        "python/llama_cpp/__init__.py",
        "python/LICENSE.md",
    }


def test_a_bare_llama_cpp_tree_has_no_python_part(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, str(tree / "vendor" / "llama.cpp"))
    fetch(tmp_path / "dest")
    assert content(tmp_path / "dest") == {"llama.cpp/include/llama.h", "llama.cpp/src/models/a.cpp"}


def test_unchanged_files_keep_their_mtime(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, str(tree))
    dest = tmp_path / "dest"
    fetch(dest)
    names = ("llama.cpp/include/llama.h", "llama.cpp/src/models/a.cpp")
    before = [(dest / name).stat().st_mtime_ns for name in names]
    (tree / "vendor/llama.cpp/src/models/a.cpp").write_text("changed")
    (tree / "vendor/llama.cpp/include/llama.h").touch()
    fetch(dest)
    after = [(dest / name).stat().st_mtime_ns for name in names]
    assert after[0] == before[0] and after[1] > before[1]
    assert (dest / names[1]).read_text() == "changed"


def test_a_wrong_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "gguf_flash"
    cache.mkdir()
    (cache / read_pin().sdist).write_bytes(b"not it")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(ENV, raising=False)
    with pytest.raises(StepError, match="has sha256"):
        fetch(tmp_path / "dest")
    assert not (tmp_path / "dest").exists()


def test_without_network_one_block_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "dest")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for word in ("step:", "why:", "do:", ENV, read_pin().sdist, "pinned llama.cpp source"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_path_that_is_no_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, str(tmp_path))
    with pytest.raises(StepError, match="holds neither"):
        fetch(tmp_path / "dest")
    monkeypatch.setenv(ENV, str(tmp_path / "absent"))
    with pytest.raises(StepError, match="does not exist"):
        fetch(tmp_path / "dest")
