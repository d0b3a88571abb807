"""gguf-flash bench decode: ours beside unpatched llama.cpp under one memory limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gguf_flash.bench.decode import ARMS
from gguf_flash.bench.pair import STOCK_ARMS
from gguf_flash.cli.bench.options import (
    decode_arguments,
    end,
    make_plan,
    pair_arguments,
    show,
    stock_option,
    take_work,
)
from gguf_flash.cli.progress import progress_bar
from gguf_flash.settings import POLICIES, READERS


@click.command("decode")
@pair_arguments
@stock_option
@click.option(
    "--arm", "arms", type=click.Choice(ARMS), multiple=True, help="Only these [default: all]."
)
@decode_arguments
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--policy", type=click.Choice(POLICIES), help="Of ours.")
@click.option("--window", type=click.IntRange(1), help="Of ours.")
@click.option("--reader", type=click.Choice(READERS), help="Of ours.")
@click.option("--depth", type=click.IntRange(1, 4096), help="Of ours.")
def command(
    arms: tuple[str, ...], rounds: int, no_cgroup: bool, as_json: bool, out: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Decode with DENSE and FLASH, the same weights, arm by arm in turn under the limit --ram.

    \b
    mmap    unpatched llama.cpp, the file mapped, under the limit
    ram     unpatched llama.cpp, all weights in RAM, no limit
    naive   every FFN weight read from the file for every token
    hybrid  every neuron computed, half of the FFN cached
    ours    the selected neurons, a cache of what the limit leaves

    Each run is a process in a cgroup of its own (root), with the files out of the page cache first.
    The bound is the larger of resident bytes over memory bandwidth and missed bytes over disk
    speed.

    \b
    Example:
      gguf-flash bench decode dense.gguf flash.gguf --ram 50% --stock build/stock/bin --json
    """
    from gguf_flash.bench.decode import decode

    settings = {name: options.pop(name) for name in ("policy", "window", "reader", "depth")}
    chosen = arms or ARMS
    needs_stock = bool(set(STOCK_ARMS) & set(chosen))
    plan = make_plan(options, stock=needs_stock, **take_work(options))
    with progress_bar("decode", as_json, unit="run") as progress:
        report = decode(
            plan, arms=chosen, rounds=rounds, cgroup=not no_cgroup, settings=settings,
            progress=progress,
        )  # fmt: skip
    show(report, as_json, out, report["arms"])
    if not as_json:
        click.echo(verdict(report))
    end(report["arms"], report["unavailable"])


def verdict(report: dict[str, Any]) -> str:
    """Ratios and bound in words."""
    words = [
        f"ours is {report[key]:.2f} times as fast as {what}"
        for key, what in (("ratio_vs_mmap", "mmap"), ("ratio_vs_ram", "all weights in RAM"))
        if report[key] is not None
    ]
    if report["bound_error"]:
        words.append(f"no bound was measured: {report['bound_error']}")
    bound = report["bound"]
    if bound and report["bound_ratio"] is not None:
        words.append(
            f"{100 * report['bound_ratio']:.0f} % of what the {bound['binds']} allows"
            f" ({bound['tokens_per_s']:.2f} tokens/s: memory {bound['memory_ms']:.0f} ms at"
            f" {bound['memory_bytes_per_s'] / 1e9:.1f} GB/s, device {bound['device_ms']:.0f} ms at"
            f" {bound['device_bytes_per_s'] / 1e9:.2f} GB/s)"
        )
    return "; ".join(words) or "nothing to compare"
