"""Benchmarks of a pair of models: every report has its figures, and limits hold."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import Cli
from planted import check_arm, check_head, needs_cgroup, pair

from gguf_flash.bench.ablation import STEPS
from gguf_flash.bench.arms import Arm, Work, alternate, run_arm, stock_folder
from gguf_flash.bench.bound import bound_of
from gguf_flash.bench.cgroup import MemoryCgroup
from gguf_flash.bench.decode import decode, ratio
from gguf_flash.bench.pair import RESERVE, Pair, Plan
from gguf_flash.cli.bench.decode import verdict
from gguf_flash.cli.bench.options import end
from gguf_flash.cli.bench.table import arms_table
from gguf_flash.errors import ArgumentError, FlashError, IoError, ToolError
from gguf_flash.runtime import tool_path
from gguf_flash.sizes import format_size

SMALL = ("--no-cgroup", "--ram", "300MiB", "--threads", "1")
FEW = ("--tokens", "6", "--warmup", "8")


@pytest.mark.stock
def test_decode_report(cli: Cli, planted: Path, tmp_path: Path) -> None:
    from stock import stock_lib_dir

    out = tmp_path / "decode.json"
    words = (*SMALL, *FEW, "--rounds", "2", "--stock", stock_lib_dir(), "--out", out)
    report = cli.json("bench", "decode", *pair(planted), *words)
    check_head(report, "decode")
    assert json.loads(out.read_text()) == report
    arms = {a["name"]: a for a in report["arms"]}
    assert list(arms) == ["mmap", "ram", "naive", "hybrid", "ours"]
    for arm in arms.values():
        check_arm(arm)
        assert len(arm["runs"]) == 2
    every = 3 * 1024
    assert arms["naive"]["selected_per_token"] == arms["hybrid"]["selected_per_token"] == every
    assert arms["naive"]["misses_per_token"] > 0.9 * every
    assert 0.05 * every < arms["ours"]["selected_per_token"] < 0.2 * every
    assert arms["ours"]["hit_rate"] > 0.5
    assert not arms["mmap"]["memory"]
    assert report["ratio_vs_mmap"] == pytest.approx(
        arms["ours"]["tokens_per_s"]["median"] / arms["mmap"]["tokens_per_s"]["median"]
    )
    bound = report["bound"]
    assert bound["token_ms"] == max(bound["memory_ms"], bound["device_ms"])
    rate = arms["ours"]["tokens_per_s"]["median"]
    assert report["bound_ratio"] == pytest.approx(rate / bound["tokens_per_s"])


def test_ours_alone_needs_no_stock(cli: Cli, planted: Path, tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    words = (*SMALL, *FEW, "--rounds", "1", "--arm", "ours", "--out", out)
    text = cli("bench", "decode", *pair(planted), *words).stdout
    report = json.loads(out.read_text())
    assert [a["name"] for a in report["arms"]] == ["ours"]
    assert report["ratio_vs_mmap"] is None
    assert "PLANTED" in text
    assert report["threads"] == 1
    assert " cores, --threads 1, " in text
    assert "measured: active 3" in text
    assert "% of what the" in text


def test_ablation_report(cli: Cli, planted: Path) -> None:
    words = (*SMALL, *FEW, "--rounds", "1")
    report = cli.json(
        "bench", "ablation", *pair(planted), *words, env={"OMP_WAIT_POLICY": "passive"}
    )
    check_head(report, "ablation")
    assert report["environment"]["variables"]["OMP_WAIT_POLICY"] == "passive"
    steps = {s["name"]: s for s in report["steps"]}
    assert list(steps) == list(STEPS)
    for step in steps.values():
        check_arm(step)
    assert steps["predictor"]["misses_per_token"] < steps["naive"]["misses_per_token"] / 2
    assert steps["window"]["misses_per_token"] < steps["predictor"]["misses_per_token"]
    assert steps["budget"]["misses_per_token"] <= steps["window"]["misses_per_token"]
    assert steps["window"]["runs"][0]["settings"]["policy"] == "window"
    assert steps["merging"]["requests_per_token"] < steps["budget"]["requests_per_token"]
    ahead = {name: step["runs"][0]["ahead_per_token"] for name, step in steps.items()}
    assert {name for name, neurons in ahead.items() if neurons} == {"lookahead", "score"}
    assert steps["lookahead"]["runs"][0]["foreseen_per_token"] > 0.5 * ahead["lookahead"]
    found = report["bundling"]
    assert found["misses_per_token"] == steps["window"]["misses_per_token"] and found["parts"] == 2
    assert found["ratio"] == pytest.approx(found["apart_ms"] / found["bundled_ms"])
    assert not report["unavailable"]


def test_ablation_of_a_file_without_predictor(cli: Cli, small_opt: object) -> None:
    gate = small_opt.flash("gate")  # type: ignore[attr-defined]
    report = cli.json(
        "bench", "ablation", small_opt.dense, gate, *SMALL, *FEW, "--rounds", "1",  # type: ignore[attr-defined]
        "--prompt", "The old man",
    )  # fmt: skip
    assert [s["name"] for s in report["steps"]] == [
        "predictor",
        "window",
        "budget",
        "merging",
        "score",
    ]
    assert set(report["unavailable"]) == {"naive", "hybrid", "lookahead"}
    assert report["planted"] == ""
    words = ("bench", "decode", small_opt.dense, gate, *SMALL)  # type: ignore[attr-defined]
    done = cli(*words, "--arm", "naive", code=1)
    assert "naive: a file of --select gate cannot" in done.stdout
    assert "gguf-flash: no arm gave a figure" in done.stderr


def test_memory_report(cli: Cli, planted: Path) -> None:
    words = (*FEW, "--no-cgroup", "--shares", "1,200,250", "--threads", "1")
    report = cli.json("bench", "memory", *pair(planted), *words)
    check_head(report, "memory")
    low, middle, high = report["points"]
    assert "holds no cache beside" in low["error"]
    for point in (middle, high):
        check_arm(point)
        assert point["memory"]["ram_bytes"] <= point["ram_bytes"]
    assert middle["memory"]["cache_bytes"] < high["memory"]["cache_bytes"]


def test_memory_of_which_nothing_ran_ends_with_code_1(cli: Cli, planted: Path) -> None:
    words = ("bench", "memory", *pair(planted), *FEW, "--no-cgroup", "--threads", "1")
    done = cli(*words, "--shares", "10,20", code=1)
    assert "gguf-flash: no arm gave a figure" in done.stderr
    both = Pair.open(*pair(planted), Work("", tokens=6, warmup=8, threads=1))
    least = int(100 * both.least_bytes / both.dense_bytes) + 1
    for share in (10, 20):
        assert f"\n{share}%: the share {share}% (" in done.stdout
    assert f"give --shares {least} or more" in done.stdout
    assert "--ram" not in done.stdout
    points = cli.json(*words, "--shares", f"{least - 1},{least}")["points"]
    assert [bool(p["error"]) for p in points] == [True, False]
    done = cli(*words, "--shares", "50,0", code=2)
    assert "--shares takes percents above 0 up to 1000, found 0" in done.stderr


@pytest.mark.parametrize(
    ("ran", "unavailable", "what"),
    [
        ({"mmap": 1, "ours": 1, "naive": 0}, [], None),
        ({"mmap": 1}, [], None),
        ({"mmap": 1, "ours": 0}, [], "no arm of ours"),
        ({"ram": 1}, ["naive"], "no arm of ours"),
        ({"mmap": 0, "ours": 0}, [], "no arm"),
        ({}, ["naive"], "no arm"),
    ],
)
def test_code_of_a_bench_by_what_ran(
    ran: dict[str, int], unavailable: list[str], what: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    arms = [{"name": name, "runs": [{}] * count} for name, count in ran.items()]
    if what is None:
        return end(arms, unavailable)
    with pytest.raises(SystemExit) as left:
        end(arms, unavailable)
    assert left.value.code == 1
    assert f"gguf-flash: {what} gave a figure" in capsys.readouterr().err


@pytest.mark.stock
def test_prefill_report(cli: Cli, planted: Path) -> None:
    from stock import stock_lib_dir

    words = (*SMALL, "--prompt-tokens", "40", "--rounds", "1", "--stock", stock_lib_dir())
    report = cli.json("bench", "prefill", *pair(planted), *words)
    check_head(report, "prefill")
    assert [a["name"] for a in report["arms"]] == ["mmap", "ram", "ours"]
    for arm in report["arms"]:
        assert arm["runs"][0]["prompt"]["tokens"] == 40
        assert arm["prompt_tokens_per_s"]["median"] > 0
    assert report["arms"][2]["runs"][0]["prompt"]["bytes"] > 0
    assert report["ratio_vs_ram"] > 0


def test_long_report(cli: Cli, planted: Path) -> None:
    report = cli.json("bench", "long", *pair(planted), *SMALL, "--tokens", "120")
    check_head(report, "long")
    greedy, nucleus = report["texts"]
    for text in (greedy, nucleus):
        each = text["runs"][0]["each"]
        assert len(each) == 120
        mean = sum(t["bytes_read"] for t in each) / 120
        assert mean == pytest.approx(text["bytes_per_token"])
        assert [s["from"] for s in text["stretches"]] == [0, 100]
    assert greedy["runs"][0]["generated"] != nucleus["runs"][0]["generated"]


@pytest.mark.root
def test_limit_holds_and_is_counted(planted: Path) -> None:
    needs_cgroup()
    flash = pair(planted)[1]
    work = Work(str(flash), tokens=4, warmup=0, threads=1)
    found = run_arm(Arm("ours", "", work, 256 << 20))
    assert 1 << 20 < found["cgroup_peak_bytes"] <= 256 << 20
    with pytest.raises(FlashError, match=r"arm 'tight'.*more than its limit"):
        run_arm(Arm("tight", "", work, 4 << 20))


def test_an_arm_that_fails_is_reported(planted: Path) -> None:
    flash = pair(planted)[1]
    good = Arm("good", "", Work(str(flash), tokens=2, warmup=0, threads=1))
    bad = Arm("bad", "", Work(str(flash), settings={"ram": 4096}, tokens=2, threads=1))
    found = alternate([bad, good], 2, cgroup=False)
    assert "arm 'bad'" in found[0]["error"]
    assert found[0]["tokens_per_s"] is None
    assert len(found[1]["runs"]) == 2


def test_runs_of_an_arm_that_fails_later_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No cgroup in the second round; in the first there is nothing to keep, and it is raised."""
    figures = {
        "tokens_per_s": 4.0, "token_ms": 250.0, "prompt": {"tokens_per_s": 9.0}, "memory": {}
    }  # fmt: skip
    given: list[dict[str, object] | ToolError] = [figures, figures, ToolError("x"), ToolError("y")]

    def run(arm: Arm, *, cgroup: bool) -> dict[str, object]:
        found = given.pop(0)
        if isinstance(found, ToolError):
            raise found
        return found

    monkeypatch.setattr("gguf_flash.bench.arms.run_arm", run)
    arms = [Arm("a", "", Work("")), Arm("b", "", Work(""))]
    found = alternate(arms, 3)
    assert [(f["error"], len(f["runs"])) for f in found] == [("x", 1), ("y", 1)]
    assert found[0]["tokens_per_s"]["median"] == 4
    arms_table(found)
    shown = capsys.readouterr().out
    assert shown.count("4.00..4.00") == 2
    assert "b: y" in shown
    given[:] = [ToolError("z"), figures]
    with pytest.raises(ToolError, match="z"):
        alternate(arms, 3)


def test_a_bound_that_cannot_be_measured_costs_no_figures(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise IoError("cannot start thread 2 of 2")

    monkeypatch.setattr("gguf_flash.bench.decode.bound_of", refuse)
    both = Pair.open(*pair(planted))
    plan = Plan(both, "", 300 << 20, 256 << 20, Work("", tokens=2, warmup=0, threads=1))
    report = decode(plan, arms=("ours",), rounds=1, cgroup=False)
    check_arm(report["arms"][0])
    assert (report["bound"], report["bound_ratio"]) == (None, None)
    assert report["bound_error"] == "cannot start thread 2 of 2"
    assert verdict(report) == "no bound was measured: cannot start thread 2 of 2"


def test_every_file_of_a_set_leaves_the_cache(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = pair(planted)[1]
    words = ["--split-max-tensors", "7", flash, tmp_path / "s"]
    subprocess.run([tool_path("llama-gguf-split"), *words], check=True, capture_output=True)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 1
    dropped: list[Path] = []
    monkeypatch.setattr("gguf_flash.bench.arms.drop_cache", dropped.append)
    work = Work(str(files[0]), tokens=2, warmup=0, threads=1)
    assert run_arm(Arm("ours", "", work), cgroup=False)["tokens"] == 2
    assert dropped == files


def test_no_cgroup_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    for membership in ("0::/", "3:cpu:/x\n"):
        group = MemoryCgroup(1 << 20, tmp_path / "none", membership)
        with pytest.raises(ToolError, match="cannot limit memory with a cgroup"), group:
            pass


def test_cgroup_of_version_2(tmp_path: Path) -> None:
    """The files of a kernel with the unified hierarchy, in a folder that stands for it."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "a").mkdir()
    group = MemoryCgroup(1 << 20, tmp_path, "0::/a\n")
    with group:
        assert group.path.parent == tmp_path / "a"
        assert (tmp_path / "a" / "cgroup.subtree_control").read_text() == "+memory"
        assert (group.path / "memory.max").read_text() == str(1 << 20)
        (group.path / "memory.peak").write_text("77")
        assert group.peak() == 77
        for f in group.path.iterdir():  # a kernel's own files go with the folder
            f.unlink()
    assert not group.path.exists()


def test_a_cgroup_left_behind_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf_flash.bench.cgroup._PAUSE", 0)
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    group = MemoryCgroup(1 << 20, tmp_path, "0::/\n")
    with pytest.warns(RuntimeWarning, match=r"cgroup '.*' is left behind \(.*rmdir") as told, group:
        pass  # its files stay, as a process that does not end would
    assert str(group.path) in str(told[0].message)


def test_stock_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GGUF_FLASH_STOCK", raising=False)
    with pytest.raises(ToolError, match="build-stock"):
        stock_folder(None)
    with pytest.raises(ToolError, match=r"holds no libllama\.so"):
        stock_folder(str(tmp_path))


def test_build_stock_wants_a_checkout(cli: Cli, tmp_path: Path) -> None:
    done = cli("bench", "build-stock", "--out", tmp_path, "--checkout", tmp_path, code=2)
    assert "is no checkout of gguf_flash" in done.stderr


@pytest.mark.parametrize(
    ("ram", "message"),
    [
        ("1%", "holds no cache beside"),
        ("x%", "a share such as 50% expected"),
        ("0%", "a share above 0%"),
        ("many", "cannot read the size 'many'"),
    ],
)
def test_bad_ram(ram: str, message: str, cli: Cli, planted: Path) -> None:
    done = cli("bench", "decode", *pair(planted), "--ram", ram, "--arm", "ours", code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_ram_that_is_named_as_the_least_is(cli: Cli, planted: Path) -> None:
    words = ("bench", "decode", *pair(planted), *FEW, "--no-cgroup", "--arm", "ours")
    told = cli(*words, code=2).stderr  # the default, half of 5 MB
    assert f"less --reserve {format_size(RESERVE)} for the process" in told
    least = int(re.search(r"give at least --ram (\d+)MiB, or less .* --reserve", told)[1])  # type: ignore[index]
    assert "give at least" in cli(*words, "--ram", f"{least - 1}MiB", code=2).stderr
    words = (*words, "--threads", "1", "--rounds", "1")
    check_arm(cli.json(*words, "--ram", f"{least}MiB")["arms"][0])
    less = f"{least - (RESERVE >> 20) + 1}MiB"
    check_arm(cli.json(*words, "--ram", less, "--reserve", "1MiB")["arms"][0])


def test_models_in_the_wrong_order(cli: Cli, planted: Path) -> None:
    dense, flash = pair(planted)
    done = cli("bench", "decode", flash, dense, "--arm", "ours", code=2)
    assert "the dense model comes first" in done.stderr


def test_models_that_are_not_the_same(cli: Cli, planted: Path, small_opt: object) -> None:
    dense = small_opt.dense  # type: ignore[attr-defined]
    done = cli("bench", "decode", dense, pair(planted)[1], "--arm", "ours", code=2)
    assert "was not made from" in done.stderr


def test_shares_of_ram(planted: Path) -> None:
    both = Pair.open(*pair(planted))
    assert both.limit("50%") == both.dense_bytes // 2
    assert both.measured == json.loads((planted / "planted.json").read_text())["measured"]
    plan = Plan(both, "", both.limit("250%"), 0, Work(""))
    assert plan.weights() == both.limit("250%")
    with pytest.raises(ArgumentError, match="expected, found"):
        both.limit("5000%")


@pytest.mark.stock
@pytest.mark.root
def test_mmap_of_a_quantized_model_keeps_no_copy(tmp_path: Path) -> None:
    """Repacked, these 40 MB of Q4_0 would be as many bytes of anonymous memory again."""
    from stock import stock_lib_dir

    from gguf_flash.bench.make_model import make_model
    from gguf_flash.bench.shapes import custom_shape

    needs_cgroup()
    make_model(tmp_path, custom_shape(1024, 4096, 6, 512), "q4_0", tokens=48)
    both = Pair.open(*pair(tmp_path))
    plan = Plan(both, str(stock_lib_dir()), 1 << 30, 0, Work("", tokens=2, warmup=0, threads=1))
    mapped, whole = run_arm(plan.mmap()), run_arm(plan.whole())
    assert mapped["peak_rss_bytes"] < whole["peak_rss_bytes"] - both.dense_bytes // 2


def test_bound_takes_the_slower(planted: Path) -> None:
    flash = pair(planted)[1]
    arm = {"bytes_per_token": 1.0, "requests_per_token": 1.0, "memory": {"resident_bytes": 1 << 40}}
    assert bound_of(arm, flash, 1)["binds"] == "memory"
    arm = {"bytes_per_token": 1e12, "requests_per_token": 1e8, "memory": {"resident_bytes": 1}}
    found = bound_of(arm, flash, 1)
    assert found["binds"] == "device"
    assert found["request_bytes"] == 10000
    assert found["device_ms"] == pytest.approx(1e15 / found["device_bytes_per_s"])


def test_ratio_of_what_did_not_run() -> None:
    assert ratio({"tokens_per_s": {"median": 3.0}}, {"tokens_per_s": {"median": 2.0}}) == 1.5
    assert ratio({"tokens_per_s": {"median": 3.0}}, {"tokens_per_s": None}) is None
    assert ratio(None, None) is None


def test_worker_refuses_a_folder_without_libraries(planted: Path, tmp_path: Path) -> None:
    arm = Arm("stock", "", Work(str(pair(planted)[0]), stock=str(tmp_path), tokens=2))
    with pytest.raises(FlashError, match=r"arm 'stock': .*holds no libllama\.so"):
        run_arm(arm, cgroup=False)
