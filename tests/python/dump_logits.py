"""Write a model's logits for a fixed text: python dump_logits.py MODEL OUT.npy THREADS [f32]

float32 (rows, n_vocab): 48 rows of a prompt read at once, then 8 tokens one by one. It uses the
bindings of llama-cpp-python alone, on the libraries that LLAMA_CPP_LIB_PATH names. With f32 the KV
cache is not rounded to halves, which would magnify a difference in the last bit.
"""

from __future__ import annotations

import sys

import llama_cpp
import numpy as np

TEXT = (
    b"Whenever I find myself growing grim about the mouth; whenever it is a damp, drizzly November"
)


def main() -> None:
    model, out, threads, *options = sys.argv[1:]
    kv_type = llama_cpp.GGML_TYPE_F32 if options == ["f32"] else None
    llm = llama_cpp.Llama(
        model, n_ctx=256, logits_all=True, n_threads=int(threads),
        n_threads_batch=int(threads), verbose=False, type_k=kv_type, type_v=kv_type,
    )  # fmt: skip
    tokens = llm.tokenize(TEXT * 4)[:56]
    llm.eval(tokens[:48])
    for token in tokens[48:]:
        llm.eval([token])
    np.save(out, llm.scores[: llm.n_tokens])


if __name__ == "__main__":
    main()
