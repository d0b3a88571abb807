"""A fork after a model was loaded and has run, in a process of its own each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_dense

from gguf_flash.converters import convert

FORKED = """
import os, sys, gguf_flash
path, reader, threads, what = sys.argv[1:]
llm = gguf_flash.FlashLlama(path, ram="40%", n_ctx=128, threads=int(threads), reader=reader)
def text():
    llm.reset()
    done = llm.create_completion("Call me Ishmael", max_tokens=8, temperature=0)
    return done["choices"][0]["text"]
before = text()
child = os.fork()
if child == 0:
    same = "use" not in what or text() == before
    if "close" in what:
        llm.close()
    if "exit" in what:
        sys.exit(0 if same else 1)
    os._exit(0 if same else 1)
mine = text() == before
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
llm.close()
print(code, mine, text is not None)
"""


@pytest.mark.parametrize(
    ("what", "reader", "threads"),
    [
        ("use,close", "auto", 1),
        ("use,close", "auto", 2),
        ("use,close", "pread", 2),
        ("close", "pread", 1),
        ("close", "auto", 2),
        ("exit", "pread", 2),
    ],
)
def test_a_fork_after_loading(
    tiny: tuple[Path, Path], what: str, reader: str, threads: int
) -> None:
    """Parent and child write the same text, and both can free the model."""
    command = [sys.executable, "-c", FORKED, str(tiny[1]), reader, str(threads), what]
    done = subprocess.run(
        command, cwd=tiny[1].parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split()[:2] == ["0", "True"], done.stderr


def test_workers_of_multiprocessing(tiny: tuple[Path, Path]) -> None:
    program = (
        "import multiprocessing, sys, gguf_flash\n"
        "llm = gguf_flash.FlashLlama(sys.argv[1], ram='40%', n_ctx=128, threads=2)\n"
        "def text(n):\n"
        "    llm.reset()\n"
        "    done = llm.create_completion('Call me', max_tokens=8, temperature=0)\n"
        "    return done['choices'][0]['text']\n"
        "wanted = text(0)\n"
        "with multiprocessing.get_context('fork').Pool(3) as pool:\n"
        "    found = pool.map(text, range(6))\n"
        "print(found == [wanted] * 6)\n"
    )
    command = [sys.executable, "-c", program, str(tiny[1])]
    done = subprocess.run(
        command, cwd=tiny[1].parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True\n", done.stderr


def test_a_fork_copies_no_cache(tmp_path: Path) -> None:
    """Pages that io_uring has pinned would be copied by the fork itself: the whole cache."""
    flash = tmp_path / "flash.gguf"
    dense = make_dense(tmp_path / "dense.gguf", n_ff=16384, n_layer=4, type="F16")
    convert(dense, flash, select="all")
    program = (
        "import os, sys, numpy as np\n"
        "from gguf_flash import _core\n"
        "def dirty():\n"
        "    lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "    return sum(int(x.split()[1]) for x in lines if x.startswith('Private_Dirty')) * 1024\n"
        "model = _core.open_model(sys.argv[1], ram='100%')\n"
        "x = np.random.default_rng(0).standard_normal((1, model.n_embd), dtype=np.float32)\n"
        "wanted = [model.ffn(n, x) for n in model.layers]\n"
        "if os.fork() == 0:\n"
        "    mine = dirty()\n"
        "    same = all((model.ffn(n, x) == w).all() for n, w in zip(model.layers, wanted))\n"
        "    print(mine, model.stats()['memory']['cache_bytes'], same, flush=True)\n"
        "    del model\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print(all((model.ffn(n, x) == w).all() for n, w in zip(model.layers, wanted)))\n"
    )
    command = [sys.executable, "-c", program, str(flash)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    private, cache, child, parent = done.stdout.split()
    assert (child, parent) == ("True", "True")
    assert int(cache) > 16 << 20 and int(private) < int(cache) // 2
