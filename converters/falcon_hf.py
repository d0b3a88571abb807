"""Falcon for upstream's Hugging Face converter: its class, told what the checkpoint's form is.

Run inside it by ``hf_script.py``.  transformers writes ``num_kv_heads`` into every ``config.json``
and ignores it in multi-query checkpoints (7B), which have one; upstream's class believes it.
"""

from __future__ import annotations

from typing import Any

from conversion.base import ModelBase
from conversion.falcon import FalconModel


@ModelBase.register("FalconForCausalLM")
class OneKeyFalconModel(FalconModel):
    """Upstream's, with the number of key heads that the weights have."""

    model_arch = FalconModel.model_arch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._new_form = self.hparams.get("new_decoder_architecture", False)
        if self.hparams.get("multi_query", True) and not self._new_form:
            self.hparams["num_kv_heads"] = 1

    def set_gguf_parameters(self) -> None:
        """Upstream's keys, after refusing forms that its graph would run as another model."""
        parallel = self._new_form or self.hparams.get("parallel_attn", True)
        if not parallel or self.hparams.get("alibi", False) or self.hparams.get("bias", False):
            raise ValueError(
                "config.json has parallel_attn false, or alibi or bias true, expected the forms of"
                " Falcon 7B, 40B and 180B, which are all that llama.cpp runs"
            )
        super().set_gguf_parameters()
