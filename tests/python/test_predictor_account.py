"""A damaged account of a calibration is refused when the predictor is opened, not at convert."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from gguf_flash.errors import PredictorError
from gguf_flash.predictor.account import calibration_fault
from gguf_flash.predictor.file import Predictor

PREDICTOR = DATA / "small-opt" / "predictor.safetensors"
GOOD: dict[str, Any] = Predictor.open(PREDICTOR).training["calibration"]
Change = Callable[[dict[str, Any]], Any]


def put(key: str, value: Any) -> Change:
    return lambda c: {**c, key: value}


def entry(key: str, value: Any) -> Change:
    return lambda c: {**c, key: [*c[key][:-1], value]}


def cut(key: str) -> Change:
    return lambda c: {**c, key: [row[:-1] for row in c[key]]}


DAMAGED: dict[str, tuple[Change, str]] = {
    "a list": (lambda c: [c], "an object expected"),
    "a text": (lambda c: "x" * 99, "an object expected"),
    **{
        f"no {key}": (lambda c, k=key: {n: v for n, v in c.items() if n != k}, f"lacks '{key}'")  # type: ignore[misc]
        for key in GOOD
    },
    "text a number": (put("text", 1), "'text' must be a text"),
    "half a character": (put("target", "\ud800"), "'target' must be a text"),
    "tokens a text": (put("tokens", "4096"), "'tokens' must be a whole number"),
    "tokens a float": (put("tokens", 1.5), "'tokens' must be a whole number"),
    "window true": (put("window", True), "'window' must be a whole number"),
    "window too large": (put("window", 1 << 32), "'window' must be a whole number"),
    "a layer too few": (lambda c: {**c, "active": c["active"][1:]}, "each of 6 layers"),
    "no list": (put("capacity", 7), "each of 6 layers"),
    "a negative capacity": (entry("capacity", -1), "whole numbers"),
    "NaN": (entry("selected", float("nan")), "shares in"),
    "a share above 1": (entry("false_negatives", 1.1), "shares in"),
    "a share as text": (entry("false_positives", "0.1"), "shares in"),
    "an endless curve": (entry("miss_curve", [float("inf")] * 8), "a list of lists"),
    "a curve that is none": (entry("miss_curve", 1.0), "a list of lists"),
    "a curve too short": (entry("miss_curve", [1.0]), "equally long"),
    "slots that are fewer": (cut("miss_slots"), "equally long"),
    "slots of a half": (entry("miss_slots", [0.5] * 8), "a list of lists"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged(tmp_path: Path, what: str) -> None:
    change, sentence = DAMAGED[what]
    path = tmp_path / "p.safetensors"
    data = PREDICTOR.read_bytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    training = json.loads(metadata["training"])
    training["calibration"] = change(copy.deepcopy(GOOD))
    path.write_bytes(save(load(data), {**metadata, "training": json.dumps(training)}))
    with pytest.raises(PredictorError, match="calibration") as refused:
        Predictor.open(path)
    assert sentence in str(refused.value) and "calibrate again" in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_what_is_fine() -> None:
    assert calibration_fault(None, 6) == ""
    assert calibration_fault(GOOD, 6) == ""
    assert calibration_fault({**GOOD, "note": object()}, 6) == ""
    assert "7 layers" in calibration_fault(GOOD, 7)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(key=st.sampled_from(sorted(GOOD)), value=JSON)
def test_any_json(key: str, value: Any) -> None:
    """Never an exception."""
    assert "\n" not in calibration_fault({**GOOD, key: value}, 6)
