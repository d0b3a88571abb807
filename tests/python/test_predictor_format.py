"""Keys and tensors of predictors: what both readers make of them, right or wrong."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from golden.make_golden import describe_predictors
from hostile_model import Model, good
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_flash import _core
from gguf_flash.errors import CorruptFileError, FlashError
from gguf_flash.format import read_layout
from gguf_flash.format.container import Tensor, encode_value
from gguf_flash.format.ggml_types import TYPES
from gguf_flash.format.keys import Keys
from gguf_flash.format.predictor import (
    LayerPredictor,
    check_calibration,
    check_predictor_tensors,
    check_predictors,
    predictor_names,
)

GOLDEN = Path(__file__).parent / "golden"
PREDICTORS = sorted(GOLDEN.glob("v1-predictor-*.gguf"))
F32, F16, I8 = TYPES[0], TYPES[1], TYPES[24]


def keys_of(**values: tuple[str, Any]) -> Keys:
    """Keys of a file; "predictor__rank" stands for flash_ffn.predictor.rank."""
    kv = {f"flash_ffn.{k.replace('__', '.')}": encode_value(t, v) for k, (t, v) in values.items()}
    return Keys(Path("m.gguf"), kv)


# --- golden files ---------------------------------------------------------------------------------


def test_both_kinds_of_golden_predictor_are_there() -> None:
    assert [p.stem for p in PREDICTORS] == ["v1-predictor-gated", "v1-predictor-ungated"]


@pytest.mark.parametrize("path", PREDICTORS, ids=lambda p: p.stem)
def test_both_readers_agree_with_the_golden_description(path: Path) -> None:
    expected = json.loads(path.with_suffix(".json").read_text())
    found = json.loads(json.dumps(describe_predictors(read_layout(path))))
    assert found == {k: expected[k] for k in ("predictors", "calibration")}
    capacity = (expected["calibration"] or {"capacity": [0, 0]})["capacity"]
    engine = _core.read_layout(str(path))["layers"]
    for layer, want, slots in zip(engine, expected["predictors"], capacity, strict=True):
        assert (layer["layer"], layer["rank"]) == (want["layer"], want["rank"])
        assert (layer["predictor_threshold"], layer["capacity"]) == (want["threshold"], slots)


@pytest.mark.parametrize("path", PREDICTORS, ids=lambda p: p.stem)
def test_the_engine_scores_as_golden_tensors_say(path: Path) -> None:
    tensors = {t.name: t.data.astype(np.float64) for t in gguf.GGUFReader(path).tensors
               if "ffn_pred" in t.name}  # fmt: skip
    model = _core.open_model(str(path))
    x = np.random.default_rng(3).standard_normal((6, model.n_embd)).astype(np.float32)
    for layer in model.layers:
        a, b, bias = (tensors[name] for name in predictor_names(layer))
        expected = np.maximum(x @ a.T, 0) @ b.T + bias
        np.testing.assert_allclose(model.scores(layer, x, 2), expected, rtol=4e-3, atol=4e-2)


# --- Keys.numbers ---------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 2.0**127, width=32), max_size=6))
def test_numbers_come_back_as_they_were_written(values: list[float]) -> None:
    keys = keys_of(x=("arr:f32", values))
    found = keys.numbers("x", "arr of f32", len(values), 21)
    assert found == tuple(values) and all(type(v) is float for v in found)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=6))
def test_integers_come_back_as_they_were_written(values: list[int]) -> None:
    found = keys_of(x=("arr:u32", values)).numbers("x", "arr of u32", len(values), 21)
    assert found == tuple(values) and all(type(v) is int for v in found)


@given(
    st.lists(st.floats(0, 1, width=32, exclude_max=True), min_size=1, max_size=6),
    st.sampled_from([1.0, -1.0, -(2.0**-149), math.nan, math.inf, -math.inf]),
    st.data(),
)
def test_one_bad_number_is_refused_with_its_rule(
    values: list[float], bad: float, data: st.DataObject
) -> None:
    assert len(keys_of(x=("arr:f32", values)).numbers("x", "arr of f32", len(values), 21, below=1))
    values[data.draw(st.integers(0, len(values) - 1))] = bad
    with pytest.raises(CorruptFileError, match=r"flash_ffn\.x.*\(SPEC R21\)$"):
        keys_of(x=("arr:f32", values)).numbers("x", "arr of f32", len(values), 21, below=1)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_numbers_of_another_count_are_refused(count: int) -> None:
    with pytest.raises(CorruptFileError, match=r"must hold 2 finite values.*\(SPEC R23\)$"):
        keys_of(x=("arr:f32", [0.5] * count)).numbers("x", "arr of f32", 2, 23)


def test_absent_numbers() -> None:
    assert keys_of().numbers("x", "arr of f32", 2, 23, required=False) == ()
    with pytest.raises(CorruptFileError, match=r"\(SPEC R6\)$"):
        keys_of().numbers("x", "arr of f32", 2, 23)
    with pytest.raises(CorruptFileError, match=r"\(SPEC R6\)$"):  # optional, but not of any type
        keys_of(x=("arr:u32", [1, 2])).numbers("x", "arr of f32", 2, 23, required=False)


# --- format.predictor -----------------------------------------------------------------------------


def test_predictors_of_layers() -> None:
    keys = keys_of(
        predictor__rank=("arr:u32", [4, 2**32 - 1]), predictor__threshold=("arr:f32", [0.0, 0.75])
    )
    expected = (LayerPredictor(3, 4, 0.0), LayerPredictor(9, 2**32 - 1, 0.75))
    assert check_predictors(keys, [3, 9]) == expected
    with pytest.raises(CorruptFileError, match="SPEC R21"):
        check_predictors(keys, [3])


def test_calibration_without_tokens_is_ignored() -> None:
    assert check_calibration(keys_of(calibration__active=("arr:f32", [math.nan])), 2) is None


def test_calibration_that_says_nothing_more() -> None:
    found = check_calibration(keys_of(calibration__tokens=("u32", 7)), 2)
    assert found is not None
    assert (found.tokens, found.text, found.target, found.window) == (7, "", "", 0)
    assert found.capacity == found.miss_slots == found.miss_curve == ()
    assert set(found.rates.values()) == {()}


@given(st.integers(1, 5), st.integers(0, 5), st.data())
def test_miss_curves_are_cut_by_layer(n_layers: int, points: int, data: st.DataObject) -> None:
    n = n_layers * points
    slots = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=n, max_size=n))
    curve = data.draw(st.lists(st.floats(0, 2.0**127, width=32), min_size=n, max_size=n))
    keys = keys_of(
        calibration__tokens=("u32", 7),
        calibration__miss_slots=("arr:u32", slots),
        calibration__miss_curve=("arr:f32", curve),
    )
    found = check_calibration(keys, n_layers)
    assert found is not None
    assert len(found.miss_slots) == len(found.miss_curve) == (n_layers if points else 0)
    assert [v for row in found.miss_slots for v in row] == slots
    assert [v for row in found.miss_curve for v in row] == curve
    assert all(len(row) == points for row in (*found.miss_slots, *found.miss_curve))


def test_predictor_tensors() -> None:
    predictor = LayerPredictor(5, 4, 0.5)
    a, b, bias = predictor_names(5)
    shapes = {a: (32, 4), b: (4, 16), bias: (16,)}
    right = {n: Tensor(n, s, F32 if n == bias else F16, 0, 0) for n, s in shapes.items()}
    check_predictor_tensors(Path("m"), right, [predictor], [16], 32)
    check_predictor_tensors(Path("m"), {}, (), [16], 32)  # of a file without predictors
    for name, shape in shapes.items():
        kind = right[name].type
        wrong = [None, Tensor(name, (*shape, 1), kind, 0, 0), Tensor(name, shape, I8, 0, 0)]
        wrong.append(Tensor(name, (shape[0] + 1, *shape[1:]), kind, 0, 0))
        for tensor in wrong:
            tensors = {n: t for n, t in {**right, name: tensor}.items() if t is not None}
            with pytest.raises(CorruptFileError, match=rf"{re.escape(name)}.*\(SPEC R22\)$"):
                check_predictor_tensors(Path("m"), tensors, [predictor], [16], 32)


# --- the two readers on the same files ------------------------------------------------------------

ARRAYS = [k for k, kind, _ in good("predictor").kv if kind in ("arr:u32", "arr:f32")]
NUMBERS = {
    "arr:u32": st.sampled_from([0, 1, 2, 3, 4, 32, 2**31, 2**32 - 1]),
    "arr:f32": st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, -1.0, math.nan, math.inf])
    | st.floats(0, 2, width=32)
    | st.floats(width=32),
}


def verdict(read: Any, path: Path) -> str:
    """The rule that a reader names, "" when it takes the file."""
    try:
        read(path)
    except FlashError as error:
        return type(error).__name__ + str(error).rpartition("(SPEC ")[2]
    return ""


def damage(model: Model, data: st.DataObject) -> None:
    """Replace one array of the file by another, or drop it."""
    key = data.draw(st.sampled_from([k for k in ARRAYS if "predictor." in k or "calibration" in k]))
    if data.draw(st.integers(0, 9)) == 0:
        model.drop(key)
        return
    right = next(kind for k, kind, _ in model.kv if k == key)
    kind = data.draw(st.sampled_from([right] * 9 + list(NUMBERS)))
    lengths = st.sampled_from([2, 2, 2, 2, 6, 0, 1, 3])
    n = data.draw(lengths)
    model.set(key, kind, data.draw(st.lists(NUMBERS[kind], min_size=n, max_size=n)))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_both_readers_judge_alike(data: st.DataObject) -> None:
    model = good("predictor")
    damage(model, data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(model.encode())
        assert verdict(read_layout, path) == verdict(lambda p: _core.read_layout(str(p)), path)


@pytest.mark.parametrize("share", [1.0009999, 1.001, 1.0010001])
def test_both_readers_draw_the_line_of_shares_alike(share: float, tmp_path: Path) -> None:
    model = good("predictor")
    model.set("flash_ffn.calibration.active", "arr:f32", [0.0, share])
    path = tmp_path / "m.gguf"
    path.write_bytes(model.encode())
    found = verdict(read_layout, path)
    assert found == verdict(lambda p: _core.read_layout(str(p)), path)
    assert found == ("" if share < 1.001 else "CorruptFileErrorR23)")
