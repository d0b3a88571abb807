"""OPT from Hugging Face folders: random checkpoints of both forms against transformers' numbers.

Needs the extra `hf`. The tokenizer is GPT-2's, out of the pinned source, with OPT's ids and in the
files that the published checkpoints have.
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
from test_hf import MISSING, Checkpoint, vocabulary_file

from gguf_flash import FlashLlama
from gguf_flash.converters import convert
from gguf_flash.converters.upstream import _convert_folder
from gguf_flash.format import read_layout

pytestmark = [
    pytest.mark.hf,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
PROMPT = "The white whale was seen by none but the"
STEPS = 48
POSITIONS = 256
F32 = 0  # of ggml_type: else the KV cache is F16
VOCAB = 50272
SMALL: dict[str, Any] = {
    "hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "word_embed_proj_dim": 64, "max_position_embeddings": 320, "init_std": 0.2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "before": SMALL,
    "after": {**SMALL, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "bare": {
        **SMALL, "enable_bias": False, "_remove_final_layer_norm": True,
        "tie_word_embeddings": False,
    },
    "gelu": {**SMALL, "activation_function": "gelu_new"},
    # opt-125m's shape, with weights that make something of the FFN
    "125m": {"init_std": 0.06},
}  # fmt: skip
# ggml's table of GELU goes from F16 to F16; test_hf shows that nothing else differs.
TOLERANCE = {"gelu": 1e-2}
EVERY_KIND = [*list(KINDS)[:-1], pytest.param("125m", marks=pytest.mark.slow)]
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")

TEXT = (
    "Call me Ishmael. Don't you'll we've 3.14159, 2026-07-01 and 1234567890\n\n\n  \t tabs \t\n"
    "    four spaces  two   three\u00a0nbsp\u3000wide \u2028 line\r\n"
    "naïve café Übermut Ελληνικά русский 漢字かな 한국어 עברית हिन्दी ไทย 🐳👩‍🚀 \u0000\ufffd"
    "</s>middle<pad>of<s>the <unk> text </s> <mask>''\"\"``__--==##!!!???   "
)


def save_tokenizer(folder: Path, *, all_special: bool) -> None:
    """vocab.json, merges.txt and the configuration of facebook/opt-*.

    There, <s> and <unk> are entries that no text reaches; with `all_special` they are special.
    """
    from transformers import AutoTokenizer

    name = "ggml-vocab-gpt-2.gguf"
    vocabulary_file(name, folder / name)
    gpt2 = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    (folder / name).unlink()
    model = json.loads(gpt2.backend_tokenizer.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    words = [*SPECIAL, *(w for w in words if w != "<|endoftext|>")]
    vocabulary = {word: i for i, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    special = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    if all_special:
        special |= {"unk_token": "<unk>", "additional_special_tokens": ["<s>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    config = {
        "tokenizer_class": "GPT2Tokenizer", "errors": "replace", "add_prefix_space": False,
        "add_bos_token": True, **special,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Checkpoints:
    """Random checkpoints and their files in F32, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Checkpoint] = {}

    def __getitem__(self, kind: str) -> Checkpoint:
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def _make(self, kind: str) -> Checkpoint:
        import torch
        from transformers import OPTConfig, OPTForCausalLM

        folder = self.folder / kind
        folder.mkdir()
        save_tokenizer(folder, all_special=kind == "after")
        torch.manual_seed(1)
        model = OPTForCausalLM(OPTConfig(vocab_size=VOCAB, **KINDS[kind]))
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim == 1:  # biases and norms, which are born 0 and 1
                    p.add_(torch.randn_like(p) * 0.2)
                elif name.endswith("fc2.weight"):
                    p.mul_(2)
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
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("opt-hf"))


def load(model: Path) -> FlashLlama:
    return FlashLlama(
        model, n_ctx=320, logits_all=True, type_k=F32, type_v=F32, flash_attn=False, threads=2
    )


def evaluate(model: Path, tokens: list[int]) -> np.ndarray[Any, Any]:
    llm = load(model)
    llm.eval(tokens[:-4])
    for token in tokens[-4:]:
        llm.eval([token])
    found = llm.scores[: len(tokens)].copy()
    llm.close()
    return found


def greedy(model: Path, tokens: list[int]) -> list[int]:
    llm = load(model)
    llm.eval(tokens)
    text = []
    for _ in range(STEPS):
        text.append(int(llm.scores[llm.n_tokens - 1].argmax()))
        llm.eval(text[-1:])
    llm.close()
    return text


def tokens_of(count: int = POSITIONS) -> list[int]:
    """The leading token, then any."""
    return [2, *(int(t) for t in np.random.default_rng(3).integers(4, 50000, count - 1))]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_logits_are_those_of_transformers(
    checkpoints: Checkpoints, kind: str, record_property: Any
) -> None:
    tokens = tokens_of()
    wanted = checkpoints[kind].logits(tokens)
    found = evaluate(checkpoints.gguf(kind, "dense"), tokens)
    difference = float(np.abs(found - wanted).max())
    record_property("max_logit_difference", difference)
    print(f"{kind}: logits differ by {difference:.2e} of a deviation of {wanted.std():.2f}")
    assert wanted.std() > 1
    assert difference < TOLERANCE.get(kind, 1e-3)
    table = {"gelu": "", "after": "opt-350m"}.get(kind, "opt")  # GELU is no family of the table
    if table:
        note(
            table, "largest difference of logits, dense to transformers", difference, 1e-3,
            checkpoints.gguf(kind, "gate"), "F32",
        )  # fmt: skip
    for select in ("all", "gate") if kind != "gelu" else ("all",):
        flash = evaluate(checkpoints.gguf(kind, select), tokens)
        apart = float(np.abs(flash - found).max() / np.abs(found).max())
        assert apart < (1e-5 if kind != "gelu" else 1e-3)
        if table:
            note(
                table, f"of the largest logit, select {select} to dense", apart, 1e-5,
                checkpoints.gguf(kind, select), "F32",
            )  # fmt: skip
        layout = read_layout(checkpoints.gguf(kind, select))
        assert layout.activation == ("gelu" if kind == "gelu" else "relu")


@pytest.mark.parametrize("kind", ["before", "after", pytest.param("125m", marks=pytest.mark.slow)])
def test_greedy_text(checkpoints: Checkpoints, kind: str) -> None:
    text = checkpoints[kind]
    tokens = tokens_of(12)
    expected = list(tokens)
    for _ in range(STEPS):
        expected.append(int(text.logits(expected)[-1].argmax()))
    assert len(set(expected[12:])) > STEPS // 8
    for select in ("dense", "all", "gate"):
        assert greedy(checkpoints.gguf(kind, select), tokens) == expected[12:]


@pytest.mark.parametrize("kind", ["before", "after", "bare"])
def test_every_part_decides_the_logits(checkpoints: Checkpoints, kind: str) -> None:
    """The agreement above means something: without any one part the numbers are others."""
    import torch

    tokens = tokens_of(40)
    whole = checkpoints[kind].logits(tokens)
    maimed = Checkpoint(kind, checkpoints[kind].folder)
    for name, p in maimed.model.named_parameters():
        if "k_proj.bias" in name:
            continue  # adds the same to every score of a query, which softmax takes away
        with torch.no_grad():
            kept = p.clone()
            p.copy_(p.roll(1, dims=0))
            change = float(np.abs(maimed.logits(tokens) - whole).max())
            p.copy_(kept)
        assert change > 0.01, name


@pytest.mark.parametrize("kind", ["before", "after"])
def test_tokens_are_those_of_transformers(checkpoints: Checkpoints, kind: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(checkpoints[kind].folder)
    flash = checkpoints.gguf(kind, "gate")
    kv = read_layout(flash).kv
    assert kv["tokenizer.ggml.pre"].decode() == "gpt-2"
    assert kv["tokenizer.ggml.bos_token_id"].decode() == 2
    assert kv["tokenizer.ggml.add_bos_token"].decode()
    llm = load(flash)
    for text in (TEXT, *TEXT.splitlines(), PROMPT, "", " ", "</s>", "</s></s> a", *SPECIAL):
        wanted = theirs(text)["input_ids"]
        assert wanted[0] == 2
        found = llm.tokenize(text.encode(), special=True)
        assert found == wanted, text
    assert ("<s>" in theirs.get_added_vocab()) == (kind == "after")
    llm.close()


def test_the_command_converts_a_folder(checkpoints: Checkpoints, cli: Cli, tmp_path: Path) -> None:
    folder, out = checkpoints["after"].folder, tmp_path / "out.gguf"
    cli("convert", folder, "--out", out, "--outtype", "f32", "--select", "gate")
    assert cli.json("verify", out, "--against", checkpoints.gguf("after", "dense"))["ok"]


@pytest.mark.parametrize(
    ("file", "key", "value", "reason"),
    [
        ("config.json", "layer_norm_elementwise_affine", False, "norms without weights are not"),
        ("config.json", "activation_function", "tanh", "activation 'tanh' from 'opt.hidden_act"),
        ("tokenizer_config.json", "add_prefix_space", True, "expected GPT-2's byte-level BPE"),
    ],
)
def test_what_is_refused(
    checkpoints: Checkpoints, cli: Cli, tmp_path: Path, file: str, key: str, value: Any, reason: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["before"].folder, folder)
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**config, key: value}))
    done = cli("convert", folder, "--out", tmp_path / "out.gguf", code=2)
    assert reason in done.stderr and len(done.stderr.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
