"""OPT for upstream's Hugging Face converter, of which this is one more class.

Run inside it by ``hf_script.py``.  Differences from other architectures that upstream converts:
``embed_positions`` has two rows in front that no position uses, the 350M form normalises after
each half of a layer and projects its narrower embeddings, and the tokenizer is GPT-2's with ids
of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import gguf
from conversion.base import ModelBase, TextModel

from gguf_flash.converters.activations import activation_of

if TYPE_CHECKING:
    from torch import Tensor

_T = gguf.MODEL_TENSOR
_OUTER = {
    "embed_tokens": _T.TOKEN_EMBD,
    "embed_positions": _T.POS_EMBD,
    "project_in": _T.FC,
    "project_out": _T.DENSE_2_OUT,
    "final_layer_norm": _T.OUTPUT_NORM,
    "lm_head": _T.OUTPUT,
}
_IN_LAYER = {
    "self_attn_layer_norm": _T.ATTN_NORM,
    "self_attn.q_proj": _T.ATTN_Q,
    "self_attn.k_proj": _T.ATTN_K,
    "self_attn.v_proj": _T.ATTN_V,
    "self_attn.out_proj": _T.ATTN_OUT,
    "final_layer_norm": _T.FFN_NORM,
    "fc1": _T.FFN_UP,
    "fc2": _T.FFN_DOWN,
}
_UNUSED_POSITIONS = 2

# gguf-py has no OPT: its tables of architectures get one more row.
ARCH: Any = "opt"
gguf.MODEL_ARCH_NAMES[ARCH] = ARCH
gguf.MODEL_TENSORS[ARCH] = [*_OUTER.values(), *_IN_LAYER.values()]


@ModelBase.register("OPTForCausalLM")
class OPTModel(TextModel):
    """Writes what cpp_patch/models/opt.cpp reads."""

    model_arch = ARCH

    def set_gguf_parameters(self) -> None:
        """Keys that upstream's general ones lack, after refusing what the graph has not."""
        super().set_gguf_parameters()
        hparams, writer = self.hparams, self.gguf_writer
        if not hparams.get("layer_norm_elementwise_affine", True):
            raise ValueError(
                "config.json has layer_norm_elementwise_affine false, expected true: norms without"
                " weights are not supported for OPT; add weights of 1 and biases of 0"
            )
        activation = activation_of(ARCH, hparams.get("activation_function"), None)
        if activation != activation_of(ARCH, None, None):
            writer.add_string(f"{ARCH}.hidden_activation", activation)
        writer.add_feed_forward_length(hparams["ffn_dim"])
        writer.add_layer_norm_eps(1e-5)  # torch's, which no config changes
        writer.add_norm_before_residual(hparams.get("do_layer_norm_before", True))
        width = hparams.get("word_embed_proj_dim") or hparams["hidden_size"]
        if width != hparams["hidden_size"]:
            writer.add_dense_features_dims("dense_2", hparams["hidden_size"], width)

    def set_vocab(self) -> None:
        """GPT-2's byte-level BPE; a leading token exactly if the folder's own tokenizer adds it."""
        from transformers import AutoTokenizer

        tokens, types, pre = self.get_vocab_base()
        self.gguf_writer.add_tokenizer_model("gpt2")
        self.gguf_writer.add_tokenizer_pre(pre)
        self.gguf_writer.add_token_list(tokens)
        self.gguf_writer.add_token_types(types)
        tokenizer = AutoTokenizer.from_pretrained(self.dir_model)
        special = gguf.SpecialVocab(self.dir_model, load_merges=True, n_vocab=len(tokens))
        bos = tokenizer.bos_token_id
        special.special_token_ids.update(bos=bos, eos=tokenizer.eos_token_id)
        special.add_special_token = {"bos": tokenizer("a").input_ids[0] == bos}
        special.add_to_gguf(self.gguf_writer)

    def get_vocab_base_pre(self, tokenizer: Any) -> str:
        """Upstream's name of the splitting rules: its digest covers the ids, which are OPT's."""
        found = json.loads(tokenizer.backend_tokenizer.to_str())
        pre = found.get("pre_tokenizer") or {}
        plain = pre.get("type") == "ByteLevel" and pre.get("use_regex", True)
        if not plain or pre.get("add_prefix_space") or found.get("normalizer"):
            raise ValueError(
                f"the tokenizer splits text by {pre or 'nothing'}, expected GPT-2's byte-level BPE"
                " without a prefix space, which is OPT's"
            )
        return "gpt-2"

    def modify_tensors(
        self, data_torch: Tensor, name: str, bid: int | None
    ) -> Iterable[tuple[str, Tensor]]:
        """The tensor under its name in the file."""
        path, _, suffix = name.removeprefix("model.").removeprefix("decoder.").rpartition(".")
        if path == "lm_head" and self.hparams.get("tie_word_embeddings", True):
            return
        if path == "embed_positions":
            data_torch = data_torch[_UNUSED_POSITIONS:]
        table = _OUTER if bid is None else _IN_LAYER
        key = table.get(path if bid is None else path.removeprefix(f"layers.{bid}."))
        if key is None:
            raise ValueError(f"tensor '{name}' belongs to no OPT model")
        yield self.format_tensor_name(key, bid, f".{suffix}"), data_torch
