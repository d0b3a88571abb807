"""Predictors in flash-GGUFs: which are refused, and what verify and other tools make of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import Cli, SmallOpt
from predictors import (
    load,
    logits,
    predictor_of,
    random_tensors,
    same_bits,
    saved,
    sha256,
    tokens_of,
)
from safetensors.numpy import save_file
from tiny_models import make_dense

from gguf_flash.calibrate import collect
from gguf_flash.calibrate.recording import Recording
from gguf_flash.converters import convert, verify
from gguf_flash.format import read_layout
from gguf_flash.predictor.file import Predictor, PredictorLayer
from gguf_flash.runtime import tool_path

N_FF = 128
# Sums of n_ff F32 products in another order, over two layers, relative to the largest logit.
F32_ROUNDING = 1e-5


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return make_dense(tmp_path / "dense.gguf", arch="opt", n_ctx=64)


@pytest.fixture
def trained(tmp_path: Path, dense: Path) -> Path:
    return saved(predictor_of(dense, random_tensors), tmp_path / "predictor.safetensors")


# --- refused --------------------------------------------------------------------------------------


def edit(change: Callable[[Predictor], None]) -> Callable[[Path], None]:
    """Change a good predictor and save it again."""

    def apply(path: Path) -> None:
        predictor = Predictor.open(path)
        change(predictor)
        path.write_bytes(predictor.to_bytes())  # save() would refuse some

    return apply


def put(layer: int, name: str, make: Callable[[PredictorLayer], Any]) -> Callable[[Path], None]:
    return edit(lambda p: setattr(p.layers[layer], name, make(p.layers[layer])))


def nan_in(array: Any) -> Any:
    array = array.copy()
    array.flat[7] = np.nan
    return array


def calibrated(value: Any) -> Callable[[Path], None]:
    return edit(lambda p: p.training.update(calibration=value))


def change_rank(path: Path) -> None:
    """B of another rank than A."""
    put(1, "b", lambda x: np.ascontiguousarray(x.b[:, :-1]))(path)


def change_n_ff(path: Path) -> None:
    edit(lambda p: p.layers.update({0: fewer(p.layers[0])}))(path)


def fewer(x: PredictorLayer) -> PredictorLayer:
    return PredictorLayer(x.layer, x.a, x.b[:-1], x.bias[:-1], x.threshold)


def add_layer(p: Predictor) -> None:
    x = p.layers[1]
    p.layers[2] = PredictorLayer(2, x.a, x.b, x.bias, x.threshold)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another model": (edit(lambda p: setattr(p, "model_sha256", "0" * 64)), "another model"),
    "wrong rank": (change_rank, "rank 8 and B 7"),
    "NaN in A": (put(0, "a", lambda x: nan_in(x.a)), "NaN"),
    "NaN in B": (put(1, "b", lambda x: nan_in(x.b)), "NaN"),
    "NaN in b": (put(1, "bias", lambda x: nan_in(x.bias)), "NaN"),
    "a missing layer": (edit(lambda p: p.layers.pop(1)), "lacks layer 1"),
    "an extra layer": (edit(add_layer), "has layer 2 that the model does not have"),
    "wrong n_ff": (change_n_ff, "127 neurons in layer 0"),
    "a threshold of 1": (put(0, "threshold", lambda x: 1.0), "threshold must be in [0, 1)"),
    "no safetensors": (lambda path: path.write_bytes(b"\x80\x04pickle" * 50), "no safetensors"),
    "another safetensors": (
        lambda path: save_file({"x": np.zeros(3, np.float32)}, path), "no predictor",
    ),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "truncated"),
    "empty": (lambda path: path.write_bytes(b""), "truncated"),
    "calibration is no object": (calibrated([1, 2]), "calibration"),
    "calibration lacks values": (calibrated({"tokens": 5}), "calibration"),
    "calibration of one layer": (
        calibrated({
            "text": "x", "target": "x", "tokens": 1, "window": 5, "miss_slots": [[1]],
            "miss_curve": [[1.0]], "capacity": [3], "active": [0.5], "selected": [0.5],
            "false_negatives": [0.1], "false_positives": [0.1],
        }), "calibration",
    ),
    "calibration of words": (
        calibrated({
            "text": 3, "target": "x", "tokens": "many", "window": 5, "miss_slots": [[1], [1]],
            "miss_curve": [[1.0], [1.0]], "capacity": [-3, 3], "active": [0.5, 0.5],
            "selected": [0.5, 0.5], "false_negatives": [0.1, 0.1], "false_positives": [0.1, 0.1],
        }), "calibration",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(cli: Cli, dense: Path, trained: Path, tmp_path: Path, what: str) -> None:
    spoil, sentence = REFUSED[what]
    spoil(trained)
    out = tmp_path / "flash.gguf"
    done = cli("convert", dense, "--out", out, "--predictor", trained, "--quiet", code=2)
    assert done.stderr.count("\n") == 1 and sentence in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense.gguf", "predictor.safetensors"]


@pytest.mark.parametrize(
    "words",
    [
        ("--select", "predictor"),
        ("--select", "gate", "--predictor", "FILE"),
        ("--select", "all", "--predictor", "FILE"),
        ("--dense", "--predictor", "FILE"),
        ("--predictor-type", "q8_0"),
        ("--dense", "--select", "predictor"),
    ],
    ids=" ".join,
)
def test_words_that_do_not_go_together(
    cli: Cli, dense: Path, trained: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    given = [trained if word == "FILE" else word for word in words]
    done = cli("convert", dense, "--out", tmp_path / "f.gguf", "--quiet", *given, code=2)
    assert done.stderr.count("\n") == 1 and "--" in done.stderr
    assert not (tmp_path / "f.gguf").exists()


def test_a_predictor_that_is_not_there(cli: Cli, dense: Path, tmp_path: Path) -> None:
    words = ("--out", tmp_path / "f.gguf", "--predictor", tmp_path / "none")
    assert "does not exist" in cli("convert", dense, *words, code=2).stderr
    assert not (tmp_path / "f.gguf").exists()


# --- accepted -------------------------------------------------------------------------------------


def test_quantized_from_the_recorded_model(cli: Cli, small_opt: SmallOpt, tmp_path: Path) -> None:
    """The predictor names the F16 file; the same file as Q8_0 is the same model."""
    out = tmp_path / "q8.gguf"
    words = ("--outtype", "q8_0", "--predictor", small_opt.predictor)
    cli("convert", small_opt.dense, "--out", out, *words, "--quiet")
    assert read_layout(out).layers[0].parts[0].type.name == "Q8_0"
    cli("verify", out, "--against", small_opt.dense, "--predictor", small_opt.predictor)
    figures = cli.json("run", out, "--prompt", "The", "--tokens", 4, "--threads", 1)
    assert figures["tokens"] == 4


def split(path: Path, stem: Path) -> list[Path]:
    command = [tool_path("llama-gguf-split"), "--split-max-tensors", "7", path, stem]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return sorted(stem.parent.glob(f"{stem.name}-0*.gguf"))


def test_quantized_from_a_recorded_split_set(
    small_opt: SmallOpt, english: Path, tmp_path: Path
) -> None:
    """A recording of a split set names all of its files."""
    first, *others = split(small_opt.dense, tmp_path / "s")
    assert others
    recorded = tmp_path / "recording"
    collect(first, english, tokens=64, ctx=64, out=recorded, threads=1)
    predictor = Predictor.open(small_opt.predictor)
    predictor.model_sha256 = Recording.open(recorded).model_sha256
    assert predictor.model_sha256 != sha256(first)
    trained = saved(predictor, tmp_path / "p.safetensors")
    for outtype in (None, "q8_0"):
        convert(first, tmp_path / "f.gguf", predictor=trained, outtype=outtype)


def test_other_tools(cli: Cli, small_opt: SmallOpt, tmp_path: Path) -> None:
    """Split, and requantized but for the bundles, the file goes on running."""
    flash, words = small_opt.flash("predictor"), ("--prompt", "The", "--tokens", 12, "--threads", 1)
    wanted = cli.json("run", flash, *words)["text"]
    first, *others = split(flash, tmp_path / "s")
    assert others and cli.json("run", first, *words)["text"] == wanted
    assert cli.json("inspect", first)["calibration"]["tokens"] == 4096
    out = tmp_path / "requantized.gguf"
    command = [tool_path("llama-quantize"), "--allow-requantize", flash, out, "Q8_0"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    assert types["blk.0.attn_q.weight"] == "Q8_0" and types["blk.0.ffn_bundle"] == "I8"
    figures = cli.json("run", out, *words)
    assert figures["tokens"] == 12 and figures["flash_bytes"] > 0


# --- verify, and reordered neurons ----------------------------------------------------------------


def orders() -> dict[int, Any]:
    return {1: np.random.default_rng(2).permutation(N_FF).astype(np.int64)}


def overwrite(flash: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a resident tensor, seen as rows of bytes (one a neuron), in place."""
    layout = read_layout(flash)
    t = next(t for t in layout.resident if t.name == name)
    data = bytearray(flash.read_bytes())
    rows = np.frombuffer(data, np.uint8, t.nbytes, t.offset).reshape(t.shape[-1], -1)
    rows[:] = change(rows.copy())
    flash.write_bytes(data)


def flip(rows: Any) -> Any:
    rows[3, 1] ^= 1
    return rows


def test_verify(cli: Cli, dense: Path, trained: Path, tmp_path: Path) -> None:
    flash = tmp_path / "f.gguf"
    convert(dense, flash, predictor=trained)
    assert verify(flash, dense, predictor=trained).ok
    assert verify(flash, dense).ok
    shown = cli.json("verify", flash, "--against", dense, "--predictor", trained)
    assert shown["ok"] and shown["permuted_layers"] == 0


@pytest.mark.parametrize("part", ["a.weight", "b.weight", "b.bias"])
@pytest.mark.parametrize("order", [False, True], ids=["as is", "reordered"])
def test_verify_finds_one_wrong_bit(
    cli: Cli, dense: Path, trained: Path, tmp_path: Path, part: str, order: bool
) -> None:
    flash = tmp_path / "f.gguf"
    convert(dense, flash, predictor=trained, orders=orders() if order else None)
    overwrite(flash, f"blk.1.ffn_pred_{part}", flip)
    report = verify(flash, dense, predictor=trained)
    assert not report.ok and "1" in report.summary()
    words = ("--against", dense, "--predictor", trained)
    assert "not equal" in cli("verify", flash, *words, code=1).stderr
    assert verify(flash, dense).ok  # not compared


def ranked(dense: Path, path: Path, rank: int) -> Path:
    return saved(predictor_of(dense, lambda n, w: random_tensors(n, w, rank)), path)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("order", [False, True], ids=["as is", "reordered"])
def test_quantized_predictors(dense: Path, tmp_path: Path, order: bool, name: str) -> None:
    """Each row as the gguf package rounds it, compared bit by bit; and the model runs."""
    trained, flash = ranked(dense, tmp_path / "p.safetensors", 32), tmp_path / "f.gguf"
    moved = orders() if order else None
    convert(dense, flash, predictor=trained, predictor_type=name.lower(), orders=moved)
    kind = gguf.GGMLQuantizationType[name]
    tensors = {t.name: t for t in gguf.GGUFReader(flash).tensors}
    for layer, p in Predictor.open(trained).layers.items():
        rows = p.b if moved is None or layer not in moved else p.b[moved[layer]]
        for part, wanted in (("a", p.a), ("b", rows)):
            found = tensors[f"blk.{layer}.ffn_pred_{part}.weight"]
            quantized = gguf.quants.quantize(wanted.astype(np.float32), kind)
            assert found.tensor_type == kind and np.array_equal(found.data, quantized)
    assert verify(flash, dense, predictor=trained).ok
    assert np.isfinite(logits(load(flash), tokens_of(1), 8)).all()
    overwrite(flash, "blk.1.ffn_pred_b.weight", flip)
    assert not verify(flash, dense, predictor=trained).ok


def test_predictors_are_quantized(dense: Path, tmp_path: Path) -> None:
    """By default Q8_0 whatever the bundles are, where blocks of 32 fit; and the model runs."""
    out = tmp_path / "f.gguf"
    for bundles, rank, wanted in (("q8_0", 32, "Q8_0"), ("q8_0", 8, "F16"), (None, 32, "Q8_0")):
        trained = ranked(dense, tmp_path / "p.safetensors", rank)
        convert(dense, out, predictor=trained, outtype=bundles)
        types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
        assert types["blk.0.ffn_pred_a.weight"] == types["blk.1.ffn_pred_b.weight"] == wanted
        assert np.isfinite(logits(load(out), tokens_of(1), 8)).all()


def test_verify_finds_another_threshold(dense: Path, trained: Path, tmp_path: Path) -> None:
    convert(dense, tmp_path / "f.gguf", predictor=trained)
    put(1, "threshold", lambda x: 0.25)(trained)
    report = verify(tmp_path / "f.gguf", dense, predictor=trained)
    assert "threshold" in report.summary() and not report.ok


@pytest.mark.parametrize("order", [False, True], ids=["as is", "reordered"])
def test_verify_misses_the_predictor(
    dense: Path, trained: Path, tmp_path: Path, order: bool
) -> None:
    """A file that selects without one is not what --predictor says."""
    convert(dense, tmp_path / "f.gguf", orders=orders() if order else None)
    report = verify(tmp_path / "f.gguf", dense, predictor=trained)
    assert not report.ok and "predictor" in report.summary()


def test_verify_with_another_models_predictor(dense: Path, trained: Path, tmp_path: Path) -> None:
    convert(dense, tmp_path / "f.gguf", predictor=trained, orders=orders())
    other = make_dense(tmp_path / "o.gguf", arch="opt", n_ctx=64, n_ff=96)
    given = saved(predictor_of(other, random_tensors), tmp_path / "other.safetensors")
    assert not verify(tmp_path / "f.gguf", dense, predictor=given).ok


def test_reordered_neurons(dense: Path, trained: Path, tmp_path: Path) -> None:
    """Rows of B and values of b move with their neurons; the model computes the same."""
    for name, order in (("plain", None), ("moved", orders())):
        convert(dense, tmp_path / f"{name}.gguf", predictor=trained, orders=order)
    report = verify(tmp_path / "moved.gguf", dense, predictor=trained)
    assert report.ok and report.permuted_layers == 1
    llms = [load(tmp_path / f"{name}.gguf") for name in ("plain", "moved")]
    wanted, found = (logits(llm, tokens_of(1), 20) for llm in llms)
    assert np.abs(found - wanted).max() <= F32_ROUNDING * np.abs(wanted).max()
    assert not same_bits(found, wanted)  # sums run in another order
    counts = [[x["selected"] for x in llm.flash_stats()["layers"]] for llm in llms]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("part", ["b.weight", "b.bias"])
def test_verify_finds_a_row_that_moved_elsewhere(
    dense: Path, trained: Path, tmp_path: Path, part: str
) -> None:
    """The same rows, but two of them belong to each other's neuron."""
    flash = tmp_path / "f.gguf"
    convert(dense, flash, predictor=trained, orders=orders())

    def swap(rows: Any) -> Any:
        rows = rows if part == "b.weight" else rows.reshape(N_FF, 4)
        return rows[[1, 0, *range(2, N_FF)]].reshape(rows.shape)

    overwrite(flash, f"blk.1.ffn_pred_{part}", swap)
    assert not verify(flash, dense, predictor=trained).ok
