"""Checkpoints from strangers: nothing in one runs, and nothing outside its folder is read."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from gguf_flash.converters import convert
from gguf_flash.converters.checkpoint import check_checkpoint
from gguf_flash.errors import ArgumentError, FlashError

needs_torch = pytest.mark.skipif(
    any(find_spec(m) is None for m in ("torch", "transformers")), reason="not installed"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512,
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of weights that nobody reads before the folder was looked at."""
    made = tmp_path / "checkpoint"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "model.safetensors").write_bytes(b"")
    (tmp_path / "secret").write_text("{}")
    return made


def index(name: str) -> Callable[[Path], None]:
    text = json.dumps({"weight_map": {"model.norm.weight": name}})
    return lambda folder: Path(folder, "model.safetensors.index.json").write_text(text) and None


def tokenizer(**config: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        text = json.dumps(config).replace("SECRET", str(folder.parent / "secret"))
        (folder / "tokenizer_config.json").write_text(text)

    return write


def link(name: str, to: str) -> Callable[[Path], None]:
    return lambda folder: Path(folder, name).symlink_to(to)


OUTSIDE: dict[str, tuple[Callable[[Path], None], str]] = {
    "shard above": (index("../../etc/passwd"), r"names the file '../../etc/passwd' outside"),
    "shard of the root": (index("/etc/passwd"), r"names the file '/etc/passwd' outside"),
    "shard behind a folder": (index("a/../../secret"), r"names the file 'a/../../secret' outside"),
    "vocabulary": (tokenizer(vocab_file="SECRET"), r"names the file '.*/secret' outside"),
    "first argument": (tokenizer(init_inputs=["SECRET"]), r"names the file '.*/secret' outside"),
    "one of several": (
        tokenizer(fast_tokenizer_files=["a.json", "../secret"]), r"names the file '../secret'",
    ),
    "module": (
        lambda folder: Path(folder, "modules.json").write_text('[{"path": "../x"}]') and None,
        r"'modules.json' names the file '../x' outside",
    ),
    "link": (link("chat_template.jinja", "../secret"), r"is a link to '.*/secret' outside"),
    "absolute link": (link("tokenizer.json", "/etc/passwd"), r"is a link to '/etc/passwd' outside"),
    "link to a folder": (link("audio_tokenizer", "/etc"), r"is a link to '/etc' outside"),
    "pipe": (lambda folder: os.mkfifo(folder / "tokenizer.json"), "is no regular file"),
    "device": (link("model-1.safetensors", "/dev/zero"), "is no regular file"),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTSIDE)
def test_what_leads_out_of_the_folder(folder: Path, tmp_path: Path, case: str) -> None:
    change, words = OUTSIDE[case]
    change(folder)
    with pytest.raises(ArgumentError, match=words) as refused:
        convert(folder, tmp_path / "out.gguf")
    assert "\n" not in str(refused.value) and "; " in str(refused.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "secret"]


def test_the_command_refuses_it(cli: Cli, folder: Path, tmp_path: Path) -> None:
    index("../secret")(folder)
    done = cli("convert", folder, "--out", tmp_path / "out.gguf", code=2)
    assert done.stderr.count("\n") == 1 and "names the file '../secret'" in done.stderr


def test_what_may_stay(folder: Path, tmp_path: Path) -> None:
    """Shards, links within, weights on another disk, paths on the author's machine."""
    index("model-00001-of-00001.safetensors")(folder)
    tokenizer(vocab_file="vocab.json", special_tokens_map_file="/home/author/none.json")(folder)
    (folder / "tokenizer.json").write_text("{}")
    link("tokenizer_2.json", "tokenizer.json")(folder)
    (tmp_path / "weights.safetensors").write_bytes(b"")
    link("model-1.safetensors", "../weights.safetensors")(folder)
    (folder / "broken.index.json").write_text("[")
    check_checkpoint(folder)


def test_a_snapshot_in_the_cache_of_huggingface_hub(folder: Path, tmp_path: Path) -> None:
    """Its files are links to blobs."""
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    shutil.move(folder, snapshot)
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    check_checkpoint(snapshot)
    link("tokenizer.json", "../../../secret")(snapshot)
    with pytest.raises(ArgumentError, match=r"is a link to '.*/secret'"):
        check_checkpoint(snapshot)


# --- code -----------------------------------------------------------------------------------------


class Evil:
    """Unpickled, it runs a shell."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.trace}'",)


def plain_pickle(path: Path, evil: Evil) -> None:
    path.write_bytes(pickle.dumps({"model.norm.weight": evil}))


def torch_file(path: Path, evil: Evil) -> None:
    import torch

    torch.save({"model.norm.weight": evil}, path)


def old_torch_file(path: Path, evil: Evil) -> None:
    import torch

    torch.save({"model.norm.weight": evil}, path, _use_new_zipfile_serialization=False)


@pytest.mark.hf
@needs_torch
@pytest.mark.parametrize("write", [plain_pickle, torch_file, old_torch_file])
def test_a_pickle_that_runs_code(
    folder: Path, tmp_path: Path, write: Callable[[Path, Evil], None]
) -> None:
    trace = tmp_path / "trace"
    (folder / "model.safetensors").unlink()
    write(folder / "pytorch_model.bin", Evil(trace))
    with pytest.raises(
        FlashError, match="other than tensors, and pickles are never run"
    ) as refused:
        convert(folder, tmp_path / "out.gguf")
    assert "\n" not in str(refused.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "secret"]
    pickle.loads(pickle.dumps(Evil(trace)))
    assert trace.exists()  # what the test rests on


def opt_folder(folder: Path) -> None:
    """A complete OPT checkpoint, whose class asks transformers for the tokenizer."""
    import torch
    from test_opt_hf import SMALL, save_tokenizer
    from transformers import OPTConfig, OPTForCausalLM

    (folder / "model.safetensors").unlink()
    torch.manual_seed(1)
    OPTForCausalLM(OPTConfig(vocab_size=50272, **SMALL)).save_pretrained(folder)
    save_tokenizer(folder, all_special=False)


def add_code(folder: Path, trace: Path, name: str, classes: dict[str, Any]) -> None:
    """Let the JSON file `name` ask for classes in Python that leaves a trace."""
    text = f"open({str(trace)!r}, 'w')\nclass Config: pass\nclass Tokenizer: pass\n"
    (folder / "evil.py").write_text(text)
    config = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({**config, "auto_map": classes}))


@pytest.mark.hf
@needs_torch
def test_code_that_is_not_needed_is_ignored(folder: Path, tmp_path: Path) -> None:
    """transformers has classes of its own for these."""
    opt_folder(folder)
    convert(folder, tmp_path / "usual.gguf")
    trace = tmp_path / "trace"
    tokenizers = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    add_code(folder, trace, "config.json", {"AutoConfig": "evil.Config", **tokenizers})
    add_code(folder, trace, "tokenizer_config.json", tokenizers)
    convert(folder, tmp_path / "out.gguf")
    assert not trace.exists()
    # But for the name of the folder, which both have: bytes and all.
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "usual.gguf").read_bytes()


@pytest.mark.hf
@needs_torch
def test_code_that_is_needed_is_refused(folder: Path, tmp_path: Path) -> None:
    opt_folder(folder)
    trace = tmp_path / "trace"
    add_code(folder, trace, "tokenizer_config.json", {"AutoTokenizer": ["evil.Tokenizer", None]})
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "EvilTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(FlashError, match=r"code from a checkpoint is never run") as refused:
        convert(folder, tmp_path / "out.gguf")
    assert "\n" not in str(refused.value) and not trace.exists()
    assert not (tmp_path / "out.gguf").exists()


FORBIDDEN = """
from gguf_flash.converters.hf_script import forbid_code
forbid_code()
from transformers import AutoTokenizer, AutoConfig
import sys
for auto in (AutoTokenizer, AutoConfig):
    try:
        auto.from_pretrained(sys.argv[1], trust_remote_code=True)
    except ValueError as error:
        print(error)
"""


@pytest.mark.hf
@needs_torch
def test_trust_means_nothing(folder: Path, tmp_path: Path) -> None:
    """Every class that upstream's converter loads with trust_remote_code=True."""
    trace = tmp_path / "trace"
    classes = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", None]}
    add_code(folder, trace, "config.json", classes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil"}))
    add_code(folder, trace, "tokenizer_config.json", {"AutoTokenizer": classes["AutoTokenizer"]})
    command = [sys.executable, "-c", FORBIDDEN, str(folder)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert len(re.findall("code from a checkpoint is never run", done.stdout)) == 2, done.stderr
    assert not trace.exists()
    trusting = FORBIDDEN.replace("forbid_code()\nfrom transf", "from transf")
    subprocess.run([*command[:2], trusting, str(folder)], cwd=tmp_path, capture_output=True)
    assert trace.exists()  # what the test rests on
