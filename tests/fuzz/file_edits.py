"""Random edits of a hostile_model.Model: most of them break one rule of SPEC.md, some none."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable
from typing import Any

from hostile_model import Model, Tensor

INTEGERS = (0, 1, 2, 3, 4, 7, 31, 32, 33, 63, 64, 100, 255, 256, 512, 1024, 4096, 65535, 65536,
            65537, 1 << 24, (1 << 24) + 32, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
            (1 << 32) + 1, 1 << 40, (1 << 62) + 32, (1 << 63) - 1, 1 << 63,
            (1 << 64) - 1)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.001, 1.0009999, 1.0010001, 1.5, -1.0, 1e-45, 3e38, float("nan"),
          float("inf"), float("-inf"))  # fmt: skip
TEXTS = ("", "all", "gate", "predictor", "up", "down", "relu", "drelu", "relu\0", "a\nb", "\x1b[2J",
         "\udcff", "\udcfe\udc80", "\udced\udca0\udc80", "../../etc/passwd", "/dev/zero", "x" * 63,
         "x" * 64, "x" * 65536, "x" * 65537, "blk.0", "blk.1", "dec.blk.0", "ü" * 30)  # fmt: skip
KEYS = ("general.architecture", "general.alignment", "split.count", "split.no",
        "split.tensors.count", *(f"flash_ffn.{k}" for k in (
            "version", "select", "layers", "n_embd", "gated", "fused", "bundle.parts",
            "bundle.types", "bundle.align", "activation", "threshold", "blocks", "predictor.rank",
            "predictor.threshold", "calibration.tokens", "calibration.text", "calibration.target",
            "calibration.window", "calibration.capacity", "calibration.active",
            "calibration.miss_slots", "calibration.miss_curve", "sparsity.target",
            "checksum.algorithm", "checksum.layers",
            "sparsity.criterion", "sparsity.tokens", "sparsity.zeros", "sparsity.perplexity",
            "source.name", "pad", "unknown")))  # fmt: skip
_BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
_SIGNED = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}
SCALARS = (*_BITS, *_SIGNED, "f32", "f64", "bool", "str")


def scalar(rng: random.Random, kind: str) -> Any:
    """A value of a kind, from those that are at limits."""
    if kind == "str":
        return rng.choice(TEXTS)
    if kind == "bool":
        return rng.random() < 0.5
    if kind in ("f32", "f64"):
        return rng.choice(FLOATS)
    if kind in _BITS:
        return rng.choice(INTEGERS) % (1 << _BITS[kind])
    half = 1 << (_SIGNED[kind] - 1)
    return (rng.choice(INTEGERS) + half) % (2 * half) - half


def value(rng: random.Random) -> tuple[str, Any]:
    """A kind and a value of it: a scalar, an array, or bytes that claim to be one."""
    chance = rng.random()
    if chance < 0.1:
        count = rng.choice((0, 1, 2, 1 << 20, 1 << 61, (1 << 64) - 1))
        item = rng.choice((0, 4, 7, 8, 9, 10, 13, 99))
        return "raw", rng.choice((
            struct.pack("<IIQ", 9, item, count), struct.pack("<IQ", 8, count),
            struct.pack("<I", rng.randrange(20)), struct.pack("<IB", 7, rng.randrange(256)),
        ))  # fmt: skip
    kind = rng.choice(SCALARS)
    if chance < 0.5:
        return kind, scalar(rng, kind)
    return f"arr:{kind}", [scalar(rng, kind) for _ in range(rng.choice((0, 1, 2, 3, 4, 6)))]


def _like(rng: random.Random, kind: str, old: Any) -> tuple[str, Any]:
    """A value of the kind that was there."""
    if kind == "raw":
        return value(rng)
    if not kind.startswith("arr:"):
        return kind, scalar(rng, kind)
    items = list(old)
    for _ in range(rng.randint(1, 2)):
        if items and rng.random() < 0.7:
            items[rng.randrange(len(items))] = scalar(rng, kind[4:])
        elif items and rng.random() < 0.5:
            items.pop()
        else:
            items.append(scalar(rng, kind[4:]))
    return kind, items


def _change_value(rng: random.Random, m: Model) -> None:
    if m.kv:
        i = rng.randrange(len(m.kv))
        key, kind, old = m.kv[i]
        m.kv[i] = (key, *(_like(rng, kind, old) if rng.random() < 0.6 else value(rng)))


def _add_key(rng: random.Random, m: Model) -> None:
    key = rng.choice(KEYS) if rng.random() < 0.8 else rng.choice(TEXTS)
    if rng.random() < 0.7:
        m.drop(key)
    m.kv.insert(rng.randint(0, len(m.kv)), (key, *value(rng)))


def _move_key(rng: random.Random, m: Model) -> None:
    if m.kv:
        entry = m.kv.pop(rng.randrange(len(m.kv)))
        if rng.random() < 0.4:
            m.kv.insert(rng.randint(0, len(m.kv)), entry)


def _name(rng: random.Random, m: Model) -> str:
    layer = rng.choice(("0", "1", "2", "00", "4294967295", "4294967296", "18446744073709551616",
                        "-1", "+1", " 1", "٣"))  # fmt: skip
    tail = rng.choice(("ffn_bundle", "ffn_threshold", "ffn_down_scale", "ffn_gate.weight",
                       "ffn_up.weight", "ffn_down.weight", "ffn_pred_a.weight", "ffn_bundle\n",
                       "ffn_pred_b.bias", "attn_q.weight", "ffn_bundle.weight"))  # fmt: skip
    stack = rng.choice(("", "", "", "dec.", "enc."))
    return rng.choice((f"{stack}blk.{layer}.{tail}", *TEXTS, rng.choice(m.tensors).name))


def _change_tensor(rng: random.Random, m: Model) -> None:
    if not m.tensors:
        return
    t = rng.choice(m.tensors)
    what = rng.randrange(5)
    if what == 0:
        t.name = _name(rng, m)
    elif what == 1:
        t.type = rng.randrange(45) if rng.random() < 0.9 else rng.choice(INTEGERS) % (1 << 32)
    elif what == 2 and t.shape:
        t.shape[rng.randrange(len(t.shape))] = rng.choice(INTEGERS)
    elif what == 3:
        t.shape = [rng.choice(INTEGERS[:20]) for _ in range(rng.randint(0, 5))]
    else:
        t.offset = rng.choice((*INTEGERS, *(32 * rng.randrange(300) for _ in range(20))))


def _add_tensor(rng: random.Random, m: Model) -> None:
    if m.tensors and rng.random() < 0.5:
        t = copy.deepcopy(rng.choice(m.tensors))
    else:
        t = Tensor("other", [rng.choice((0, 1, 2, 3, 4, 32))], rng.choice((0, 1, 8, 24)), 0)
        t.nbytes = 4 * t.shape[0]
        t.offset = rng.choice((-1, -1, 0, 32, 512))
    if m.tensors and rng.random() < 0.8:
        t.name = _name(rng, m)
    m.tensors.insert(rng.randint(0, len(m.tensors)), t)


def _drop_tensor(rng: random.Random, m: Model) -> None:
    if m.tensors:
        m.tensors.pop(rng.randrange(len(m.tensors)))


def _counts(rng: random.Random, m: Model) -> None:
    kv, tensors = len(m.kv), len(m.tensors)
    if rng.random() < 0.5:
        m.claim_kv = rng.choice((0, kv - 1, kv + 1, *INTEGERS)) % (1 << 64)
    else:
        m.claim_tensors = rng.choice((0, tensors - 1, tensors + 1, *INTEGERS)) % (1 << 64)


def _front(rng: random.Random, m: Model) -> None:
    m.version = rng.choice((0, 1, 2, 3, 4, 3 << 24))
    m.magic = rng.choice((b"GGUF", b"GGUF", b"gguf", b"GGML", b"\0\0\0\0"))


def _cut(rng: random.Random, m: Model) -> None:
    m.cut = rng.choice((1, 31, 32, 33, 512, 1024, rng.randrange(20000)))


_EDITS: tuple[tuple[int, Callable[[random.Random, Model], None]], ...] = (
    (10, _change_value), (5, _add_key), (2, _move_key), (8, _change_tensor), (3, _add_tensor),
    (2, _drop_tensor), (1, _counts), (1, _front), (1, _cut),
)  # fmt: skip


def edit_model(rng: random.Random, model: Model) -> None:
    """Make one random edit."""
    weights, edits = zip(*_EDITS, strict=True)
    rng.choices(edits, weights)[0](rng, model)


def damage_bytes(rng: random.Random, data: bytes, header: int) -> bytes:
    """Change one to three bytes or words of the header, or cut the file inside it."""
    out = bytearray(data)
    if rng.random() < 0.2:
        return bytes(out[: rng.randrange(header)])
    for _ in range(rng.randint(1, 3)):
        word = rng.choice((b"\0", b"\xff", bytes([rng.randrange(256)]), b"\0" * 8, b"\xff" * 8,
                           struct.pack("<Q", rng.choice(INTEGERS))))  # fmt: skip
        at = rng.randrange(max(1, min(header, len(out)) - len(word)))
        out[at : at + len(word)] = word
    return bytes(out)
