"""gguf-flash calibrate: targets, what is stored about them, and what convert makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli, SmallOpt
from recordings import SHA256 as PLANTED_SHA256
from recordings import PlantedLayer, plant, write_recording

from gguf_flash.calibrate.calibration import GRID, Target, calibrate
from gguf_flash.calibrate.recording import Recording
from gguf_flash.calibrate.selection import (
    curve_slots,
    filling,
    loads_per_token,
    miss_curve,
    window_capacity,
)
from gguf_flash.converters import convert
from gguf_flash.errors import ArgumentError, FlashError
from gguf_flash.format import read_layout
from gguf_flash.perplexity import perplexity
from gguf_flash.predictor.file import Predictor, PredictorLayer

TOKENS, CTX, N_EMBD, N_FF = 1024, 64, 48, 96
HELD_OUT = 128  # the last two windows of 64: a tenth, rounded


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("fn=5%", "fn", 0.05),
        ("fn=0.05", "fn", 0.05),
        ("fn=0", "fn", 0.0),
        ("bytes=2MiB", "bytes", 2 << 20),
        ("bytes=1500", "bytes", 1500),
        ("kl=0.01", "kl", 0.01),
    ],
)
def test_targets(text: str, kind: str, value: float) -> None:
    assert Target.parse(text) == Target(kind, pytest.approx(value))


@pytest.mark.parametrize(
    "text",
    ["", "fn", "fn=", "fn=x", "fn=-1%", "fn=100%", "fn=1", "fn=nan", "fn=5%%", "kl=0", "kl=-1",
     "kl=inf", "kl=nan", "kl=5%", "bytes=0", "bytes=-1", "bytes=x", "bytes=60%", "rate=5%",
     "FN=5%", "5%"],
)  # fmt: skip
def test_targets_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"fn=5%, bytes=2MiB or kl=0.01 expected") as refused:
        Target.parse(text)
    assert f"'{text}'" in str(refused.value)


# --- planted recordings ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Predictor]:
    """Two planted layers, and a predictor that sees them through noise."""
    layers = [plant(seed, TOKENS, N_EMBD, N_FF) for seed in (1, 2)]
    folder = write_recording(tmp_path_factory.mktemp("planted") / "r", layers, ctx=CTX)
    trained = {i: fitted(i, layer) for i, layer in enumerate(layers)}
    return Recording.open(folder), Predictor(trained, PLANTED_SHA256, "opt", N_EMBD, {"seed": 1})


def fitted(number: int, layer: PlantedLayer) -> PredictorLayer:
    """Features relu(+-x), and the least squares fit of the activity on them."""
    x = layer.x.astype(np.float32)
    identity = np.eye(N_EMBD, dtype=np.float32)
    a = np.concatenate([identity, -identity])
    features = np.concatenate([np.maximum(x @ a.T, 0), np.ones((len(x), 1), np.float32)], axis=1)
    wanted = 4.0 * (layer.h > 0) - 2.0
    w = np.linalg.lstsq(features, wanted, rcond=None)[0]
    b, bias = w[:-1].T.astype(np.float16), w[-1].astype(np.float32)
    return PredictorLayer(number, a.astype(np.float16), b, bias, 0.5)


def held_out(recording: Recording, predictor: Predictor, layer: int) -> tuple[Any, Any]:
    """What is selected and what is active on the held-out tokens."""
    recorded, begin = recording.layer(layer), TOKENS - HELD_OUT
    chosen = predictor.layers[layer].selected(np.asarray(recorded.x()[begin:]))
    return chosen, recorded.active(begin, TOKENS)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.3])
def test_a_share_of_misses(planted: tuple[Recording, Predictor], share: float) -> None:
    """Reached in every layer, and one more miss would be too many."""
    recording, given = planted
    found = calibrate(recording, given, Target("fn", share))
    for layer in (0, 1):
        chosen, active = held_out(recording, found, layer)
        missed, total = np.count_nonzero(active & ~chosen), np.count_nonzero(active)
        assert missed <= share * total < missed + 1
        p = found.layers[layer]
        assert p.stats["false_negatives"] == missed / total
        assert p.stats["false_positives"] == chosen[~active].mean()
        assert 0 < p.threshold < 1
    assert [p.threshold for p in given.layers.values()] == [0.5, 0.5]  # a copy was changed


def test_what_is_stored(planted: tuple[Recording, Predictor]) -> None:
    recording, given = planted
    found = calibrate(recording, given, Target("fn", 0.1), window=3).training["calibration"]
    head = {"text": "planted.txt", "tokens": HELD_OUT, "target": "10 % missed", "window": 3}
    assert {k: v for k, v in found.items() if not isinstance(v, list)} == head
    slots = curve_slots(N_FF)
    for i in (0, 1):
        chosen, active = held_out(recording, calibrate(recording, given, Target("fn", 0.1)), i)
        assert found["capacity"][i] == window_capacity(chosen, 3)
        assert found["active"][i] == active.mean() and found["selected"][i] == chosen.mean()
        assert found["miss_slots"][i] == slots
        assert found["miss_curve"][i] == miss_curve(chosen, slots, filling(HELD_OUT))
    assert {len(v) for v in found.values() if isinstance(v, list)} == {2}


def read_bytes(recording: Recording, predictor: Predictor, strides: dict[int, int]) -> float:
    chosen = {i: held_out(recording, predictor, i)[0] for i in strides}
    return sum(loads_per_token(chosen[i], 1) * stride for i, stride in strides.items())


def test_bytes_per_token(planted: tuple[Recording, Predictor]) -> None:
    """The least missed share on the grid whose loads fit; loads need not fall with the share.

    A window of one token: in a longer one these planted neurons are nearly all cached.
    """
    recording, given = planted
    strides = {0: 512, 1: 2048}
    by_share = [calibrate(recording, given, Target("fn", s)) for s in GRID]
    loads = [read_bytes(recording, p, strides) for p in by_share]
    chosen = set()
    for limit in loads:
        found = calibrate(recording, given, Target("bytes", limit), strides=strides, window=1)
        first = next(i for i, v in enumerate(loads) if v <= limit)
        assert thresholds(found) == thresholds(by_share[first])
        chosen.add(first)
    assert len(chosen) > 4
    least = GRID[int(np.argmin(loads))]
    with pytest.raises(ArgumentError, match=f"missing {100 * least:g} % of the active neurons"):
        calibrate(recording, given, Target("bytes", min(loads) - 1), strides=strides, window=1)


def thresholds(predictor: Predictor) -> list[float]:
    return [p.threshold for p in predictor.layers.values()]


@pytest.mark.parametrize("meets", [0, 1, 5, len(GRID) - 1])
def test_divergence_is_searched(planted: tuple[Recording, Predictor], meets: int) -> None:
    """The largest share that meets the target, in at most four measurements."""
    recording, given = planted
    by_share = [thresholds(calibrate(recording, given, Target("fn", s))) for s in GRID]
    asked = []

    def measure(chosen: Any) -> float:
        asked.append(by_share.index([chosen[0], chosen[1]]))
        return float(asked[-1])

    found = calibrate(recording, given, Target("kl", meets or 0.5), measure_kl=measure)
    assert thresholds(found) == by_share[meets]
    assert len(asked) <= 4
    with pytest.raises(ArgumentError, match=r"missing 0.2 % of the active neurons is too much"):
        calibrate(recording, given, Target("kl", 0.1), measure_kl=lambda chosen: 1.0)
    with pytest.raises(ArgumentError, match="give --model"):
        calibrate(recording, given, Target("kl", 0.1))


# --- the verb, on the trained OPT -----------------------------------------------------------------


def words_for(small_opt: SmallOpt, out: Path, *more: object) -> tuple[object, ...]:
    given = ("calibrate", small_opt.recording(), "--predictor", small_opt.predictor)
    return (*given, "--out", out, *more)


def test_round_trip(cli: Cli, small_opt: SmallOpt, tmp_path: Path) -> None:
    """The same bytes each time; --json, the file, convert and inspect say the same."""
    out, again, flash = (tmp_path / n for n in ("a.safetensors", "b.safetensors", "f.gguf"))
    words = ("--target", "fn=3%", "--window", 7, "--held-out", 0.25)
    shown = cli.json(*words_for(small_opt, out, *words))
    line = cli(*words_for(small_opt, again, *words)).stdout
    assert f"wrote {again}: 6 layers for 3 % missed, on 1024 tokens" in line
    assert out.read_bytes() == again.read_bytes()
    kept = Predictor.open(out).training["calibration"]
    assert kept["window"] == shown["window"] == 7 and shown["target"] == "3 % missed"
    convert(small_opt.dense, flash, predictor=out)
    seen = cli.json("inspect", flash)
    head = {k: shown[k] for k in ("text", "tokens", "target", "window")}
    assert seen["calibration"] == head
    assert head["text"] == "english.txt" and head["tokens"] == 1024
    for i, (mine, theirs) in enumerate(zip(shown["layers"], seen["layers"], strict=True)):
        assert (mine["layer"], mine["rank"], mine["capacity"]) == (
            i, theirs["rank"], theirs["capacity"],
        )  # fmt: skip
        for name in ("threshold", "active", "selected", "false_negatives", "false_positives"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-6)  # stored as F32
        pairs = zip(mine["miss_slots"], mine["miss_curve"], strict=True)
        assert theirs["miss_curve"] == [[n, pytest.approx(v, rel=1e-6)] for n, v in pairs]
        assert mine["false_negatives"] <= 0.03
    assert "3 % missed; 1024 tokens of english.txt" in cli("inspect", flash).stdout
    assert read_layout(flash).text("flash_ffn.calibration.target") == "3 % missed"


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.0005, 0.005])
def test_a_target_in_divergence(
    cli: Cli, small_opt: SmallOpt, english: Path, tmp_path: Path, target: float
) -> None:
    """Measured again on the converted file; the next share of the grid would be too much."""
    out, text = tmp_path / "p.safetensors", english.read_text(encoding="utf-8")
    limits = ("--model", small_opt.dense, "--text", english, "--ctx", 128, "--chunks", 4)
    words = ("--target", f"kl={target}", *limits, "--threads", 1)
    before = sorted(small_opt.dense.parent.iterdir())
    shown = cli.json(*words_for(small_opt, out, *words))
    assert sorted(small_opt.dense.parent.iterdir()) == before  # no temporary file stays
    recording, given = Recording.open(small_opt.recording()), Predictor.open(small_opt.predictor)
    by_share = [calibrate(recording, given, Target("fn", s)) for s in GRID]
    chosen = [thresholds(p) for p in by_share].index([x["threshold"] for x in shown["layers"]])
    by_share[chosen + 1].save(tmp_path / "next.safetensors")
    found = {}
    for name in ("p", "next"):
        convert(
            small_opt.dense, tmp_path / f"{name}.gguf", predictor=tmp_path / f"{name}.safetensors"
        )
        found[name] = perplexity(
            tmp_path / f"{name}.gguf", text, against=small_opt.dense, ctx=128, batch=128,
            chunks=4, threads=1,
        )["mean_kl"]  # fmt: skip
    assert found["p"] <= target < found["next"]


def test_a_target_in_bytes(cli: Cli, small_opt: SmallOpt, tmp_path: Path) -> None:
    """The stride of a bundle is 1024 bytes here, in every layer."""
    out = tmp_path / "p.safetensors"
    words = ("--model", small_opt.dense, "--window", 2)
    cli(*words_for(small_opt, out, "--target", "bytes=100KiB", *words))
    recording, found = Recording.open(small_opt.recording()), Predictor.open(out)
    begin = recording.split(0.1)
    read = 1024 * sum(
        loads_per_token(found.layers[r.layer].selected(np.asarray(r.x()[begin:])), 2)
        for r in recording.layers
    )
    assert 50 << 10 < read <= 100 << 10
    assert found.training["calibration"]["target"] == "100.0 KiB per token"
    none = tmp_path / "none.safetensors"
    refused = cli(*words_for(small_opt, none, "--target", "bytes=1KiB", *words), code=2)
    assert refused.stderr.count("\n") == 1 and "no threshold reads as little" in refused.stderr
    assert not none.exists()


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no such target": (("--target", "fn=200%"), "fn=5%"),
    "bytes without a model": (("--target", "bytes=1MiB"), "give --model"),
    "divergence without a text": (("--target", "kl=0.1", "--model", "MODEL"), "--text"),
    "bytes of another model": (("--target", "bytes=1MiB", "--model", "OTHER"), "another model"),
    "divergence of another model": (
        ("--target", "kl=0.1", "--model", "OTHER", "--text", "TEXT"), "another model",
    ),
    "no recording": (("RECORDING", "missing"), "is no recording"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(
    cli: Cli, small_opt: SmallOpt, english: Path, tiny: tuple[Path, Path], tmp_path: Path, what: str
) -> None:
    words, sentence = REFUSED[what]
    files = {"MODEL": small_opt.dense, "OTHER": tiny[0], "TEXT": english}
    given = [files.get(word, word) for word in words]
    recording = tmp_path / "missing" if given[0] == "RECORDING" else small_opt.recording()
    more = () if given[0] == "RECORDING" else given
    out = tmp_path / "out.safetensors"
    fixed = ("--predictor", small_opt.predictor, "--out", out, "--threads", 1)
    done = cli("calibrate", recording, *fixed, *more, code=2)
    assert done.stderr.count("\n") == 1 and sentence in done.stderr
    assert not out.exists()


def test_a_recording_of_another_model(
    cli: Cli, small_opt: SmallOpt, planted: tuple[Recording, Predictor], tmp_path: Path
) -> None:
    recording, own = planted
    other = Predictor.open(small_opt.predictor)
    with pytest.raises(FlashError, match="trained on another model"):
        calibrate(recording, other, Target("fn", 0.1))
    own = Predictor({0: own.layers[0]}, own.model_sha256, "opt", N_EMBD, {})
    with pytest.raises(FlashError, match="lacks layer 1"):
        calibrate(recording, own, Target("fn", 0.1))
    words = ("--predictor", small_opt.predictor, "--out", tmp_path / "out")
    done = cli("calibrate", recording.path, *words, code=2)
    assert done.stderr.count("\n") == 1 and "another model" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help(cli: Cli) -> None:
    shown = cli("calibrate", "--help").stdout
    for word in ("--target", "fn=SHARE", "bytes=SIZE", "kl=NATS", "--window", "--held-out"):
        assert word in shown
