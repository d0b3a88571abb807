"""FlashLlama: llama-cpp-python's `Llama` with the engine's settings and counters.

Importing this module imports llama_cpp; `gguf_flash.FlashLlama` does so when it is first used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from gguf_flash._core import raise_last_error
from gguf_flash.errors import ArgumentError, FlashError, UnsupportedError
from gguf_flash.llama_log import LlamaLog
from gguf_flash.runtime import activate
from gguf_flash.session import decode_error, engine_of
from gguf_flash.settings import Settings, check_overrides
from gguf_flash.sizes import ram_setting
from gguf_flash.turns import Turns

activate()

import llama_cpp  # noqa: E402  (it reads where its libraries are when it is imported)
from llama_cpp import llama_cpp as _api  # noqa: E402


def _check_names(llama_kwargs: dict[str, Any]) -> None:
    """`Llama` swallows unknown keywords, and a misspelled RAM limit with them."""
    known = inspect.signature(llama_cpp.Llama.__init__).parameters
    for name in llama_kwargs:
        if name not in known:
            raise ArgumentError(f"FlashLlama takes no keyword '{name}'; check its spelling")


class _Freed:
    """Stands where llama-cpp-python kept pointers to what `close` has freed."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        raise FlashError(f"'{self._path}' was closed; load it again to use it")


def _in_turn(name: str) -> Callable[..., Any]:
    """The method `name` of `Llama`, in a turn of its caller."""
    usual = getattr(llama_cpp.Llama, name)

    @functools.wraps(usual)
    def method(self: FlashLlama, *words: Any, **options: Any) -> Any:
        with self._turns.turn():
            return usual(self, *words, **options)

    return method


def _step_by_step(name: str) -> Callable[..., Any]:
    """The generator `name` of `Llama`, each step in a turn."""
    usual = getattr(llama_cpp.Llama, name)

    @functools.wraps(usual)
    def method(self: FlashLlama, *words: Any, **options: Any) -> Generator[Any, Any, None]:
        steps, sent = usual(self, *words, **options), None
        with contextlib.closing(steps):
            while True:
                with self._turns.turn():
                    try:
                        found = steps.send(sent)
                    except StopIteration:
                        return
                sent = yield found

    return method


class FlashLlama(llama_cpp.Llama):
    """A `llama_cpp.Llama` that reads the FFN weights of a flash-GGUF from the SSD.

    A dense GGUF works too, as an ordinary `Llama`; its `flash_stats()` is empty.

    Threads take turns: a completion that is not streamed is one turn, else each of its steps is.
    For texts at the same time, use an object for each. `close` may be called from any thread; what
    another one runs then ends in a FlashError, as everything does afterwards.

    Args:
        model_path: the model.
        ram: RAM in all, KV cache and buffers included: bytes, "200MiB", or "60%" of the weights on
            flash beside all the rest.
        watch: "on" gives neuron cache back while the system or the cgroup is short of memory.
        window: tokens whose neurons stay cached under policy "window" (5).
        policy: "budget" (default), "score" or "window".
        reader: "auto" (default), "io_uring" or "pread".
        depth: reads in flight (224 by io_uring, 32 by pread).
        prefill: how a prompt reads a layer; "auto" (default) goes by what is missing.
        lookahead: "on" (default) reads for the next layer before its turn, "off" does not.
        threads: for text and prompt; None takes llama-cpp-python's choice.
        llama_kwargs: everything `Llama` takes; its kv_overrides win over the settings above.

    A setting left at None comes from GGUF_FLASH_*, then from the engine.

    Raises:
        FlashError: the model cannot be loaded, or a read failed during a decode. After a failed
            read the object may be used again.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        ram: int | str | None = None,
        window: int | None = None,
        policy: str | None = None,
        reader: str | None = None,
        depth: int | None = None,
        prefill: str | None = None,
        lookahead: str | None = None,
        watch: str | None = None,
        threads: int | None = None,
        **llama_kwargs: Any,
    ) -> None:
        self._turns = Turns(os.fspath(model_path))
        self.settings = Settings(
            ram=ram,
            window=window,
            policy=policy,
            reader=reader,
            depth=depth,
            prefill=prefill,
            lookahead=lookahead,
            watch=watch,
        )
        overrides = {**self.settings.overrides(), **(llama_kwargs.pop("kv_overrides", None) or {})}
        check_overrides(overrides)
        _check_names(llama_kwargs)
        if threads is not None:
            llama_kwargs.setdefault("n_threads", threads)
            llama_kwargs.setdefault("n_threads_batch", threads)
        llama_kwargs.setdefault("verbose", False)
        self._load(os.fspath(model_path), kv_overrides=overrides or None, **llama_kwargs)
        self._engine = engine_of(_api, self.model)

    def _load(self, path: str, **llama_kwargs: Any) -> None:
        if not os.path.exists(path):
            raise ArgumentError(f"cannot open '{path}': there is no such file; check the path")
        log = LlamaLog(_api, forward=llama_kwargs["verbose"])
        try:
            with log:
                super().__init__(path, **llama_kwargs)
        except ValueError as error:
            if "Failed to" not in str(error):
                raise
            raise log.load_error(path) from error
        if _api.llama_model_has_encoder(self.model):
            self.close()
            raise UnsupportedError(
                f"cannot use '{path}': it has an encoder (T5), which must read the text before the"
                " decoder writes, and llama-cpp-python calls the decoder alone; use gguf-flash run"
            )
        if llama_kwargs.get("lora_path") and not self._lora_adapter:
            raise UnsupportedError(
                f"cannot use the adapter '{llama_kwargs['lora_path']}' with '{path}':"
                f" {log.reason() or 'llama.cpp refused it'}; matrices on flash take no LoRA"
            )

    def flash_stats(self) -> dict[str, Any]:
        """The engine's counters, readable at any moment: "total", "layers", "reader", "memory",
        "settings". {} for a dense model."""
        engine = self._engine
        return {} if engine is None else engine.stats()

    def set_ram(self, ram: int | str) -> None:
        """Another RAM limit from now on, as the argument `ram`; while a completion runs, too.

        The neuron cache shrinks or grows between two layers, and the text stays the same. Does
        nothing for a dense model. Raises ArgumentError for what is no size, and RamTooSmallError
        below what the model and its context need, with everything as before.
        """
        if (engine := self._engine) is not None:
            engine.set_ram(ram_setting(ram))

    def reset_flash_stats(self) -> None:
        """Set the counters to zero."""
        if (engine := self._engine) is not None:
            engine.reset_stats()

    def close(self) -> None:
        """Free the model and its engine, when the step that another thread is in has ended."""
        if not hasattr(self, "_turns"):  # __init__ refused its arguments
            return
        with self._turns.last() as still_open:
            self._engine = None
            if still_open and hasattr(self, "_stack"):
                super().close()
                for name in ("_model", "_ctx", "_batch"):
                    setattr(self, name, _Freed(self.model_path))

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens; a failed read raises a FlashError and leaves the model usable."""
        with self._turns.turn(), self._explained():
            super().eval(tokens)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Embed text; a failed read raises a FlashError and leaves the model usable."""
        with self._turns.turn(), self._explained():
            return super().embed(*args, **kwargs)

    tokenize = _in_turn("tokenize")
    detokenize = _in_turn("detokenize")
    reset = _in_turn("reset")
    sample = _in_turn("sample")
    save_state = _in_turn("save_state")
    load_state = _in_turn("load_state")
    generate = _step_by_step("generate")
    _create_completion = _step_by_step("_create_completion")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FlashError:
            raise
        except RuntimeError as error:
            if "llama_decode returned" not in str(error):
                raise
            if self._engine is None:
                raise_last_error(self.model)  # our own architectures have reasons, too
                raise
            status = int(str(error).rsplit(maxsplit=1)[-1])
            raise decode_error(self.model, status) from error
