"""Bundles, scales and dense matrices that are missing, too many, or of another shape or type."""

from __future__ import annotations

from cases import attr, case, key
from hostile_model import BF16, F32, I8, N_EMBD, N_FF, STRIDE, Model, Tensor

key("r12_unlisted_layer", "layers", "arr:u32", [0, 2])
attr("r12_no_bundle", "blk.1.ffn_bundle", "name", "blk.1.other.weight")


for _number in (1 << 32, 1 << 64, 10**40):

    @case(f"r12_bundle_of_layer_{_number}")
    def _(m: Model, n: int = _number) -> None:
        m.tensors.append(Tensor(f"blk.{n}.ffn_bundle", [STRIDE, N_FF], I8, STRIDE * N_FF))


for _name in ("blk.1.ffn_bundle\n", "blk.01.ffn_bundle", "blk.+1.ffn_bundle", "blk. 1.ffn_bundle",
              "blk.\u0661.ffn_bundle", "../blk.1.ffn_bundle", "blk.1.ffn_bundle.weight",
              "blk.1.ffn_bundle\0", "blk..ffn_bundle"):  # fmt: skip
    attr(f"r12_named_{_name.encode().hex()}", "blk.1.ffn_bundle", "name", _name)


@case("r12_extra_bundle")
def _(m: Model) -> None:
    m.set("flash_ffn.layers", "arr:u32", [0])
    m.set("flash_ffn.bundle.types", "arr:u32", [0] * 3)


attr("r13_not_i8", "blk.0.ffn_bundle", "type", F32)
attr("r13_three_dimensions", "blk.0.ffn_bundle", "shape", [512, 2, 2])
attr("r13_one_dimension", "blk.0.ffn_bundle", "shape", [STRIDE * N_FF])
attr("r13_no_stride", "blk.0.ffn_bundle", "shape", [0, N_FF])
attr("r13_more_neurons_than_32_bits", "blk.0.ffn_bundle", "shape", [STRIDE, 1 << 32])
attr("r13_neurons_overflow", "blk.0.ffn_bundle", "shape", [STRIDE, 1 << 50])
attr("r13_no_neurons", "blk.0.ffn_bundle", "shape", [512, 0])
key("r14_rows_overlap", "n_embd", "u32", 64)


@case("r14_stride_not_aligned")
def _(m: Model) -> None:
    m.set("flash_ffn.bundle.align", "u32", 1024)


@case("r14_stride_shorter_than_parts")
def _(m: Model) -> None:
    m.set("flash_ffn.bundle.align", "u32", 32)
    for t in m.tensors[:2]:
        t.shape[0] = 352


@case("r17_dense_down_too")
def _(m: Model) -> None:
    m.tensors.append(Tensor("blk.0.ffn_down.weight", [N_FF, N_EMBD], F32, 4 * N_EMBD * N_FF))


attr("r17_no_deciding", "blk.1.ffn_gate.weight", "name", "blk.1.x.weight", "gate")
attr("r17_deciding_shape", "blk.1.ffn_gate.weight", "shape", [N_FF, N_EMBD], "gate")
attr("r17_deciding_type", "blk.1.ffn_gate.weight", "type", I8, "gate")
attr("r25_no_scales", "blk.1.ffn_down_scale", "name", "blk.1.other", "codes")
attr("r25_scales_bf16", "blk.1.ffn_down_scale", "type", BF16, "codes")
attr("r25_scales_of_fewer_neurons", "blk.0.ffn_down_scale", "shape", [N_EMBD, 1], "codes")
attr("r25_scales_one_dimension", "blk.0.ffn_down_scale", "shape", [N_EMBD * 2], "codes")
attr("r25_half_a_block_of_neurons", "blk.0.ffn_bundle", "shape", [STRIDE, 48], "codes")
attr("r25_one_block_of_neurons", "blk.0.ffn_bundle", "shape", [STRIDE, 32], "codes")
key("r10_up_codes", "bundle.types", "arr:u32", [F32, I8, F32] * 2, "codes")
