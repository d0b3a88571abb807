"""A dense GGUF and the flash-GGUF of the same weights, and the arms that run them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf_flash.bench.arms import Arm, Work
from gguf_flash.bench.environment import environment
from gguf_flash.bench.make_model import planted_label
from gguf_flash.errors import ArgumentError
from gguf_flash.format.reader import read_layout, read_set, set_tensors
from gguf_flash.memory import memory_needs
from gguf_flash.session import default_threads
from gguf_flash.sizes import format_size, parse_size

__all__ = ["RESERVE", "STOCK_ARMS", "Pair", "Plan", "all_neurons", "whole_mib"]

RESERVE = 32 << 20  # of a limit, for what --ram does not count (memory.BASE_BYTES)
STOCK_ARMS = ("mmap", "ram")  # of unpatched llama.cpp; all others are ours
Settings = Mapping[str, int | str | None]  # as gguf_flash.settings has them

_SMALLEST = "1%"  # of the bundles: what the engine can just work with


@dataclass(frozen=True)
class Pair:
    """Both files, and the bytes of their weights.

    least_bytes: RAM below which the engine refuses the flash-GGUF and the context of the work it
    was opened for. label: of a planted model, else "". measured: its shares, from planted.json
    beside it.
    """

    dense: Path
    flash: Path
    dense_bytes: int
    resident_bytes: int
    bundle_bytes: int
    least_bytes: int
    select: str
    label: str
    measured: Mapping[str, float]

    @classmethod
    def open(cls, dense: Path | str, flash: Path | str, work: Work | None = None) -> Pair:
        """Raises a FlashError for files that are not what they should be."""
        dense, flash = Path(dense).resolve(), Path(flash).resolve()
        files = read_set(dense, versions=(2, 3))
        if "flash_ffn.version" in files[0].kv:
            raise ArgumentError(
                f"'{dense}' is a flash-GGUF: the dense model comes first, then the flash-GGUF"
            )
        layout = read_layout(flash)
        kept = read_set(flash)[0].kv
        if odd := [k for k, v in files[0].kv.items() if _of_the_model(k) and kept.get(k) != v]:
            raise ArgumentError(
                f"'{flash}' was not made from '{dense}': they differ in the key '{odd[0]}'"
            )
        nbytes, label = sum(t.nbytes for t in set_tensors(files)), planted_label(dense)
        least = int(memory_needs(flash, (work or Work("")).context)["memory"]["floor_bytes"])
        sizes = (nbytes, layout.resident_bytes, layout.bundle_bytes, least)
        return cls(dense, flash, *sizes, layout.select, label, _measured(dense, label))

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {**vars(self), "dense": str(self.dense), "flash": str(self.flash)}

    def limit(self, ram: str) -> int:
        """Bytes meant by `ram`: a size, or a share of the dense model's weights."""
        if ram.strip().endswith("%"):
            try:
                share = float(ram.strip()[:-1])
            except ValueError as e:
                raise ArgumentError(f"a share such as 50% expected, found {ram!r}") from e
            if not 0 < share <= 1000:
                raise ArgumentError(f"a share above 0% expected, found {ram!r}")
            return int(self.dense_bytes * share / 100)
        return parse_size(ram)


def whole_mib(nbytes: int) -> str:
    """At least `nbytes`, as an option takes it: "259MiB"."""
    return f"{-(-nbytes // (1 << 20))}MiB"


def _of_the_model(key: str) -> bool:
    return not key.startswith(("split.", "flash_ffn.")) and key != "general.alignment"


def _measured(dense: Path, label: str) -> dict[str, float]:
    """What make-model measured of the planted model called `label`; {} if it is not there."""
    try:
        account = json.loads((dense.parent / "planted.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    mine = isinstance(account, dict) and account.get("planted") == label
    return dict(account["measured"]) if mine else {}


def all_neurons(pair: Pair) -> Mapping[str, str] | None:
    """What makes the engine select every neuron; None where the file cannot."""
    if pair.select == "predictor":
        return {"GGUF_FLASH_PREDICTOR_THRESHOLD": "0"}
    return {} if pair.select == "all" else None


@dataclass(frozen=True)
class Plan:
    """The arms for a pair under one limit. work: what all of them do, without a model."""

    pair: Pair
    stock: str
    limit: int
    reserve: int
    work: Work

    @property
    def threads(self) -> int:
        """Threads that every arm runs with."""
        return self.work.threads or default_threads()

    def head(self, bench: str) -> dict[str, Any]:
        """What a report begins with; taken before the runs, for the load that they begin under."""
        return {
            "bench": bench,
            "environment": environment(self.pair.flash),
            "threads": self.threads,
            "planted": self.pair.label,
            "model": self.pair.as_dict(),
        }

    def weights(self) -> int:
        """What of the limit is --ram. Raises ArgumentError if that is too little."""
        left, least = self.limit - self.reserve, self.pair.least_bytes
        if left < least:
            parts = (self.limit, self.reserve, self.pair.resident_bytes, least)
            limit, reserve, resident, needed = map(format_size, parts)
            raise ArgumentError(
                f"--ram {limit} less --reserve {reserve} for the process holds no cache beside"
                f" {resident} of resident weights and the context, which take {needed} with the"
                f" smallest: give at least --ram {whole_mib(self.reserve + least)}, or less for the"
                " process with --reserve"
            )
        return left

    def mmap(self) -> Arm:
        """Unpatched llama.cpp under the limit, nothing copied out of the mapping."""
        work = replace(self.work, model=str(self.pair.dense), stock=self.stock, repack=False)
        return Arm("mmap", "unpatched llama.cpp, mmap, under the limit", work, self.limit)

    def whole(self) -> Arm:
        """Unpatched llama.cpp without a limit: the file is read once before the first token."""
        work = replace(self.work, model=str(self.pair.dense), stock=self.stock)
        return Arm("ram", "unpatched llama.cpp, all weights in RAM, no limit", work, None)

    def flash(
        self,
        name: str,
        what: str,
        settings: Settings,
        environment: Mapping[str, str] | None = None,
        *,
        every: bool = False,
    ) -> Arm | None:
        """Ours with these settings; None if `every` neuron is wanted and the file cannot."""
        chooses = all_neurons(self.pair) if every else {}
        if chooses is None:
            return None
        chosen = {k: v for k, v in settings.items() if v is not None}
        work = replace(self.work, model=str(self.pair.flash), settings=chosen)
        return Arm(name, what, work, self.limit, {**chooses, **(environment or {})})

    def naive(self, environment: Mapping[str, str] | None = None) -> Arm | None:
        """All FFN weights read for every token."""
        what = "all FFN weights read from the file for every token, the smallest cache"
        return self.flash("naive", what, {"ram": _SMALLEST}, environment, every=True)

    def hybrid(self, environment: Mapping[str, str] | None = None) -> Arm | None:
        """Half of the FFN cached, or what the limit leaves."""
        half = self.pair.least_bytes + self.pair.bundle_bytes // 2
        ram = min(half, self.weights())
        share = (ram - self.pair.least_bytes) / self.pair.bundle_bytes
        what = f"every neuron selected, {100 * share:.0f} % of the FFN cached"
        return self.flash("hybrid", what, {"ram": ram}, environment, every=True)

    def predictor(self, environment: Mapping[str, str] | None = None) -> Arm | None:
        """The selected neurons, nothing kept from token to token."""
        if self.pair.select == "all":
            return None
        what = "the selected neurons, the smallest cache"
        return self.flash("predictor", what, {"ram": _SMALLEST}, environment)

    def ours(
        self,
        name: str = "ours",
        settings: Settings | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Arm:
        """The selected neurons, and a cache of what the limit leaves."""
        given = {k: v for k, v in (settings or {}).items() if v is not None}
        words = [f"{k} {v}" for k, v in {**given, **(environment or {})}.items()]
        what = ", ".join(["the selected neurons, a cache of what the limit leaves", *words])
        arm = self.flash(name, what, {"ram": self.weights(), **given}, environment)
        assert arm is not None
        return arm
