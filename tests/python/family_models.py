"""Tiny random models of the families that are sparse by nature, for unpatched llama.cpp as well.

As ``tiny_models``, whose writer and tokenizer they use: the tensors that each graph of the pinned
source asks for, with random values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from tiny_models import ARCHS, Arch, _add_attention, _add_ffn, _add_keys, _Maker

N_EMBD, N_FF, N_LAYER, N_CTX = 64, 192, 2, 256
N_VOCAB = 258
HEADS = N_EMBD // 32
Block = Callable[[_Maker, str, bool], None]


def _types(kind: str) -> dict[str, str]:
    return dict.fromkeys(("gate", "up", "down"), kind)


def _spec(arch: str, gated: bool) -> Arch:
    return ARCHS.get(arch, Arch(gated=gated, fused=arch == "glm4"))


def _usual(m: _Maker, blk: str, gated: bool) -> None:
    """Attention and FFN as Llama has them."""
    spec = _spec(m.arch, gated)
    _add_attention(m, spec, blk, N_EMBD, m.other)
    _add_ffn(m, spec, gated, blk, (N_EMBD, N_FF), _types(m.type), m.biases)


def _glm4(m: _Maker, blk: str, gated: bool) -> None:
    _usual(m, blk, gated)
    for name in ("post_attention_norm", "post_ffw_norm"):
        m.norm(f"{blk}.{name}", N_EMBD, False)


def _bitnet(m: _Maker, blk: str, gated: bool) -> None:
    _usual(m, blk, gated)
    for name, n in (("attn_sub_norm", N_EMBD), ("ffn_sub_norm", N_FF)):
        values = 1 + 0.3 * m.rng.standard_normal(n, dtype="float32")
        m.writer.add_tensor(f"{blk}.{name}.weight", values)


def _plm(m: _Maker, blk: str, gated: bool) -> None:
    """Multi-head latent attention: heads of 32, half of each rotated, keys and values from 24."""
    m.norm(f"{blk}.attn_norm", N_EMBD, False)
    m.norm(f"{blk}.attn_kv_a_norm", 24, False)
    shapes = {
        "attn_q": (HEADS * 32, N_EMBD), "attn_kv_a_mqa": (24 + 16, N_EMBD),
        "attn_kv_b": (HEADS * (16 + 32), 24), "attn_output": (N_EMBD, HEADS * 32),
    }  # fmt: skip
    for name, shape in shapes.items():
        m.add(f"{blk}.{name}.weight", shape, m.other)
    _add_ffn(m, Arch(gated=False), False, blk, (N_EMBD, N_FF), _types(m.type), False)


def _plm_keys(m: _Maker) -> None:
    m.writer.add_kv_lora_rank(24)
    m.writer.add_key_length(32)
    m.writer.add_value_length(32)
    m.writer.add_rope_dimension_count(16)


def _t5(m: _Maker, blk: str, gated: bool) -> None:
    """A block of the encoder and one of the decoder, which attends to both."""
    for stack in ("enc", "dec"):
        own = f"{stack}.{blk}"
        m.norm(f"{own}.attn_norm", N_EMBD, False)
        for name in ("q", "k", "v", "o"):
            m.add(f"{own}.attn_{name}.weight", (N_EMBD, N_EMBD), m.other)
        if blk == "blk.0":
            m.add(f"{own}.attn_rel_b.weight", (32, HEADS))
        _add_ffn(m, Arch(gated=gated), gated, own, (N_EMBD, N_FF), _types(m.type), False)
    m.norm(f"dec.{blk}.cross_attn_norm", N_EMBD, False)
    for name in ("q", "k", "v", "o"):
        m.add(f"dec.{blk}.cross_attn_{name}.weight", (N_EMBD, N_EMBD), m.other)


def _t5_keys(m: _Maker) -> None:
    m.writer.add_relative_attn_buckets_count(32)
    m.writer.add_decoder_start_token_id(256)
    m.scales |= {"attn_q": 32**-0.5}  # T5 trains without a scale in attention
    for stack in ("enc", "dec"):
        m.norm(f"{stack}.output_norm", N_EMBD, False)


ALTUP, N_ALTUP, LAUREL = 4, 256, 64  # fixed in upstream's graph of Gemma 3n
STEP = 0.2
GEMMA3N_LAYERS = 21  # upstream's graph lets all above 20 use the keys of others


def _gemma3n(m: _Maker, blk: str, gated: bool) -> None:
    _usual(m, blk, gated)
    for name in ("altup_router_norm", "altup_correct_scale"):
        m.norm(f"{blk}.{name}", N_EMBD, False)
    # Small steps, as in a trained model: 21 layers of full ones magnify a last bit a thousandfold.
    for name in ("post_attention_norm", "post_ffw_norm", "post_norm", "laurel_post_norm"):
        m.writer.add_tensor(f"{blk}.{name}.weight", np.full(N_EMBD, STEP, np.float32))
    for name in ("attn_q_norm", "attn_k_norm"):
        m.norm(f"{blk}.{name}", 32, False)
    shapes = {
        "inp_gate": (N_ALTUP, N_EMBD), "proj": (N_EMBD, N_ALTUP),
        "altup_correct_coef": (ALTUP, ALTUP), "altup_predict_coef": (ALTUP * ALTUP, ALTUP),
        "altup_router": (ALTUP, N_EMBD), "laurel_l": (LAUREL, N_EMBD), "laurel_r": (N_EMBD, LAUREL),
    }  # fmt: skip
    for name, shape in shapes.items():
        m.add(f"{blk}.{name}.weight", shape, "F32" if "altup" in name else m.other)


def _gemma3n_keys(m: _Maker) -> None:
    w = m.writer
    w.add_key_length(32)
    w.add_value_length(32)
    w.add_sliding_window(64)
    w.add_sliding_window_pattern([i % 5 < 4 for i in range(GEMMA3N_LAYERS)])
    for name in ("altup_proj", "altup_unembd_proj"):
        m.add(f"{name}.weight", (ALTUP - 1, N_EMBD, N_EMBD))
    m.add("per_layer_token_embd.weight", (N_VOCAB, N_ALTUP * GEMMA3N_LAYERS))
    m.add("per_layer_model_proj.weight", (N_ALTUP * GEMMA3N_LAYERS, N_EMBD))
    m.norm("per_layer_proj_norm", N_ALTUP, False)


BLOCKS: dict[str, Block] = {
    "bitnet": _bitnet, "gemma3n": _gemma3n, "glm4": _glm4, "plm": _plm, "t5": _t5,
}  # fmt: skip


def _apertus_keys(m: _Maker) -> None:
    for name in ("alpha_n", "alpha_p", "beta", "eps"):
        m.writer.add_array(f"xielu.{name}", [0.5] * N_LAYER)


KEYS: dict[str, Callable[[_Maker], None]] = {
    "apertus": _apertus_keys, "gemma3n": _gemma3n_keys, "plm": _plm_keys, "t5": _t5_keys,
}  # fmt: skip


class _FamilyMaker(_Maker):
    def __init__(
        self, path: Path, arch: str, seed: int, type: str, other: str, biases: bool
    ) -> None:
        super().__init__(path, arch, seed)
        self.arch, self.type, self.other, self.biases = arch, type, other, biases


def make_family(
    path: Path, arch: str, *, gated: bool = True, type: str = "F32", other_type: str = "F32",
    biases: bool = False, activation: str | None = None, seed: int = 0,
) -> Path:  # fmt: skip
    """Write a dense GGUF of ``arch`` with the FFN matrices in ``type``; returns ``path``.

    64 wide, FFNs of 192, two layers (Gemma 3n: 21), vocabulary and tokenizer of ``tiny_models``.
    ``biases``: of the FFN.  ``activation`` is written as ``<arch>.hidden_activation``.
    """
    m = _FamilyMaker(path, arch, seed, type, other_type, biases)
    spec = _spec(arch, gated)
    layers = GEMMA3N_LAYERS if arch == "gemma3n" else N_LAYER
    _add_keys(m, spec, N_EMBD, N_FF, layers, N_CTX)
    if activation:
        m.writer.add_string(f"{arch}.hidden_activation", activation)
    m.add("token_embd.weight", (N_VOCAB, N_EMBD), other_type)
    if arch != "t5":
        m.norm("output_norm", N_EMBD, not spec.rms)
    if arch not in ("bitnet", "plm", "eurobert"):  # theirs is that of the embeddings, or none
        m.add("output.weight", (N_VOCAB, N_EMBD), other_type)
    KEYS.get(arch, lambda m: None)(m)
    for i in range(layers):
        BLOCKS.get(arch, _usual)(m, f"blk.{i}", gated)
    m.writer.write_header_to_file()
    m.writer.write_kv_data_to_file()
    m.writer.write_tensors_to_file()
    m.writer.close()
    return path
