"""Dense models with another activation than their architecture's: the patched llama.cpp obeys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import Cli
from numpy_model import NumpyModel, silence_attention, silu
from predictors import load, logits, same_bits, tokens_of
from stock import stock_lib_dir
from test_gate import logits as dump
from tiny_models import make_dense

from gguf_flash.converters import convert, convert_dense
from gguf_flash.converters.dense import DenseModel
from gguf_flash.errors import FlashError
from gguf_flash.format import read_layout
from gguf_flash.format.container import Value, encode_value
from gguf_flash.format.writer import GgufWriter, PlannedTensor
from gguf_flash.runtime import lib_dir

# Sums of n_ff F32 products in another order, over two layers, relative to the largest logit.
F32_ROUNDING = 1e-5
# Another activation in every layer moves logits by far more than any rounding.
VISIBLE = 1e-2
CUTS = (0.1, 0.3)  # one for each layer

CASES = [
    ("llama", "relu"),
    ("llama", "relu_sqr"),
    ("llama", "gelu_erf"),
    ("phi3", "relu"),
    ("phi3", "gelu_erf"),
    ("starcoder2", "relu"),
    ("starcoder2", "relu_sqr"),
    ("nemotron", "relu"),
    ("opt", "silu"),
]


def with_keys(dense: Path, out: Path, keys: dict[str, Value]) -> Path:
    """A copy of `dense` with more keys."""
    with DenseModel(dense) as source:
        tensors = list(source.tensors.values())
        planned = [PlannedTensor(t.name, t.shape, t.type) for t in tensors]
        with GgufWriter(out, {**source.kv, **keys}, planned) as writer:
            for t in tensors:
                for piece in source.blocks(t):
                    writer.write(piece)
    return out


def far(found: Any, wanted: Any) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("cuts", [None, CUTS], ids=["plain", "thresholds"])
@pytest.mark.parametrize(("arch", "activation"), CASES)
def test_dense_equals_flash(
    tmp_path: Path, arch: str, activation: str, cuts: tuple[float, ...] | None
) -> None:
    """The graph's nodes and the engine compute one function, in a prompt and token by token."""
    plain = make_dense(tmp_path / "plain.gguf", arch=arch, n_ctx=64, biases=arch == "llama")
    dense, flash = tmp_path / "dense.gguf", tmp_path / "flash.gguf"
    convert_dense(plain, dense, activation=activation, threshold=cuts)
    convert(dense, flash, select="all" if arch == "phi3" else "gate")
    layout = read_layout(flash)
    assert layout.activation == activation
    assert layout.thresholds == (tuple(np.float32(cuts)) if cuts else ())
    usual, wanted, found = (logits(load(p), tokens_of(1), 30) for p in (plain, dense, flash))
    assert far(found, wanted) <= F32_ROUNDING
    assert far(usual, wanted) > VISIBLE
    if cuts:
        convert_dense(plain, tmp_path / "uncut.gguf", activation=activation)
        assert far(logits(load(tmp_path / "uncut.gguf"), tokens_of(1), 30), wanted) > VISIBLE / 10


def test_thresholds_alone(tmp_path: Path) -> None:
    """They cut the architecture's own activation, too: small values of SiLU, of either sign."""
    plain = make_dense(tmp_path / "plain.gguf")
    dense, flash = tmp_path / "dense.gguf", tmp_path / "flash.gguf"
    convert_dense(plain, dense, threshold=CUTS)
    convert(dense, flash, select="gate")
    usual, wanted, found = (logits(load(p), tokens_of(2)) for p in (plain, dense, flash))
    assert far(found, wanted) <= F32_ROUNDING and far(usual, wanted) > VISIBLE


@pytest.mark.parametrize("threshold", [0.0, 0.25])
@pytest.mark.parametrize("activation", ["relu", "relu_sqr", "silu"])
def test_one_layer_is_numpys(tmp_path: Path, activation: str, threshold: float) -> None:
    """A model of one FFN and no attention, from token to logits."""
    plain = silence_attention(make_dense(tmp_path / "plain.gguf", n_layer=1))
    convert_dense(plain, tmp_path / "d.gguf", activation=activation, threshold=[threshold])
    model, tokens = NumpyModel(plain), tokens_of(3)
    stream = model.weights["token_embd.weight"][tokens]
    x = model.norm("blk.0.ffn_norm", stream)
    gate, up = model.linear("blk.0.ffn_gate", x), model.linear("blk.0.ffn_up", x)
    assert np.abs(gate - threshold).min() > 1e-7  # F32 sums agree on which side it is
    if activation == "silu":
        value = silu(gate)
        value = np.where(np.abs(value) > threshold, value, 0)
    else:
        value = np.where(gate > threshold, gate, 0) ** (2 if activation == "relu_sqr" else 1)
    stream = stream + model.linear("blk.0.ffn_down", value * up)
    wanted = model.norm("output_norm", stream) @ model.weights["output.weight"].T
    assert far(logits(load(tmp_path / "d.gguf"), tokens), wanted) <= F32_ROUNDING


@pytest.mark.stock
@pytest.mark.parametrize("arch", ["llama", "phi3", "starcoder2"])
def test_unpatched_llama_cpp_ignores_the_key(tmp_path: Path, arch: str) -> None:
    """Of the same file it runs the architecture's activation; GGUF_FLASH_DISABLE=1 does so too."""
    plain = make_dense(tmp_path / "plain.gguf", arch=arch)
    dense = make_dense(tmp_path / "dense.gguf", arch=arch, activation="relu")
    wanted = dump(plain, tmp_path / "plain.npy", stock_lib_dir())
    stock = dump(dense, tmp_path / "stock.npy", stock_lib_dir())
    patched = dump(dense, tmp_path / "patched.npy", lib_dir())
    assert same_bits(stock, wanted)
    assert far(patched, wanted) > VISIBLE


def test_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_dense(tmp_path / "plain.gguf")
    convert_dense(plain, tmp_path / "dense.gguf", activation="relu", threshold=CUTS)
    wanted = logits(load(plain), tokens_of(4))
    monkeypatch.setenv("GGUF_FLASH_DISABLE", "1")
    monkeypatch.setenv("GGUF_FLASH_ACTIVATION", "relu")
    assert same_bits(logits(load(tmp_path / "dense.gguf"), tokens_of(4)), wanted)
    assert same_bits(logits(load(plain), tokens_of(4)), wanted)


@pytest.mark.parametrize("key", ["silu", "swish"])
def test_the_architectures_own(tmp_path: Path, key: str) -> None:
    """A key that names what the graph has anyway changes no bit."""
    plain = make_dense(tmp_path / "plain.gguf")
    named = make_dense(tmp_path / "named.gguf", activation=key)
    wanted, found = (logits(load(p), tokens_of(5)) for p in (plain, named))
    assert same_bits(found, wanted)


@pytest.mark.parametrize(
    ("key", "activation"),
    [("relu2", "relu_sqr"), ("ReLU", "relu"), ("gelu_new", "gelu"), ("geglu", "gelu")],
)
def test_spellings(tmp_path: Path, key: str, activation: str) -> None:
    """Names that checkpoints have mean the same to llama.cpp and to the converter."""
    named = make_dense(tmp_path / "named.gguf", activation=key)
    convert_dense(named, tmp_path / "dense.gguf", activation=activation)
    convert(named, tmp_path / "flash.gguf")
    assert read_layout(tmp_path / "flash.gguf").activation == activation
    wanted, found = (logits(load(p), tokens_of(6)) for p in (tmp_path / "dense.gguf", named))
    assert same_bits(found, wanted)


def test_settings_are_stronger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment over the file, an override over both; they reach plain files, too."""
    plain = make_dense(tmp_path / "plain.gguf")
    asked = {}
    for name, cuts in (("relu", None), ("relu", CUTS), ("relu_sqr", None)):
        path = tmp_path / f"{name}{cuts}.gguf"
        convert_dense(plain, path, activation=name, threshold=cuts)
        asked[name, cuts] = path, logits(load(path), tokens_of(7))
    over = {"flash_ffn.activation": "relu", "flash_ffn.threshold": "0.1,0.3"}
    found = logits(load(plain, kv_overrides=over), tokens_of(7))
    assert same_bits(found, asked["relu", CUTS][1])
    monkeypatch.setenv("GGUF_FLASH_ACTIVATION", "relu")
    assert same_bits(logits(load(plain), tokens_of(7)), asked["relu", None][1])
    squared = asked["relu_sqr", None][0]
    assert same_bits(logits(load(squared), tokens_of(7)), asked["relu", None][1])
    monkeypatch.setenv("GGUF_FLASH_THRESHOLD", "0.1,0.3")
    assert same_bits(logits(load(squared), tokens_of(7)), asked["relu", CUTS][1])
    again = logits(load(plain, kv_overrides={"flash_ffn.activation": "silu"}), tokens_of(7))
    assert far(again, asked["relu", CUTS][1]) > VISIBLE


def test_each_open_model_has_its_own(tmp_path: Path) -> None:
    """Models that are open together, and one opened after another was closed."""
    plain = make_dense(tmp_path / "plain.gguf")
    relu = make_dense(tmp_path / "relu.gguf", activation="relu")
    wanted = {p: logits(load(p), tokens_of(8)) for p in (plain, relu)}
    both = [load(relu), load(plain), load(relu)]
    for llm, path in zip(both, (relu, plain, relu), strict=True):
        assert same_bits(logits(llm, tokens_of(8)), wanted[path])
    both[0].close()
    assert same_bits(logits(both[2], tokens_of(8)), wanted[relu])
    assert same_bits(logits(load(plain), tokens_of(8)), wanted[plain])


# --- refused --------------------------------------------------------------------------------------


def test_an_unknown_activation(cli: Cli, tmp_path: Path) -> None:
    strange = make_dense(tmp_path / "strange.gguf", activation="mish")
    done = cli("run", strange, "--prompt", "x", code=2)
    assert done.stderr.count("\n") == 1 and "'mish'" in done.stderr
    done = cli("convert", strange, "--out", tmp_path / "f.gguf", "--quiet", code=2)
    assert done.stderr.count("\n") == 1 and "'mish'" in done.stderr
    words = ("run", strange, "--prompt", "x", "--tokens", 2)
    assert cli.json(*words, env={"GGUF_FLASH_ACTIVATION": "silu"})["tokens"] == 2
    done = cli(*words, env={"GGUF_FLASH_ACTIVATION": "mish"}, code=2)
    assert done.stderr.count("\n") == 1 and "GGUF_FLASH_ACTIVATION" in done.stderr


@pytest.mark.parametrize("count", [3, 7])
def test_thresholds_for_other_blocks(cli: Cli, tmp_path: Path, count: int) -> None:
    plain = make_dense(tmp_path / "plain.gguf")
    cuts = encode_value("arr:f32", [0.1] * count)
    wrong = with_keys(plain, tmp_path / "wrong.gguf", {"flash_ffn.threshold": cuts})
    done = cli("run", wrong, "--prompt", "x", code=2)
    assert done.stderr.count("\n") == 1 and f"2 blocks expected, found {count}" in done.stderr
    listed = tmp_path / "cuts.json"
    listed.write_text(json.dumps([0.1] * count))
    for more in ((), ("--dense",)):
        words = ("convert", plain, "--out", tmp_path / "out.gguf", "--threshold", listed, *more)
        done = cli(*words, "--quiet", code=2)
        assert done.stderr.count("\n") == 1 and f"found {count}" in done.stderr
        assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("value", ["-0.5", "nan", "inf", "1e40", "[0.1, -1]", '"x"', "{}"])
@pytest.mark.parametrize("dense", [False, True])
def test_thresholds_that_are_none(cli: Cli, tmp_path: Path, value: str, dense: bool) -> None:
    plain, out = make_dense(tmp_path / "plain.gguf"), tmp_path / "out.gguf"
    given: object = value
    if value[0] in '["{':
        given = tmp_path / "cuts.json"
        given.write_text(value)
    words = ("convert", plain, "--out", out, f"--threshold={given}", *(["--dense"] * dense))
    done = cli(*words, "--quiet", code=2)
    assert done.stderr.count("\n") == 1 and "threshold" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(("arr:f32", [0.1, v]) for v in (-0.5, float("nan"), float("inf"))),
        ("arr:f32", []),
        ("arr:f64", [0.1, 0.1]),
        ("f32", 0.1),
        ("str", "0.1"),
    ],
)
def test_thresholds_of_a_file_that_are_none(tmp_path: Path, kind: str, value: Any) -> None:
    """Rather than another model than the file's maker meant, none."""
    plain = make_dense(tmp_path / "plain.gguf")
    keys = {"flash_ffn.threshold": encode_value(kind, value)}
    wrong = with_keys(plain, tmp_path / "wrong.gguf", keys)
    with pytest.raises(FlashError, match="threshold"):
        load(wrong)
    if value:
        with pytest.raises(FlashError, match="threshold"):
            convert(wrong, tmp_path / "flash.gguf")


def test_blocks_without_an_ffn(tmp_path: Path) -> None:
    """llama.cpp looks a threshold up by block: a dense file has one for each, used or not."""
    writer = gguf.GGUFWriter(tmp_path / "plain.gguf", "nemotron")
    writer.add_block_count(4)
    for i in (1, 2):
        writer.add_tensor(f"blk.{i}.ffn_up.weight", np.zeros((96, 32), np.float32))
        writer.add_tensor(f"blk.{i}.ffn_down.weight", np.zeros((32, 96), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert_dense(tmp_path / "plain.gguf", tmp_path / "dense.gguf", threshold=[0.25, 0.5])
    with DenseModel(tmp_path / "dense.gguf") as found:
        assert found.thresholds == [0, 0.25, 0.5, 0]
    convert(tmp_path / "dense.gguf", tmp_path / "flash.gguf")
    assert read_layout(tmp_path / "flash.gguf").thresholds == (0.25, 0.5)


def test_command_line_carries_it_over(cli: Cli, tmp_path: Path) -> None:
    """convert --dense writes the keys, and a conversion of that file copies what they say."""
    plain = make_dense(tmp_path / "plain.gguf")
    dense, flash = tmp_path / "dense.gguf", tmp_path / "flash.gguf"
    words = ("--dense", "--activation", "relu", "--threshold", "0.1")
    shown = cli.json("convert", plain, "--out", dense, *words)
    assert shown == {"path": str(dense), "file_bytes": dense.stat().st_size}
    with DenseModel(dense) as found:
        assert found.text("llama.hidden_activation") == "relu"
        assert found.thresholds == [pytest.approx(0.1)] * 2
    cli("convert", dense, "--out", flash, "--select", "gate", "--quiet")
    seen = cli.json("inspect", flash)
    assert seen["activation"] == "relu"
    assert [x["activation_threshold"] for x in seen["layers"]] == [pytest.approx(0.1)] * 2
    wanted, got = (logits(load(p), tokens_of(9)) for p in (dense, flash))
    assert far(got, wanted) <= F32_ROUNDING
    cli("verify", flash, "--against", dense, "--quiet")


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "flash"])
def test_fatrelu_is_relu_and_a_threshold(cli: Cli, tmp_path: Path, dense: bool) -> None:
    source, out = make_dense(tmp_path / "s.gguf"), tmp_path / "o.gguf"
    words = ("convert", source, "--out", out, *(["--dense"] if dense else []))
    cli(*words, "--activation", "fatrelu:0.25")
    keys = gguf.GGUFReader(out).fields
    assert keys["flash_ffn.threshold"].contents() == [0.25, 0.25]
    name = "llama.hidden_activation" if dense else "flash_ffn.activation"
    assert keys[name].contents() == "relu"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fatrelu",), "or fatrelu:T with a number T, found 'fatrelu'"),
        (("fatrelu:much",), "found 'fatrelu:much'"),
        (("fatrelu:-1",), "a threshold is a number, zero or more, found -1.0"),
        (("fatrelu:nan",), "a threshold is a number, zero or more, found nan"),
        (("fatrelu:0.1", "--threshold", 0.2), "both give thresholds; use --activation relu"),
    ],
)
def test_a_fatrelu_that_is_none(
    cli: Cli, tmp_path: Path, words: tuple[object, ...], said: str
) -> None:
    source, out = make_dense(tmp_path / "s.gguf"), tmp_path / "o.gguf"
    done = cli("convert", source, "--out", out, "--activation", *words, code=2)
    assert said in done.stderr and not out.exists()
