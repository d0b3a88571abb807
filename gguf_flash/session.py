"""One model and one context of llama.cpp, driven token by token, with the least memory possible."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gguf_flash.errors import ArgumentError, FlashError, UnsupportedError
from gguf_flash.llama_api import low_level
from gguf_flash.llama_log import LlamaLog
from gguf_flash.settings import Settings, check_overrides
from gguf_flash.sizes import ram_setting
from gguf_flash.turns import Turns

if TYPE_CHECKING:
    from gguf_flash._core import Interrupt, Meter, Model, Recorder

_NO_ROOM, _ABORTED = 1, 2
_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def default_threads() -> int:
    """The processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def engine_of(api: Any, model: int) -> Model | None:
    """The engine that the hooks opened for the `llama_model*` at `model`; None if it is dense."""
    buffer = ctypes.create_string_buffer(32)
    if api.llama_model_meta_val_str(model, b"flash_ffn.version", buffer, len(buffer)) < 0:
        return None
    from gguf_flash import _core

    return _core.attached(model)


def new_interrupt() -> Interrupt:
    """A means to end a decode."""
    from gguf_flash import _core

    return _core.Interrupt()


def decode_error(model: int, status: int) -> FlashError:
    """The exception for a decode that llama.cpp ended with `status`; raises the engine's own."""
    from gguf_flash import _core

    if status == _NO_ROOM:
        return ArgumentError("the context is full; make it larger (--ctx, n_ctx)")
    if status == _ABORTED:
        return FlashError("the decode was interrupted; the model may be used again")
    _core.raise_last_error(model)
    return FlashError(f"llama_decode returned {status} and the engine gave no reason")


def interrupt_all() -> None:
    """`Session.interrupt` for every session of this process."""
    for session in list(_sessions):
        session.interrupt()


class Session:
    """A model, dense or flash, and its context.

    Use it as a context manager, or call `close`. Threads take turns. With `repack` off, llama.cpp
    leaves quantized weights as they lie in the file; else it copies some into a faster order, in
    RAM that no file backs. `shown` is what messages call the model, when `path` was made from
    something else. With `sizes_only` nothing is loaded and no RAM limit refused: the engine's
    `stats()["memory"]` tells what the model and a context would take, and `check_ram` whether the
    limit holds them.
    Raises a FlashError if the model cannot be loaded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Settings | None = None,
        *,
        repack: bool = True,
        shown: str | os.PathLike[str] | None = None,
        sizes_only: bool = False,
    ) -> None:
        self.path = os.fspath(path)
        self.shown = os.fspath(shown or path)
        self.api = low_level()
        self.log = LlamaLog(self.api)
        self._turns = Turns(self.shown)
        self._interrupt = new_interrupt()
        _sessions.add(self)
        self._context: int | None = None
        self._batch: Any = None
        self._watcher: Recorder | Meter | None = None
        self._model: int | None = None
        params = self.api.llama_model_default_params()
        self._overrides = override_array(self.api, (settings or Settings()).overrides())
        params.kv_overrides = self._overrides
        params.use_extra_bufts = repack
        if sizes_only:
            params.no_alloc = True
            params.load_mode = self.api.LLAMA_LOAD_MODE_NONE
        with self.log:
            self._model = self.api.llama_model_load_from_file(os.fsencode(self.path), params)
        if self._model is None:
            raise self.log.load_error(self.shown, self.path)
        self._vocab = self.api.llama_model_get_vocab(self._model)
        self.n_vocab: int = self.api.llama_vocab_n_tokens(self._vocab)
        self.engine = engine_of(self.api, self._model)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the context, then the model. A decode under way is interrupted first.

        The engine's object must not be used afterwards, and no other method: they raise FlashError.
        """
        self.interrupt()
        with self._turns.last():
            self._free()

    def set_ram(self, ram: int | str) -> None:
        """Another RAM limit from now on, as `Settings.ram`; from any thread, during a decode too.

        The neuron cache shrinks or grows between two layers; the text stays the same. Does nothing
        for a dense model. Raises ArgumentError for what is no size, and RamTooSmallError below what
        the model and its context need, with everything as before.
        """
        if (engine := self.engine) is not None:
            engine.set_ram(ram_setting(ram))

    def interrupt(self) -> None:
        """Let the decode under way, or else the next, end with a FlashError; from any thread."""
        self._interrupt.asked = True

    def _free(self) -> None:
        self.engine = None
        if self._batch is not None:
            self.api.llama_batch_free(self._batch)
            self._batch = None
        if self._context is not None:
            self.api.llama_free(self._context)
            self._context = None
        if self._model is not None:
            self.api.llama_model_free(self._model)
            self._model = None

    def open_context(
        self,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_outputs: int,
        threads: int | None = None,
        flash_attention: bool = True,
        watcher: Recorder | Meter | None = None,
        encodes: bool = False,
    ) -> None:
        """Make the context: `n_ctx` tokens in all, `n_batch` a decode, `n_outputs` rows of logits.

        `n_outputs` decides most of the compute buffer. With `flash_attention` off, logits do not
        depend on the number of threads; with it on, llama.cpp shares long attention out by thread.
        `watcher` sees every graph that the context computes. `encodes` promises that `encode` is
        called before any decode, without which a model with an encoder (T5) is refused.
        """
        api = self.api
        if self.has_encoder and not encodes:
            raise UnsupportedError(
                f"'{self.shown}' reads a text with an encoder and writes another one (T5), so the"
                " text cannot be followed token by token; give a model without encoder, or use run"
            )
        params = api.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_ubatch = min(n_batch, n_ubatch)
        params.n_outputs_max = params.n_outputs_max_per_seq = n_outputs
        params.n_threads = params.n_threads_batch = threads or default_threads()
        if not flash_attention:
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.abort_callback = api.ggml_abort_callback(self._interrupt.callback)
        params.abort_callback_data = self._interrupt.user_data
        if watcher is not None:
            self._watcher = watcher  # the context keeps its address
            params.cb_eval = api.ggml_backend_sched_eval_callback(watcher.callback)
            params.cb_eval_user_data = watcher.user_data
        with self.log:
            self._context = api.llama_init_from_model(self._model, params)
        if self._context is None:
            raise self.log.load_error(self.shown, self.path)
        self._batch = api.llama_batch_init(n_batch, 0, 1)

    @property
    def bos(self) -> int | None:
        """The token that llama.cpp puts first, None if this model has none."""
        if not self.api.llama_vocab_get_add_bos(self._vocab):
            return None
        return int(self.api.llama_vocab_bos(self._vocab))

    def is_end(self, token: int) -> bool:
        """Whether `token` ends a text."""
        with self._turns.turn():
            return bool(self.api.llama_vocab_is_eog(self._vocab, token))

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of `text`, begin token included; `special` reads "<|im_end|>" as one token."""
        data = text.encode("utf-8", "surrogateescape")  # an argument's bytes as they were
        room = len(data) + 2
        tokens = (self.api.llama_token * room)()
        with self._turns.turn():
            count = self.api.llama_tokenize(
                self._vocab, data, len(data), tokens, room, True, special
            )
        if count < 0:
            raise ArgumentError(f"cannot tokenize a text of {len(data)} bytes for '{self.shown}'")
        return list(tokens[:count])

    def piece(self, token: int) -> bytes:
        """The bytes that `token` stands for; part of a character is possible."""
        piece = self.api.llama_token_to_piece
        buffer = ctypes.create_string_buffer(256)
        with self._turns.turn():
            count = piece(self._vocab, token, buffer, len(buffer), 0, False)
            if count < 0:
                buffer = ctypes.create_string_buffer(-count)
                count = piece(self._vocab, token, buffer, -count, 0, False)
        return buffer.raw[:count]

    def chat_prompt(self, message: str) -> str:
        """`message` as a user's turn in the model's own chat format, ready for the answer."""
        api = self.api
        template = api.llama_model_chat_template(self._model, None)
        if not template:
            raise ArgumentError(f"'{self.shown}' has no chat template; run it without --chat")
        turn = (api.llama_chat_message * 1)()
        turn[0].role, turn[0].content = b"user", message.encode()
        room = 2 * len(turn[0].content) + 4096
        buffer = ctypes.create_string_buffer(room)
        count = api.llama_chat_apply_template(template, turn, 1, True, buffer, room)
        if count < 0 or count > room:
            raise ArgumentError(
                f"llama.cpp does not know the chat template of '{self.shown}'; write the turns into"
                " --prompt and run without --chat"
            )
        return buffer.raw[:count].decode()

    @property
    def has_encoder(self) -> bool:
        """Whether the model has an encoder beside its decoder, which must read a text first."""
        return bool(self.api.llama_model_has_encoder(self._model))

    @property
    def decoder_start(self) -> int:
        """The token that a decoder with an encoder begins with."""
        token = int(self.api.llama_model_decoder_start_token(self._model))
        return token if token >= 0 else int(self.api.llama_vocab_bos(self._vocab))

    @property
    def has_memory(self) -> bool:
        """Whether the context keeps tokens from one decode to the next; encoders do not."""
        return bool(self.api.llama_get_memory(self._context))

    def clear(self) -> None:
        """Forget all decoded tokens."""
        with self._turns.turn():
            self.api.llama_memory_clear(self.api.llama_get_memory(self._context), True)

    def decode(self, tokens: Sequence[int], position: int, wanted: int) -> None:
        """Decode `tokens` (at most n_batch) from `position` on, with logits of the last `wanted`.

        Raises the engine's FlashError if a read failed; the context is then as it was before, and
        the same call may be made again.
        """
        self._run(self.api.llama_decode, tokens, position, wanted)

    def encode(self, tokens: Sequence[int]) -> None:
        """Let the encoder read `tokens`, all at once (at most n_ubatch). Raises as `decode`."""
        self._run(self.api.llama_encode, tokens, 0, len(tokens))

    def _run(self, call: Any, tokens: Sequence[int], position: int, wanted: int) -> None:
        with self._turns.turn():
            self._fill_batch(tokens, position, wanted)
            status = call(self._context, self._batch)
            if status == _ABORTED:
                self._interrupt.asked = False
            if status != 0:
                assert self._model is not None
                raise decode_error(self._model, status)

    def _fill_batch(self, tokens: Sequence[int], position: int, wanted: int) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= len(tokens) - wanted

    def logits(self, rows: int) -> Any:
        """float32 (rows, n_vocab), a numpy view of llama.cpp's memory until the next decode."""
        import numpy as np

        pointer = self.api.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(rows, self.n_vocab))

    def sample(self, sampler: int) -> int:
        """Choose a token from the last row of logits and tell `sampler`."""
        with self._turns.turn():
            return int(self.api.llama_sampler_sample(sampler, self._context, -1))


def override_array(api: Any, overrides: Mapping[str, int | str]) -> Any:
    """`overrides` as llama.cpp takes them: an array of structures ended by an empty key."""
    check_overrides(overrides)
    array = (api.llama_model_kv_override * (len(overrides) + 1))()
    for entry, (key, value) in zip(array, overrides.items(), strict=False):
        entry.key = key.encode()
        if isinstance(value, str):
            entry.tag = api.LLAMA_KV_OVERRIDE_TYPE_STR
            entry.value.val_str = value.encode()
        else:
            entry.tag = api.LLAMA_KV_OVERRIDE_TYPE_INT
            entry.value.val_i64 = value
    return array
