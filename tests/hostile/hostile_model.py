"""A flash-GGUF before it is bytes, so that its rules can be broken: what hostile_files.py edits.

Bytes are laid out here from SPEC.md alone, without gguf_flash.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

_IDS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"),
    "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"),
    "f64": (12, "d"),
}  # fmt: skip
F32, F16, Q8_0, I8, I16, BF16 = 0, 1, 8, 24, 25, 30
N_EMBD, N_FF, STRIDE = 32, 4, 512


def text(s: str) -> bytes:
    """A str of the format; "\\udc80" to "\\udcff" stand for single bytes that are no UTF-8."""
    data = s.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def encoded(kind: str, v: Any) -> bytes:
    if kind == "raw":
        return v
    if kind == "str":
        return struct.pack("<I", 8) + text(v)
    if kind.startswith("arr:"):
        item = kind[4:]
        head = struct.pack("<IIQ", 9, 8 if item == "str" else _IDS[item][0], len(v))
        if item == "str":
            return head + b"".join(text(x) for x in v)
        return head + struct.pack(f"<{len(v)}{_IDS[item][1]}", *v)
    type_id, code = _IDS[kind]
    return struct.pack("<I" + code, type_id, v)


@dataclass
class Tensor:
    name: str
    shape: list[int]
    type: int
    nbytes: int
    offset: int = -1  # -1: where the tensors before it end, were they all in place


@dataclass
class Model:
    """A flash-GGUF before it is bytes; the rules are broken by editing it."""

    magic: bytes = b"GGUF"
    version: int = 3
    kv: list[tuple[str, str, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    cut: int = 0  # bytes missing at the end
    claim_kv: int | None = None
    claim_tensors: int | None = None

    def set(self, key: str, kind: str, value: Any) -> None:
        self.kv = [(k, kind, value) if k == key else (k, t, v) for k, t, v in self.kv]

    def drop(self, key: str) -> None:
        self.kv = [x for x in self.kv if x[0] != key]

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    def header(self) -> bytes:
        """Everything before the padding in front of the data."""
        n_tensors = len(self.tensors) if self.claim_tensors is None else self.claim_tensors
        n_kv = len(self.kv) if self.claim_kv is None else self.claim_kv
        out = bytearray(self.magic + struct.pack("<IQQ", self.version, n_tensors, n_kv))
        for key, kind, value in self.kv:
            out += text(key) + encoded(kind, value)
        end = 0
        for t in self.tensors:
            offset = end if t.offset < 0 else t.offset
            out += text(t.name) + struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape)
            out += struct.pack("<IQ", t.type, offset)
            end += -(-t.nbytes // 32) * 32
        return bytes(out)

    def encode(self) -> bytes:
        """The file; its tensors are zeros."""
        out = self.header()
        end = sum(-(-t.nbytes // 32) * 32 for t in self.tensors)
        out += b"\0" * (-len(out) % 32) + b"\0" * end
        return out[: len(out) - self.cut]


def _add_predictors(m: Model) -> None:
    """Predictors of rank 3 and 32, and everything that calibration may have measured."""
    m.kv += [
        ("flash_ffn.predictor.rank", "arr:u32", [3, 32]),
        ("flash_ffn.predictor.threshold", "arr:f32", [0.0, 0.5]),
        ("flash_ffn.calibration.tokens", "u32", 1000),
        ("flash_ffn.calibration.text", "str", "a.txt"),
        ("flash_ffn.calibration.target", "str", "5 % missed"),
        ("flash_ffn.calibration.window", "u32", 5),
        ("flash_ffn.calibration.capacity", "arr:u32", [2, N_FF]),
        ("flash_ffn.calibration.active", "arr:f32", [0.25, 0.5]),
        ("flash_ffn.calibration.selected", "arr:f32", [0.5, 1.0]),
        ("flash_ffn.calibration.false_negatives", "arr:f32", [0.0, 0.05]),
        ("flash_ffn.calibration.false_positives", "arr:f32", [0.25, 1.0]),
        ("flash_ffn.calibration.miss_slots", "arr:u32", [1, 2, 4, 1, 2, 4]),
        ("flash_ffn.calibration.miss_curve", "arr:f32", [3.0, 1.5, 0.0, 2e18, 1.0, 0.0]),
    ]
    for i, (rank, kind, row) in enumerate([(3, F16, 6), (32, Q8_0, 34)]):
        block = f"blk.{i}.ffn_pred"
        m.tensors += [
            Tensor(f"{block}_a.weight", [N_EMBD, rank], F32, 4 * N_EMBD * rank),
            Tensor(f"{block}_b.weight", [rank, N_FF], kind, row * N_FF),
            Tensor(f"{block}_b.bias", [N_FF], F32, 4 * N_FF),
        ]


def _use_codes(m: Model) -> None:
    """64 neurons a layer, whose down rows are codes."""
    m.set("flash_ffn.bundle.types", "arr:u32", [F32, F32, I8] * 2)
    for i in range(2):
        bundle = m.tensor(f"blk.{i}.ffn_bundle")
        bundle.shape, bundle.nbytes = [STRIDE, 64], STRIDE * 64
        m.tensors.append(Tensor(f"blk.{i}.ffn_down_scale", [N_EMBD, 2], F16, 2 * N_EMBD * 2))


def good(select: str = "all") -> Model:
    """A correct file of two llama layers with F32 parts; of "codes", down rows are codes.

    "ungated" is one of "all" without a gate.
    """
    if select == "ungated":
        m = good()
        m.set("flash_ffn.gated", "bool", False)
        m.set("flash_ffn.bundle.parts", "arr:str", ["up", "down"])
        m.set("flash_ffn.bundle.types", "arr:u32", [F32] * 4)
        return m
    if select == "codes":
        m = good()
        _use_codes(m)
        return m
    m = Model()
    parts = ["up", "down"] if select == "gate" else ["gate", "up", "down"]
    m.kv = [
        ("general.architecture", "str", "llama"),
        ("flash_ffn.version", "u32", 1),
        ("flash_ffn.select", "str", select),
        ("flash_ffn.layers", "arr:u32", [0, 1]),
        ("flash_ffn.n_embd", "u32", N_EMBD),
        ("flash_ffn.gated", "bool", True),
        ("flash_ffn.fused", "bool", False),
        ("flash_ffn.bundle.parts", "arr:str", parts),
        ("flash_ffn.bundle.types", "arr:u32", [F32] * (2 * len(parts))),
        ("flash_ffn.bundle.align", "u32", 512),
        ("flash_ffn.activation", "str", "silu"),
    ]
    for i in range(2):
        name = f"blk.{i}.ffn_bundle"
        m.tensors.append(Tensor(name, [STRIDE, N_FF], I8, STRIDE * N_FF))
    if select == "gate":
        for i in range(2):
            name = f"blk.{i}.ffn_gate.weight"
            m.tensors.append(Tensor(name, [N_EMBD, N_FF], F32, 4 * N_EMBD * N_FF))
    if select == "predictor":
        _add_predictors(m)
    m.tensors.append(Tensor("token_embd.weight", [N_EMBD, 8], F32, 4 * N_EMBD * 8))
    return m
