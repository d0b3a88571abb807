"""Tiny dense GGUF models with random weights that unpatched llama.cpp loads and runs.

``make_dense`` writes one with ``gguf.GGUFWriter``, so nothing under test takes part.  The
tokenizer is byte-level BPE over the 256 bytes: any text is made of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

VOCAB_EXTRA = ("<|endoftext|>", "<|pad|>")


@dataclass(frozen=True)
class Arch:
    """What an architecture needs beside its FFN: its form, norms and biases."""

    gated: bool
    fused: bool = False
    rms: bool = True  # RMS norm without bias, else layer norm with bias
    attn_bias: bool = False  # required biases on attention and output
    ffn_norm: bool = True
    positions: bool = False  # learned ones, and output tied to the embeddings


# llama: silu, gated. nemotron: relu_sqr, biases optional. phi2: gelu, biases always.
# phi3: silu, gate and up fused. starcoder2: gelu, biases always. opt: relu, patched llama.cpp only.
ARCHS = {
    "llama": Arch(gated=True),
    "phi3": Arch(gated=True, fused=True),
    "nemotron": Arch(gated=False, rms=False),
    "starcoder2": Arch(gated=False, rms=False, attn_bias=True),
    "phi2": Arch(gated=False, rms=False, attn_bias=True, ffn_norm=False),
    "opt": Arch(gated=False, rms=False, attn_bias=True, positions=True),
}
BIASES_REQUIRED = ("starcoder2", "phi2", "opt")


def _byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 byte values, in order of the byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


class _Maker:
    def __init__(self, path: Path, arch: str, seed: int, up_scale: float = 1.0) -> None:
        self.scales = {"ffn_up": up_scale, "ffn_down.weight": 1 / up_scale}
        self.writer = gguf.GGUFWriter(path, arch)
        self.rng = np.random.default_rng(seed)

    def _scale(self, name: str) -> np.float32:
        found = [scale for part, scale in self.scales.items() if part in name]
        return np.float32(found[0] if found else 1.0)

    def add(self, name: str, shape: tuple[int, ...], type_name: str = "F32") -> None:
        """A random matrix (numpy shape) of the given type."""
        scale = 1 / np.sqrt(shape[-1])
        values = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        values *= self._scale(name)
        kind = Type[type_name]
        if kind == Type.F32:
            self.writer.add_tensor(name, values)
        elif kind == Type.F16:
            self.writer.add_tensor(name, values.astype(np.float16))
        else:
            self.writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(self, name: str, n: int, bias: bool) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(n, np.float32))
        if bias:
            self.bias(name, n)

    def bias(self, name: str, n: int) -> None:
        values = self.rng.standard_normal(n, dtype=np.float32) * np.float32(0.1)
        values *= self._scale(name)
        self.writer.add_tensor(f"{name}.bias", values)


def _add_keys(m: _Maker, spec: Arch, n_embd: int, n_ff: int, n_layer: int, n_ctx: int) -> None:
    w, n_head = m.writer, max(1, n_embd // 32)
    w.add_name("tiny")
    w.add_context_length(n_ctx)
    w.add_embedding_length(n_embd)
    w.add_block_count(n_layer)
    w.add_feed_forward_length(n_ff)
    w.add_head_count(n_head)
    w.add_head_count_kv(n_head)
    w.add_rope_dimension_count(n_embd // n_head)
    if spec.rms:
        w.add_layer_norm_rms_eps(1e-5)
    else:
        w.add_layer_norm_eps(1e-5)
    tokens = [*_byte_tokens(), *VOCAB_EXTRA]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([1] * 256 + [3] * len(VOCAB_EXTRA))
    w.add_token_merges(["t h"])
    w.add_bos_token_id(256)
    w.add_eos_token_id(256)
    w.add_add_bos_token(False)
    w.add_chat_template("{% for m in messages %}{{ m.content }}\n{% endfor %}")


def _add_attention(m: _Maker, spec: Arch, blk: str, n_embd: int, type_name: str) -> None:
    m.norm(f"{blk}.attn_norm", n_embd, not spec.rms)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        m.add(f"{blk}.{name}.weight", (n_embd, n_embd), type_name)
        if spec.attn_bias:
            m.bias(f"{blk}.{name}", n_embd)


def _add_opt(m: _Maker, n_embd: int, n_ctx: int, n_word: int | None, type_name: str) -> int:
    """What only OPT has; returns the width of its embeddings. ``n_word`` makes it the 350M form."""
    m.add("position_embd.weight", (n_ctx, n_embd))
    m.writer.add_bool("opt.norm_before_residual", n_word is None)
    if n_word is None:
        return n_embd
    m.writer.add_uint32("opt.dense_2_feat_out", n_word)
    m.add("fc.weight", (n_embd, n_word), type_name)
    m.add("dense_2.weight", (n_word, n_embd), type_name)
    return n_word


def _add_ffn(
    m: _Maker, spec: Arch, gated: bool, blk: str, shape: tuple[int, int],
    types: Mapping[str, str], biases: bool,
) -> None:  # fmt: skip
    n_embd, n_ff = shape
    if spec.ffn_norm:
        m.norm(f"{blk}.ffn_norm", n_embd, not spec.rms)
    if gated and not spec.fused:
        m.add(f"{blk}.ffn_gate.weight", (n_ff, n_embd), types["gate"])
    m.add(f"{blk}.ffn_up.weight", (n_ff * (2 if spec.fused else 1), n_embd), types["up"])
    m.add(f"{blk}.ffn_down.weight", (n_embd, n_ff), types["down"])
    if biases:
        if gated and not spec.fused:
            m.bias(f"{blk}.ffn_gate", n_ff)
        m.bias(f"{blk}.ffn_up", n_ff * (2 if spec.fused else 1))
        m.bias(f"{blk}.ffn_down", n_embd)


def make_dense(
    path: Path | str,
    *,
    arch: str | None = None,
    gated: bool | None = None,
    n_embd: int = 64,
    n_ff: int = 128,
    n_layer: int = 2,
    type: str | Sequence[Mapping[str, str]] = "F32",
    other_type: str = "F32",
    biases: bool = False,
    activation: str | None = None,
    n_ctx: int = 512,
    seed: int = 0,
    up_scale: float = 1.0,
    n_word: int | None = None,
) -> Path:
    """Write a dense GGUF to ``path`` and return it.

    ``arch``: a key of ARCHS; by default llama, or nemotron when ``gated`` is False.
    ``type``: of the FFN matrices; or for each layer a dict with gate, up and down.
    ``other_type``: of attention, embedding and output matrices.
    ``biases``: FFN biases; architectures that require them have them anyway.
    ``activation``: written as ``<arch>.hidden_activation``, which unpatched llama.cpp ignores.
    ``n_embd``: a multiple of 32 (heads are 32 wide).
    ``up_scale``: ffn_up and its bias times this, ffn_down divided by it. When it is large, GELU
    meets no small value and is ReLU: a plain ReLU model that unpatched llama.cpp runs.
    ``n_word``: for opt, embeddings of this width with projections, and norms after each half.
    """
    path = Path(path)
    arch = arch or ("nemotron" if gated is False else "llama")
    spec = ARCHS[arch]
    gated = spec.gated if gated is None else gated
    m = _Maker(path, arch, seed, up_scale)
    _add_keys(m, spec, n_embd, n_ff, n_layer, n_ctx)
    if activation:
        m.writer.add_string(f"{arch}.hidden_activation", activation)
    n_vocab = 256 + len(VOCAB_EXTRA)
    width = _add_opt(m, n_embd, n_ctx, n_word, other_type) if spec.positions else n_embd
    m.add("token_embd.weight", (n_vocab, width), other_type)
    for i in range(n_layer):
        own = type[i] if not isinstance(type, str) else dict.fromkeys(("gate", "up", "down"), type)
        _add_attention(m, spec, f"blk.{i}", n_embd, other_type)
        wanted = biases or arch in BIASES_REQUIRED
        _add_ffn(m, spec, gated, f"blk.{i}", (n_embd, n_ff), own, wanted)
    if n_word is None:
        m.norm("output_norm", n_embd, not spec.rms)
    if not spec.positions:
        m.add("output.weight", (n_vocab, n_embd), other_type)
    if arch == "phi2":
        m.bias("output", n_vocab)
    m.writer.write_header_to_file()
    m.writer.write_kv_data_to_file()
    m.writer.write_tensors_to_file()
    m.writer.close()
    return path
