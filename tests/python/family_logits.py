"""Write models' logits for fixed tokens: python family_logits.py MODEL OUT.npy [MODEL OUT.npy ...]

float32 (rows, n_vocab): 40 rows of a prompt read at once, then 8 tokens one by one. A model with an
encoder (T5) reads other tokens there first. Only llama-cpp-python's bindings take part, on the
libraries that LLAMA_CPP_LIB_PATH names. The KV cache is F32: halves would magnify a last bit.
"""

from __future__ import annotations

import sys
from typing import Any

import llama_cpp as api
import numpy as np
from families import POSITIONS, tokens

PROMPT, ENCODED = 40, 24


def batch_of(tokens: list[int], position: int) -> Any:
    """A batch of one sequence, all of whose rows are wanted."""
    batch = api.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, position + i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
    return batch


class Evaluation:
    """A model and a context of it."""

    def __init__(self, path: str) -> None:
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self.model:
            sys.exit(f"cannot load {path}")
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 256
        params.n_threads = params.n_threads_batch = 2
        params.type_k = params.type_v = api.GGML_TYPE_F32
        params.flash_attn_type = 0  # else attention rounds to halves
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            sys.exit(f"no context for {path}")
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def encode(self, tokens: list[int]) -> None:
        """Let an encoder read them."""
        if api.llama_encode(self.context, batch_of(tokens, 0)) != 0:
            sys.exit("llama_encode failed")

    def decode(self, tokens: list[int], position: int) -> Any:
        """float32 (len(tokens), n_vocab)."""
        if api.llama_decode(self.context, batch_of(tokens, position)) != 0:
            sys.exit("llama_decode failed")
        logits = api.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (len(tokens), self.n_vocab)).copy()


def main() -> None:
    for model, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        np.save(out, logits_of(model))


def logits_of(model: str) -> Any:
    """float32 (POSITIONS, n_vocab)."""
    run = Evaluation(model)
    if api.llama_model_has_encoder(run.model):
        run.encode(tokens(POSITIONS + ENCODED)[-ENCODED:])
    rows = [run.decode(tokens()[:PROMPT], 0)]
    rows += [run.decode([t], PROMPT + i) for i, t in enumerate(tokens()[PROMPT:])]
    return np.concatenate(rows)


if __name__ == "__main__":
    main()
