"""The engine's settings, and the `flash_ffn.*` overrides that carry them into llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gguf_flash.errors import ArgumentError
from gguf_flash.sizes import ram_setting

POLICIES = ("budget", "window", "score")
READERS = ("auto", "io_uring", "pread")
PREFILLS = ("auto", "select", "stream")
LOOKAHEADS = ("on", "off")
WATCHES = ("on", "off")

# llama.cpp keeps an override's string in char[128], the terminating zero included.
_LONGEST_STRING = 127


@dataclass(frozen=True)
class Settings:
    """What a run may choose.

    None leaves a choice to GGUF_FLASH_<NAME>, then to the engine.

    ram: in all: weights, tokenizer, KV cache, compute buffers, the engine's own and the neuron
        cache, beside the interpreter and its libraries (`gguf_flash.memory.BASE_BYTES`): bytes,
        "200MiB", or "60%" of what is on flash beside all the rest (see `ram_setting`).
    watch: "on" or "off": give neuron cache back while the system or the cgroup is short of memory,
        and take it again later.
    window: tokens whose neurons stay cached under policy "window".
    policy: "budget", "window" or "score".
    reader: "auto", "io_uring" or "pread".
    depth: reads in flight; None: 224 by io_uring, 32 by pread.
    prefill: how a prompt reads a layer: "select" neurons, "stream" it whole, or "auto".
    lookahead: "on" or "off": read what the next layer will probably select before its turn, where
        a predictor can tell.
    activation: in place of the model's, also of a dense one: "relu", "relu_sqr", "silu", "gelu",
        "gelu_erf", "drelu".
    """

    ram: int | str | None = None
    window: int | None = None
    policy: str | None = None
    reader: str | None = None
    depth: int | None = None
    prefill: str | None = None
    lookahead: str | None = None
    activation: str | None = None
    watch: str | None = None

    def chosen(self) -> dict[str, int | str]:
        """The settings that are not None, as the engine takes them. Raises ArgumentError."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        if "ram" in found:
            found["ram"] = ram_setting(found["ram"])
        return found

    def overrides(self) -> dict[str, int | str]:
        """The `kv_overrides` that llama.cpp hands to the engine. Raises ArgumentError."""
        found = {f"flash_ffn.{name}": value for name, value in self.chosen().items()}
        check_overrides(found)
        return found


def check_overrides(overrides: Mapping[str, object]) -> None:
    """Raise ArgumentError if llama.cpp would cut an override's key or text."""
    for key, value in overrides.items():
        if len(key.encode()) > _LONGEST_STRING:
            raise ArgumentError(f"the override key '{key}' is longer than {_LONGEST_STRING} bytes")
        if isinstance(value, str) and len(value.encode()) > _LONGEST_STRING:
            raise ArgumentError(
                f"the override '{key}' is longer than {_LONGEST_STRING} bytes: '{value}'"
            )
