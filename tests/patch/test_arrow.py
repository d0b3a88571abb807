"""The dependency arrow: patches -> models -> hooks -> engine -> ggml; bindings -> engine; Python ->
_core.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPP_PATCH = ROOT / "cpp_patch"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
LLAMA = re.compile(r"(^|/)llama[-.]|^models/models\.h$")
PYTHON = re.compile(r"^Python\.h$|^pybind11/")
HEAVY = {"torch", "transformers", "llama_cpp", "rich"}


def includes(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".h", ".hpp", ".cpp", ".cc", ".inc"}:
            for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
                yield path, name


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(top-level package imported, whether at import time of the module)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(scope)
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            yield name.split(".")[0], id(node) not in inside


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def python_files() -> list[Path]:
    return [*(ROOT / "gguf_flash").rglob("*.py"), *(ROOT / "converters").rglob("*.py")]


def test_the_engine_knows_neither_llama_nor_python() -> None:
    for path, name in includes(CPP_PATCH / "engine"):
        assert not LLAMA.search(name), f"{path} includes {name}"
        assert not PYTHON.search(name), f"{path} includes {name}"
        assert "gguf_flash_hooks" not in name, f"{path} includes {name}"


def test_the_bindings_know_the_engine_only() -> None:
    for path, name in includes(CPP_PATCH / "bindings"):
        assert not LLAMA.search(name), f"{path} includes {name}"
        assert "gguf_flash_hooks" not in name, f"{path} includes {name}"


def test_the_hooks_and_models_know_no_python() -> None:
    for path, name in [*includes(CPP_PATCH / "hooks"), *includes(CPP_PATCH / "models")]:
        assert not PYTHON.search(name), f"{path} includes {name}"


def test_the_models_know_the_engine_by_the_hooks_alone() -> None:
    for path, name in includes(CPP_PATCH / "models"):
        assert not name.startswith("gguf_flash/"), f"{path} includes {name}"
    for path, name in includes(CPP_PATCH / "hooks"):
        assert "gguf_flash_models" not in name, f"{path} includes {name}"


def test_the_engine_uses_only_public_headers_of_ggml() -> None:
    for path, name in includes(CPP_PATCH / "engine"):
        assert name not in {"ggml-impl.h", "ggml-quants.h", "ggml-common.h"}, f"{path}: {name}"
        assert not name.startswith("ggml-cpu/"), f"{path} includes {name}"


def test_python_imports_nothing_from_beside_the_package() -> None:
    local = {p.stem for p in ROOT.iterdir() if p.is_dir()} | {"tests", "examples", "shared"}
    for path in python_files():
        for name, _ in imports(path):
            assert name == "gguf_flash" or name not in local, f"{path} imports {name}"


@pytest.mark.parametrize("module", ["gguf_flash", "gguf_flash.cli", "gguf_flash.runtime"])
def test_importing_the_package_stays_light(module: str) -> None:
    code = f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_is_imported_inside_functions_only() -> None:
    for path in python_files():
        if "predictor" not in path.parts:
            for name, eager in imports(path):
                assert not (eager and name in HEAVY - {"llama_cpp"}), f"{path} imports {name}"
