"""Plans of models: against what the engine refuses, and against what it then reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli, SmallOpt
from test_plan import report

from gguf_flash.bench.measure import random_tokens
from gguf_flash.bench.shapes import LEAD
from gguf_flash.calibrate.calibration import Target, calibrate
from gguf_flash.calibrate.recording import Recording
from gguf_flash.calibrate.selection import filling
from gguf_flash.converters import convert
from gguf_flash.errors import ArgumentError, NotFlashError, RamTooSmallError
from gguf_flash.measure import difference
from gguf_flash.memory import ContextSize
from gguf_flash.plan import DeviceProfile, curves_of
from gguf_flash.plan.cost import Costs
from gguf_flash.plan.facts import Facts
from gguf_flash.plan.planner import Planner
from gguf_flash.predictor.file import Predictor
from gguf_flash.session import Session
from gguf_flash.settings import Settings

DEVICE = DeviceProfile.of(report(), "a test")


# Bundles of these models are so small that a gap is dozens of neurons: without any, bytes follow
# from misses.
NO_GAPS = Costs(gap=0)


@pytest.fixture(autouse=True)
def _exactly_the_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUF_FLASH_GAP", "0")
    monkeypatch.setenv("GGUF_FLASH_LOOKAHEAD", "off")


def planner(path: Path, selected: float | None = None) -> Planner:
    facts = Facts.read(path)
    return Planner(facts, curves_of(facts.layout, selected), DEVICE, NO_GAPS)


@pytest.fixture(scope="module")
def calibrated(small_opt: SmallOpt, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The trained OPT, its predictors calibrated on text they have not seen, and that recording."""
    folder = tmp_path_factory.mktemp("plan")
    recording = Recording.open(small_opt.recording())
    trained = Predictor.open(small_opt.predictor)
    found = calibrate(recording, trained, Target("fn", 0.05), held_out=0.5)
    found.save(folder / "predictor.safetensors")
    flash = folder / "flash.gguf"
    convert(small_opt.dense, flash, predictor=folder / "predictor.safetensors")
    return flash, recording


def per_token(
    path: Path, ram: str, windows: Iterable[list[int]], skip: int
) -> tuple[dict[str, float], list[int]]:
    """What the engine counts of tokens decoded one by one, of all but the first `skip`."""
    with Session(path, Settings(ram=ram)) as session:
        windows = list(windows)
        session.open_context(
            n_ctx=len(windows[0]), n_batch=1, n_ubatch=1, n_outputs=1, threads=1,
            flash_attention=False,
        )  # fmt: skip
        assert session.engine is not None
        counted = -skip
        for window in windows:
            session.clear()
            for position, token in enumerate(window):
                if counted == 0:
                    before = session.engine.stats()["total"]
                session.decode([token], position, 1)
                counted += 1
        stats = session.engine.stats()
        gain = difference(before, stats["total"])
    names = ("misses", "bytes_read", "requests", "selected")
    return {n: gain[n] / counted for n in names}, [x["slots"] for x in stats["layers"]]


def check_counts(plan: Planner, found: dict[str, float], slots: list[int], within: float) -> None:
    cost = plan.steady(slots)
    assert cost.selected == pytest.approx(found["selected"], rel=0.05)
    one = 0.01 * found["selected"]  # what is near nothing need not be near in proportion
    stride = plan.facts.stride
    assert cost.misses == pytest.approx(found["misses"], rel=within, abs=one)
    assert cost.bytes == pytest.approx(found["bytes_read"], rel=within, abs=one * stride)
    assert cost.requests == pytest.approx(found["requests"], rel=2 * within, abs=one)


@pytest.mark.parametrize("ram", ["25%", "40%", "60%"])
def test_a_trained_model_reads_what_was_planned(ram: str, calibrated: tuple[Path, Any]) -> None:
    flash, recording = calibrated
    begin, ctx = recording.split(0.5), recording.ctx
    ids = recording.token_ids()[begin:].tolist()
    windows = [ids[i : i + ctx] for i in range(0, len(ids), ctx)]
    found, slots = per_token(flash, ram, windows, filling(len(ids)))
    check_counts(planner(flash), found, slots, 0.1)


@pytest.mark.parametrize("ram", ["15%", "30%", "50%"])
def test_a_planted_model_reads_what_was_planned(ram: str, planted: Path) -> None:
    flash, tokens = planted / "flash.gguf", 384
    with Session(planted / "dense.gguf") as session:
        ids = random_tokens(
            session, tokens, json.loads((planted / "planted.json").read_text())["seed"]
        )
    found, slots = per_token(flash, ram, [ids], LEAD + filling(tokens - LEAD))
    check_counts(planner(flash), found, slots, 0.15)


@pytest.mark.parametrize("ram", ["10%", "40%", "90%"])
def test_a_model_that_needs_every_neuron_reads_what_was_planned(
    ram: str, small_opt: SmallOpt
) -> None:
    flash = small_opt.flash("all")
    found, slots = per_token(flash, ram, [[2, *range(100, 115)]], 4)
    check_counts(planner(flash), found, slots, 0.15)


def test_a_run_from_an_empty_cache(calibrated: tuple[Path, Any]) -> None:
    """The first tokens miss more, and the curve says how much more."""
    flash, recording = calibrated
    ids = recording.token_ids()[recording.split(0.5) :][:128].tolist()
    plan = planner(flash)
    found, slots = per_token(flash, "60%", [ids], 0)
    first = plan.first(slots, 0, 128)
    assert first.misses > 1.1 * plan.steady(slots).misses
    assert first.misses == pytest.approx(found["misses"], rel=0.25)
    assert plan.first(slots, 5000, 64).misses == pytest.approx(plan.steady(slots).misses, rel=0.05)


def in_session(path: Path, ram: int | str, context: ContextSize) -> dict[str, Any]:
    with Session(path, Settings(ram=ram)) as session:
        context.open(session)
        assert session.engine is not None
        stats: dict[str, Any] = session.engine.stats()
        return stats


def test_the_floor_is_what_the_engine_refuses_below(
    planted: Path, small_opt: SmallOpt, tiny: tuple[Path, Path]
) -> None:
    paths = [planted / "flash.gguf", tiny[1]]
    paths += [small_opt.flash(select) for select in ("all", "gate", "predictor")]
    for path in paths:
        context = ContextSize(96, 32, threads=2)
        facts = Facts.read(path, context)
        assert in_session(path, facts.floor, context)["layers"][0]["slots"] > 0
        with pytest.raises(RamTooSmallError, match=f"it needs {facts.floor} bytes"):
            in_session(path, facts.floor - 1, context)
        with pytest.raises(RamTooSmallError, match=r"give at least [0-9]+MiB$"):
            facts.ram_bytes(facts.floor - 1)
        assert facts.ram_bytes(facts.floor) == facts.floor
        for share in ("0.1%", "37.5%", "100%"):
            engine = in_session(path, share, context)["memory"]["ram_bytes"]
            assert facts.ram_bytes(share) == engine


def test_the_engine_shares_slots_as_planned(calibrated: tuple[Path, Any], planted: Path) -> None:
    for path in (calibrated[0], planted / "flash.gguf"):
        plan = planner(path)
        for share in (0, 7, 20, 33.3, 50, 75, 99):
            stats = in_session(path, f"{share}%" if share else plan.facts.floor, ContextSize())
            found = [layer["slots"] for layer in stats["layers"]]
            assert found == plan.share(stats["memory"]["ram_bytes"])


def test_a_split_fits_and_grows_with_the_ram(calibrated: tuple[Path, Any]) -> None:
    plan = planner(calibrated[0])
    points = plan.report([f"{n}%" for n in range(10, 101, 10)])["points"]
    for p in points:
        slots = p["slots"]
        used = sum(n * x.slot_bytes for n, x in zip(slots, plan.facts.layers, strict=True))
        assert plan.facts.fixed + used <= p["ram_bytes"]
        assert all(0 < n <= x.n_ff for n, x in zip(slots, plan.facts.layers, strict=True))
        parts = (
            p["sweep_ms"]
            + p["ffn_ms"]
            + p["fixed_ms"]
            + max(p["read_ms"] - p["hidden_ms"], p["request_ms"])
        )
        assert p["token_ms"] == pytest.approx(parts) == pytest.approx(1000 / p["tokens_per_s"])
    misses = [p["misses_per_token"] for p in points]
    assert misses == sorted(misses, reverse=True) and misses[-1] == 0
    assert [p["hit_rate"] for p in points][-1] == 1
    # Layers of this model differ much in what they select; so must their caches.
    assert max(points[2]["slots"]) > 2 * min(points[2]["slots"])


def test_more_misses_than_break_even_say_so(small_opt: SmallOpt, planted: Path) -> None:
    """A disk that gives a sixteenth of its sequential speed at random, and one that gives all."""
    slow = report(sequential=[{**report()["sequential"][0], "bytes_per_s": 32 * 16384 * 1000}])
    for row in slow["random"]:
        row["requests_per_s"] = 2000.0
        row["bytes_per_s"] = 2000.0 * row["size"]
    # The engine's buffers are larger than this model, which would fit whole into the least RAM.
    facts = replace(Facts.read(small_opt.flash("gate")), dense=1 << 30)
    half = curves_of(facts.layout, 0.5)
    plan = Planner(facts, half, DeviceProfile.of(slow, "x"), NO_GAPS)
    p = plan.report(["10%"])
    assert p["break_even_share"] == pytest.approx(facts.stride * 2000 / (32 * 16384 * 1000))
    (said,) = p["points"][0]["advice"]
    limit = f"above {100 * p['break_even_share']:.2g} % reading whole layers in sequence takes less"
    assert re.match(r"a token misses 4\d % of the neurons", said) and limit in said
    # 2000 requests a second of any size: of single neurons, or of up to 64 in a row.
    assert p["points"][0]["whole_layers_tokens_per_s"] > p["points"][0]["tokens_per_s"]
    assert "convert it with --select all, for about" in said
    few = Planner(facts, curves_of(facts.layout, 0.001), DeviceProfile.of(slow, "x"), NO_GAPS)
    assert few.report(["10%"])["points"][0]["advice"] == []


def test_a_model_that_fits_says_so(planted: Path) -> None:
    plan = planner(planted / "flash.gguf")
    dense = (planted / "dense.gguf").stat().st_size
    assert plan.facts.dense == pytest.approx(dense, rel=0.02)
    (inside,) = plan.report([plan.facts.floor + dense])["points"]
    assert "fits into this RAM" in inside["advice"][0]
    larger = replace(plan, facts=replace(plan.facts, dense=inside["ram_bytes"]))
    (outside,) = larger.report([inside["ram_bytes"]])["points"]
    assert "fits" not in str(outside["advice"])  # the context would have no room
    assert inside["bytes_per_token"] == 0 and inside["binds"] == "memory"


def test_what_is_assumed_without_curves(small_opt: SmallOpt) -> None:
    gate = small_opt.flash("gate")
    unknown = planner(gate)
    assert "all are taken to be read" in unknown.curves.assumed and not unknown.curves.measured
    given = planner(gate, 0.1)
    assert "selects 10 % as given" in given.curves.assumed
    slots = given.share(given.facts.ram_bytes("50%"))
    assert given.steady(slots).bytes < 0.2 * unknown.steady(slots).bytes
    assert planner(small_opt.flash("all")).curves.assumed == ""
    assert planner(small_opt.flash("predictor")).curves.measured


def test_command(cli: Cli, planted: Path, tmp_path: Path) -> None:
    profile = tmp_path / "disk.json"
    profile.write_text(json.dumps(report()))
    flash = planted / "flash.gguf"
    words = ("plan", flash, "--ram", "20%..80%", "--ram", "1MiB", "--profile", profile)
    found = cli.json(*words)
    assert found["planted"].startswith("planted custom") and found["device"]["threads"] == 2
    assert len(found["points"]) == 11
    assert "give at least" in found["points"][-1]["error"]
    assert found["points"][0]["first"]["tokens"] == 64
    rates = [p["tokens_per_s"] for p in found["points"][:-1]]
    assert all(b > a * (1 - 1e-9) for a, b in pairwise(rates))
    shown = cli(*words).stdout
    assert "PLANTED model" in shown and "least RAM: " in shown and "slots of the layers" in shown
    assert str(found["floor_bytes"]) in shown


def test_command_measures_and_checks(cli: Cli, planted: Path) -> None:
    file = os.path.relpath(planted / "flash.gguf", cli.folder)  # the run begins in another folder
    words = ("plan", file, "--ram", "40%", "--check", "8", "--threads", "1")
    found = cli.json(*words)
    assert found["device"]["source"].startswith("measured on")
    compared = found["points"][0]["check"]
    assert (compared["tokens"], compared["warmup"]) == (8, 32)
    for name in ("tokens_per_s", "bytes_per_token", "requests_per_token", "misses_per_token"):
        v = compared[name]
        assert v["measured"] > 0 and v["ratio"] == pytest.approx(v["predicted"] / v["measured"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ram", "1MiB"), "give at least"),
        (("--ram", "many"), "cannot read the size 'many'"),
        (("--ram", "120%"), "a share must be above 0% and at most 100%"),
        (("--ram", "9GiB..1GiB"), "a range from less to more"),
        (("--selected", "0"), "--selected takes a share"),
        (("--selected", "nan%"), "--selected takes a share"),
    ],
)
def test_command_refuses(
    words: tuple[str, ...], message: str, cli: Cli, planted: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "disk.json"
    profile.write_text(json.dumps(report()))
    done = cli("plan", planted / "flash.gguf", "--profile", profile, *words, code=2)
    assert message in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_other_files_are_refused(cli: Cli, planted: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFlashError):
        Facts.read(planted / "dense.gguf")
    done = cli("plan", planted / "dense.gguf", code=2)
    assert "gguf-flash convert" in done.stderr and "Traceback" not in done.stderr
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    done = cli("plan", planted / "flash.gguf", "--profile", empty, code=2)
    assert "is no device profile" in done.stderr


def test_ram_of_no_size_is_refused_from_python(planted: Path) -> None:
    with pytest.raises(ArgumentError):
        planner(planted / "flash.gguf").report(["x"])
