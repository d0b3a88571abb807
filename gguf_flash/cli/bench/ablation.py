"""gguf-flash bench ablation: what each of the paper's steps gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gguf_flash.cli.bench.options import (
    decode_arguments,
    end,
    make_plan,
    pair_arguments,
    show,
    take_work,
)
from gguf_flash.cli.progress import progress_bar


@click.command("ablation")
@pair_arguments
@decode_arguments
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--window", type=click.IntRange(1), default=5, show_default=True, help="Of the step window."
)
def command(
    rounds: int, window: int, no_cgroup: bool, as_json: bool, out: Path | None, **options: Any
) -> None:
    """Naive, hybrid, + predictor, + window, + budget, + merging, + lookahead, + score.

    RAM, bytes, requests and times of each step; and what bundling saves the disk, computed.

    \b
    Example:
      gguf-flash bench ablation dense.gguf flash.gguf --ram 50%
    """
    from gguf_flash.bench.ablation import ablation

    plan = make_plan(options, stock=False, **take_work(options))
    with progress_bar("ablation", as_json, unit="run") as progress:
        report = ablation(
            plan, rounds=rounds, window=window, cgroup=not no_cgroup, progress=progress
        )
    show(report, as_json, out, report["steps"])
    end(report["steps"])
