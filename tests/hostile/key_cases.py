"""Keys that are missing, of another type, or say what cannot be."""

from __future__ import annotations

from cases import CASES, added, case, key
from hostile_model import I16, Model


@case("r04_no_version")
def _(m: Model) -> None:
    m.drop("flash_ffn.version")


key("r05_version_0", "version", "u32", 0)
key("r05_version_2", "version", "u32", 2)
key("r06_version_type", "version", "u64", 1)
key("r06_select_type", "select", "u32", 1)
key("r06_layers_type", "layers", "arr:i32", [0, 1])
key("r06_gated_type", "gated", "u8", 1)
key("r06_activation_type", "activation", "u32", 1)
for _name in ("select", "layers", "n_embd", "gated", "fused"):
    CASES[f"r06_no_{_name}"] = ("all", lambda m, k=_name: m.drop(f"flash_ffn.{k}"))
for _name in ("parts", "types", "align"):
    CASES[f"r06_no_{_name}"] = ("all", lambda m, k=_name: m.drop(f"flash_ffn.bundle.{k}"))
key("r06_align_type", "bundle.align", "u64", 512)
key("r06_types_type", "bundle.types", "arr:u64", [0] * 6)
key("r06_parts_type", "bundle.parts", "str", "down")
key("r06_n_embd_type", "n_embd", "f32", 32.0)
key("r06_fused_type", "fused", "arr:bool", [False])
key("r07_empty", "select", "str", "")
key("r07_with_a_zero", "select", "str", "all\0")
key("r07_no_utf8", "select", "str", "all\udcff")
key("r07_a_long_one_with_line_ends", "select", "str", "all\n" * 100_000)
key("r07_oracle", "select", "str", "oracle")
key("r08_layers_empty", "layers", "arr:u32", [])
key("r08_layers_descend", "layers", "arr:u32", [1, 0])
key("r08_layers_repeat", "layers", "arr:u32", [0, 0])
key("r08_layers_many", "layers", "arr:u32", list(range(65537)))
key("r09_no_parts", "bundle.parts", "arr:str", [])
key("r09_parts_many", "bundle.parts", "arr:str", [""] * 100_000)
key("r09_part_of_a_long_name", "bundle.parts", "arr:str", ["gate", "up", "down\n" * 100_000])
key("r09_part_with_a_zero", "bundle.parts", "arr:str", ["gate", "up", "down\0"])
key("r09_fused_not_gated", "fused", "bool", True, "ungated")
key("r09_no_down", "bundle.parts", "arr:str", ["gate", "up"])
key("r09_order", "bundle.parts", "arr:str", ["up", "gate", "down"])
key("r09_unknown_part", "bundle.parts", "arr:str", ["gate", "up", "sideways"])
key("r09_not_gated", "gated", "bool", False)
key("r10_too_few_types", "bundle.types", "arr:u32", [0] * 5)
key("r10_too_many_types", "bundle.types", "arr:u32", [0] * 7)
key("r10_unknown_type", "bundle.types", "arr:u32", [0, 0, 999] * 2)
key("r10_integer_type", "bundle.types", "arr:u32", [0, 0, I16] * 2)
key("r10_partial_block", "bundle.types", "arr:u32", [0, 0, 12] * 2)
key("r10_no_width", "n_embd", "u32", 0)
key("r10_rows_too_wide", "n_embd", "u32", (1 << 24) + 32)
key("r10_types_many", "bundle.types", "arr:u32", [0] * 1_000_000)
key("r10_type_of_32_bits", "bundle.types", "arr:u32", [0, 0, (1 << 32) - 1] * 2)
key("r10_type_between_types", "bundle.types", "arr:u32", [0, 0, 31] * 2)
key("r10_q8_k", "bundle.types", "arr:u32", [0, 15, 0] * 2)
key("r11_align_0", "bundle.align", "u32", 0)
key("r11_align_500", "bundle.align", "u32", 500)
key("r11_align_16", "bundle.align", "u32", 16)
key("r11_align_131072", "bundle.align", "u32", 131072)
key("r18_activation", "activation", "str", "tanh")


key("r18_activation_empty", "activation", "str", "")
key("r18_activation_drelu", "activation", "str", "drelu", "ungated")
added("r06_threshold_type", "flash_ffn.threshold", "f32", 0.5)
added("r06_thresholds_of_f64", "flash_ffn.threshold", "arr:f64", [0.0, 0.0])
added("r06_blocks_type", "flash_ffn.blocks", "arr:u32", [0, 1])


def _checksums(name: str, algorithm: str, digests: list[str]) -> None:
    def edit(m: Model) -> None:
        m.kv.append(("flash_ffn.checksum.algorithm", "str", algorithm))
        m.kv.append(("flash_ffn.checksum.layers", "arr:str", digests))

    CASES[name] = ("all", edit)


_checksums("r27_algorithm", "md5", ["0" * 64] * 2)
_checksums("r27_algorithm_upper_case", "SHA256", ["0" * 64] * 2)
_checksums("r27_of_one_layer", "sha256", ["0" * 64])
_checksums("r27_of_many_layers", "sha256", ["0" * 64] * 100_000)
_checksums("r27_short", "sha256", ["0" * 64, "0" * 63])
_checksums("r27_upper_case", "sha256", ["0" * 64, "A" * 64])
_checksums("r27_no_hex", "sha256", ["0" * 64, "g" * 64])
_checksums("r27_line_end", "sha256", ["0" * 64, "0" * 63 + "\n"])
_checksums("r27_no_utf8", "sha256", ["0" * 64, "0" * 63 + "\udcff"])
added("r06_checksums_type", "flash_ffn.checksum.layers", "str", "0" * 64)
added("r06_no_checksum_algorithm", "flash_ffn.checksum.layers", "arr:str", ["0" * 64] * 2)


def _blocks(name: str, values: list[str]) -> None:
    CASES[name] = ("all", lambda m: m.kv.append(("flash_ffn.blocks", "arr:str", values)))


_blocks("r26_blocks_of_other_layers", ["dec.blk.0"])
_blocks("r26_blocks_many", ["x"] * 100_000)
_blocks("r26_blocks_no_utf8", ["dec.blk.0", "dec.\udcff"])
_blocks("r26_blocks_overlong", ["dec.blk.0", "\udcc0\udcaf"])
_blocks("r26_blocks_surrogate", ["dec.blk.0", "\udced\udca0\udc80"])
_blocks("r26_blocks_repeat", ["dec.blk.0", "dec.blk.0"])
_blocks("r26_blocks_empty", ["dec.blk.0", ""])


def _threshold(name: str, values: list[float]) -> None:
    CASES[name] = ("all", lambda m: m.kv.append(("flash_ffn.threshold", "arr:f32", values)))


_threshold("r18_threshold_length", [0.0])
_threshold("r18_threshold_nan", [0.0, float("nan")])
_threshold("r18_threshold_infinite", [0.0, float("inf")])
_threshold("r18_threshold_negative", [0.0, -1.0])
