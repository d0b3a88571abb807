"""Families made ReLU, from Hugging Face folders: their activation arrives, whoever says it.

Needs the extra `hf`. Random checkpoints against transformers' numbers: one whose config.json names
ReLU, one whose config.json does not and which is converted with `--activation relu`.
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
from families import note
from test_hf import MISSING, Checkpoint
from test_hf import Checkpoints as RandomCheckpoints
from test_opt_hf import load

from gguf_flash.converters import convert, convert_dense
from gguf_flash.format import read_layout

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 320, "initializer_range": 0.1,
}  # fmt: skip
POSITIONS = 96
SINGLE = 8  # of these, decoded one by one
N_FF = 256
SPM_SIZE = 600
TEXT = "Call me Ishmael. Naïve café — русский 漢字かな 한국어 🐳👩\u200d🚀, 3.14159\n\n\tline  two"


@dataclass(frozen=True)
class Family:
    """An architecture: the key of config.json for its activation, and what its authors wrote."""

    model_type: str
    key: str
    usual: str
    threshold: float = 0.0
    table: str = ""  # its line of the table in converters/README.md
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """Options of every conversion."""
        return ["--threshold", str(self.threshold)] if self.threshold else []


_GQA = {"num_key_value_heads": 2, "intermediate_size": N_FF}
FAMILIES = {
    "falcon-40b": Family(
        "falcon", "activation", "gelu", table="falcon",
        options={"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-7b": Family("falcon", "activation", "gelu", 0.0, "falcon", {"multi_query": True}),
    "phi-2": Family("phi", "hidden_act", "gelu_new", 0.0, "phi2", {"intermediate_size": N_FF}),
    "llama": Family("llama", "hidden_act", "silu", 0.0, "llama", _GQA),
    "llama-fatrelu": Family("llama", "hidden_act", "silu", 0.1, "prosparse", _GQA),
}  # fmt: skip
# Of the largest logit, between flash and dense of one type. In Q4_0 the engine takes down columns
# as F16, and llama.cpp rounds what it multiplies with down's rows to 8 bits.
APART = {"f16": 2e-3, "q8_0": 3e-2, "q4_0": 3e-2}
# FATReLU jumps: a value beside the threshold falls to either side by its last bit in F16.
FATRELU_JUMP = 2e-2


class Checkpoints(RandomCheckpoints):
    """Random checkpoints of FAMILIES and their files, each made once."""

    def _tokenizer(self, family: Family, folder: Path) -> int:
        if family.model_type != "llama":
            self.bpe.save_pretrained(folder)
            return len(self.bpe)
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            input=str(self.english), model_prefix=str(folder / "tokenizer"), vocab_size=SPM_SIZE,
            model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
            remove_extra_whitespaces=False, minloglevel=2,
        )  # fmt: skip
        return SPM_SIZE

    def _make(self, kind: str) -> Checkpoint:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        family, folder = FAMILIES[kind], self.folder / kind
        folder.mkdir()
        options = {**SHAPE, "vocab_size": self._tokenizer(family, folder), family.key: "relu"}
        options |= {**family.options, "bos_token_id": 1, "eos_token_id": 2}
        torch.manual_seed(1)
        config = AutoConfig.for_model(family.model_type, **options)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for key, p in model.named_parameters():
                if p.ndim == 1:  # biases and norms, which are born 0 and 1
                    p.add_(torch.randn_like(p) * 0.1)
                elif key.endswith(("down_proj.weight", "fc2.weight", "dense_4h_to_h.weight")):
                    p.mul_(3)
        model.save_pretrained(folder)
        checkpoint = Checkpoint(kind, folder)
        if family.threshold:
            for layer in checkpoint.model.model.layers:
                layer.mlp.act_fn = torch.nn.Threshold(family.threshold, 0.0)
        return checkpoint

    def silent(self, name: str) -> Path:
        """The same weights, with a config.json that names the family's usual activation."""
        folder = self.folder / f"{name}-silent"
        if not folder.exists():
            shutil.copytree(self[name].folder, folder)
            config = json.loads((folder / "config.json").read_text())
            config[FAMILIES[name].key] = FAMILIES[name].usual
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        out = self.folder / f"{name}.gguf"
        if not out.exists():
            make(out)
        return out

    def dense(self, name: str) -> Path:
        """Written in F32 by the command."""
        words = ["--dense", "--outtype", "f32", *FAMILIES[name].words]
        source = self[name].folder
        return self.once(name, lambda out: self.cli("convert", source, "--out", out, *words))

    def flash(self, name: str, select: str) -> Path:
        """Made from the dense file, which says all that is to be known."""
        dense = self.dense(name)
        return self.once(f"{name}-{select}", lambda out: convert(dense, out, select=select))


@pytest.fixture(scope="module")
def checkpoints(cli: Cli, english: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(cli, tmp_path_factory.mktemp("families"), english)


TOKENS = [int(t) for t in np.random.default_rng(5).integers(300, SPM_SIZE, POSITIONS)]


def evaluate(model: Path) -> tuple[np.ndarray[Any, Any], float]:
    """Logits of TOKENS, and the share of neurons selected for a token (of a dense file, 0)."""
    llm = load(model)
    llm.eval(TOKENS[:-SINGLE])
    before = llm.flash_stats().get("total", {}).get("selected", 0)
    for token in TOKENS[-SINGLE:]:
        llm.eval([token])
    found = llm.scores[:POSITIONS].copy()
    selected = llm.flash_stats().get("total", {}).get("selected", 0) - before
    llm.close()
    assert np.isfinite(found).all()
    return found, selected / (SHAPE["num_hidden_layers"] * N_FF * SINGLE)


def largest_difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_that_names_relu(
    checkpoints: Checkpoints, name: str, record_property: Any
) -> None:
    wanted = checkpoints[name].logits(TOKENS)
    assert wanted.std() > 0.5
    dense, _ = evaluate(checkpoints.dense(name))
    difference = largest_difference(dense, wanted)
    record_property("max_logit_difference", difference)
    print(f"{name}: dense differs by {difference:.2e} of a deviation of {wanted.std():.2f}")
    note(
        FAMILIES[name].table, "largest difference of logits, dense to transformers", difference,
        1e-3, checkpoints.flash(name, "gate"), "F32",
    )  # fmt: skip
    for select in ("all", "gate"):
        flash, share = evaluate(checkpoints.flash(name, select))
        apart = largest_difference(flash, dense) / float(np.abs(dense).max())
        print(f"{name}: flash {select}: {share:.2f} selected")
        note(
            FAMILIES[name].table, f"of the largest logit, select {select} to dense", apart, 1e-5,
            checkpoints.flash(name, select), "F32",
        )  # fmt: skip
        assert largest_difference(flash, wanted) < 1e-3
        assert share == 1 if select == "all" else 0.1 < share < 0.8
        layout = read_layout(checkpoints.flash(name, select))
        assert layout.activation == "relu"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_that_does_not(checkpoints: Checkpoints, cli: Cli, name: str) -> None:
    """And the activation decides: without the option the numbers are others."""
    wanted, folder = checkpoints[name].logits(TOKENS), checkpoints.silent(name)
    words = ["--outtype", "f32", "--activation", "relu", *FAMILIES[name].words]
    for select in (["--dense"], ["--select", "gate"]):
        out = checkpoints.folder / f"silent-{name}{select[-1]}.gguf"
        cli("convert", folder, "--out", out, *words, *select)
        found, share = evaluate(out)
        assert largest_difference(found, wanted) < 1e-3
        assert select == ["--dense"] or 0.1 < share < 0.8
    usual = checkpoints.folder / f"silent-{name}-usual.gguf"
    cli("convert", folder, "--out", usual, "--outtype", "f32")
    assert largest_difference(evaluate(usual)[0], wanted) > 0.1


@pytest.mark.parametrize("outtype", APART)
@pytest.mark.parametrize("name", FAMILIES)
def test_other_types(checkpoints: Checkpoints, name: str, outtype: str, tmp_path: Path) -> None:
    source, dense, flash = checkpoints.dense(name), tmp_path / "d.gguf", tmp_path / "f.gguf"
    convert_dense(source, dense, outtype=outtype)
    convert(source, flash, outtype=outtype, select="gate")
    expected, (found, share) = evaluate(dense)[0], evaluate(flash)
    apart = largest_difference(found, expected) / float(np.abs(expected).max())
    limit = max(APART[outtype], FATRELU_JUMP if FAMILIES[name].threshold else 0)
    note(
        FAMILIES[name].table, "of the largest logit, select gate to dense", apart, limit, flash,
        outtype.upper(),
    )  # fmt: skip
    assert 0.1 < share < 0.8


@pytest.mark.parametrize("name", FAMILIES)
def test_text_goes_through_the_tokenizer_and_back(checkpoints: Checkpoints, name: str) -> None:
    llm = load(checkpoints.flash(name, "gate"))
    tokens = llm.tokenize(TEXT.encode(), add_bos=False)
    assert llm.detokenize(tokens).decode().removeprefix(" ") == TEXT
    llm.close()


def test_a_falcon_that_upstream_would_take_for_another(
    checkpoints: Checkpoints, cli: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["falcon-7b"].folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "alibi": True}))
    done = cli("convert", folder, "--out", tmp_path / "out.gguf", code=2)
    assert "expected the forms of Falcon 7B, 40B and 180B" in done.stderr
    assert len(done.stderr.splitlines()) == 1
