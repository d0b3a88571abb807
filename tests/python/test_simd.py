"""Kernels of every instruction set of this machine give one output, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_dense

from gguf_flash.converters import convert

_SCRIPT = """
import hashlib, sys
import numpy as np
from gguf_flash import _core
from gguf_flash.engine import open_model
model = open_model(sys.argv[1])
rng = np.random.default_rng(3)
digest = hashlib.sha256()
for n_tokens in (1, 3, 5, 40):  # alone, row by row, expanded, together
    x = rng.standard_normal((n_tokens, 64), dtype=np.float32)
    digest.update(model.ffn(1, x).tobytes())
print(_core.machine("")["simd"], digest.hexdigest())
"""


def _output(path: Path, simd: str) -> tuple[str, str]:
    """The kernels that ran, and the digest of what they gave."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(path)],
        env={**os.environ, "GGUF_FLASH_SIMD": simd},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name, digest = done.stdout.split()
    return name, digest


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_every_instruction_set_gives_the_same_bits(type_name: str, tmp_path: Path) -> None:
    make_dense(tmp_path / "d.gguf", type=type_name, n_embd=64, n_ff=320)
    convert(tmp_path / "d.gguf", tmp_path / "f.gguf")
    widest, expected = _output(tmp_path / "f.gguf", "")
    for simd in ("scalar", "avx2", "avx512", "neon"):
        name, digest = _output(tmp_path / "f.gguf", simd)
        assert name in (simd, widest)  # one that is not there leaves the widest
        assert digest == expected, (simd, name)
    assert _output(tmp_path / "f.gguf", "scalar")[0] == "scalar"
