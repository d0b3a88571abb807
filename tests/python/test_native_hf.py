"""Checkpoints that are sparse by nature, from Hugging Face folders, against transformers' numbers.

Needs the extra `hf`. Random weights in each architecture's own form. What transformers has no class
for is computed by the class it was derived from, changed as its authors changed it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli
from families import Array, mean_kl, note, tokens
from test_families import logits, logits_of
from test_hf import MISSING

from gguf_flash.converters import convert
from gguf_flash.format import read_layout
from gguf_flash.runtime import lib_dir

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
N_LAYER, N_EMBD, N_FF = 2, 64, 192
VOCAB = 600
CUT = 0.05  # of FATReLU
ENCODED = 24  # tokens that T5's encoder reads, as in family_logits.py
TOLERANCE = 1e-5
FORMS = ("all", "gate")


@dataclass(frozen=True)
class Kind:
    """A checkpoint: transformers' class, what config.json says beside it, what the graph gets."""

    model_type: str
    activation: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], None] = lambda model: None
    threshold: float = 0.0


def _drelu(model: Any) -> None:
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda x, m=mlp: m.down_proj(m.gate_proj(x).relu() * m.up_proj(x).relu())


def _fatrelu(model: Any) -> None:
    import torch

    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Threshold(CUT, 0.0)


def _minicpm(model: Any) -> None:
    """Its scales are those of Llama's weights."""
    _fatrelu(model)
    model.model.embed_tokens.weight.mul_(12)
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.mul_(1.4 / N_LAYER**0.5)
    model.lm_head.weight.mul_(16 / N_EMBD)


def _ternary(model: Any) -> None:
    """As upstream's converter rounds BitNet's weights."""
    for name, p in model.named_parameters():
        if name.endswith("_proj.weight"):
            scale = p.abs().mean().clamp(min=1e-5)
            p.copy_((p / scale).round().clamp(-1, 1) * scale)


_LLAMA = {"num_key_value_heads": 2, "hidden_act": "relu"}
_FATRELU = {"hidden_act": "fatrelu", "hidden_act_param": CUT}
_RELU2 = {"num_key_value_heads": 2, "hidden_act": "relu2"}
KINDS = {
    "drelu": Kind(
        "mistral", "drelu", {**_LLAMA, "sliding_window": None},
        {"architectures": ["BambooForCausalLM"], "model_type": "bamboo"}, _drelu,
    ),
    "prosparse": Kind("llama", "relu", _LLAMA, _FATRELU, _fatrelu, threshold=CUT),
    "minicpm": Kind(
        "llama", "relu", _LLAMA,
        {
            "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 12,
            "scale_depth": 1.4, "dim_model_base": 16, "rope_scaling": None, **_FATRELU,
        },
        _minicpm, threshold=CUT,
    ),
    "arcee": Kind("arcee", "relu_sqr", _RELU2),
    "bitnet": Kind("bitnet", "relu_sqr", {**_RELU2, "tie_word_embeddings": True}, {}, _ternary),
    "t5": Kind(
        "t5", "relu",
        {"d_model": N_EMBD, "d_kv": 32, "d_ff": N_FF, "num_layers": N_LAYER, "num_heads": 2,
         "feed_forward_proj": "relu", "decoder_start_token_id": 0, "pad_token_id": 0,
         "tie_word_embeddings": False},  # tied, upstream leaves out the factor d_model ** -0.5,
    ),
}  # fmt: skip


def _tokenizer(folder: Path, english: Path, name: str) -> None:
    import sentencepiece

    prefix = "spiece" if name == "t5" else "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        input=str(english), model_prefix=str(folder / prefix), vocab_size=VOCAB,
        model_type="unigram" if name == "t5" else "bpe", byte_fallback=name != "t5", minloglevel=2,
        pad_id=0 if name == "t5" else -1, eos_id=1 if name == "t5" else 2,
        unk_id=2 if name == "t5" else 0, bos_id=-1 if name == "t5" else 1,
    )  # fmt: skip


def skip_without_protobuf() -> None:
    """Upstream's converter reads T5's tokenizer with it."""
    try:
        import sentencepiece.sentencepiece_model_pb2  # noqa: F401
    except Exception as error:  # of protobuf's, when it is older than what made the module
        pytest.skip(f"sentencepiece and protobuf do not fit: {error}")


class Checkpoints:
    """Random checkpoints with what transformers computes from them, each made once."""

    def __init__(self, folder: Path, english: Path) -> None:
        self.folder, self.english = folder, english
        self._made: dict[str, tuple[Path, Array]] = {}

    def __getitem__(self, name: str) -> tuple[Path, Array]:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> tuple[Path, Array]:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        kind, folder = KINDS[name], self.folder / name
        folder.mkdir()
        _tokenizer(folder, self.english, name)
        shape = {
            "hidden_size": N_EMBD, "intermediate_size": N_FF, "num_hidden_layers": N_LAYER,
            "num_attention_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1,
        }  # fmt: skip
        options = {**({} if name == "t5" else shape), "vocab_size": VOCAB, **kind.options}
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind.model_type, **options)
        auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
        model = auto.from_config(config).float().eval()
        with torch.no_grad():
            for key, p in model.named_parameters():
                if p.ndim == 1:  # norms, which are born 1
                    p.add_(torch.randn_like(p) * 0.1)
                elif key.endswith(("down_proj.weight", "wo.weight")):
                    p.mul_(3)
            model.save_pretrained(folder)
            kind.change(model)
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**said, **kind.config}))
        return folder, self._logits(name, model)

    def _logits(self, name: str, model: Any) -> Array:
        import torch

        text = torch.tensor([tokens()])
        with torch.inference_mode():
            if name == "t5":
                read = torch.tensor([tokens(len(tokens()) + ENCODED)[-ENCODED:]])
                found = model(input_ids=read, decoder_input_ids=text).logits[0].numpy()
            else:
                found = model(text).logits[0].numpy()
        wanted: Array = found
        return wanted


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, english: Path) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("native"), english)


@pytest.mark.parametrize("name", KINDS)
def test_predictions_are_those_of_transformers(
    checkpoints: Checkpoints, cli: Cli, tmp_path: Path, name: str
) -> None:
    """The folder says all that is to be known: no option tells the activation."""
    if name == "t5":
        skip_without_protobuf()
    kind, (folder, wanted) = KINDS[name], checkpoints[name]
    dense = tmp_path / "dense.gguf"
    cli("convert", folder, "--out", dense, "--outtype", "f32", "--dense")
    files = []
    for select in FORMS:
        files.append(tmp_path / f"{select}.gguf")
        convert(dense, files[-1], select=select)
    own, *rest = logits_of([dense, *files], lib_dir())
    assert mean_kl(wanted, own) < TOLERANCE
    for select, flash, found in zip(FORMS, files, rest, strict=True):
        layout = read_layout(flash)
        assert layout.activation == kind.activation
        assert set(layout.thresholds) == ({np.float32(kind.threshold)} if kind.threshold else set())
        kl = mean_kl(wanted, found)
        note(name, f"KL, select {select}, to transformers", kl, TOLERANCE, flash, "F32")


def test_without_its_activation_it_is_another_model(
    checkpoints: Checkpoints, cli: Cli, tmp_path: Path
) -> None:
    folder, wanted = checkpoints["drelu"]
    for activation in ("relu", "drelu"):
        out = tmp_path / f"{activation}.gguf"
        cli("convert", folder, "--out", out, "--outtype", "f32", "--activation", activation)
        assert (mean_kl(wanted, logits(out, lib_dir())) < TOLERANCE) == (activation == "drelu")


def copied(folder: Path, out: Path, **config: Any) -> Path:
    """A checkpoint with other words in its config.json."""
    shutil.copytree(folder, out)
    said = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**said, **config}))
    return out


def test_packed_weights(checkpoints: Checkpoints, cli: Cli, tmp_path: Path) -> None:
    packed = {"quantization_config": {"quant_method": "bitnet"}}
    folder = copied(checkpoints["bitnet"][0], tmp_path / "model", **packed)
    done = cli("convert", folder, "--out", tmp_path / "out.gguf", "--quiet", code=2)
    assert done.stderr.count("\n") == 1 and "expected the checkpoint with BF16" in done.stderr


@pytest.mark.parametrize("value", [-1, "x", True, float("inf")])
def test_a_threshold_that_is_none(
    checkpoints: Checkpoints, cli: Cli, tmp_path: Path, value: Any
) -> None:
    folder = copied(checkpoints["prosparse"][0], tmp_path / "model", hidden_act_param=value)
    done = cli("convert", folder, "--out", tmp_path / "out.gguf", "--quiet", code=2)
    assert done.stderr.count("\n") == 1 and "hidden_act_param" in done.stderr
