"""Predictors and what calibration measured."""

from __future__ import annotations

from typing import Any

from cases import CASES, attr, case, key
from hostile_model import F16, F32, I8, N_EMBD, N_FF, Model, Tensor


def _predictor(rule: int, what: str, of: str, kind: str, value: Any) -> None:
    key(f"r{rule:02}_{what}", of, kind, value, "predictor")


def _pred_attr(name: str, tensor: str, what: str, value: Any) -> None:
    attr(name, f"blk.1.ffn_pred_{tensor}", what, value, "predictor")


for _name in ("rank", "threshold"):
    CASES[f"r06_no_predictor_{_name}"] = (
        "predictor", lambda m, k=_name: m.drop(f"flash_ffn.predictor.{k}"),
    )  # fmt: skip
_predictor(6, "rank_type", "predictor.rank", "arr:i32", [3, 32])
_predictor(6, "predictor_threshold_type", "predictor.threshold", "f32", 0.5)
_predictor(6, "tokens_type", "calibration.tokens", "f32", 1000.0)
_predictor(6, "calibration_text_type", "calibration.text", "u32", 1)
_predictor(6, "calibration_target_type", "calibration.target", "f32", 0.05)
_predictor(6, "calibration_window_type", "calibration.window", "i32", 5)
_predictor(6, "capacity_type", "calibration.capacity", "arr:f32", [2.0, 4.0])
_predictor(6, "active_type", "calibration.active", "arr:u32", [0, 1])
_predictor(6, "miss_slots_type", "calibration.miss_slots", "arr:str", ["1", "2", "4"] * 2)
_predictor(6, "rank_scalar", "predictor.rank", "u32", 3)
_predictor(6, "capacity_text", "calibration.capacity", "str", "2")
_predictor(9, "predictor_not_gated", "gated", "bool", False)
_predictor(21, "too_few_ranks", "predictor.rank", "arr:u32", [3])
_predictor(21, "too_many_ranks", "predictor.rank", "arr:u32", [3, 32, 3])
_predictor(21, "no_ranks", "predictor.rank", "arr:u32", [])
_predictor(21, "rank_0", "predictor.rank", "arr:u32", [3, 0])
_predictor(21, "rank_1", "predictor.rank", "arr:u32", [1, 32])
_predictor(21, "too_few_thresholds", "predictor.threshold", "arr:f32", [0.5])
_predictor(21, "too_many_thresholds", "predictor.threshold", "arr:f32", [0.5] * 3)
_predictor(21, "threshold_1", "predictor.threshold", "arr:f32", [0.5, 1.0])
_predictor(21, "threshold_negative", "predictor.threshold", "arr:f32", [-0.5, 0.5])
_predictor(21, "threshold_nan", "predictor.threshold", "arr:f32", [0.5, float("nan")])
_predictor(21, "threshold_infinite", "predictor.threshold", "arr:f32", [float("inf"), 0.5])
for _name in ("a.weight", "b.weight", "b.bias"):
    _pred_attr(f"r22_no_{_name.replace('.', '_')}", _name, "name", "blk.1.other")
    _pred_attr(f"r22_integers_{_name.replace('.', '_')}", _name, "type", I8)
_pred_attr("r22_a_three_dimensions", "a.weight", "shape", [32, 32, 1])
_pred_attr("r22_a_of_another_rank", "a.weight", "shape", [N_EMBD, 31])
_pred_attr("r22_b_of_fewer_neurons", "b.weight", "shape", [32, N_FF - 1])
_pred_attr("r22_bias_of_fewer_neurons", "b.bias", "shape", [N_FF - 1])
_pred_attr("r22_bias_two_dimensions", "b.bias", "shape", [N_FF, 1])
_pred_attr("r22_bias_f16", "b.bias", "type", F16)
_predictor(22, "rank_of_another_file", "predictor.rank", "arr:u32", [4, 32])
_predictor(22, "rank_huge", "predictor.rank", "arr:u32", [3, 2**32 - 1])


@case("r17_predictor_and_dense_up", "predictor")
def _(m: Model) -> None:
    m.tensors.append(Tensor("blk.1.ffn_up.weight", [N_EMBD, N_FF], F32, 4 * N_EMBD * N_FF))


for _name in ("active", "selected", "false_negatives", "false_positives"):
    _predictor(23, f"too_few_{_name}", f"calibration.{_name}", "arr:f32", [0.5])
    _predictor(23, f"too_large_{_name}", f"calibration.{_name}", "arr:f32", [0.5, 1.0011])
_predictor(23, "active_nan", "calibration.active", "arr:f32", [0.5, float("nan")])
_predictor(23, "active_negative", "calibration.active", "arr:f32", [-0.1, 0.5])
_predictor(23, "too_many_capacities", "calibration.capacity", "arr:u32", [1, 2, 3])
_predictor(23, "no_capacities", "calibration.capacity", "arr:u32", [])
_predictor(23, "miss_slots_odd", "calibration.miss_slots", "arr:u32", [1, 2, 4, 1, 2])
_predictor(23, "miss_curve_short", "calibration.miss_curve", "arr:f32", [1.0] * 4)
_predictor(23, "miss_curve_negative", "calibration.miss_curve", "arr:f32", [1.0] * 5 + [-1.0])
_predictor(23, "miss_curve_infinite", "calibration.miss_curve", "arr:f32", [float("inf")] * 6)


@case("r06_one_rate_mistyped_another_short", "predictor")
def _(m: Model) -> None:
    """Two faults: readers that look in another order name another rule."""
    for name, kind, value in (("selected", "f32", [0.5]), ("false_positives", "u32", [0, 1])):
        m.drop(f"flash_ffn.calibration.{name}")
        m.kv.append((f"flash_ffn.calibration.{name}", f"arr:{kind}", value))


@case("r23_miss_curve_without_slots", "predictor")
def _(m: Model) -> None:
    m.drop("flash_ffn.calibration.miss_slots")


@case("r23_without_predictor")
def _(m: Model) -> None:
    m.kv.append(("flash_ffn.calibration.tokens", "u32", 1000))
    m.kv.append(("flash_ffn.calibration.active", "arr:f32", [0.5]))
