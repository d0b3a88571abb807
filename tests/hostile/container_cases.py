"""Damaged containers: counts, lengths, types, places of tensors, names that appear twice."""

from __future__ import annotations

import copy
import struct

from cases import added, attr, case, key
from hostile_model import F32, N_FF, STRIDE, Model, Tensor


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


key("r03_string_beyond_file", "select", "raw", struct.pack("<IQ", 8, 1 << 40))
key("r03_string_length_overflows", "select", "raw", struct.pack("<IQ", 8, 2**64 - 1))
key("r03_array_beyond_file", "layers", "raw", struct.pack("<IIQ", 9, 4, 1 << 62))
key("r03_array_of_arrays", "layers", "raw", struct.pack("<IIQ", 9, 9, 1))
key("r03_unknown_value_type", "select", "raw", struct.pack("<I", 77))
attr("r03_unknown_tensor_type", "token_embd.weight", "type", 4000)
attr("r03_five_dimensions", "token_embd.weight", "shape", [32, 8, 1, 1, 1])
attr("r03_shape_overflows", "token_embd.weight", "shape", [1 << 40, 1 << 40])
attr("r03_partial_block", "token_embd.weight", "type", 12)


for _name, _raw in {
    "array_type_alone": struct.pack("<II", 9, 4),
    "arrays_of_arrays_of_arrays": struct.pack("<IIQIQIQ", 9, 9, 1, 9, 1, 4, 0),
    "array_beyond_file_by_one": struct.pack("<IIQ", 9, 0, 10000),
    "array_count_overflows": struct.pack("<IIQ", 9, 10, (1 << 61) + 1),
    "strings_more_than_bytes": struct.pack("<IIQ", 9, 8, 1 << 40),
    "string_in_array_beyond_file": struct.pack("<IIQQ", 9, 8, 1, 1 << 63),
    "array_of_type_13": struct.pack("<IIQ", 9, 13, 0),
}.items():
    added(f"r03_{_name}", "tokenizer.ggml.tokens", "raw", _raw)
attr("r03_no_tensor_name", "token_embd.weight", "name", "")
attr("r03_removed_tensor_type", "token_embd.weight", "type", 4)


@case("r03_scalar_without_a_block")
def _(m: Model) -> None:
    token = m.tensor("token_embd.weight")
    token.shape, token.type = [], 8


@case("r03_key_name_of_65537_bytes")
def _(m: Model) -> None:
    m.kv.append(("k" * 65537, "u32", 1))


@case("r03_no_key_name")
def _(m: Model) -> None:
    m.kv.append(("", "u32", 1))


@case("r03_counts_that_fit_alone")
def _(m: Model) -> None:
    m.claim_kv = m.claim_tensors = (len(m.encode()) - 24) // 26


@case("r03_type_of_a_name_that_commands_a_terminal")
def _(m: Model) -> None:
    m.kv.append(("\x1b]0;\x07\n\r\u202e\udcff", "raw", struct.pack("<I", 77)))


@case("r03_long_name")
def _(m: Model) -> None:
    m.tensors[-1].name = "x" * 64


@case("r15_truncated")
def _(m: Model) -> None:
    m.cut = 1


@case("r15_bundle_truncated")
def _(m: Model) -> None:
    m.cut = 32 * 8 * 4 + N_FF * STRIDE


attr("r15_offset_overflows", "token_embd.weight", "offset", 2**64 - 32)


attr("r15_bytes_overflow", "token_embd.weight", "shape", [1 << 62])


@case("r15_no_values_beyond_file")
def _(m: Model) -> None:
    m.tensors.append(Tensor("empty", [0], F32, 0, offset=1 << 40))


@case("r16_two_of_three_overlap")
def _(m: Model) -> None:
    m.tensors.append(Tensor("empty", [0], F32, 0, offset=32))
    m.tensors.append(Tensor("other", [8], F32, 32, offset=64))


attr("r16_overlap", "blk.1.ffn_bundle", "offset", 0)
attr("r16_partial_overlap", "blk.1.ffn_bundle", "offset", 1024)
attr("r16_offset", "token_embd.weight", "offset", 4097)


for _alignment in (0, 33, (1 << 32) - 1):
    added(f"r16_alignment_{_alignment}", "general.alignment", "u32", _alignment)
for _kind in ("u64", "i32", "str"):
    _value = "32" if _kind == "str" else 32
    added(f"r16_alignment_of_{_kind}", "general.alignment", _kind, _value)
added("r15_alignment_beyond_file", "general.alignment", "u32", 1 << 31)


@case("r20_key_twice")
def _(m: Model) -> None:
    m.kv.append(("general.architecture", "str", "llama"))


@case("r20_key_twice_the_second_damaged")
def _(m: Model) -> None:
    m.kv.append(("flash_ffn.version", "raw", struct.pack("<I", 77)))


@case("r20_key_twice_of_a_name_with_a_line_end")
def _(m: Model) -> None:
    m.kv += [("a\nb\x1b[2J" + "x" * 60000, "u32", 1)] * 2


@case("r20_tensor_twice")
def _(m: Model) -> None:
    m.tensors.append(copy.copy(m.tensors[-1]))
