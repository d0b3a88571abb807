"""gguf-flash bench memory: tokens a second against RAM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gguf_flash.bench.memory import SHARES
from gguf_flash.cli.bench.options import (
    decode_arguments,
    end,
    make_plan,
    pair_arguments,
    show,
    take_work,
)
from gguf_flash.cli.progress import progress_bar
from gguf_flash.errors import ArgumentError


def _shares(context: click.Context, parameter: click.Parameter, value: str) -> list[float]:
    try:
        shares = [float(item) for item in value.split(",")]
    except ValueError as e:
        raise ArgumentError(f"--shares takes numbers with commas, found '{value}'") from e
    if odd := [s for s in shares if not 0 < s <= 1000]:
        raise ArgumentError(f"--shares takes percents above 0 up to 1000, found {odd[0]:g}")
    return shares


@click.command("memory")
@pair_arguments
@decode_arguments
@click.option(
    "--shares", callback=_shares, default=",".join(map(str, SHARES)), show_default=True,
    help="RAM, in percent of the dense model's; in place of --ram.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
def command(
    shares: list[float], rounds: int, no_cgroup: bool, as_json: bool, out: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Ours with more and more RAM (the paper's Figure 7).

    \b
    Example:
      gguf-flash bench memory dense.gguf flash.gguf --shares 40,50,60
    """
    from gguf_flash.bench.memory import memory

    plan = make_plan(options, stock=False, **take_work(options))
    with progress_bar("memory", as_json, unit="run") as progress:
        report = memory(plan, shares=shares, rounds=rounds, cgroup=not no_cgroup, progress=progress)
    show(report, as_json, out, [p for p in report["points"] if "runs" in p])
    if not as_json:
        for point in report["points"]:
            if "runs" not in point:
                click.echo(f"{point['share']:g}%: {point['error']}")
    end(report["points"])
