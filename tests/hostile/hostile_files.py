"""Malformed flash-GGUF files, each named after the rule of SPEC.md that it breaks.

Bytes are laid out here from SPEC.md alone, without gguf_flash, so these files also check that the
specification suffices.  ``python hostile_files.py FOLDER`` writes all of them, and ``good`` ones,
for readers in other languages.
"""

from __future__ import annotations

import copy
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile_model import BF16, F16, F32, I8, I16, N_EMBD, N_FF, STRIDE, Model, Tensor, good

Edit = Callable[[Model], None]
CASES: dict[str, tuple[str, Edit]] = {}  # name -> (select, edit)


def case(name: str, select: str = "all") -> Callable[[Edit], Edit]:
    def register(edit: Edit) -> Edit:
        CASES[name] = (select, edit)
        return edit

    return register


def _key(name: str, key: str, kind: str, value: Any, select: str = "all") -> None:
    CASES[name] = (select, lambda m: m.set(f"flash_ffn.{key}", kind, value))


def _attr(name: str, tensor: str, attr: str, value: Any, select: str = "all") -> None:
    CASES[name] = (select, lambda m: setattr(m.tensor(tensor), attr, value))


@case("r01_magic")
def _(m: Model) -> None:
    m.magic = b"GGML"


@case("r02_gguf_version_2")
def _(m: Model) -> None:
    m.version = 2


@case("r02_big_endian")
def _(m: Model) -> None:
    m.version = 3 << 24


@case("r03_more_keys_than_bytes")
def _(m: Model) -> None:
    m.claim_kv = 1 << 60


@case("r03_one_key_too_many")
def _(m: Model) -> None:
    m.claim_kv = len(m.kv) + 1


@case("r03_more_tensors_than_bytes")
def _(m: Model) -> None:
    m.claim_tensors = 1 << 60


_key("r03_string_beyond_file", "select", "raw", struct.pack("<IQ", 8, 1 << 40))
_key("r03_string_length_overflows", "select", "raw", struct.pack("<IQ", 8, 2**64 - 1))
_key("r03_array_beyond_file", "layers", "raw", struct.pack("<IIQ", 9, 4, 1 << 62))
_key("r03_array_of_arrays", "layers", "raw", struct.pack("<IIQ", 9, 9, 1))
_key("r03_unknown_value_type", "select", "raw", struct.pack("<I", 77))
_attr("r03_unknown_tensor_type", "token_embd.weight", "type", 4000)
_attr("r03_five_dimensions", "token_embd.weight", "shape", [32, 8, 1, 1, 1])
_attr("r03_shape_overflows", "token_embd.weight", "shape", [1 << 40, 1 << 40])
_attr("r03_partial_block", "token_embd.weight", "type", 12)


@case("r03_long_name")
def _(m: Model) -> None:
    m.tensors[-1].name = "x" * 64


@case("r04_no_version")
def _(m: Model) -> None:
    m.drop("flash_ffn.version")


_key("r05_version_0", "version", "u32", 0)
_key("r05_version_2", "version", "u32", 2)
_key("r06_version_type", "version", "u64", 1)
_key("r06_select_type", "select", "u32", 1)
_key("r06_layers_type", "layers", "arr:i32", [0, 1])
_key("r06_gated_type", "gated", "u8", 1)
_key("r06_activation_type", "activation", "u32", 1)
for _name in ("select", "layers", "n_embd", "gated", "fused"):
    CASES[f"r06_no_{_name}"] = ("all", lambda m, k=_name: m.drop(f"flash_ffn.{k}"))
for _name in ("parts", "types", "align"):
    CASES[f"r06_no_{_name}"] = ("all", lambda m, k=_name: m.drop(f"flash_ffn.bundle.{k}"))
_key("r07_oracle", "select", "str", "oracle")
_key("r08_layers_empty", "layers", "arr:u32", [])
_key("r08_layers_descend", "layers", "arr:u32", [1, 0])
_key("r08_layers_repeat", "layers", "arr:u32", [0, 0])
_key("r09_no_down", "bundle.parts", "arr:str", ["gate", "up"])
_key("r09_order", "bundle.parts", "arr:str", ["up", "gate", "down"])
_key("r09_unknown_part", "bundle.parts", "arr:str", ["gate", "up", "sideways"])
_key("r09_not_gated", "gated", "bool", False)
_key("r10_too_few_types", "bundle.types", "arr:u32", [0] * 5)
_key("r10_too_many_types", "bundle.types", "arr:u32", [0] * 7)
_key("r10_unknown_type", "bundle.types", "arr:u32", [0, 0, 999] * 2)
_key("r10_integer_type", "bundle.types", "arr:u32", [0, 0, I16] * 2)
_key("r10_partial_block", "bundle.types", "arr:u32", [0, 0, 12] * 2)
_key("r10_no_width", "n_embd", "u32", 0)
_key("r11_align_0", "bundle.align", "u32", 0)
_key("r11_align_500", "bundle.align", "u32", 500)
_key("r11_align_16", "bundle.align", "u32", 16)
_key("r11_align_131072", "bundle.align", "u32", 131072)
_key("r12_unlisted_layer", "layers", "arr:u32", [0, 2])
_attr("r12_no_bundle", "blk.1.ffn_bundle", "name", "blk.1.other.weight")


@case("r12_extra_bundle")
def _(m: Model) -> None:
    m.set("flash_ffn.layers", "arr:u32", [0])
    m.set("flash_ffn.bundle.types", "arr:u32", [0] * 3)


_attr("r13_not_i8", "blk.0.ffn_bundle", "type", F32)
_attr("r13_three_dimensions", "blk.0.ffn_bundle", "shape", [512, 2, 2])
_attr("r13_no_neurons", "blk.0.ffn_bundle", "shape", [512, 0])
_key("r14_rows_overlap", "n_embd", "u32", 64)


@case("r14_stride_not_aligned")
def _(m: Model) -> None:
    m.set("flash_ffn.bundle.align", "u32", 1024)


@case("r14_stride_shorter_than_parts")
def _(m: Model) -> None:
    m.set("flash_ffn.bundle.align", "u32", 32)
    for t in m.tensors[:2]:
        t.shape[0] = 352


@case("r15_truncated")
def _(m: Model) -> None:
    m.cut = 1


@case("r15_bundle_truncated")
def _(m: Model) -> None:
    m.cut = 32 * 8 * 4 + N_FF * STRIDE


_attr("r15_offset_overflows", "token_embd.weight", "offset", 2**64 - 32)


@case("r15_neurons_overflow")
def _(m: Model) -> None:
    m.tensors[0].shape[1] = 1 << 50


_attr("r16_overlap", "blk.1.ffn_bundle", "offset", 0)
_attr("r16_partial_overlap", "blk.1.ffn_bundle", "offset", 1024)
_attr("r16_offset", "token_embd.weight", "offset", 4097)


@case("r16_alignment")
def _(m: Model) -> None:
    m.kv.append(("general.alignment", "u32", 33))


@case("r17_dense_down_too")
def _(m: Model) -> None:
    m.tensors.append(Tensor("blk.0.ffn_down.weight", [N_FF, N_EMBD], F32, 4 * N_EMBD * N_FF))


_attr("r17_no_deciding", "blk.1.ffn_gate.weight", "name", "blk.1.x.weight", "gate")
_attr("r17_deciding_shape", "blk.1.ffn_gate.weight", "shape", [N_FF, N_EMBD], "gate")
_attr("r17_deciding_type", "blk.1.ffn_gate.weight", "type", I8, "gate")
_key("r18_activation", "activation", "str", "tanh")


def _blocks(name: str, values: list[str]) -> None:
    CASES[name] = ("all", lambda m: m.kv.append(("flash_ffn.blocks", "arr:str", values)))


_blocks("r26_blocks_of_other_layers", ["dec.blk.0"])
_blocks("r26_blocks_repeat", ["dec.blk.0", "dec.blk.0"])
_blocks("r26_blocks_empty", ["dec.blk.0", ""])


def _threshold(name: str, values: list[float]) -> None:
    CASES[name] = ("all", lambda m: m.kv.append(("flash_ffn.threshold", "arr:f32", values)))


_threshold("r18_threshold_length", [0.0])
_threshold("r18_threshold_nan", [0.0, float("nan")])
_threshold("r18_threshold_infinite", [0.0, float("inf")])
_threshold("r18_threshold_negative", [0.0, -1.0])


def _predictor(rule: int, what: str, key: str, kind: str, value: Any) -> None:
    _key(f"r{rule:02}_{what}", key, kind, value, "predictor")


def _pred_attr(name: str, tensor: str, attr: str, value: Any) -> None:
    _attr(name, f"blk.1.ffn_pred_{tensor}", attr, value, "predictor")


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


@case("r23_miss_curve_without_slots", "predictor")
def _(m: Model) -> None:
    m.drop("flash_ffn.calibration.miss_slots")


@case("r23_without_predictor")
def _(m: Model) -> None:
    m.kv.append(("flash_ffn.calibration.tokens", "u32", 1000))
    m.kv.append(("flash_ffn.calibration.active", "arr:f32", [0.5]))


_attr("r25_no_scales", "blk.1.ffn_down_scale", "name", "blk.1.other", "codes")
_attr("r25_scales_bf16", "blk.1.ffn_down_scale", "type", BF16, "codes")
_attr("r25_scales_of_fewer_neurons", "blk.0.ffn_down_scale", "shape", [N_EMBD, 1], "codes")
_attr("r25_scales_one_dimension", "blk.0.ffn_down_scale", "shape", [N_EMBD * 2], "codes")
_attr("r25_half_a_block_of_neurons", "blk.0.ffn_bundle", "shape", [STRIDE, 48], "codes")
_attr("r25_one_block_of_neurons", "blk.0.ffn_bundle", "shape", [STRIDE, 32], "codes")
_key("r10_up_codes", "bundle.types", "arr:u32", [F32, I8, F32] * 2, "codes")
_SPARSITY: dict[str, tuple[str, Any]] = {
    "target": ("f32", 0.5),
    "criterion": ("str", "weighted"),
    "text": ("str", "a.txt"),
    "tokens": ("u32", 4096),
    "held_out": ("u32", 2040),
    "perplexity": ("f32", 20.5),
    "dense_perplexity": ("f32", 16.25),
    "mean_kl": ("f32", 0.0),
    "zeros": ("arr:f32", [0.5, 1.0]),
}


def add_thresholds(m: Model) -> None:
    """Thresholds of layer 1's neurons, and what they cost."""
    m.kv += [(f"flash_ffn.sparsity.{k}", *v) for k, v in _SPARSITY.items()]
    m.tensors.append(Tensor("blk.1.ffn_threshold", [N_FF], F32, 4 * N_FF))


def _sparsity(name: str, key: str, kind: str, value: Any) -> None:
    def edit(m: Model) -> None:
        add_thresholds(m)
        m.set(f"flash_ffn.sparsity.{key}", kind, value)

    CASES[name] = ("all", edit)


for _name, (_kind, _) in _SPARSITY.items():
    _wrong = ("f32", 1.0) if _kind in ("u32", "str") else ("u32", 1)
    _sparsity(f"r06_sparsity_{_name}_type", _name, *_wrong)
for _name in ("perplexity", "dense_perplexity", "mean_kl"):
    _sparsity(f"r24_{_name}_nan", _name, "f32", float("nan"))
_sparsity("r24_target_large", "target", "f32", 1.5)
_sparsity("r24_target_negative", "target", "f32", -0.5)
_sparsity("r24_perplexity_infinite", "perplexity", "f32", float("inf"))
_sparsity("r24_mean_kl_negative", "mean_kl", "f32", -1.0)
_sparsity("r24_zeros_of_one_layer", "zeros", "arr:f32", [0.5])
_sparsity("r24_zeros_large", "zeros", "arr:f32", [0.5, 1.1])


def _threshold_tensor(name: str, attr: str, value: Any) -> None:
    def edit(m: Model) -> None:
        add_thresholds(m)
        setattr(m.tensors[-1], attr, value)

    CASES[name] = ("all", edit)


_threshold_tensor("r24_thresholds_of_no_layer", "name", "blk.2.ffn_threshold")
_threshold_tensor("r24_thresholds_f16", "type", F16)
_threshold_tensor("r24_thresholds_of_fewer_neurons", "shape", [N_FF - 1])
_threshold_tensor("r24_thresholds_two_dimensions", "shape", [2, N_FF // 2])


@case("r20_key_twice")
def _(m: Model) -> None:
    m.kv.append(("general.architecture", "str", "llama"))


@case("r20_tensor_twice")
def _(m: Model) -> None:
    m.tensors.append(copy.copy(m.tensors[-1]))


def _split_count(name: str, type_name: str, value: Any) -> None:
    CASES[name] = ("all", lambda m: m.kv.append(("split.count", type_name, value)))


_split_count("r19_count_nan", "f32", float("nan"))
_split_count("r19_count_negative", "i32", -1)
_split_count("r19_count_bool", "bool", True)
_split_count("r19_count_huge", "u64", 2**64 - 1)


def _split(no: int, count: int, total: int) -> list[tuple[str, str, Any]]:
    return [
        ("split.no", "u16", no),
        ("split.count", "u16", count),
        ("split.tensors.count", "i32", total),
    ]


def split_set(folder: Path, name: str, fault: str = "") -> Path:
    """Write the good file as a set of two and return the first; ``fault`` breaks R19 or R20."""
    first, second = good(), Model()
    total = len(first.tensors) + (fault == "total")
    second.tensors = [first.tensors.pop(), first.tensors.pop()]
    second.kv = _split(5 if fault == "number" else 1, 2, total)
    first.kv += _split(1 if fault == "not_first" else 0, 2, total)
    if fault == "duplicate":
        second.tensors[0] = copy.copy(first.tensors[0])
    path = folder / f"{name}-00001-of-00002.gguf"
    if fault == "name":
        path = folder / f"{name}.gguf"
    path.write_bytes(first.encode())
    if fault != "missing":
        (folder / f"{name}-00002-of-00002.gguf").write_bytes(second.encode())
    return path


SPLIT_CASES = {
    "r19_file_missing": "missing",
    "r19_split_no": "number",
    "r19_not_the_first": "not_first",
    "r19_tensor_count": "total",
    "r19_name": "name",
    "r20_tensor_in_two_files": "duplicate",
}


def write_case(folder: Path, name: str) -> Path:
    """Write the files of one case to ``folder`` and return the one to open."""
    if name in SPLIT_CASES:
        return split_set(folder, name, SPLIT_CASES[name])
    if name == "good_split":
        return split_set(folder, name)
    if name == "good_thresholds":
        model = good()
        add_thresholds(model)
    elif name in GOOD_CASES:
        model = good(name[5:])
    else:
        select, edit = CASES[name]
        model = good(select)
        edit(model)
    path = folder / f"{name}.gguf"
    path.write_bytes(model.encode())
    return path


ALL_CASES = sorted([*CASES, *SPLIT_CASES])
GOOD_CASES = [f"good_{n}" for n in ("all", "codes", "gate", "predictor", "split", "thresholds")]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for case_name in [*GOOD_CASES, *ALL_CASES]:
        print(write_case(target, case_name))
