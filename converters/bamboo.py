"""Bamboo and TurboSparse-Mistral for upstream's Hugging Face converter, which does not know them.

Run inside it by ``hf_script.py``.  They are Mistral with ReLU on gate and up (dReLU), and call it
"relu" in ``config.json``.
"""

from __future__ import annotations

from conversion.base import ModelBase
from conversion.llama import LlamaModel


@ModelBase.register("BambooForCausalLM")
class BambooModel(LlamaModel):
    """Upstream's class for Mistral, which writes architecture ``llama``."""

    model_arch = LlamaModel.model_arch

    def set_gguf_parameters(self) -> None:
        """Upstream's keys, and the activation."""
        if self.hparams.get("hidden_act", "relu") != "relu":
            raise ValueError(
                f"config.json has hidden_act '{self.hparams['hidden_act']}', expected 'relu', which"
                " Bamboo applies to gate and up"
            )
        super().set_gguf_parameters()
        self.gguf_writer.add_string("llama.hidden_activation", "drelu")
