"""What no flash-GGUF can be made of or run from: one sentence, what and why, and exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import DATA, Cli
from family_models import make_family

from gguf_flash import FlashLlama
from gguf_flash.converters import convert
from gguf_flash.errors import FlashError, UnsupportedError

UP, DOWN = np.ones((8, 32), np.float32), np.ones((32, 8), np.float32)
FFN = {"blk.0.ffn_up.weight": UP, "blk.0.ffn_down.weight": DOWN}
EXPERTS = {"blk.0.ffn_up_exps.weight": np.ones((2, 8, 32), np.float32)}


def file_of(
    path: Path, arch: str, tensors: dict[str, np.ndarray[Any, Any]] = FFN, **keys: str
) -> Path:
    w = gguf.GGUFWriter(path, arch)
    for key, text in keys.items():
        w.add_string(key.replace("__", "."), text)
    for name, array in tensors.items():
        w.add_tensor(name, array)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "it is a vision projector": ("clip", {"general__type": "mmproj"}),
    "'bert' is an embedding model": ("bert", {}),
    "'t5encoder' is an embedding model": ("t5encoder", {}),
    "architecture 'frobnicate' is unknown": ("frobnicate", {}),
    "architecture 'apertus' in llama.cpp multiplies": ("apertus", {}),
    "architecture 'rwkv7' in llama.cpp multiplies": ("rwkv7", {}),
    "it is a mixture of experts": ("llama", {"tensors": EXPERTS}),
    "it is an adapter file": ("llama", {"general__type": "adapter"}),
    "activation 'xielu' .* is unknown to the engine": (
        "llama", {"llama__hidden_activation": "xielu"},
    ),
    "compares all gate values": ("gemma3n", {}),
}  # fmt: skip


@pytest.mark.parametrize("message", CASES)
def test_convert(tmp_path: Path, message: str) -> None:
    arch, options = CASES[message]
    source = file_of(tmp_path / "source.gguf", arch, **options)
    with pytest.raises(FlashError, match=message) as refused:
        convert(source, tmp_path / "flash.gguf")
    assert "\n" not in str(refused.value) and "; " in str(refused.value)  # and what to do
    assert [p.name for p in tmp_path.iterdir()] == ["source.gguf"]


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    source = file_of(tmp_path / "source.gguf", "bert")
    done = cli("convert", source, "--out", tmp_path / "flash.gguf", code=2)
    assert done.stderr.count("\n") == 1 and "embedding model" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arch", "words"),
    [
        ("clip", "it is a vision projector"),
        ("frobnicate", "unknown model architecture: 'frobnicate'"),
    ],
)
def test_run(cli: Cli, tmp_path: Path, arch: str, words: str) -> None:
    source = file_of(tmp_path / "source.gguf", arch)
    done = cli("run", source, "--prompt", "x", code=2)
    assert done.stderr.count("\n") == 1 and words in done.stderr


def test_run_an_embedding_model(cli: Cli, tmp_path: Path) -> None:
    source = make_family(tmp_path / "source.gguf", "eurobert")
    done = cli("run", source, "--prompt", "x", code=2)
    assert done.stderr.count("\n") == 1 and "is an embedding model" in done.stderr


def converted_all_the_same(dense: Path, flash: Path, **options: Any) -> Path:
    """What another converter could write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gguf_flash.converters.dense.refusal", lambda arch: "")
        patch.setattr("gguf_flash.converters.build.needs_gate", lambda arch: False)
        convert(dense, flash, **options)
    return flash


@pytest.mark.parametrize("select", ["all", "gate"])
def test_a_graph_of_its_own_is_refused_at_load(cli: Cli, tmp_path: Path, select: str) -> None:
    """With its name, before the first decode."""
    dense = make_family(tmp_path / "dense.gguf", "apertus", gated=False)
    flash = converted_all_the_same(dense, tmp_path / "flash.gguf", select=select)
    done = cli("run", flash, "--prompt", "x", code=2)
    assert done.stderr.count("\n") == 1
    assert "cannot run architecture 'apertus' from flash" in done.stderr


def test_gemma3n_without_resident_gates_is_refused_at_load(tmp_path: Path, cli: Cli) -> None:
    dense = make_family(tmp_path / "dense.gguf", "gemma3n")
    flash = converted_all_the_same(dense, tmp_path / "flash.gguf")
    done = cli("run", flash, "--prompt", "x", code=2)
    assert done.stderr.count("\n") == 1
    assert "'gemma3n' from flash with select 'all'" in done.stderr
    assert "--select gate" in done.stderr


@pytest.mark.parametrize("words", [["perplexity", "--ctx", "64"], ["inspect", "--probe"]])
def test_a_model_with_an_encoder_cannot_be_followed(
    cli: Cli, tmp_path: Path, words: list[str]
) -> None:
    t5 = make_family(tmp_path / "t5.gguf", "t5", gated=False)
    text = DATA / "english.txt"
    verb, *rest = words
    given = [*rest, text] if "--probe" in rest else [*rest, "--text", text]
    done = cli(verb, t5, *given, code=2)
    assert done.stderr.splitlines()[-1].startswith("gguf-flash: ")
    with pytest.raises(UnsupportedError, match="use gguf-flash run"):
        FlashLlama(str(t5), n_ctx=64)


def test_a_model_with_an_encoder_runs(cli: Cli, tmp_path: Path) -> None:
    """The prompt goes to the encoder, the text comes from the decoder."""
    t5 = make_family(tmp_path / "t5.gguf", "t5", gated=False)
    words = ("--prompt", "Call me Ishmael.", "--tokens", 12)
    wanted = cli.json("run", t5, *words)
    assert wanted["tokens"] > 0
    for select in ("all", "gate"):
        convert(t5, tmp_path / "flash.gguf", select=select)
        found = cli.json("run", tmp_path / "flash.gguf", *words)
        assert found["text"] == wanted["text"] and found["hit_rate"] is not None
    other = cli.json("run", t5, "--prompt", "Ishmael calls me", "--tokens", 12)
    assert other["text"] != wanted["text"]
