"""What `gguf-flash calibrate` stores in a predictor file, and whether a file has it as it must be.

    text, target        str
    tokens, window      int
    capacity            one int per layer
    active, selected, false_negatives, false_positives      one share per layer
    miss_slots, miss_curve      one list per layer, all of one length: ints, and numbers

`convert` copies all of them, so what it takes for granted is checked here, when the file is read.
"""

from __future__ import annotations

from typing import Any

__all__ = ["calibration_fault"]

_TEXTS = ("text", "target")
_COUNTS = ("tokens", "window")
_SHARES = ("active", "selected", "false_negatives", "false_positives")
_CURVES = ("miss_slots", "miss_curve")
_LIMIT = 1 << 32  # a flash-GGUF holds the counts as u32


def calibration_fault(found: Any, n_layers: int) -> str:
    """What is wrong with training["calibration"] of `n_layers` layers, as a clause; "" if nothing.

    Fine are None, for a predictor that was not calibrated, and keys that are not listed above.
    """
    if found is None:
        return ""
    if not isinstance(found, dict):
        return f"an object expected, found {_shown(found)}"
    for name in (*_TEXTS, *_COUNTS, "capacity", *_SHARES, *_CURVES):
        if name not in found:
            return f"it lacks '{name}'"
        if wanted := _expected(name, found[name], n_layers):
            return f"'{name}' must be {wanted}, found {_shown(found[name])}"
    lengths = {len(row) for name in _CURVES for row in found[name]}
    if len(lengths) > 1:
        shown = _shown(sorted(lengths))
        return f"the lists in 'miss_slots' and 'miss_curve' must be equally long, found {shown}"
    return ""


def _expected(name: str, value: Any, n_layers: int) -> str:
    """What `value` should be; "" if it is."""
    if name in _TEXTS:
        return "" if _is_text(value) else "a text"
    if name in _COUNTS:
        return "" if _is_count(value) else "a whole number"
    if not isinstance(value, list) or len(value) != n_layers:
        return f"a list of one entry for each of {n_layers} layers"
    if name == "capacity":
        return "" if all(map(_is_count, value)) else "a list of whole numbers"
    if name in _SHARES:
        return "" if all(_is_number(v) and v <= 1 for v in value) else "a list of shares in [0, 1]"
    is_entry = _is_count if name == "miss_slots" else _is_number
    good = all(isinstance(row, list) and all(map(is_entry, row)) for row in value)
    return "" if good else "a list of lists of numbers"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LIMIT


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _LIMIT  # no NaN passes


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
