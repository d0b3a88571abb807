"""The table of families in converters/README.md is what the tests gave, and says nothing else."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import families_table
import numpy as np
import pytest
from families import FAMILIES, mean_kl, note, tokens
from families_table import README, RESULTS, ROOT, merged, table, written
from tiny_models import make_dense

from gguf_flash.converters import convert

KEPT = json.loads(RESULTS.read_text())


def test_the_readme_is_rendered_from_the_kept_results() -> None:
    assert written(README.read_text(), KEPT) == README.read_text()


def test_every_family_has_results_and_each_is_below_its_tolerance() -> None:
    assert {r["family"] for r in KEPT} == set(FAMILIES)
    assert all(0 <= r["measured"] < r["tolerance"] for r in KEPT)
    for name in FAMILIES:
        checks = " ".join(r["check"] for r in KEPT if r["family"] == name)
        assert "select gate" in checks
        assert ("select all" in checks) == (name != "gemma3n")


def test_every_result_is_of_a_test_that_exists() -> None:
    for name in {r["test"].split("[")[0] for r in KEPT}:
        file, function = name.split(" ")
        tree = ast.parse((ROOT / "tests" / "python" / Path(file).name).read_text())
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name


def test_results_are_noted_merged_and_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash, results = tmp_path / "flash.gguf", tmp_path / "results.jsonl"
    convert(make_dense(tmp_path / "dense.gguf"), flash)
    monkeypatch.setenv("GGUF_FLASH_FAMILIES", str(results))
    for measured in (0.5, 0.25):  # the later run of the same test counts
        note("llama", "KL, select all, to numpy", measured, 1, flash, "F32")
    note("opt", "KL, select gate, to numpy", 2e-7, 1e-6, flash, "Q8_0")
    with pytest.raises(AssertionError):
        note("llama", "KL, select all, to numpy", 1.5, 1, flash, "F32")
    with pytest.raises(AssertionError):
        note("unheard of", "KL", 0, 1, flash, "F32")
    found = merged(results.read_text())
    assert [r["family"] for r in found] == ["opt", "llama"]
    assert found[1]["measured"] == 0.25 and found[1]["activation"] == "silu"
    assert found[1]["test"].endswith("test_results_are_noted_merged_and_rendered")
    shown = table(found)
    assert "| `llama` | `silu` | ReLU of the gate | gated | F32 |" in shown
    assert "KL to numpy F32: 2e-01 < 1e+00 (1)" in shown
    assert "2e-07 < 1e-06" in shown and "Q8_0" in shown


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "python"
    folder.mkdir(parents=True)
    (tmp_path / "tests" / "data").mkdir()
    (tmp_path / "converters").mkdir()
    for name in ("families.py", "families_table.py"):
        shutil.copy(Path(families_table.__file__).parent / name, folder)
    shutil.copy(README, tmp_path / "converters")
    lines = tmp_path / "results.jsonl"
    lines.write_text("".join(json.dumps(r) + "\n" for r in KEPT[:4]))
    subprocess.run([sys.executable, folder / "families_table.py", lines], check=True)
    assert json.loads((tmp_path / "tests/data/families.json").read_text()) == KEPT[:4]
    shown = (tmp_path / "converters" / "README.md").read_text()
    assert shown == written(README.read_text(), KEPT[:4])


def test_mean_kl() -> None:
    a = np.log(np.array([[0.5, 0.5], [0.25, 0.75]]))
    b = np.log(np.array([[0.25, 0.75], [0.25, 0.75]])) + 7
    assert mean_kl(a, a) == pytest.approx(0, abs=1e-15)
    assert mean_kl(a, b) == pytest.approx((0.5 * np.log(2) + 0.5 * np.log(2 / 3)) / 2)
    assert tokens(3) == tokens()[:3]
