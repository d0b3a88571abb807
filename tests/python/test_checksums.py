"""Checksums of bundles: written by convert, kept by copies, and told layer by layer by verify."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_models import make_dense

from gguf_flash.cli import main
from gguf_flash.converters import convert, verify, verify_checksums
from gguf_flash.errors import ArgumentError
from gguf_flash.format import read_bundle, read_layout


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense") / "d.gguf"
    return make_dense(path, n_embd=32, n_ff=64, n_layer=3, type="F16")


@pytest.fixture
def flash(dense: Path, tmp_path: Path) -> Path:
    convert(dense, tmp_path / "f.gguf")
    return tmp_path / "f.gguf"


def _damage(path: Path, layer: int, byte: int = -1) -> None:
    b = read_layout(path).bundle(layer)
    with open(path, "r+b") as f:
        f.seek(b.offset + (byte if byte >= 0 else b.nbytes - 1))
        old = f.read(1)
        f.seek(-1, 1)
        f.write(bytes([old[0] ^ 1]))


def test_they_are_of_all_bytes_of_the_bundles(dense: Path, tmp_path: Path) -> None:
    made = convert(dense, tmp_path / "f.gguf")
    layout = read_layout(tmp_path / "f.gguf")
    assert len(layout.checksums) == 3 and made.checksums == layout.checksums
    for b, digest in zip(layout.layers, layout.checksums, strict=True):
        data = np.ascontiguousarray(read_bundle(layout, b.layer)).tobytes()
        assert hashlib.sha256(data).hexdigest() == digest
    assert made == layout


def test_of_reordered_neurons_too(dense: Path, tmp_path: Path) -> None:
    order = np.arange(64)[::-1].copy()
    convert(dense, tmp_path / "f.gguf", orders={1: order})
    assert verify_checksums(tmp_path / "f.gguf").ok


def test_the_file_is_what_its_source_gives(flash: Path, dense: Path) -> None:
    assert verify(flash, dense).ok
    report = verify_checksums(flash)
    assert report.ok and report.checksums == 3
    assert report.summary() == "verified: the checksums of 3 layers are right"


@pytest.mark.parametrize("byte", [0, 100, -1])
def test_the_layer_that_differs_is_named(flash: Path, byte: int) -> None:
    _damage(flash, 1, byte)
    report = verify_checksums(flash)
    assert len(report.differences) == 1 and report.differences[0].startswith("layer 1 has the")


def test_progress_ends_with_all_bytes(flash: Path) -> None:
    told: list[tuple[int, int, str]] = []
    verify_checksums(flash, progress=lambda *what: told.append(what))
    size = read_layout(flash).bundle_bytes
    assert told[-1] == (size, size, "layer 2") and [t[2] for t in told] == sorted(
        t[2] for t in told
    )


def test_a_file_without_them(dense: Path, tmp_path: Path) -> None:
    layout = convert(dense, tmp_path / "f.gguf", checksums=False)
    assert layout.checksums == () and "flash_ffn.checksum.layers" not in layout.kv
    with pytest.raises(ArgumentError, match="it has none; give its source with --against"):
        verify_checksums(tmp_path / "f.gguf")


def test_verb(flash: Path, dense: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["verify", str(flash), *arguments])
        return result.exit_code, result.output

    assert run("--checksums") == (0, "verified: the checksums of 3 layers are right\n")
    assert run("--checksums", "--quiet") == (0, "")
    for wrong in ((), ("--checksums", "--against", str(dense))):
        code, text = run(*wrong)
        assert code == 2 and "--against SOURCE, or --checksums, not both" in text
    _damage(flash, 2)
    code, text = run("--checksums", "--json")
    assert code == 1 and json.loads(text)["differences"][0].startswith("layer 2 ")
    code, text = run("--checksums")
    assert code == 1 and text.startswith("not equal: layer 2 has the checksum ")


def test_convert_without(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.gguf"
    arguments = ["convert", str(dense), "--out", str(out), "--no-checksums", "--quiet"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert read_layout(out).checksums == ()
