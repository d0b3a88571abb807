"""Text from a model, piece by piece, and what each token cost."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Iterator
from typing import Any

from gguf_flash.errors import ArgumentError, RamTooSmallError, UnsupportedError
from gguf_flash.measure import difference, peak_rss, per_token
from gguf_flash.session import Session
from gguf_flash.settings import Settings

# llama.cpp's own defaults for sampling at a temperature above zero.
_TOP_K, _TOP_P, _MIN_P = 40, 0.95, 0.05
_LARGEST_BATCH = 512


class Generation:
    """One prompt and its continuation: iterate it for the text as it comes, then read `figures()`.

    Args:
        path: the model, dense or flash.
        prompt: the text to continue, or with `chat` the user's message.
        tokens: how many to generate at most; a model that ends its text ends earlier.
        temperature: 0 takes the likeliest token each time; else `seed` decides.
        top_p: sample among the likeliest tokens whose probabilities sum up to it (nucleus), 1 to
            leave none out; None is llama.cpp's 0.95. Needs a temperature above 0.
        ctx: room for prompt and text, in tokens; None makes it just large enough.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        prompt: str,
        *,
        tokens: int = 64,
        settings: Settings | None = None,
        threads: int | None = None,
        seed: int = 0,
        temperature: float = 0.0,
        top_p: float | None = None,
        ctx: int | None = None,
        chat: bool = False,
    ) -> None:
        if top_p is not None and (temperature <= 0 or not 0 < top_p <= 1):
            raise ArgumentError(
                "--top-p takes a share above 0 and at most 1, and chooses among samples: give"
                " --temperature above 0 with it"
            )
        self.settings = settings or Settings()
        self._limit = tokens
        self._text = ""
        self._generated: list[int] = []
        self._prompt_s = self._decode_s = 0.0
        self._steps = self._begun = 0
        self._marks: list[dict[str, Any]] = []
        self._sampler: Any = None
        try:
            self.session = Session(path, self.settings)
        except RamTooSmallError:
            self._say_all_it_needs(path, prompt, chat, ctx, threads)
            raise
        try:
            self._open(prompt, chat, ctx, threads)
            self._sampler = make_sampler(self.session.api, temperature, seed, top_p)
        except BaseException:
            self.session.close()
            raise

    def _say_all_it_needs(
        self, path: str | os.PathLike[str], prompt: str, chat: bool, ctx: int | None,
        threads: int | None,
    ) -> None:  # fmt: skip
        """Raise RamTooSmallError with what the context would take as well."""
        with Session(path, self.settings, sizes_only=True) as self.session:
            self._open(prompt, chat, ctx, threads)
            if self.session.engine is not None:
                self.session.engine.check_ram()

    def _open(self, prompt: str, chat: bool, ctx: int | None, threads: int | None) -> None:
        text = self.session.chat_prompt(prompt) if chat else prompt
        self.prompt = self.session.tokenize(text, special=chat)
        self._open_context(ctx, threads)

    def _open_context(self, ctx: int | None, threads: int | None) -> None:
        needed = len(self.prompt) + self._limit
        if not self.prompt:
            raise ArgumentError(
                "the prompt is empty and this model has no begin token; give --prompt"
            )
        if ctx is not None and ctx < needed:
            raise ArgumentError(
                f"--ctx {ctx} is too small: the prompt has {len(self.prompt)} tokens and"
                f" {self._limit} are to come; give at least {needed}"
            )
        encodes = self.session.has_encoder  # in one batch
        self.n_batch = len(self.prompt) if encodes else min(_LARGEST_BATCH, len(self.prompt))
        self.session.open_context(
            n_ctx=ctx or needed,
            n_batch=self.n_batch,
            n_ubatch=self.n_batch,
            n_outputs=self.n_batch if encodes else 1,
            threads=threads,
            flash_attention=False,  # so that the text does not depend on the number of threads
            encodes=encodes,
        )
        if not self.session.has_memory:
            raise UnsupportedError(
                f"'{self.session.path}' is an embedding model, which writes no text; give a"
                " language model"
            )

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model, from any thread: who iterates gets a FlashError."""
        self.session.close()  # first: then nobody samples any more
        if self._sampler is not None:
            self.session.api.llama_sampler_free(self._sampler)
            self._sampler = None

    def __iter__(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._read_prompt()
        for token in self._tokens():
            piece = decoder.decode(self.session.piece(token))
            self._text += piece
            if piece:
                yield piece
        rest = decoder.decode(b"", final=True)
        self._text += rest
        if rest:
            yield rest

    def _mark(self) -> None:
        """Read the engine's counters: at the start, after the prompt, at the end."""
        engine = self.session.engine
        self._marks.append(engine.stats()["total"] if engine else {})

    def _read_prompt(self) -> None:
        self._mark()
        begin = time.perf_counter()
        first = self.prompt
        if self.session.has_encoder:
            self.session.encode(self.prompt)
            first = [self.session.decoder_start]
        for start in range(0, len(first), self.n_batch):
            part = first[start : start + self.n_batch]
            last = start + len(part) == len(first)
            self.session.decode(part, start, 1 if last else 0)
        self._begun = len(first)
        self._prompt_s = time.perf_counter() - begin
        self._mark()

    def _tokens(self) -> Iterator[int]:
        """Generated tokens; the last one is not decoded, for nothing would use its logits."""
        try:
            for i in range(self._limit):
                if i > 0:
                    self._step(self._generated[-1], self._begun + i - 1)
                token = self.session.sample(self._sampler)
                if self.session.is_end(token):
                    break
                self._generated.append(token)
                yield token
        finally:
            self._mark()

    def _step(self, token: int, position: int) -> None:
        begin = time.perf_counter()
        self.session.decode([token], position, 1)
        self._decode_s += time.perf_counter() - begin
        self._steps += 1

    def figures(self) -> dict[str, Any]:
        """What the run gave and cost. Times are per decoded token, the prompt's own apart.

        Keys: text, tokens, tokens_per_s, bytes_per_token, requests_per_token, hit_rate,
        predictor_ms (scoring neurons), io_ms, mem_ms, compute_ms, peak_rss_bytes, kv_bytes,
        compute_bytes, prompt_tokens, prompt_s, prompt_bytes, ram_bytes, flash_bytes, memory,
        settings, reader. For a dense model the engine's figures are 0, None or empty.
        """
        start, prompted, end = self._marks
        engine = self.session.engine
        empty: dict[str, Any] = {"memory": {}, "settings": {}, "layers": [], "reader": ""}
        stats = engine.stats() if engine else empty
        memory = stats["memory"]
        return {
            "text": self._text,
            "tokens": len(self._generated),
            "tokens_per_s": self._steps / self._decode_s if self._steps else 0.0,
            **per_token(difference(prompted, end), self._steps),
            "peak_rss_bytes": peak_rss(),
            "kv_bytes": self.session.log.kv_bytes,
            "compute_bytes": self.session.log.compute_bytes,
            "prompt_tokens": len(self.prompt),
            "prompt_s": self._prompt_s,
            "prompt_bytes": difference(start, prompted)["bytes_read"],
            "ram_bytes": memory.get("ram_bytes"),
            "flash_bytes": sum(layer["n_ff"] * layer["read_bytes"] for layer in stats["layers"]),
            "memory": memory,
            "settings": stats["settings"],
            "reader": stats["reader"],
        }


def make_sampler(api: Any, temperature: float, seed: int, top_p: float | None = None) -> Any:
    """A llama.cpp sampler chain: greedy at temperature 0, else its usual chain with `seed`."""
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    if temperature <= 0:
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
        return chain
    for sampler in (
        api.llama_sampler_init_top_k(_TOP_K),
        api.llama_sampler_init_top_p(_TOP_P if top_p is None else top_p, 1),
        api.llama_sampler_init_min_p(_MIN_P, 1),
        api.llama_sampler_init_temp(temperature),
        api.llama_sampler_init_dist(seed & 0xFFFFFFFF),
    ):
        api.llama_sampler_chain_add(chain, sampler)
    return chain
