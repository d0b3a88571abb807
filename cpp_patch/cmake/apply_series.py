"""Apply the patch series to a fetched llama.cpp tree: strict, idempotent, gentle to mtimes.

    apply_series.py SOURCE PATCHES

SOURCE/.gguf_flash_pristine/ keeps the upstream text of every file that a patch touches, and a
stamp there records the series. When the series changed, the result is computed again from the
pristine texts, and only files whose text differs are written, so ninja rebuilds only those.

A hunk's context must match exactly; it may have moved (upstream grew above it), in which case the
nearest match is taken and reported. An ambiguous or missing match is an error: no fuzz.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from build_step import StepError, run_step, write_if_changed

try:
    from unidiff import Hunk, PatchSet
except ImportError:
    sys.exit("apply_series.py needs the Python package unidiff: pip install unidiff")

PRISTINE = ".gguf_flash_pristine"
STAMP = "stamp.json"
ADVICE = 'make the hunk fit the source again: cpp_patch/README.md, "Moving the pin"'


def read_series(patches: Path) -> list[Path]:
    """Paths of the patches in the order of PATCHES/series (blank and # lines are skipped)."""
    lines = (patches / "series").read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for name in names:
        if not (patches / name).is_file():
            raise StepError(f"{patches / 'series'} names {name}, which is not there", ADVICE)
    return [patches / name for name in names]


def series_hash(series: Sequence[Path]) -> str:
    """sha256 over names and contents of the patches and over this script."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in series:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def candidates(lines: Sequence[str], wanted: Sequence[str], first: int) -> list[int]:
    """Indices not below `first` where `wanted` stands in `lines`."""
    last = len(lines) - len(wanted)
    size = len(wanted)
    return [at for at in range(first, last + 1) if lines[at : at + size] == wanted]


def place_hunk(lines: Sequence[str], hunk: Hunk, first: int, drift: int) -> int:
    """Index in `lines` where the hunk applies: the match nearest to where it is expected."""
    wanted = [line.value for line in hunk if not line.is_added]
    expected = hunk.source_start - 1 + drift
    found = candidates(lines, wanted, first)
    if not found:
        raise LookupError("its context is nowhere in the file")
    found.sort(key=lambda at: abs(at - expected))
    if len(found) > 1 and found[0] != expected:
        raise LookupError(f"its context moved and now matches {len(found)} places")
    return found[0]


def patch_text(text: str, hunks: Sequence[Hunk]) -> str:
    """Text with all hunks applied; raises LookupError naming the hunk that does not fit."""
    lines = io.StringIO(text).readlines()  # splits at \n only, as diff does
    out: list[str] = []
    done = drift = 0
    for number, hunk in enumerate(hunks, 1):
        try:
            at = place_hunk(lines, hunk, done, drift)
        except LookupError as error:
            raise LookupError(f"hunk {number} (line {hunk.source_start}): {error}") from error
        drift = at - (hunk.source_start - 1)
        out += lines[done:at]
        out += [line.value for line in hunk if not line.is_removed]
        done = at + sum(not line.is_added for line in hunk)
    return "".join(out + lines[done:])


def pristine_text(source: Path, name: str) -> str:
    """Upstream text of a file, saved on first sight before anything is patched."""
    saved = source / PRISTINE / name
    if not saved.exists():
        original = source / name
        if not original.is_file():
            raise LookupError("the file does not exist in this llama.cpp")
        write_if_changed(saved, original.read_bytes())
    return saved.read_bytes().decode("utf-8")


def patched_texts(source: Path, series: Sequence[Path]) -> dict[str, str]:
    """Final text of every file that the series touches, by name relative to SOURCE."""
    texts: dict[str, str] = {}
    for patch in series:
        for change in PatchSet(patch.read_text(encoding="utf-8")):
            name = change.path
            try:
                if name not in texts:
                    texts[name] = pristine_text(source, name)
                texts[name] = patch_text(texts[name], list(change))
            except LookupError as error:
                raise StepError(
                    f"{patch.name} does not apply to {name}: {error}", ADVICE
                ) from error
    return texts


def read_stamp(path: Path) -> dict[str, object]:
    """The stamp of the last run, empty if there is none."""
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def apply(source: Path, patches: Path) -> list[str]:
    """Bring SOURCE to the state `pristine + series`; returns the names of files written."""
    series = read_series(patches)
    wanted = series_hash(series)
    stamp_path = source / PRISTINE / STAMP
    stamp = read_stamp(stamp_path)
    if stamp.get("series") == wanted:
        return []
    texts = patched_texts(source, series)
    before = stamp.get("files")
    for name in before if isinstance(before, list) else []:
        if name not in texts:  # no longer patched: back to upstream's text
            texts[name] = pristine_text(source, name)
    # Without a stamp an interrupted run starts over; every step before this one changed nothing.
    stamp_path.unlink(missing_ok=True)
    written = [n for n in sorted(texts) if write_if_changed(source / n, texts[n].encode("utf-8"))]
    record = {"series": wanted, "files": sorted(texts)}
    write_if_changed(stamp_path, json.dumps(record, indent=1).encode())
    return written


def main() -> None:
    """Command line entry."""
    source, patches = (Path(argument).resolve() for argument in sys.argv[1:3])
    for name in apply(source, patches):
        print(f"-- gguf_flash: patched {name}", flush=True)


if __name__ == "__main__":
    run_step("apply cpp_patch/patches to llama.cpp", main)
