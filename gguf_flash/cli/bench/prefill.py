"""gguf-flash bench prefill: how fast a prompt is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gguf_flash.cli.bench.options import end, make_plan, pair_arguments, show, stock_option
from gguf_flash.cli.progress import progress_bar


@click.command("prefill")
@pair_arguments
@stock_option
@click.option(
    "--prompt-tokens", type=click.IntRange(2), default=512, show_default=True,
    help="Random tokens to read.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def command(
    prompt_tokens: int, rounds: int, seed: int, no_cgroup: bool, as_json: bool, out: Path | None,
    **options: Any,
) -> None:  # fmt: skip
    """Read a prompt with unpatched llama.cpp (mmap, all in RAM) and with ours; tokens/s of it.

    \b
    Example:
      gguf-flash bench prefill dense.gguf flash.gguf --ram 50% --stock build/stock/bin
    """
    from gguf_flash.bench.prefill import prefill

    plan = make_plan(options, stock=True, seed=seed)
    with progress_bar("prefill", as_json, unit="run") as progress:
        report = prefill(
            plan, prompt_tokens=prompt_tokens, rounds=rounds, cgroup=not no_cgroup,
            progress=progress,
        )  # fmt: skip
    show(report, as_json, out, report["arms"])
    end(report["arms"])
