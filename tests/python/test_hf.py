"""Hugging Face folders, converted for real: random checkpoints against transformers' own numbers.

Needs the extra `hf`. The checkpoints have the architectures' real forms and real tokenizers, random
weights, and FFNs that decide the logits; each conversion is that of the command line.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build_step import cache_dir, read_pin
from conftest import Cli
from fetch_source import ENV

from gguf_flash import FlashLlama
from gguf_flash.format import read_layout

MISSING = [m for m in ("torch", "transformers", "sentencepiece") if find_spec(m) is None]
pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
PROMPT = "The white whale was seen by none but the"
STEPS = 16
F32 = 0  # of ggml_type: llama.cpp's KV cache is F16 unless told otherwise, transformers' is F32

DOWN = ("down_proj.weight", "fc2.weight")
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("llama", {"num_key_value_heads": 2}),
    "relu": ("llama", {"num_key_value_heads": 2, "hidden_act": "relu"}),
    "gelu": ("phi", {"intermediate_size": 256, "hidden_act": "gelu_new"}),
    "relu_sqr": ("nemotron", {"num_key_value_heads": 4, "vocab_size": 320}),
}
# ggml looks GELU up in a table from F16 to F16: each activation is off by up to 2^-11 of its value
# going in and coming out. `test_gelu_is_off_by_its_table_only` shows that nothing else differs.
TOLERANCE = {"silu": 1e-3, "relu": 1e-3, "gelu": 5e-3, "relu_sqr": 1e-3}


@dataclass(frozen=True)
class Checkpoint:
    """A folder, and what transformers computes from it in F32."""

    kind: str
    folder: Path

    @cached_property
    def model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32 (len(tokens), n_vocab)."""
        import torch

        with torch.inference_mode():
            found: np.ndarray = self.model(torch.tensor([tokens])).logits[0].numpy()
        return found

    def greedy(self, tokens: list[int]) -> list[int]:
        """The STEPS likeliest tokens after `tokens`, by evaluating the whole text each time."""
        text = list(tokens)
        for _ in range(STEPS):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(tokens) :]


class Checkpoints:
    """Random checkpoints and their flash-GGUFs in F32, each made once."""

    def __init__(self, cli: Cli, folder: Path, english: Path) -> None:
        self.cli, self.folder, self.english = cli, folder, english
        self._made: dict[str, Checkpoint] = {}

    @cached_property
    def bpe(self) -> Any:
        """GPT-2's tokenizer, out of the pinned source, which upstream's converter recognises."""
        from transformers import AutoTokenizer

        name = "ggml-vocab-gpt-2.gguf"
        vocabulary_file(name, self.folder / name)
        return AutoTokenizer.from_pretrained(self.folder, gguf_file=name)

    def tokenizer(self, kind: str, folder: Path) -> int:
        """Put a tokenizer into `folder`; returns its size. Nemotron's has to be SentencePiece."""
        if KINDS[kind][0] != "nemotron":
            self.bpe.save_pretrained(folder)
            return len(self.bpe)
        import sentencepiece

        size: int = KINDS[kind][1]["vocab_size"]
        sentencepiece.SentencePieceTrainer.train(
            input=str(self.english), model_prefix=str(folder / "tokenizer"), vocab_size=size,
            model_type="bpe", minloglevel=2,
        )  # fmt: skip
        return size

    def __getitem__(self, kind: str) -> Checkpoint:
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: str) -> Checkpoint:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = self.folder / kind
        folder.mkdir()
        model_type, options = KINDS[kind]
        options = {**SHAPE, "vocab_size": self.tokenizer(kind, folder), **options}
        config = AutoConfig.for_model(model_type, **options, bos_token_id=0, eos_token_id=1)
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim == 1:  # biases and norms, which are born 0 and 1
                    p.add_(torch.randn_like(p) * 0.1)
                elif name.endswith(DOWN):
                    p.mul_(3)
        model.save_pretrained(folder)
        return Checkpoint(kind, folder)

    def flash(self, kind: str, outtype: str = "f32", *words: str) -> Path:
        """Converted on the command line."""
        out = self.folder / f"{kind}-{outtype}{''.join(words)}.gguf"
        if not out.exists():
            self.cli(
                "convert", self[kind].folder, "--out", out, "--outtype", outtype, *words, "--quiet"
            )
        return out


def vocabulary_file(name: str, out: Path) -> None:
    """Copy models/`name` of the pinned llama.cpp source; skips if that source is not here."""
    source = Path(os.environ.get(ENV) or cache_dir() / read_pin().sdist)
    if source.is_dir():
        for root in (source, source / "vendor/llama.cpp"):
            if (root / "models" / name).is_file():
                shutil.copyfile(root / "models" / name, out)
                return
    elif source.is_file():
        with tarfile.open(source) as tar:
            member = next(m for m in tar if m.name.endswith(f"/vendor/llama.cpp/models/{name}"))
            data = tar.extractfile(member)
            assert data is not None
            out.write_bytes(data.read())
            return
    pytest.skip(f"no models/{name}: build the package once, or set {ENV} to its source")


@pytest.fixture(scope="module")
def checkpoints(cli: Cli, english: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(cli, tmp_path_factory.mktemp("hf"), english)


def evaluate(model: Path, tokens: list[int]) -> tuple[np.ndarray, dict[str, Any]]:
    """Logits of each token, float32 (len(tokens), n_vocab), and the engine's totals."""
    llm = load(model)
    llm.eval(tokens[:-4])
    for token in tokens[-4:]:
        llm.eval([token])
    logits, stats = llm.scores[: len(tokens)].copy(), llm.flash_stats()["total"]
    llm.close()
    return logits, stats


def load(model: Path) -> FlashLlama:
    return FlashLlama(
        model, n_ctx=64, logits_all=True, type_k=F32, type_v=F32, flash_attn=False, threads=1
    )


def tokens_of(model: Path) -> list[int]:
    llm = load(model)
    tokens = llm.tokenize(PROMPT.encode())
    llm.close()
    assert len(tokens) >= 8
    return tokens


def text_of(model: Path, tokens: list[int]) -> str:
    llm = load(model)
    text = b"".join(llm.detokenize([t]) for t in tokens)
    llm.close()
    return text.decode(errors="replace")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_text_are_those_of_transformers(
    checkpoints: Checkpoints, cli: Cli, kind: str, record_property: Any
) -> None:
    flash, checkpoint = checkpoints.flash(kind), checkpoints[kind]
    assert read_layout(flash).activation == kind
    tokens = tokens_of(flash)
    if KINDS[kind][0] != "nemotron":
        assert tokens == checkpoints.bpe(PROMPT)["input_ids"]
    expected = checkpoint.greedy(tokens)
    wanted = checkpoint.logits(tokens + expected)
    found, _ = evaluate(flash, tokens + expected)
    difference = float(np.abs(found - wanted).max())
    record_property("max_logit_difference", difference)
    record_property("logit_deviation", float(wanted.std()))
    print(f"{kind}: logits differ by {difference:.2e} of a deviation of {wanted.std():.2f}")
    assert difference < TOLERANCE[kind]
    run = cli.json("run", flash, "--prompt", PROMPT, "--tokens", STEPS)
    assert run["tokens"] == STEPS
    assert run["text"] == text_of(flash, expected)


def test_gelu_is_off_by_its_table_only(checkpoints: Checkpoints) -> None:
    """With GELU rounded as ggml's table does, transformers agrees as closely as elsewhere.

    Not in every row: where two programs' last bits differ, one input may round to the next F16.
    """
    import torch

    rounded, tokens = Checkpoint("gelu", checkpoints["gelu"].folder), list(range(5, 45))

    def table(x: Any) -> Any:
        return torch.where(x.abs() < 10, exact(x.half().float()).half().float(), torch.relu(x))

    for layer in rounded.model.model.layers:
        exact = layer.mlp.activation_fn
        del layer.mlp.activation_fn
        layer.mlp.activation_fn = table
    found, _ = evaluate(checkpoints.flash("gelu"), tokens)
    rows = np.abs(found - rounded.logits(tokens)).max(axis=1)
    print(f"gelu through an F16 table: logits differ by {np.median(rows):.2e} in half of the rows")
    assert np.median(rows) < 5e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_ffn_decides_the_logits(checkpoints: Checkpoints, kind: str) -> None:
    """The agreement above means something: without the FFN the numbers are others."""
    import torch

    whole, maimed = checkpoints[kind], Checkpoint(kind, checkpoints[kind].folder)
    with torch.no_grad():
        for name, p in maimed.model.named_parameters():
            if name.endswith(DOWN):
                p.zero_()
    tokens = list(range(5, 30))
    assert np.abs(maimed.logits(tokens) - whole.logits(tokens)).max() > 1


def test_select_gate_reads_the_active_neurons_only(checkpoints: Checkpoints, cli: Cli) -> None:
    """`hidden_act` relu, which upstream's converter drops, arrives as the model's activation."""
    flash = checkpoints.flash("relu", "f32", "--select", "gate")
    layout = read_layout(flash)
    assert (layout.activation, layout.text("llama.hidden_activation")) == ("relu", "relu")
    assert "llama.hidden_activation" not in read_layout(checkpoints.flash("silu")).kv
    tokens = tokens_of(flash)
    found, stats = evaluate(flash, tokens)
    wanted = checkpoints["relu"].logits(tokens)
    assert np.abs(found - wanted).max() < TOLERANCE["relu"]
    neurons = SHAPE["num_hidden_layers"] * SHAPE["intermediate_size"]
    assert 0.2 < stats["selected"] / (len(tokens) * neurons) < 0.8
    cli("verify", flash, "--against", checkpoints["relu"].folder)


@pytest.mark.parametrize(
    ("kind", "outtype", "parts", "correlation"),
    [
        ("gelu", "f32", "F32 F32", 0.99999),
        ("relu_sqr", "f32", "F32 F32", 0.99999),
        ("silu", "q8_0", "Q8_0 Q8_0 I8", 0.999),
        ("silu", "q4_0", "Q4_0 Q4_0 F16", 0.9),
    ],
)
def test_types_and_proof(
    checkpoints: Checkpoints, cli: Cli, kind: str, outtype: str, parts: str, correlation: float
) -> None:
    """Upstream writes q8_0 itself; q4_0 is what llama-quantize makes of its F16."""
    flash = checkpoints.flash(kind, outtype)
    assert [p.type.name for p in read_layout(flash).bundle(1).parts] == parts.split()
    proof = cli.json("verify", flash, "--against", checkpoints[kind].folder)
    assert proof["ok"] and proof["layers"] == SHAPE["num_hidden_layers"]
    tokens = tokens_of(flash)
    found, _ = evaluate(flash, tokens)
    wanted = checkpoints[kind].logits(tokens)
    agreement = float(np.corrcoef(found.ravel(), wanted.ravel())[0, 1])
    print(f"{kind} {outtype}: correlation of logits {agreement:.6f}")
    assert agreement > correlation


def _refused(cli: Cli, folder: Path, outtype: str = "f32") -> str:
    """The one sentence on stderr for a folder that cannot be converted; nothing else is left."""
    before = sorted(folder.parent.iterdir())
    out = folder.parent / "out.gguf"
    done = cli("convert", folder, "--out", out, "--outtype", outtype, code=2)
    assert sorted(folder.parent.iterdir()) == before
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("gguf-flash: ") and "Traceback" not in done.stderr
    return done.stderr


def test_an_architecture_that_upstream_does_not_know(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "ctrl"
    folder.mkdir()
    config = {"architectures": ["CTRLLMHeadModel"], "model_type": "ctrl"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    said = _refused(cli, folder)
    assert said.endswith("it ended with status 1: Model CTRLLMHeadModel is not supported\n")


@pytest.mark.parametrize("outtype", ["f32", "q4_0"])
def test_checkpoints_that_are_damaged(
    checkpoints: Checkpoints, cli: Cli, tmp_path: Path, outtype: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["relu_sqr"].folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    assert "status 1: " in _refused(cli, folder, outtype)
    (folder / "config.json").write_text("no JSON")
    assert "status 1: " in _refused(cli, folder, outtype)
    weights.unlink()
    assert "no weights" in _refused(cli, folder)
    (folder / "config.json").unlink()
    assert "it has no 'config.json', so it is no Hugging Face model" in _refused(cli, folder)


def test_an_activation_that_the_engine_lacks(
    checkpoints: Checkpoints, cli: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["silu"].folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "fatrelu"}))
    said = _refused(cli, folder)
    assert "activation 'fatrelu' from 'llama.hidden_activation' is unknown" in said
