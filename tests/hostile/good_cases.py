"""Files at the edge of what the rules allow: readers must accept them."""

from __future__ import annotations

from collections.abc import Callable

from hostile_model import F32, Model, Tensor, good
from threshold_cases import add_thresholds


def _paths(m: Model) -> None:
    """Names that look like paths are names."""
    m.kv += [
        ("flash_ffn.source.name", "str", "../../etc/passwd"),
        ("general.name", "str", "/dev/zero\n\x1b[2J\udcff"),
        ("../../key", "str", "x"),
    ]
    m.tensors.append(Tensor("../../../tmp/x\n\udcff", [8], F32, 32))


def _empty(m: Model) -> None:
    """Tensors without values, one of them inside another tensor."""
    m.tensors.append(Tensor("empty", [0, 4], F32, 0, offset=32))
    m.tensors.append(Tensor("last", [0], F32, 0))


def _large(m: Model) -> None:
    """The longest names, and keys that nobody asks about of every type."""
    m.kv.append(("k" * 65536, "u32", 1))
    m.tensors.append(Tensor("t" * 63, [8], F32, 32))
    for kind in ("u8", "i8", "u16", "i16", "i32", "u64", "i64", "f64"):
        m.kv.append((f"flash_ffn.unknown.{kind}", f"arr:{kind}", [0, 1]))
    m.kv.append(("flash_ffn.calibration.active", "str", "ignored without .tokens"))


def _blocks(m: Model) -> None:
    m.kv.append(("flash_ffn.blocks", "arr:str", ["enc.blk.0", "d\u00e9c.blk.0"]))


def _checksums(m: Model) -> None:
    """Of zeros; reading a layout compares nothing."""
    m.kv.append(("flash_ffn.checksum.layers", "arr:str", ["0" * 64, "f" * 64]))
    m.kv.append(("flash_ffn.checksum.algorithm", "str", "sha256"))


def _algorithm_alone(m: Model) -> None:
    m.kv.append(("flash_ffn.checksum.algorithm", "str", "md5"))


GOOD: dict[str, tuple[str, Callable[[Model], None]]] = {
    "good_all": ("all", lambda m: None),
    "good_blocks": ("all", _blocks),
    "good_checksums": ("all", _checksums),
    "good_checksum_algorithm_alone": ("all", _algorithm_alone),
    "good_codes": ("codes", lambda m: None),
    "good_empty_tensors": ("all", _empty),
    "good_gate": ("gate", lambda m: None),
    "good_large": ("all", _large),
    "good_paths": ("predictor", _paths),
    "good_predictor": ("predictor", lambda m: None),
    "good_thresholds": ("all", add_thresholds),
    "good_ungated": ("ungated", lambda m: None),
}


def good_model(name: str) -> Model:
    """The model of a name of GOOD."""
    form, edit = GOOD[name]
    model = good(form)
    edit(model)
    return model
