"""Malformed files: each is refused with the number of the rule it breaks, quickly."""

from __future__ import annotations

import re
import runpy
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_dense

from gguf_flash import _core
from gguf_flash.converters import convert
from gguf_flash.errors import (
    CorruptFileError,
    FlashError,
    IoError,
    NotFlashError,
    UnsupportedError,
    VersionError,
)
from gguf_flash.format import read_bundle, read_layout

HOSTILE = runpy.run_path(str(Path(__file__).parents[1] / "hostile" / "hostile_files.py"))
CLASSES = {
    1: NotFlashError,
    2: VersionError,
    4: NotFlashError,
    5: VersionError,
    7: UnsupportedError,
}


READERS = {"python": read_layout, "engine": lambda path: _core.read_layout(str(path))}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", HOSTILE["ALL_CASES"])
def test_rule_is_named(name: str, reader: str, tmp_path: Path) -> None:
    """Both readers refuse with the same rule and the same kind of error."""
    path = HOSTILE["write_case"](tmp_path, name)
    rule = int(name[1:3])
    with pytest.raises(FlashError) as info:
        READERS[reader](path)
    message = str(info.value)
    assert message.endswith(f"(SPEC R{rule})"), message
    unsupported = name.startswith(("r18_activation", "r27_algorithm"))
    expected = UnsupportedError if unsupported else CLASSES.get(rule)
    assert type(info.value) is (expected or CorruptFileError)
    assert str(tmp_path) in message and message.isprintable() and len(message) < 700


@pytest.mark.parametrize("name", HOSTILE["GOOD_CASES"])
def test_good_files_are_read(name: str, tmp_path: Path) -> None:
    path = HOSTILE["write_case"](tmp_path, name)
    layout = read_layout(path)
    assert [b.layer for b in layout.layers] == [0, 1]
    assert [x["layer"] for x in _core.read_layout(str(path))["layers"]] == [0, 1]
    n_ff = 64 if name == "good_codes" else 4
    assert read_bundle(layout, 1).shape == (n_ff, 512)


def test_every_rule_has_a_case() -> None:
    assert {int(n[1:3]) for n in HOSTILE["ALL_CASES"]} == set(range(1, 28))


def test_spec_lists_the_rules() -> None:
    import gguf_flash.format.reader as reader

    spec = (Path(reader.__file__).parent / "SPEC.md").read_text()
    assert re.findall(r"^\| R(\d+) \|", spec, re.M) == [str(i) for i in range(1, 28)]


@pytest.mark.parametrize("content", [b"", b"G", b"GGUF", b"GGUF\x03\0\0\0", b"\0" * 64])
def test_tiny_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(FlashError, match=r"\(SPEC R[13]\)"):
        read_layout(path)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="No such file"):
        read_layout(tmp_path / "none.gguf")
    with pytest.raises(IoError, match="directory"):
        read_layout(tmp_path)


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flash")
    dense = make_dense(folder / "d.gguf", n_embd=32, n_ff=32, n_layer=2, type="Q8_0")
    convert(dense, folder / "f.gguf")
    return folder / "f.gguf"


def test_every_truncation_is_refused(flash: Path, tmp_path: Path) -> None:
    data = flash.read_bytes()
    header = read_layout(flash).files[0].data_offset
    cuts = {*range(0, header, 37), *range(header, len(data), 4093), len(data) - 1}
    path = tmp_path / "cut.gguf"
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        with pytest.raises(FlashError, match=r"\(SPEC R(1|3|15)\)"):
            read_layout(path)


def test_flipped_header_bytes(flash: Path, tmp_path: Path) -> None:
    data = bytearray(flash.read_bytes())
    header = read_layout(flash).files[0].data_offset
    rng = np.random.default_rng(7)
    path = tmp_path / "flip.gguf"
    start, valid = time.monotonic(), 0
    for _ in range(1500):
        mutant = bytearray(data)
        for at in rng.integers(0, header, rng.integers(1, 4)):
            mutant[at] = rng.integers(0, 256)
        path.write_bytes(mutant)
        try:
            layout = read_layout(path)
        except FlashError:
            continue
        valid += 1
        for b in layout.layers:
            assert b.offset + b.nbytes <= len(data)
            assert read_bundle(layout, b.layer).shape == (b.n_ff, b.stride)
    assert valid > 0
    assert time.monotonic() - start < 60
