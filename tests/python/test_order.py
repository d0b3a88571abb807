"""Neurons in another order: which one is chosen, that all of a neuron moves, and what it saves."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import DATA, Cli, SmallOpt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy_model import NumpyModel, silence_attention
from predictors import load, logits, predictor_of, random_tensors, saved, tokens_of
from recordings import plant, write_recording
from tiny_models import make_dense

from gguf_flash.calibrate import collect
from gguf_flash.calibrate.coactivity import chain, requests_per_token
from gguf_flash.calibrate.inputs import FfnInputs
from gguf_flash.calibrate.recording import Recording
from gguf_flash.calibrate.selection import missed
from gguf_flash.converters import convert, order, verify, verify_checksums
from gguf_flash.converters.flash_file import FlashFile
from gguf_flash.converters.reorder import reorder
from gguf_flash.converters.selections import Selections
from gguf_flash.errors import ArgumentError, FlashError, IoError, NotFlashError, UnsupportedError
from gguf_flash.format import read_layout

TEXT = DATA / "english.txt"
# Sums of F16 down rows run in another order, and llama.cpp rounds what F16 matrices are given to
# halves. Relative to the largest logit, as between flash and dense in the families' table.
F16_ROUNDING = 2e-3


def far(found: Any, wanted: Any) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


# --- which order ----------------------------------------------------------------------------------


@given(arrays(np.bool_, st.tuples(st.integers(0, 12), st.integers(1, 20))))
def test_chain_is_a_permutation(misses: Any) -> None:
    found = chain(misses)
    assert np.array_equal(np.sort(found), np.arange(misses.shape[1]))
    counts = np.count_nonzero(misses, axis=0)[found]
    assert counts[0] == counts.max()
    assert not counts[np.count_nonzero(counts) :].any()  # those that are never missed are last


def clustered(seed: int, groups: int = 16, size: int = 8, tokens: int = 300) -> Any:
    """bool [tokens, groups * size], where groups of neurons in no order are missed together."""
    random = np.random.default_rng(seed)
    of_groups = random.random((tokens, groups)) < 0.1
    misses = np.repeat(of_groups, size, axis=1) & (random.random((tokens, groups * size)) < 0.9)
    return misses[:, random.permutation(groups * size)]


def test_chain_finds_groups() -> None:
    """Eight neurons that come together become one read, also for tokens it has not seen."""
    misses = clustered(1, tokens=600)
    found = chain(misses[:300])
    before = requests_per_token(misses[300:], np.arange(128), 4096, 0)
    after = requests_per_token(misses[300:], found, 4096, 0)
    assert after < 0.5 * before


def test_chain_by_hand() -> None:
    """Most missed first, its closest next, by the angle and not by the count alone."""
    columns = ["111110000", "000000000", "001111111", "111100000", "000000011"]
    misses = np.array([[c == "1" for c in column] for column in columns]).T
    # 2 is the most missed (7). With it 4 has 2 of 2 tokens (0.53), 0 has 3 of 5 (0.51), 3 2 of 4.
    assert chain(misses).tolist() == [2, 4, 0, 3, 1]


@pytest.mark.parametrize(
    ("places", "stride", "gap", "expected"),
    [
        ([], 512, 0, 0),
        ([3], 512, 0, 1),
        ([3, 4, 5], 512, 0, 1),
        ([3, 5], 512, 0, 2),
        ([3, 5], 512, 512, 1),
        ([3, 6], 512, 512, 2),
        (list(range(64)), 512, 0, 1),
        (list(range(65)), 512, 0, 2),  # 64 pieces of memory a read
        (list(range(0, 66, 2)), 512, 512, 2),  # gaps are pieces: 32 neurons and 31 of them
        (list(range(4)), 256 << 10, 0, 2),  # 512 KiB a read
        ([0, 1], 1 << 20, 0, 2),
    ],
)
def test_requests(places: list[int], stride: int, gap: int, expected: int) -> None:
    misses = np.zeros((1, 70), np.bool_)
    misses[0, places] = True
    assert requests_per_token(misses, np.arange(70), stride, gap) == expected
    moved = np.random.default_rng(0).permutation(70)
    there = np.zeros_like(misses)
    there[0, moved[places]] = True
    assert requests_per_token(there, moved, stride, gap) == expected


def test_missed_is_of_the_cache() -> None:
    selected = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 0], [1, 0, 1]], np.bool_)
    expected = [[1, 1, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert missed(selected, 2).tolist() == [[bool(v) for v in row] for row in expected]


# --- everything of a neuron moves -----------------------------------------------------------------


def tensors(path: Path) -> dict[str, Any]:
    return {
        t.name: (t.tensor_type, t.shape.tolist(), t.data) for t in gguf.GGUFReader(path).tensors
    }


CASES: dict[str, dict[str, Any]] = {
    "llama-all": {"arch": "llama", "select": "all"},
    "llama-gate": {"arch": "llama", "select": "gate", "biases": True},
    "fused-all": {"arch": "phi3", "select": "all"},
    "fused-gate": {"arch": "phi3", "select": "gate", "biases": True},
    "plain-gate": {"arch": "starcoder2", "select": "gate", "type": "Q4_0"},
    "predictor": {"arch": "opt", "select": "predictor"},
}


@pytest.mark.parametrize("thresholds", [False, True], ids=["", "thresholds"])
@pytest.mark.parametrize("case", CASES)
def test_reorder_is_convert_with_orders(tmp_path: Path, case: str, thresholds: bool) -> None:
    """The same file as the converter makes in this order, which verify proves."""
    options = dict(CASES[case])
    select = options.pop("select")
    dense = make_dense(tmp_path / "d.gguf", n_ctx=64, **options)
    if thresholds:
        dense = with_thresholds(dense, tmp_path / "cut.gguf")
    predictor = None
    if select == "predictor":
        predictor = saved(predictor_of(dense, random_tensors), tmp_path / "p.safetensors")
    orders = {n: np.random.default_rng(n).permutation(128) for n in (0, 1)}
    given: dict[str, Any] = {"select": select, "predictor": predictor}
    convert(dense, tmp_path / "f.gguf", **given)
    convert(dense, tmp_path / "wanted.gguf", orders=orders, **given)
    with FlashFile(read_layout(tmp_path / "f.gguf")) as flash:
        reorder(flash, tmp_path / "found.gguf", orders)
    wanted, found = tensors(tmp_path / "wanted.gguf"), tensors(tmp_path / "found.gguf")
    assert list(found) == list(wanted)
    for name, (kind, shape, data) in wanted.items():
        assert found[name][:2] == (kind, shape), name
        assert np.array_equal(found[name][2], data), name
    assert read_layout(tmp_path / "found.gguf").kv == read_layout(tmp_path / "wanted.gguf").kv
    report = verify(tmp_path / "found.gguf", dense, predictor=predictor)
    assert report.ok and report.permuted_layers == 2


def with_thresholds(dense: Path, out: Path) -> Path:
    from test_sparsity import own_thresholds

    from gguf_flash.calibrate.sparsity import FoundThresholds
    from gguf_flash.converters import convert_dense

    found: FoundThresholds = own_thresholds(dense)
    return convert_dense(dense, out, sparsify=lambda path, act: found)


def test_only_one_layer_and_in_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer larger than the memory for it, and one that keeps its order."""
    monkeypatch.setattr("gguf_flash.converters.reorder._PANEL_BYTES", 50_000)
    monkeypatch.setattr("gguf_flash.converters.reorder._READ_BYTES", 7_000)
    dense = make_dense(tmp_path / "d.gguf")
    convert(dense, tmp_path / "f.gguf", select="gate")
    orders = {1: np.random.default_rng(1).permutation(128)}
    with FlashFile(read_layout(tmp_path / "f.gguf")) as flash:
        reorder(flash, tmp_path / "o.gguf", orders)
    before, after = tensors(tmp_path / "f.gguf"), tensors(tmp_path / "o.gguf")
    assert np.array_equal(after["blk.0.ffn_bundle"][2], before["blk.0.ffn_bundle"][2])
    assert np.array_equal(after["blk.1.ffn_bundle"][2], before["blk.1.ffn_bundle"][2][orders[1]])
    assert verify(tmp_path / "o.gguf", dense).permuted_layers == 1


# --- by a recording, by a text --------------------------------------------------------------------


def recorded(dense: Path, folder: Path, tokens: int = 128) -> Path:
    collect(dense, TEXT, tokens=tokens, ctx=64, out=folder, threads=1)
    return folder


@pytest.mark.parametrize("select", ["all", "gate"])
def test_selections_are_those_recorded(tmp_path: Path, select: str) -> None:
    """Of squared ReLU, what the file's own rows select is what was active in the dense model."""
    dense = make_dense(tmp_path / "d.gguf", arch="nemotron", n_ctx=64, biases=True)
    recording = Recording.open(recorded(dense, tmp_path / "rec"))
    orders = {1: np.random.default_rng(1).permutation(128)}
    layout = convert(dense, tmp_path / "f.gguf", select=select, orders=orders)
    inputs = FfnInputs.recorded(tmp_path / "rec", layout, 128)
    with FlashFile(layout) as flash:
        for b in layout.layers:
            found = Selections(flash).of(b, inputs.x(b.layer))
            active = recording.layer(b.layer).active(0, 128)
            wanted = active[:, orders.get(b.layer, np.arange(128))]
            assert np.count_nonzero(found != wanted) <= 0.002 * wanted.size  # inputs are halves
            assert 0.2 < wanted.mean() < 0.8


def test_selections_by_thresholds(tmp_path: Path) -> None:
    """SiLU with a threshold for each neuron, and the gate's bias."""
    plain = silence_attention(make_dense(tmp_path / "p.gguf", biases=True))
    dense = with_thresholds(plain, tmp_path / "d.gguf")
    layout = convert(dense, tmp_path / "f.gguf", select="gate")
    model, x = NumpyModel(plain), np.random.default_rng(0).standard_normal((50, 64))
    cuts = {n: data for n, (_, _, data) in tensors(tmp_path / "f.gguf").items()}
    with FlashFile(layout) as flash:
        for b in layout.layers:
            found = Selections(flash).of(b, x.astype(np.float32))
            v = model.linear(f"blk.{b.layer}.ffn_gate", x)
            above = np.abs(v / (1 + np.exp(-v))) - cuts[f"blk.{b.layer}.ffn_threshold"]
            assert (
                np.array_equal(found, above > 0) or np.abs(above[found != (above > 0)]).max() < 1e-6
            )
            assert 0.05 < found.mean() < 0.95


@pytest.mark.parametrize("select", ["gate", "predictor"])
def test_a_text_gives_the_inputs_of_the_file(
    small_opt: SmallOpt, select: str, tmp_path: Path
) -> None:
    """Halves of what the dense model's FFNs are given, where the selection loses nothing."""
    layout = read_layout(small_opt.flash(select))
    found = FfnInputs.run(layout, TEXT, 300, threads=1)
    assert (found.text, found.tokens) == ("english.txt", 300)
    wanted = FfnInputs.recorded(small_opt.recording(), layout, 256)
    first = layout.layers[0].layer
    # Layer 0 is given the same under any selection, but for the first token of a window.
    assert np.allclose(found.x(first)[1:200], wanted.x(first)[1:200], atol=0.02, rtol=0.02)
    if select == "gate":
        for b in layout.layers:
            assert np.allclose(found.x(b.layer)[:200], wanted.x(b.layer)[:200], atol=0.1, rtol=0.1)


@pytest.mark.parametrize("by", ["recording", "text"])
@pytest.mark.parametrize("select", ["gate", "predictor"])
def test_an_ordered_file_is_the_same_model(
    cli: Cli,
    small_opt: SmallOpt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    select: str,
    by: str,
) -> None:
    flash, out = small_opt.flash(select), tmp_path / "o.gguf"
    given = ("--recording", small_opt.recording()) if by == "recording" else ("--text", TEXT)
    shown = cli.json("order", flash, out, *given, "--tokens", 400, "--threads", 1)
    assert (shown["tokens"], shown["held_out"]) == (320, 80)
    assert shown["requests"] <= shown["requests_before"]
    assert shown["requests"] == sum(x["requests"] for x in shown["layers"])
    predictor = small_opt.predictor if select == "predictor" else None
    report = verify(out, small_opt.dense, predictor=predictor)
    assert report.ok and report.permuted_layers == len(read_layout(out).layers)
    tokens = tokens_of(3, 40)
    wanted, found = (logits(load(p), tokens, 20) for p in (flash, out))
    assert np.array_equal(found.argmax(axis=1), wanted.argmax(axis=1))
    if select == "predictor":  # a score next to the threshold falls to either side: so select all
        assert far(found, wanted) <= 10 * F16_ROUNDING
        monkeypatch.setenv("GGUF_FLASH_PREDICTOR_THRESHOLD", "0")
        wanted, found = (logits(load(p), tokens, 20) for p in (flash, out))
    assert far(found, wanted) <= F16_ROUNDING
    assert cli.json("inspect", out)["order"] == {"text": "english.txt", "tokens": 320}
    assert "by 320 tokens of english.txt" in cli("inspect", out).stdout
    assert cli.json("inspect", flash)["order"] is None


def test_an_ordered_file_is_ordered_again(small_opt: SmallOpt, tmp_path: Path) -> None:
    """A recording is in the dense model's order, the file in its own: selections go by the file."""
    first, again = tmp_path / "a.gguf", tmp_path / "b.gguf"
    once = order(small_opt.flash("gate"), first, recording=small_opt.recording(), tokens=400)
    twice = order(first, again, recording=small_opt.recording(), tokens=400)
    # Of neurons unused for equally long the cache evicts the first, which is another one now.
    assert twice.requests_before == pytest.approx(once.requests, rel=0.02)
    misses = [[x.misses for x in done.layers] for done in (once, twice)]
    assert misses[1] == pytest.approx(misses[0], rel=0.02)
    assert verify(again, small_opt.dense).ok


def test_the_engine_reads_less_often(
    small_opt: SmallOpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own counters, on a text that the order was not chosen by."""
    monkeypatch.setenv("GGUF_FLASH_GAP", "0")
    monkeypatch.setenv("GGUF_FLASH_LOOKAHEAD", "off")
    flash, out = small_opt.flash("predictor"), tmp_path / "o.gguf"
    order(flash, out, recording=small_opt.recording(), tokens=2000)
    words = TEXT.read_text()[20000:21000]
    totals = []
    for path in (flash, out):
        llm = load(path, n_ctx=128, ram="30%")
        logits(llm, llm.tokenize(words.encode())[:100], 1)
        totals.append(llm.flash_stats()["total"])
    before, after = totals
    assert after["selected"] == before["selected"]
    assert abs(after["misses"] - before["misses"]) <= 0.02 * before["misses"]
    assert after["requests"] < 0.97 * before["requests"]


# --- refused --------------------------------------------------------------------------------------


def test_verify_finds_rows_that_moved_alone(small_opt: SmallOpt, tmp_path: Path) -> None:
    """Two bundles that changed places without their values of the resident tensors."""
    out = tmp_path / "o.gguf"
    order(small_opt.flash("gate"), out, recording=small_opt.recording(), tokens=100)
    b = read_layout(out).layers[0]
    data = bytearray(out.read_bytes())
    rows = np.frombuffer(data, np.uint8, b.nbytes, b.offset).reshape(b.n_ff, b.stride)
    rows[[0, 1]] = rows[[1, 0]]
    out.write_bytes(data)
    assert not verify(out, small_opt.dense).ok


@pytest.mark.parametrize(
    "wrong", [np.zeros(128, np.int64), np.arange(127), np.arange(1, 129), np.arange(-1, 127)]
)
def test_no_permutation(tmp_path: Path, wrong: Any) -> None:
    convert(make_dense(tmp_path / "d.gguf"), tmp_path / "f.gguf")
    with (
        FlashFile(read_layout(tmp_path / "f.gguf")) as flash,
        pytest.raises(ArgumentError, match="layer 1 is not a permutation of 128 neurons"),
    ):
        reorder(flash, tmp_path / "o.gguf", {1: wrong})
    assert not (tmp_path / "o.gguf").exists()


def test_codes_keep_their_places(cli: Cli, tmp_path: Path) -> None:
    dense = make_dense(tmp_path / "d.gguf", type="Q8_0", n_ctx=64)
    convert(dense, tmp_path / "f.gguf", select="gate")
    out = tmp_path / "o.gguf"
    result = cli("order", tmp_path / "f.gguf", out, "--text", TEXT, code=2)
    assert "codes of Q8_0" in result.stderr and "--down-type f16" in result.stderr
    assert result.stderr.count("\n") == 1 and not out.exists()


def test_refused(small_opt: SmallOpt, tmp_path: Path) -> None:
    flash, out, rec = small_opt.flash("gate"), tmp_path / "o.gguf", small_opt.recording()
    other = write_recording(tmp_path / "rec", [plant(1, tokens=512)])
    silu = make_dense(tmp_path / "silu.gguf", n_ctx=64)
    convert(silu, tmp_path / "silu.flash.gguf", select="gate")
    (tmp_path / "short.txt").write_text("a")
    refused: list[tuple[type[FlashError], str, dict[str, Any]]] = [
        (ArgumentError, "give one of them", {}),
        (ArgumentError, "give one of them", {"recording": rec, "text": TEXT}),
        (ArgumentError, "above 0 and below 1", {"recording": rec, "cache": 1.0}),
        (ArgumentError, "at least 10 tokens", {"recording": rec, "tokens": 5}),
        (ArgumentError, "of another model", {"recording": other}),
        (ArgumentError, "give a recording", {"text": TEXT, "flash": small_opt.flash("all")}),
        (ArgumentError, "choose another name", {"recording": rec, "out": flash}),
        (ArgumentError, "every neuron", {"text": TEXT, "flash": tmp_path / "silu.flash.gguf"}),
        (ArgumentError, "at least 10 expected", {"text": tmp_path / "short.txt"}),
        (NotFlashError, "R4", {"recording": rec, "flash": small_opt.dense}),
        (IoError, "does not exist", {"recording": rec, "out": tmp_path / "no" / "o.gguf"}),
    ]
    for error, words, options in refused:
        with pytest.raises(error, match=words):
            order(options.pop("flash", flash), options.pop("out", out), **options)
    assert not out.exists()


def test_a_full_disk_leaves_nothing(
    small_opt: SmallOpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash, rec, written = small_opt.flash("gate"), small_opt.recording(), os.write

    def full(fd: int, data: Any) -> int:
        if len(data) > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(IoError, match="No space left"):
        order(flash, tmp_path / "o.gguf", recording=rec, tokens=50)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_of_its_own(tmp_path: Path) -> None:
    """Without a known activation nothing tells what the file selects."""
    layout = convert(make_dense(tmp_path / "d.gguf"), tmp_path / "f.gguf", select="gate")
    object.__setattr__(layout, "activation", "")
    layout.kv["general.architecture"] = gemma(layout)
    with FlashFile(layout) as flash, pytest.raises(UnsupportedError, match="'gemma3n'"):
        Selections(flash)


def gemma(layout: Any) -> Any:
    from gguf_flash.format.container import encode_value

    return encode_value("str", "gemma3n")


def test_an_ordered_file_has_checksums_of_its_own(small_opt: SmallOpt, tmp_path: Path) -> None:
    out = tmp_path / "ordered.gguf"
    order(small_opt.flash("gate"), out, text=TEXT)
    assert not verify_checksums(out).differences
    with pytest.raises(ArgumentError, match="exists"):
        order(small_opt.flash("gate"), out, text=TEXT)
