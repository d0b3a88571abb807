"""Thresholds of neurons, and what a file says they cost."""

from __future__ import annotations

from typing import Any

from cases import CASES
from hostile_model import F16, F32, N_FF, Model, Tensor

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
_threshold_tensor("r24_thresholds_of_layer_2_32", "name", f"blk.{(1 << 32) + 1}.ffn_threshold")
_threshold_tensor("r24_thresholds_f16", "type", F16)
_threshold_tensor("r24_thresholds_of_fewer_neurons", "shape", [N_FF - 1])
_threshold_tensor("r24_thresholds_two_dimensions", "shape", [2, N_FF // 2])
