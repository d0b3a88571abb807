"""Differential fuzz: the Python reader and the engine's judge the same damaged files alike.

Each file is a good one of tests/hostile with a few edits of its keys, tensor infos, counts and
bytes, alone or as a split set. Both readers must accept it, with the same layout, or refuse it
with the same kind of error, of the same rule, in one line. A file that breaks this is kept.

    python tests/fuzz/fuzz_readers.py --seconds 600 --seed 1
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "hostile"))

from file_edits import damage_bytes, edit_model
from hostile_model import good
from split_cases import split_pair
from threshold_cases import add_thresholds

from gguf_flash import _core
from gguf_flash.errors import FlashError
from gguf_flash.format import read_layout

_FIELDS = ("select", "activation", "n_embd", "gated", "fused", "align", "bundle_bytes",
           "resident_bytes")  # fmt: skip


def rule_of(error: FlashError) -> str:
    """What a refusal says: kind and rule. Raises AssertionError unless it is one short line."""
    message = str(error)
    assert message.isprintable() and len(message) < 1000, f"not one short line: {message!r}"
    match = re.search(r"\(SPEC R(\d+)\)$", message)
    return f"{type(error).__name__} R{match[1]}" if match else type(error).__name__


def python_verdict(path: Path) -> Any:
    """Fields of the layout, or kind of error and rule."""
    try:
        layout = read_layout(path)
    except FlashError as e:
        return rule_of(e), str(e)
    layers = [(b.layer, b.n_ff, b.stride, b.offset) for b in layout.layers]
    return [getattr(layout, name) for name in _FIELDS], layers


def engine_verdict(path: Path) -> Any:
    """As python_verdict."""
    try:
        layout = _core.read_layout(str(path))
    except FlashError as e:
        return rule_of(e), str(e)
    names = ("layer", "n_ff", "stride", "offset")
    return [layout[k] for k in _FIELDS], [tuple(x[n] for n in names) for x in layout["layers"]]


def same(python: Any, engine: Any) -> bool:
    """Whether both accepted with the same layout, or refused for the same reason."""
    if isinstance(python[0], str) and isinstance(engine[0], str):
        return bool(python[0] == engine[0])  # the sentences differ
    return bool(python == engine)


def make_file(rng: random.Random, folder: Path) -> Path:
    """A damaged file, or the first of a damaged split set."""
    model = good(rng.choice(("all", "gate", "predictor", "codes")))
    if rng.random() < 0.3:
        add_thresholds(model)
    models = split_pair(model) if rng.random() < 0.15 else [model]
    count = len(models)
    if count == 2 and rng.random() < 0.2:
        models.append(copy.deepcopy(models[1]))
        count = rng.choice((2, 3))
    if rng.random() < 0.7:
        for _ in range(rng.randint(1, 2)):
            edit_model(rng, rng.choice(models))
    paths = []
    for i, m in enumerate(models):
        data = m.encode()
        if rng.random() < 0.25:
            data = damage_bytes(rng, data, len(m.header()))
        name = f"x-{i + 1:05d}-of-{count:05d}.gguf" if len(models) > 1 else "x.gguf"
        if len(models) == 1 and rng.random() < 0.05:
            name = "x-00001-of-00002.gguf"
        paths.append(folder / name)
        paths[-1].write_bytes(data)
    return paths[0]


def try_one(seed: int, folder: Path) -> str:
    """Judge the file of ``seed``; returns the verdict, raises AssertionError if they differ."""
    rng = random.Random(seed)
    path = make_file(rng, folder)
    python, engine = python_verdict(path), engine_verdict(path)
    assert same(python, engine), f"Python: {python}\n  engine: {engine}"
    return python[0] if isinstance(python[0], str) else "accepted"


def main() -> int:
    """Fuzz for a time, or one seed again; 1 if the readers differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1, help="the first; each file has its own")
    parser.add_argument("--one", action="store_true", help="only the file of --seed")
    parser.add_argument("--keep", type=Path, default=Path("differing"), help="where such files go")
    parser.add_argument("--most", type=int, default=1, help="differences to end after")
    options = parser.parse_args()
    end, seed, found = time.monotonic() + options.seconds, options.seed, 0
    verdicts: Counter[str] = Counter()
    while found < options.most and (seed == options.seed or not options.one):
        if time.monotonic() > end:
            break
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdicts[try_one(seed, Path(folder))] += 1
            except Exception as e:
                found += 1
                print(f"seed {seed}: {type(e).__name__}: {e}", file=sys.stderr)
                shutil.copytree(folder, options.keep / str(seed), dirs_exist_ok=True)
        seed += 1
    print(f"{seed - options.seed} files, {found} differences: {dict(verdicts.most_common())}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
