"""Persimmon for upstream's Hugging Face converter, of which this is one more class.

Run inside it by ``hf_script.py``.  What differs from other architectures that upstream converts:
``query_key_value`` holds query, key and value of one head after the other, and the tokenizer is a
SentencePiece model that is usually a unigram one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
from conversion.base import ModelBase, TextModel

from gguf_flash.converters.activations import activation_of

if TYPE_CHECKING:
    from torch import Tensor

_T = gguf.MODEL_TENSOR
_OUTER = {
    "embed_tokens": _T.TOKEN_EMBD,
    "final_layernorm": _T.OUTPUT_NORM,
    "lm_head": _T.OUTPUT,
}
_IN_LAYER = {
    "input_layernorm": _T.ATTN_NORM,
    "self_attn.q_layernorm": _T.ATTN_Q_NORM,
    "self_attn.k_layernorm": _T.ATTN_K_NORM,
    "self_attn.dense": _T.ATTN_OUT,
    "post_attention_layernorm": _T.FFN_NORM,
    "mlp.dense_h_to_4h": _T.FFN_UP,
    "mlp.dense_4h_to_h": _T.FFN_DOWN,
}
_FUSED = "self_attn.query_key_value"
_SPLIT = (_T.ATTN_Q, _T.ATTN_K, _T.ATTN_V)
_ROPE_TYPES = ("default", "linear")
_UNIGRAM = 1  # of SentencePiece's TrainerSpec.ModelType

# gguf-py has no Persimmon: its tables of architectures get one more row.
ARCH: Any = "persimmon"
gguf.MODEL_ARCH_NAMES[ARCH] = ARCH
gguf.MODEL_TENSORS[ARCH] = [*_OUTER.values(), *_IN_LAYER.values(), *_SPLIT]


def _sentencepiece_model(path: Path) -> Any:
    # transformers' copy, for sentencepiece's own needs a newer protobuf than upstream's converter.
    from transformers.utils import sentencepiece_model_pb2_new as pb2

    return pb2.ModelProto.FromString(path.read_bytes())


def _spell_ascii_bytes(tokens: list[bytes], scores: list[float], types: list[int]) -> None:
    """Make the byte tokens of ASCII characters that are no tokens themselves those characters.

    llama.cpp's unigram tokenizer has no bytes: a line end would be an unknown token.  The score is
    what SentencePiece gives a character that it does not know.
    """
    known, kinds = set(tokens), gguf.TokenType
    score = min(s for s, t in zip(scores, types, strict=True) if t == kinds.NORMAL) - 10.0
    for i, text in enumerate(tokens):
        if types[i] != kinds.BYTE or (byte := int(text[3:5], 16)) not in range(1, 128):
            continue
        character = bytes([byte])
        if byte != ord(" ") and character not in known:  # a blank is the token of U+2581
            tokens[i], scores[i], types[i] = character, score, kinds.NORMAL


@ModelBase.register("PersimmonForCausalLM")
class PersimmonModel(TextModel):
    """Writes what cpp_patch/models/persimmon.cpp reads."""

    model_arch = ARCH

    def set_gguf_parameters(self) -> None:
        """Keys that upstream's general ones lack, after refusing what the graph has not."""
        rope_type = self.rope_parameters.get("rope_type") or "default"
        if rope_type not in _ROPE_TYPES:
            raise ValueError(
                f"config.json has rope_scaling of type '{rope_type}', expected one of"
                f" {', '.join(_ROPE_TYPES)}: others are not supported for Persimmon"
            )
        super().set_gguf_parameters()
        hparams = self.hparams
        activation = activation_of(ARCH, hparams.get("hidden_act"), None)
        if activation != activation_of(ARCH, None, None):
            self.gguf_writer.add_string(f"{ARCH}.hidden_activation", activation)
        width = hparams["hidden_size"] // hparams["num_attention_heads"]
        rotated = int(width * hparams.get("partial_rotary_factor", 0.5))
        self.gguf_writer.add_rope_dimension_count(rotated)
        if "rope_theta" not in self.rope_parameters:
            self.gguf_writer.add_rope_freq_base(25000.0)  # PersimmonConfig's

    def set_vocab(self) -> None:
        """The SentencePiece model, unigram or BPE, else a BPE with bytes out of tokenizer.json."""
        path = self.dir_model / "tokenizer.model"
        if not path.is_file():
            self._set_vocab_from_json()
        elif (model := _sentencepiece_model(path)).trainer_spec.model_type == _UNIGRAM:
            self._set_vocab_unigram(model.normalizer_spec)
        else:
            self._set_vocab_sentencepiece()
        # LlamaTokenizer's, where tokenizer_config.json says nothing.
        config_path = self.dir_model / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        self.gguf_writer.add_add_bos_token(config.get("add_bos_token", True))
        self.gguf_writer.add_add_eos_token(config.get("add_eos_token", False))

    def _set_vocab_unigram(self, normalizer: Any) -> None:
        """As upstream's T5 has it, for llama.cpp's "llama" merges pairs, which is another thing."""
        tokens, scores, types = self._create_vocab_sentencepiece()
        _spell_ascii_bytes(tokens, scores, types)
        writer = self.gguf_writer
        writer.add_tokenizer_model("t5")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_add_space_prefix(normalizer.add_dummy_prefix)
        writer.add_remove_extra_whitespaces(normalizer.remove_extra_whitespaces)
        if normalizer.precompiled_charsmap:
            writer.add_precompiled_charsmap(normalizer.precompiled_charsmap)
        gguf.SpecialVocab(self.dir_model, n_vocab=len(tokens)).add_to_gguf(writer)

    def _set_vocab_from_json(self) -> None:
        try:
            self._set_vocab_llama_hf()
        except (FileNotFoundError, TypeError) as error:
            raise ValueError(
                "the folder has no tokenizer.model, and its tokenizer.json is not there or not a"
                " BPE with byte_fallback, which is the only other kind supported for Persimmon;"
                " add the tokenizer.model of the checkpoint"
            ) from error

    def modify_tensors(
        self, data_torch: Tensor, name: str, bid: int | None
    ) -> Iterable[tuple[str, Tensor]]:
        """The tensor under its name in the file; the fused one as three."""
        path, _, suffix = name.removeprefix("model.").rpartition(".")
        path = path if bid is None else path.removeprefix(f"layers.{bid}.")
        if path == "lm_head" and self.hparams.get("tie_word_embeddings", False):
            return
        if path.endswith("rotary_emb") and suffix == "inv_freq":
            return  # old checkpoints hold what follows from the configuration
        if path == _FUSED:
            yield from self._split(data_torch, bid, suffix)
            return
        key = (_OUTER if bid is None else _IN_LAYER).get(path)
        if key is None:
            raise ValueError(f"tensor '{name}' belongs to no Persimmon model")
        yield self.format_tensor_name(key, bid, f".{suffix}"), data_torch

    def _split(self, fused: Tensor, bid: int | None, suffix: str) -> Iterable[tuple[str, Tensor]]:
        """Query, key and value; rows are (head, which of them, place in the head)."""
        heads = fused.view(self.hparams["num_attention_heads"], 3, -1, *fused.shape[1:])
        for i, key in enumerate(_SPLIT):
            part = heads[:, i].reshape(-1, *fused.shape[1:])
            yield self.format_tensor_name(key, bid, f".{suffix}"), part
