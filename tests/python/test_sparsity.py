"""Dense models made sparse without training: thresholds that are found, written, and obeyed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import Cli
from family_models import make_family
from numpy_model import NumpyModel, silence_attention, silu
from predictors import certain_tensors, load, logits, predictor_of, same_bits, saved, tokens_of
from stock import stock_lib_dir
from test_activation import F32_ROUNDING, VISIBLE, far
from tiny_models import make_dense

from gguf_flash.calibrate import collect
from gguf_flash.calibrate.recording import Recording
from gguf_flash.calibrate.sparsity import (
    FoundThresholds,
    find_thresholds,
    parse_share,
    split_text,
    threshold_for,
)
from gguf_flash.cli.sparsity import Sparsify
from gguf_flash.converters import convert, convert_dense, verify
from gguf_flash.converters.dense import DenseModel, find_layers
from gguf_flash.errors import ArgumentError, FlashError, UnsupportedError
from gguf_flash.format.thresholds import Sparsity, threshold_name
from gguf_flash.llama_api import low_level
from gguf_flash.llama_log import LlamaLog
from gguf_flash.perplexity import perplexity

CTX = 64
# Every score is that of a byte of the text's last quarter, whose like the thresholds have seen: the
# share of zeros there is off by chance. It was at most 0.018 off in these models.
CHANCE = 0.04
# SwiGLU in one tensor, GELU and squared ReLU without a gate; "llama" with gelu is GeGLU.
OTHERS = [("phi3", None), ("starcoder2", None), ("nemotron", None)]
COST = Sparsity(0.5, "weighted", "a.txt", 4096, 2040, 20.5, 16.25, 0.25, (0.5, 0.5))


def own_thresholds(dense: Path, largest: float = 0.3) -> FoundThresholds:
    """A threshold for each neuron, at random: no two are alike."""
    rng = np.random.default_rng(4)
    with DenseModel(dense) as model:
        sizes = {x.layer: x.n_ff for x in find_layers(model)}
    neurons = {n: (largest * rng.random(n_ff)).astype(np.float32) for n, n_ff in sizes.items()}
    return FoundThresholds({}, neurons, COST)


def found_for(dense: Path, text: str, **options: Any) -> FoundThresholds:
    given = {"ctx": CTX, "tokens": 8 * CTX, "chunks": 8, "threads": 1, "text_name": "a.txt"}
    return find_thresholds(dense, options.pop("share", 0.5), text, **{**given, **options})


@pytest.fixture(scope="module")
def words(english: Path) -> str:
    return english.read_text()[:6000]


# --- obeyed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("select", ["all", "gate"])
@pytest.mark.parametrize(
    ("arch", "activation"),
    [("llama", None), ("llama", "gelu"), ("llama", "relu"), *OTHERS],
)
def test_dense_equals_flash(tmp_path: Path, arch: str, activation: str | None, select: str) -> None:
    """Each neuron's own threshold, in the graph and in the engine, in any order of the neurons."""
    plain = make_dense(tmp_path / "plain.gguf", arch=arch, n_ctx=64, biases=arch == "llama")
    dense, flash = tmp_path / "dense.gguf", tmp_path / "flash.gguf"
    wanted_cuts = own_thresholds(plain)
    convert_dense(plain, dense, activation=activation, sparsify=lambda path, act: wanted_cuts)
    order = np.random.default_rng(5).permutation(128)
    layout = convert(dense, flash, select=select, orders={1: order})
    assert layout.neuron_thresholds == (0, 1) and layout.sparsity == COST
    tensors = {t.name: t.data for t in gguf.GGUFReader(flash).tensors}
    assert np.array_equal(tensors[threshold_name(1)], wanted_cuts.neurons[1][order])
    usual, wanted, found = (logits(load(p), tokens_of(1), 30) for p in (plain, dense, flash))
    # The graph's GELU is a table of halves: next to its threshold a value comes and goes.
    is_gelu = arch == "starcoder2" or activation == "gelu"
    assert far(found, wanted) <= (VISIBLE / 10 if is_gelu else F32_ROUNDING)
    assert far(usual, wanted) > VISIBLE / 2
    assert verify(flash, dense).ok and verify(flash, dense).permuted_layers == 1


def test_one_layer_is_numpys(tmp_path: Path) -> None:
    """A model of one FFN and no attention: what is recorded of it is what passes the thresholds."""
    plain = silence_attention(make_dense(tmp_path / "plain.gguf", n_layer=2))
    cuts = own_thresholds(plain)
    convert_dense(plain, tmp_path / "d.gguf", sparsify=lambda path, act: cuts)
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 32 + CTX)))
    collect(tmp_path / "d.gguf", tmp_path / "a.txt", tokens=CTX, ctx=CTX, out=tmp_path / "rec")
    model, recording = NumpyModel(plain), Recording.open(tmp_path / "rec")
    stream = model.weights["token_embd.weight"][recording.token_ids()]
    for layer in range(2):
        x = model.norm(f"blk.{layer}.ffn_norm", stream)
        value = silu(model.linear(f"blk.{layer}.ffn_gate", x))
        above = np.abs(value) - cuts.neurons[layer]
        assert np.abs(above).min() > 1e-7  # F32 sums agree on which side it is
        assert np.array_equal(recording.layer(layer).active(0, CTX), above > 0)
        h = np.where(above > 0, value, 0) * model.linear(f"blk.{layer}.ffn_up", x)
        stream = stream + model.linear(f"blk.{layer}.ffn_down", h)


def test_a_predictor_of_a_sparse_model(tmp_path: Path) -> None:
    """It belongs to the dense file with the thresholds; the engine obeys them in its mode too."""
    plain, dense = make_dense(tmp_path / "plain.gguf"), tmp_path / "dense.gguf"
    convert_dense(plain, dense, sparsify=lambda path, act: own_thresholds(plain))
    predictor = saved(predictor_of(dense, certain_tensors), tmp_path / "p.safetensors")
    layout = convert(dense, tmp_path / "flash.gguf", predictor=predictor)
    assert layout.select == "predictor" and layout.neuron_thresholds == (0, 1)
    wanted, found = (logits(load(p), tokens_of(2)) for p in (dense, tmp_path / "flash.gguf"))
    assert far(found, wanted) <= F32_ROUNDING


def test_a_setting_is_stronger(tmp_path: Path) -> None:
    plain, dense = make_dense(tmp_path / "plain.gguf"), tmp_path / "dense.gguf"
    convert_dense(plain, dense, sparsify=lambda path, act: own_thresholds(plain))
    convert(dense, tmp_path / "flash.gguf", select="gate")
    convert_dense(plain, tmp_path / "one.gguf", threshold=[0.125])
    wanted = logits(load(tmp_path / "one.gguf"), tokens_of(3))
    for path in (dense, tmp_path / "flash.gguf"):
        found = logits(load(path, kv_overrides={"flash_ffn.threshold": "0.125"}), tokens_of(3))
        assert far(found, wanted) <= F32_ROUNDING
    layout = convert(dense, tmp_path / "again.gguf", threshold=[0.125])
    assert layout.neuron_thresholds == () and layout.sparsity is None
    assert verify(tmp_path / "again.gguf", dense).ok
    convert_dense(dense, tmp_path / "dense-again.gguf", threshold=[0.125])
    assert same_bits(logits(load(tmp_path / "dense-again.gguf"), tokens_of(3)), wanted)


@pytest.mark.stock
def test_unpatched_llama_cpp_refuses_own_thresholds(tmp_path: Path) -> None:
    """Rather than run another model: it knows no such tensors."""
    from test_gate import logits as dump

    plain, dense = make_dense(tmp_path / "plain.gguf"), tmp_path / "dense.gguf"
    convert_dense(plain, dense, sparsify=lambda path, act: own_thresholds(plain))
    with pytest.raises(AssertionError, match=r"wrong number of tensors|Failed to load model"):
        dump(dense, tmp_path / "out.npy", stock_lib_dir())


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["dense", "flash"])
def test_values_that_are_no_thresholds(tmp_path: Path, kind: str, value: float) -> None:
    plain, dense = make_dense(tmp_path / "plain.gguf"), tmp_path / "dense.gguf"
    cuts = own_thresholds(plain)
    cuts.neurons[1][7] = value
    convert_dense(plain, dense, sparsify=lambda path, act: cuts)
    convert(dense, tmp_path / "flash.gguf")
    with pytest.raises(FlashError, match=r"value 7 of .*'blk\.1\.ffn_threshold' .* expected"):
        load(tmp_path / f"{kind}.gguf")


def estimated(dense: Path, *, no_alloc: bool) -> int:
    """Bytes of llama.cpp's graph buffers; with `no_alloc` as its `--fit` estimates them."""
    api = low_level()
    params, of_context = api.llama_model_default_params(), api.llama_context_default_params()
    params.no_alloc, params.load_mode = no_alloc, api.LLAMA_LOAD_MODE_NONE
    of_context.n_ctx = of_context.n_batch = of_context.n_ubatch = 512
    log = LlamaLog(api)
    with log:
        model = api.llama_model_load_from_file(str(dense).encode(), params)
        if model is None:
            raise log.load_error(str(dense))
        context = api.llama_init_from_model(model, of_context)
    if context is not None:
        api.llama_free(context)
    api.llama_model_free(model)
    return log.compute_bytes


def test_memory_is_estimated_with_the_thresholds(tmp_path: Path) -> None:
    plain, dense = make_dense(tmp_path / "plain.gguf", n_ff=512), tmp_path / "dense.gguf"
    convert_dense(plain, dense, sparsify=lambda path, act: own_thresholds(plain))
    assert estimated(dense, no_alloc=True) == estimated(dense, no_alloc=False)
    assert estimated(dense, no_alloc=True) != estimated(plain, no_alloc=True)  # another graph


@pytest.mark.parametrize("no_alloc", [True, False])
def test_thresholds_of_another_shape(tmp_path: Path, no_alloc: bool) -> None:
    """What a load refuses, the estimate before it refuses as well."""
    plain, dense = make_dense(tmp_path / "plain.gguf"), tmp_path / "dense.gguf"
    cuts = own_thresholds(plain)
    cuts.neurons[1] = cuts.neurons[1][:-1]
    convert_dense(plain, dense, sparsify=lambda path, act: cuts)
    with pytest.raises(FlashError, match=r"blk\.1\.ffn_threshold' of the model does not hold 128"):
        estimated(dense, no_alloc=no_alloc)


# --- found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["magnitude", "weighted"])
@pytest.mark.parametrize(
    ("arch", "activation"),
    [("llama", None), ("llama", "gelu"), ("llama", "relu"), *OTHERS],
)
def test_share_of_zeros(
    tmp_path: Path, words: str, arch: str, activation: str | None, criterion: str
) -> None:
    """Of a text that the thresholds were not chosen on, and the model's figures are the file's."""
    plain = make_dense(tmp_path / "plain.gguf", arch=arch, biases=arch == "llama")
    found = found_for(plain, words, criterion=criterion, share=0.7, activation=activation)
    assert found.sparsity.zeros == pytest.approx([0.7, 0.7], abs=CHANCE)
    assert (found.sparsity.tokens, found.sparsity.held_out) == (8 * CTX, 8 * (CTX // 2 - 1))
    assert found.sparsity.mean_kl > 1e-4
    layout = convert(
        plain, tmp_path / "f.gguf", select="all", activation=activation,
        sparsify=lambda path, act: found,
    )  # fmt: skip
    assert bool(layout.neuron_thresholds) == (criterion == "weighted")
    assert bool(layout.thresholds) == (criterion == "magnitude")
    assert verify(tmp_path / "f.gguf", plain).ok
    again = perplexity(tmp_path / "f.gguf", split_text(words)[1], ctx=CTX, chunks=8, threads=1)
    # A value at its threshold comes and goes with the last bit, of which a token has a few.
    assert again["perplexity"] == pytest.approx(found.sparsity.perplexity, rel=5e-3)


def test_weights_are_the_norms_of_the_down_rows(tmp_path: Path, words: str) -> None:
    plain = make_dense(tmp_path / "plain.gguf")
    found = found_for(plain, words, criterion="weighted")
    tensors = {t.name: t.data for t in gguf.GGUFReader(plain).tensors}
    for layer, cuts in found.neurons.items():
        products = cuts * np.linalg.norm(tensors[f"blk.{layer}.ffn_down.weight"], axis=0)
        assert products == pytest.approx(np.full(len(cuts), products[0]), rel=1e-5)


def test_a_layer_with_more_zeros_than_asked_for_keeps_them(tmp_path: Path, words: str) -> None:
    plain = make_dense(tmp_path / "plain.gguf", activation="relu")
    found = found_for(plain, words, share=0.25)
    assert found.layers == {0: 0.0, 1: 0.0} and min(found.sparsity.zeros) > 0.4
    assert found.sparsity.perplexity == pytest.approx(found.sparsity.dense_perplexity, rel=1e-6)


def test_threshold_of_buckets() -> None:
    scores = np.random.default_rng(0).random(100_000).astype(np.float32)
    buckets = np.bincount(scores.view(np.uint32) >> 17, minlength=1 << 14).astype(np.uint64)
    for share in (0.1, 0.5, 0.9):
        t = threshold_for(buckets, share)
        assert float((scores <= t).mean()) == pytest.approx(share, abs=0.01)
    assert threshold_for(buckets, 0) == 0
    buckets[0] += np.uint64(900_000)  # 90 % are zero
    assert threshold_for(buckets, 0.5) == 0


def test_shares() -> None:
    assert [parse_share(t) for t in ("50%", "0.5", "0", "0%", "99.5%")] == [0.5, 0.5, 0, 0, 0.995]
    for text in ("", "half", "1", "100%", "-1%", "nan", "50"):
        with pytest.raises(ArgumentError, match="share"):
            parse_share(text)


# --- the command ----------------------------------------------------------------------------------


def test_command_line(cli: Cli, tmp_path: Path, words: str) -> None:
    plain, text = make_dense(tmp_path / "plain.gguf"), tmp_path / "a.txt"
    text.write_text(words * 3)
    for criterion in ("magnitude", "weighted"):
        for kind, more in (("flash", ()), ("dense", ("--dense",))):
            out = tmp_path / f"{criterion}.{kind}.gguf"
            given = ("--target-sparsity", "60%", "--text", text, "--criterion", criterion)
            shown = cli.json(
                "convert", plain, "--out", out, *given, "--tokens", 1000, "--threads", 1, *more
            )["sparsity"]
            assert shown["criterion"] == criterion and shown["tokens"] == 1024
            assert shown["zeros"] == pytest.approx([0.6, 0.6], abs=CHANCE)
        cli("verify", tmp_path / f"{criterion}.flash.gguf", "--against", plain, "--quiet")
        seen = cli.json("inspect", tmp_path / f"{criterion}.flash.gguf")
        for name, value in seen["sparsity"].items():
            assert value == (pytest.approx(shown[name]) if name != "text" else "a.txt")
        key = "neuron_thresholds" if criterion == "weighted" else "activation_threshold"
        assert all(x[key] > 0 and 0.5 < x["zeros"] < 0.7 for x in seen["layers"])
        said = cli("inspect", tmp_path / f"{criterion}.flash.gguf").stdout
        assert "60 % zeros asked for" in said and "mean KL" in said
        convert(tmp_path / f"{criterion}.dense.gguf", tmp_path / "second.gguf", select="gate")
        one, other = (tmp_path / n for n in (f"{criterion}.flash.gguf", "second.gguf"))
        assert same_bits(logits(load(one), tokens_of(6)), logits(load(other), tokens_of(6)))


def test_nothing_is_lost_at_zero(cli: Cli, tmp_path: Path, words: str) -> None:
    plain, text = make_dense(tmp_path / "plain.gguf"), tmp_path / "a.txt"
    text.write_text(words)
    cli("convert", plain, "--out", tmp_path / "usual.gguf", "--select", "gate", "--quiet")
    given = ("--target-sparsity", "0%", "--text", text, "--select", "gate", "--quiet")
    cli("convert", plain, "--out", tmp_path / "zero.gguf", *given)
    assert (tmp_path / "zero.gguf").read_bytes() == (tmp_path / "usual.gguf").read_bytes()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--target-sparsity", "50%"), "--text"),
        (("--text", "a.txt"), "--text goes with --target-sparsity"),
        (("--criterion", "magnitude"), "--criterion goes with --target-sparsity"),
        (("--tokens", "4096"), "--tokens goes with --target-sparsity"),
        (("--threads", "1"), "--threads goes with --target-sparsity"),
        (("--target-sparsity", "120%", "--text", "a.txt"), "120%"),
        (("--target-sparsity", "50%", "--text", "a.txt", "--threshold", "0.1"), "--threshold"),
        (("--target-sparsity", "50%", "--text", "a.txt", "--predictor", "a.txt"), "--dense"),
        (("--target-sparsity", "50%", "--text", "short.txt"), "too short"),
    ],
)
def test_refused(
    cli: Cli, tmp_path: Path, words: str, given: tuple[str, ...], message: str
) -> None:
    plain = make_dense(tmp_path / "plain.gguf")
    (tmp_path / "a.txt").write_text(words)
    (tmp_path / "short.txt").write_text(words[:1500])
    paths = [str(tmp_path / w) if w.endswith(".txt") else w for w in given]
    done = cli("convert", plain, "--out", tmp_path / "out.gguf", *paths, code=2)
    assert done.stderr.count("\n") == 1 and message in done.stderr
    assert not (tmp_path / "out.gguf").exists()


def test_thresholds_twice_are_refused(
    tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_dense(tmp_path / "plain.gguf")
    convert_dense(plain, tmp_path / "d.gguf", threshold=[0.5])
    convert_dense(plain, tmp_path / "n.gguf", sparsify=lambda path, act: own_thresholds(plain))
    for name in ("d", "n"):
        with pytest.raises(ArgumentError, match="already"):
            found_for(tmp_path / f"{name}.gguf", words)
    monkeypatch.setenv("GGUF_FLASH_THRESHOLD", "0.5")
    with pytest.raises(ArgumentError, match="GGUF_FLASH_THRESHOLD") as refused:
        found_for(plain, words)
    assert "record" not in str(refused.value)
    monkeypatch.delenv("GGUF_FLASH_THRESHOLD")
    monkeypatch.setenv("GGUF_FLASH_DISABLE", "1")
    with pytest.raises(ArgumentError, match="GGUF_FLASH_DISABLE"):
        found_for(plain, words)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder, with a stand-in for upstream's script, which needs torch."""
    made = tmp_path / "hf"
    made.mkdir()
    make_dense(made / "model.gguf")
    config = {"hidden_act": "fatrelu", "hidden_act_param": 0.3}
    (made / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(
        "gguf_flash.converters.upstream._convert_folder",
        lambda src, out, outtype: shutil.copy(src / "model.gguf", out),
    )
    return made


@pytest.mark.parametrize("written", [convert, convert_dense])
def test_a_folder_keeps_its_own_threshold(
    folder: Path, tmp_path: Path, words: str, written: Any
) -> None:
    """FATReLU's, which is not in the file that the folder becomes on the way."""
    assert convert(folder, tmp_path / "f.gguf").thresholds == (pytest.approx(0.3),) * 2

    def sparsify(dense: DenseModel, activation: str | None) -> FoundThresholds:
        return found_for(dense.paths[0], words, share=0.25, activation=activation)

    with pytest.raises(ArgumentError, match=r"hf' has thresholds already \('hidden_act_param'\)"):
        written(folder, tmp_path / "g.gguf", sparsify=sparsify)
    assert not (tmp_path / "g.gguf").exists()


@pytest.mark.parametrize("outtype", [None, "f16"])
@pytest.mark.parametrize("arch", ["t5", "gemma3n"])
def test_messages_name_what_was_given(
    tmp_path: Path, words: str, arch: str, outtype: str | None
) -> None:
    """Not the temporary file, which is gone; T5's is the session's, Gemma's ours."""
    plain, text = make_family(tmp_path / "given.gguf", arch), tmp_path / "a.txt"
    text.write_text(words * 2)
    sparsify = Sparsify(0.5, text, True, {"threads": 1})
    with pytest.raises(UnsupportedError) as refused:
        convert(plain, tmp_path / "f.gguf", outtype=outtype, select="gate", sparsify=sparsify)
    assert f"'{plain}'" in str(refused.value) and "f.gguf" not in str(refused.value)
    assert ("encoder" if arch == "t5" else "zeroes most activations") in str(refused.value)


def test_verify_sees_thresholds_of_another_model(tmp_path: Path, words: str) -> None:
    plain = make_dense(tmp_path / "plain.gguf")
    found = found_for(plain, words, criterion="weighted")
    found.neurons[1][3] *= 2
    convert(plain, tmp_path / "f.gguf", sparsify=lambda path, act: found)
    report = verify(tmp_path / "f.gguf", plain)
    assert not report.ok and "blk.1.ffn_threshold" in report.differences[0]


@pytest.mark.parametrize("reordered", [False, True])
def test_verify_sees_thresholds_of_other_neurons(
    tmp_path: Path, words: str, reordered: bool
) -> None:
    plain, rng = make_dense(tmp_path / "plain.gguf"), np.random.default_rng(7)
    found = found_for(plain, words, criterion="weighted")
    orders = {1: rng.permutation(128)} if reordered else {}
    convert(plain, tmp_path / "f.gguf", sparsify=lambda path, act: found, orders=orders)
    report = verify(tmp_path / "f.gguf", plain)
    assert report.ok and report.permuted_layers == len(orders)
    rng.shuffle(found.neurons[1])
    convert(plain, tmp_path / "f.gguf", sparsify=lambda path, act: found, orders=orders)
    assert "blk.1.ffn_threshold" in verify(tmp_path / "f.gguf", plain).summary()


def without_down_row(path: Path, out: Path, neuron: int) -> Path:
    """A copy in which layer 1 has a neuron that adds nothing."""
    data = bytearray(path.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    down = np.frombuffer(data, np.float32, tensor.n_elements, int(tensor.data_offset))
    down.reshape(tensor.data.shape)[:, neuron] = 0
    out.write_bytes(data)
    return out


@pytest.mark.parametrize("cut", [0.0, 1.0])
def test_verify_of_a_down_row_of_zeros(tmp_path: Path, words: str, cut: float) -> None:
    plain = without_down_row(make_dense(tmp_path / "a.gguf"), tmp_path / "plain.gguf", 5)
    found = found_for(plain, words, criterion="weighted")
    assert found.neurons[1][5] == np.float32(1e30)
    found.neurons[1][:] *= np.float32(cut)
    convert(plain, tmp_path / "f.gguf", sparsify=lambda path, act: found)
    assert verify(tmp_path / "f.gguf", plain).ok
    found.neurons[1][5] = 1.0  # the largest but for this one is much less
    convert(plain, tmp_path / "f.gguf", sparsify=lambda path, act: found)
    assert "blk.1.ffn_threshold" in verify(tmp_path / "f.gguf", plain).summary()


def test_verify_sees_other_thresholds_of_layers(tmp_path: Path) -> None:
    """Than the source's, unless they were asked for; of a source without any it cannot tell."""
    plain, flash = make_dense(tmp_path / "plain.gguf"), tmp_path / "f.gguf"
    for name, cut in (("half", 0.5), ("quarter", 0.25)):
        convert_dense(plain, tmp_path / f"{name}.gguf", threshold=[cut, cut / 2])
    half, quarter = tmp_path / "half.gguf", tmp_path / "quarter.gguf"
    convert(quarter, flash)
    assert verify(flash, quarter).ok and verify(flash, plain).ok
    assert verify(flash, half).differences == [
        "key 'flash_ffn.threshold' has another value than the source"
    ]
    convert(half, flash, threshold=[0.25, 0.125])
    assert verify(flash, half).ok
    convert(plain, flash)
    assert "flash_ffn.threshold" in verify(flash, half).summary()


def test_verify_sees_another_cost(tmp_path: Path) -> None:
    plain, dense, flash = make_dense(tmp_path / "plain.gguf"), tmp_path / "d.gguf", tmp_path / "f"
    found = FoundThresholds({0: 0.25, 1: 0.5}, {}, COST)
    convert_dense(plain, dense, sparsify=lambda path, act: found)
    convert(dense, flash)
    assert verify(flash, dense).ok
    data = flash.read_bytes()
    perplexity_of = np.float32(COST.perplexity).tobytes()
    assert data.count(perplexity_of) == 1
    flash.write_bytes(data.replace(perplexity_of, np.float32(2.5).tobytes()))
    assert "'flash_ffn.sparsity'" in verify(flash, dense).summary()
    for options in ({"activation": "relu"}, {"threshold": [0.125]}):
        convert(dense, flash, **options)
        assert verify(flash, dense).ok


def test_verify_sees_another_activation(tmp_path: Path) -> None:
    relu = make_dense(tmp_path / "relu.gguf", activation="relu")
    convert(relu, tmp_path / "f.gguf")
    data = (tmp_path / "f.gguf").read_bytes()
    at = data.index(b"relu", data.index(b"flash_ffn.activation"))
    (tmp_path / "f.gguf").write_bytes(data[:at] + b"silu" + data[at + 4 :])
    assert "'flash_ffn.activation' is 'silu'" in verify(tmp_path / "f.gguf", relu).summary()
    convert(relu, tmp_path / "f.gguf", activation="silu")
    assert verify(tmp_path / "f.gguf", relu).ok
