"""gguf-flash plan: how fast a model will be with so much RAM, and what would be faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gguf_flash.cli.options import json_option, model_argument, threads_option
from gguf_flash.cli.progress import progress_bar
from gguf_flash.errors import ArgumentError
from gguf_flash.sizes import format_size, ram_setting

_COLUMNS = (
    "RAM", "tokens/s", "first", "hits", "read", "requests", "resident", "FFN", "disk", "hidden",
    "binds",
)  # fmt: skip


def _share(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        share = float(value[:-1]) / 100 if value.endswith("%") else float(value)
        if 0 < share <= 1:
            return share
    except ValueError:
        pass
    raise ArgumentError(f"--selected takes a share such as 12% or 0.12, found '{value}'")


@click.command("plan")
@model_argument
@click.option(
    "--ram", "rams", multiple=True, metavar="SIZE",
    help="RAM in all, as of run: 4GiB, or 60% of the weights on flash beside all the rest; or ten"
    " steps, 35%..80% or 4GiB..8GiB; several times [default: 10%..100%].",
)  # fmt: skip
@click.option(
    "--ctx", type=click.IntRange(1, 1 << 24), default=512, show_default=True,
    help="Tokens of the context, as of run: its KV cache is part of the RAM.",
)  # fmt: skip
@click.option(
    "--batch", type=click.IntRange(1, 1 << 24), default=512, show_default=True,
    help="Tokens of the prompt that are read together: run takes all of them up to 512.",
)  # fmt: skip
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What bench io --out wrote, here or elsewhere [default: measure for some seconds].",
)
@click.option(
    "--selected", callback=_share, metavar="SHARE",
    help="Of a layer's neurons, what a token selects, in place of what the file says.",
)  # fmt: skip
@click.option(
    "--tokens", type=click.IntRange(1, 1 << 16), default=64, show_default=True,
    help="Of a short run that begins with an empty cache: the column `first`.",
)  # fmt: skip
@click.option(
    "--check", type=click.IntRange(2, 1 << 16), metavar="TOKENS",
    help="Then run MODEL for so many tokens with each RAM and compare.",
)  # fmt: skip
@click.option("--prompt", default="", help="Of --check [default: 16 random tokens].")
@threads_option
@json_option
def command(
    model: str, rams: tuple[str, ...], ctx: int, batch: int, profile: Path | None,
    selected: float | None, tokens: int, check: int | None, prompt: str,
    threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Predict how fast MODEL, a flash-GGUF, decodes with so much RAM.

    From the miss curves that calibrate stored in the file and the speed of disk and memory: tokens
    per second in the long run, hits, bytes and requests per token, how the RAM is best shared
    between layers, the least RAM it runs with, and whether it would be faster another way.
    Without --profile the disk that MODEL lies on is read for some seconds.

    With --check the predictions are for the tokens that are then run (after a prompt and 32 tokens
    that fill the cache), without a memory limit. Exit code 2 if MODEL runs with no --ram given.

    \b
    Examples:
      gguf-flash plan model.flash.gguf --ram 4GiB
      gguf-flash plan model.flash.gguf --ram 35%..80% --profile disk.json --json
      gguf-flash plan model.flash.gguf --ram 60% --check 64
    """
    from gguf_flash.memory import ContextSize
    from gguf_flash.plan.check import check as run_check
    from gguf_flash.plan.cost import LOOKING_AHEAD, Costs
    from gguf_flash.plan.curves import curves_of
    from gguf_flash.plan.device import DeviceProfile
    from gguf_flash.plan.facts import Facts
    from gguf_flash.plan.planner import Planner, expand_rams
    from gguf_flash.session import default_threads

    wanted = expand_rams(rams or ("10%..100%",))
    facts = Facts.read(model, ContextSize(ctx, batch, threads=threads))
    for ram in wanted:
        ram_setting(ram)  # refuses what is no size before anything is measured
    if profile is not None:
        device = DeviceProfile.load(profile)
    else:
        with progress_bar("device", as_json, unit="step") as progress:
            device = DeviceProfile.measure(
                Path(model), facts.stride, threads or default_threads(), progress
            )
    costs = LOOKING_AHEAD if facts.layout.select == "predictor" else Costs()
    planner = Planner(facts, curves_of(facts.layout, selected), device, costs)
    report = planner.report(wanted, tokens)
    if check is not None:
        with progress_bar("check", as_json, unit="run") as progress:
            for i, point in enumerate(report["points"]):
                progress(i, len(report["points"]), point["ram"])
                if not point["error"]:
                    point["check"] = run_check(
                        planner, point["ram_bytes"], check, prompt=prompt, threads=threads
                    )
    if as_json:
        click.echo(json.dumps(report))
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=max(120, Console().width))
    for line in _heading(report):
        console.print(line, markup=False, soft_wrap=True)
    table = Table(caption="ms per token: resident, FFN, disk, and what of it other work hides")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "binds" else "right", no_wrap=True)
    points = [p for p in report["points"] if not p["error"]]
    for p in points:
        table.add_row(*_row(p))
    console.print(table)
    for p in report["points"]:
        for text in [p["error"]] if p["error"] else p["advice"]:
            console.print(f"{p['ram']}: {text}", markup=False, soft_wrap=True)
    for p in points:
        console.print(_split(p["ram"], p["slots"]), markup=False, soft_wrap=True)
        if "check" in p:
            console.print(_checked(p["ram"], p["check"]), markup=False, soft_wrap=True)


def _heading(report: dict[str, Any]) -> list[str]:
    device = report["device"]
    lines = [
        f"{report['model']}: {format_size(report['resident_bytes'])} resident,"
        f" {format_size(report['bundle_bytes'])} on flash, select {report['select']}",
        f"device: {device['source']}, {device['reader']},"
        f" {device['sequential'] / 1e6:.0f} MB/s in sequence,"
        f" memory {device['memory'] / 1e9:.1f} GB/s",
        f"least RAM: {report['floor_bytes']} bytes ({format_size(report['floor_bytes'])}: "
        + ", ".join(
            f"{k.removesuffix('_bytes').replace('_', ' ')} {format_size(v)}"
            for k, v in report["floor_parts"].items()
        )
        + f"); all in RAM, dense: {format_size(report['dense_bytes'])},"
        f" about {report['dense_tokens_per_s']:.3g} tokens/s",
        f"reading bundle by bundle pays up to {100 * report['break_even_share']:.2g} % of a layer",
    ]
    if report["planted"]:
        lines.insert(1, f"PLANTED model, no trained weights: {report['planted']}")
    if report["assumed"]:
        lines.append(f"assumed: {report['assumed']}")
    return lines


def _row(p: dict[str, Any]) -> list[str]:
    size = format_size(p["ram_bytes"])
    return [
        size if p["ram"] == str(p["ram_bytes"]) else f"{p['ram']} = {size}",
        f"{p['tokens_per_s']:.3g}",
        f"{p['first']['tokens_per_s']:.3g}",
        "-" if p["hit_rate"] is None else f"{100 * p['hit_rate']:.1f}%",
        format_size(p["bytes_per_token"]),
        f"{p['requests_per_token']:.0f}",
        *(f"{p[k]:.1f}" for k in ("sweep_ms", "ffn_ms", "read_ms", "hidden_ms")),
        p["binds"],
    ]


def _split(ram: str, slots: list[int]) -> str:
    """Slots of the layers in order, equal neighbours together."""
    runs: list[list[int]] = []
    for n in slots:
        if runs and runs[-1][0] == n:
            runs[-1][1] += 1
        else:
            runs.append([n, 1])
    shown = " ".join(f"{n}" if count == 1 else f"{n} x {count}" for n, count in runs)
    return f"{ram}: slots of the layers: {shown}"


def _checked(ram: str, found: dict[str, Any]) -> str:
    parts = [
        f"{name.replace('_per_', '/').replace('_', ' ')} {v['predicted']:.4g} predicted,"
        f" {v['measured']:.4g} measured" + ("" if v["ratio"] is None else f" ({v['ratio']:.2f})")
        for name, v in found.items()
        if isinstance(v, dict) and "ratio" in v
    ]
    return f"{ram}: {found['tokens']} tokens after {found['warmup']}: " + "; ".join(parts)
