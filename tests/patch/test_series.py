"""The patch series: applies, stays small, can be applied again, says what is wrong."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from apply_series import apply, patch_text, read_series
from build_step import StepError
from unidiff import PatchSet

PATCHES = Path(__file__).resolve().parents[2] / "cpp_patch" / "patches"
MOST_ADDED = 60
MOST_CHANGED = 3


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    files = (p for p in (root / "src").rglob("*") if p.is_file())
    return {str(p.relative_to(root)): (p.read_bytes(), p.stat().st_mtime_ns) for p in files}


def touched() -> set[str]:
    return {c.path for p in read_series(PATCHES) for c in PatchSet(p.read_text(encoding="utf-8"))}


def test_applies_to_the_pinned_source_without_drift(source: Path) -> None:
    before = snapshot(source)
    assert set(apply(source, PATCHES)) == touched()
    after = snapshot(source)
    assert {name for name in after if after[name][0] != before[name][0]} == touched()
    for patch in read_series(PATCHES):
        for change in PatchSet(patch.read_text(encoding="utf-8")):
            text = before[change.path][0].decode()
            for hunk in change:
                line = text.splitlines()[hunk.source_start - 1]
                assert hunk[0].value.rstrip("\n") == line, f"{patch.name}: {change.path}: {hunk}"


def test_applying_twice_changes_nothing(source: Path) -> None:
    apply(source, PATCHES)
    before = snapshot(source)
    assert apply(source, PATCHES) == []
    assert snapshot(source) == before


def test_stays_small() -> None:
    added = changed = 0
    for patch in read_series(PATCHES):
        for change in PatchSet(patch.read_text(encoding="utf-8")):
            assert not change.is_added_file and not change.is_removed_file
            added += change.added
            changed += change.removed
    assert added <= MOST_ADDED
    assert changed <= MOST_CHANGED


def test_series_lists_every_patch_and_each_says_why() -> None:
    series = read_series(PATCHES)
    assert sorted(p.name for p in series) == sorted(p.name for p in PATCHES.glob("*.patch"))
    for patch in series:
        header = patch.read_text(encoding="utf-8").split("\n--- a/")[0]
        assert "\nGoes when: " in header, f"{patch.name} does not say when it can go"
        assert len(header.splitlines()) >= 4, f"{patch.name} does not say why it exists"


def test_patches_add_only_calls_into_hooks_and_architectures() -> None:
    allowed = re.compile(
        r"gguf_flash_|GGUF_FLASH_|^\s*$|^\s*return( t| out| false)?;$|^\s*\}$"
        r"|^\s*\{ up, up_b,|pimpl->n_elements = ml\.n_elements;"
        r"|^\s*cur = out;$|^\s*\} else( \{)?$|^\s*\[&\]\(ggml_tensor \* gate\)"
        r"|^    LLM_ARCH_\w+,$|^    \{ LLM_ARCH_\w+, +\"\w+\" +\},$"
        r"|^ +case LLM_ARCH_\w+:$|^ +return new llama_model_\w+\(params\);$"
    )
    for patch in read_series(PATCHES):
        for change in PatchSet(patch.read_text(encoding="utf-8")):
            for line in (line for hunk in change for line in hunk if line.is_added):
                assert allowed.search(line.value), f"{patch.name}: {line.value!r}"


def test_only_files_whose_text_changed_are_written_again(source: Path, tmp_path: Path) -> None:
    apply(source, PATCHES)
    before = snapshot(source)
    fewer = tmp_path / "patches"
    shutil.copytree(PATCHES, fewer)
    names = [p.name for p in read_series(PATCHES)]
    (fewer / "series").write_text("\n".join(names[:-1]) + "\n")
    dropped = {c.path for c in PatchSet((fewer / names[-1]).read_text(encoding="utf-8"))}
    assert set(apply(source, fewer)) == dropped
    after = snapshot(source)
    assert {name for name in after if after[name] != before[name]} == dropped
    apply(source, PATCHES)
    assert {n: data for n, (data, _) in snapshot(source).items()} == {
        n: data for n, (data, _) in before.items()
    }


def test_follows_code_that_moved(source: Path) -> None:
    name = "src/llama-context.cpp"
    path = source / name
    path.write_text("// new upstream line\n" * 7 + path.read_text())
    assert name in apply(source, PATCHES)
    assert "gguf_flash_compute(sched.get(), gf)" in path.read_text()


def test_a_hunk_that_does_not_fit_is_named_and_nothing_is_written(source: Path) -> None:
    path = source / "src" / "llama-context.cpp"
    path.write_text(path.read_text().replace("ggml_backend_sched_graph_compute_async(", "renamed("))
    before = snapshot(source)
    with pytest.raises(StepError) as caught:
        apply(source, PATCHES)
    assert "0004-" in caught.value.why and "src/llama-context.cpp" in caught.value.why
    assert "hunk 2" in caught.value.why
    assert "Moving the pin" in caught.value.do
    assert snapshot(source) == before


def test_a_moved_hunk_with_two_possible_places_is_refused() -> None:
    patch = PatchSet("--- a/f\n+++ b/f\n@@ -1,2 +1,3 @@\n a\n+new\n b\n")
    assert patch_text("x\na\nb\n", list(patch[0])) == "x\na\nnew\nb\n"
    with pytest.raises(LookupError, match="2 places"):
        patch_text("x\na\nb\na\nb\n", list(patch[0]))
