"""BitNet b1.58 2B for upstream's Hugging Face converter, whose class knows an older checkpoint.

Run inside it by ``hf_script.py``.  The newer has other names for its norms, and a BPE tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from conversion.base import ModelBase
from conversion.bitnet import BitnetModel

if TYPE_CHECKING:
    from torch import Tensor

_OLDER_NAMES = {"mlp.ffn_sub_norm": "mlp.ffn_layernorm", "attn_sub_norm": "inner_attn_ln"}


@ModelBase.register("BitNetForCausalLM")
class NewerBitnetModel(BitnetModel):
    """Upstream's, for the checkpoint with 30 layers."""

    model_arch = BitnetModel.model_arch

    def set_vocab(self) -> None:
        """SentencePiece where there is one, else byte-level BPE."""
        if (self.dir_model / "tokenizer.model").is_file():
            super().set_vocab()
        else:
            self._set_vocab_gpt2()

    def dequant_model(self) -> None:
        """Upstream's, which fails on packed weights, and would scale them by the share of zeros."""
        quantization = self.hparams.get("quantization_config") or {}
        if quantization.get("quant_method") == "bitnet":
            raise ValueError(
                "its weights are packed, four in a byte, expected the checkpoint with BF16 weights"
                " (bitnet-b1.58-2B-4T-bf16)"
            )
        super().dequant_model()

    def modify_tensors(
        self, data_torch: Tensor, name: str, bid: int | None
    ) -> Iterable[tuple[str, Tensor]]:
        """Upstream's, under the names that it knows."""
        for newer, older in _OLDER_NAMES.items():
            name = name.replace(newer, older)
        yield from super().modify_tensors(data_torch, name, bid)
