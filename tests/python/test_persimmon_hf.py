"""Persimmon from Hugging Face folders: random checkpoints against transformers' numbers.

Needs the extra `hf`. The tokenizer is a small SentencePiece model of the published one's kind.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli
from families import note
from test_hf import MISSING, Checkpoint
from test_opt_hf import POSITIONS, STEPS, evaluate, greedy, load

from gguf_flash.converters import convert
from gguf_flash.converters.upstream import _convert_folder
from gguf_flash.format import read_layout

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
VOCAB = 600
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 320, "initializer_range": 0.2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "unigram": SMALL,
    "plain": {**SMALL, "qk_layernorm": False, "tie_word_embeddings": True},
    "relu": {**SMALL, "hidden_act": "relu", "partial_rotary_factor": 0.25},
    "linear": {**SMALL, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}  # fmt: skip
TEXTS = (
    "Call me Ishmael.", "", "a",
    "  two  spaces and\na line\n\n\tend\r\n", "1234567890, 3.14!", "</s> end",
    "The white whale was seen by none but the",
)  # fmt: skip
BEYOND = "naïve café русский 漢字 🐳"
# What llama.cpp's unigram tokenizer does otherwise: bytes, the prefix of nothing but a blank.
BPE_ONLY = (BEYOND, " ")


def save_tokenizer(folder: Path, english: Path, model_type: str) -> None:
    """tokenizer.model and its configuration, with all 256 bytes as the published one has."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        input=str(english), model_prefix=str(folder / "tokenizer"), vocab_size=VOCAB,
        model_type=model_type, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.vocab").unlink()
    config = {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False, "legacy": True,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Checkpoints:
    """Random checkpoints and their files in F32, each made once."""

    def __init__(self, folder: Path, english: Path) -> None:
        self.folder, self.english = folder, english
        self._made: dict[str, Checkpoint] = {}

    def __getitem__(self, kind: str) -> Checkpoint:
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: str) -> Checkpoint:
        import torch
        from transformers import PersimmonConfig, PersimmonForCausalLM

        folder = self.folder / kind
        folder.mkdir()
        save_tokenizer(folder, self.english, "bpe" if kind == "plain" else "unigram")
        torch.manual_seed(1)
        model = PersimmonForCausalLM(PersimmonConfig(**KINDS[kind]))
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 1:  # biases and norms, which are born 0 and 1
                    p.add_(torch.randn_like(p) * 0.2)
        model.save_pretrained(folder)
        return Checkpoint(kind, folder)

    def gguf(self, kind: str, select: str) -> Path:
        """`select` "dense" is upstream's script with our class."""
        out = self.folder / f"{kind}-{select}.gguf"
        if not out.exists() and select == "dense":
            _convert_folder(self[kind].folder, out, "f32")
        elif not out.exists():
            convert(self.gguf(kind, "dense"), out, select=select)
        return out


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, english: Path) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("persimmon-hf"), english)


def tokens_of(count: int = POSITIONS) -> list[int]:
    """The leading token, then any."""
    return [1, *(int(t) for t in np.random.default_rng(3).integers(4, VOCAB, count - 1))]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(
    checkpoints: Checkpoints, kind: str, record_property: Any
) -> None:
    tokens = tokens_of()
    wanted = checkpoints[kind].logits(tokens)
    found = evaluate(checkpoints.gguf(kind, "dense"), tokens)
    difference, largest = float(np.abs(found - wanted).max()), float(np.abs(wanted).max())
    record_property("max_logit_difference", difference)
    print(f"{kind}: logits differ by {difference:.2e}, {difference / largest:.2e} of the largest")
    assert wanted.std() > 1
    note(
        "persimmon", "largest difference of logits, dense to transformers", difference, 1e-3,
        checkpoints.gguf(kind, "gate"), "F32",
    )  # fmt: skip
    for select in ("all", "gate"):
        flash = evaluate(checkpoints.gguf(kind, select), tokens)
        apart = float(np.abs(flash - found).max() / np.abs(found).max())
        note(
            "persimmon", f"of the largest logit, select {select} to dense", apart, 1e-5,
            checkpoints.gguf(kind, select), "F32",
        )  # fmt: skip
        layout = read_layout(checkpoints.gguf(kind, select))
        assert layout.activation == ("relu" if kind == "relu" else "relu_sqr")


@pytest.mark.parametrize("kind", ["unigram", "plain"])
def test_greedy_text(checkpoints: Checkpoints, kind: str) -> None:
    tokens = tokens_of(12)
    expected = list(tokens)
    for _ in range(STEPS):
        expected.append(int(checkpoints[kind].logits(expected)[-1].argmax()))
    assert len(set(expected[12:])) > STEPS // 8
    for select in ("dense", "all", "gate"):
        assert greedy(checkpoints.gguf(kind, select), tokens) == expected[12:]


@pytest.mark.parametrize("kind", ["unigram", "plain"])
def test_every_part_decides_the_logits(checkpoints: Checkpoints, kind: str) -> None:
    """The agreement above means something: without any one part the numbers are others."""
    import torch

    tokens = tokens_of(40)
    whole = checkpoints[kind].logits(tokens)
    maimed = Checkpoint(kind, checkpoints[kind].folder)
    width = SMALL["hidden_size"] // SMALL["num_attention_heads"]
    for name, p in maimed.model.named_parameters():
        with torch.no_grad():
            kept = p.clone()
            p.copy_(p.roll(1 if "query_key_value" not in name else width, dims=0))
            change = float(np.abs(maimed.logits(tokens) - whole).max())
            p.copy_(kept)
        assert change > 0.01, name


def test_positions_and_keys_decide_the_logits(checkpoints: Checkpoints) -> None:
    """A wrong share of rotated values, or a wrong base, would be seen."""
    tokens = tokens_of(40)
    whole = checkpoints["unigram"].logits(tokens)
    for key, value in (("partial_rotary_factor", 1.0), ("rope_theta", 10000.0)):
        maimed = Checkpoint("unigram", checkpoints["unigram"].folder)
        config = maimed.model.config
        setattr(config, key, value)
        made = type(maimed.model)(config).eval()
        made.load_state_dict(maimed.model.state_dict())
        maimed.__dict__["model"] = made
        assert np.abs(maimed.logits(tokens) - whole).max() > 0.01, key


@pytest.mark.parametrize("kind", ["unigram", "plain"])
def test_tokens_are_those_of_transformers(checkpoints: Checkpoints, kind: str) -> None:
    """Everywhere with BPE; with a unigram model where the vocabulary has the characters."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(checkpoints[kind].folder, use_fast=False)
    flash = checkpoints.gguf(kind, "gate")
    expected = "t5" if kind == "unigram" else "llama"
    assert read_layout(flash).kv["tokenizer.ggml.model"].decode() == expected
    llm = load(flash)
    for text in (*TEXTS, *(BPE_ONLY if kind == "plain" else ())):
        wanted = theirs(text)["input_ids"]
        assert wanted[0] == 1
        assert llm.tokenize(text.encode(), special=True) == wanted, text
    for text in (*TEXTS[3:5], TEXTS[-1], *([BEYOND] if kind == "plain" else [])):
        tokens = llm.tokenize(text.encode(), add_bos=False)
        assert llm.detokenize(tokens).decode() == f" {text}"
    llm.close()


def test_the_command_converts_a_folder(checkpoints: Checkpoints, cli: Cli, tmp_path: Path) -> None:
    folder, out = checkpoints["unigram"].folder, tmp_path / "out.gguf"
    cli("convert", folder, "--out", out, "--outtype", "f32", "--select", "gate")
    assert cli.json("verify", out, "--against", checkpoints.gguf("unigram", "dense"))["ok"]


def refused(cli: Cli, tmp_path: Path, said: str) -> None:
    done = cli("convert", tmp_path / "model", "--out", tmp_path / "out.gguf", code=2)
    assert said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("hidden_act", "tanh", "activation 'tanh' from 'persimmon.hidden_act"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "of type 'dynamic', expected"),
    ],
)
def test_what_is_refused(
    checkpoints: Checkpoints, cli: Cli, tmp_path: Path, key: str, value: Any, reason: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["unigram"].folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    refused(cli, tmp_path, reason)


def test_a_folder_without_its_tokenizer(checkpoints: Checkpoints, cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["unigram"].folder, folder)
    (folder / "tokenizer.model").unlink()
    refused(cli, tmp_path, "add the tokenizer.model of the checkpoint")
