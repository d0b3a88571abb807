"""gguf-flash bench long: a long text, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gguf_flash.cli.bench.options import end, make_plan, pair_arguments, show
from gguf_flash.cli.progress import progress_bar


@click.command("long")
@pair_arguments
@click.option("--tokens", type=click.IntRange(2), default=1000, show_default=True)
@click.option("--prompt", default="", help="A text [default: 16 random tokens].")
@click.option(
    "--temperature", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True
)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.9, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def command(
    tokens: int, prompt: str, temperature: float, top_p: float, seed: int, no_cgroup: bool,
    as_json: bool, out: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Generate greedily and by nucleus sampling; what each token read (the paper's Figure 8).

    \b
    Example:
      gguf-flash bench long dense.gguf flash.gguf --ram 50% --tokens 1000 --out long.json
    """
    from gguf_flash.bench.long import long

    plan = make_plan(options, stock=False, prompt=prompt, seed=seed)
    with progress_bar("long", as_json, unit="run") as progress:
        report = long(
            plan, tokens=tokens, temperature=temperature, top_p=top_p, cgroup=not no_cgroup,
            progress=progress,
        )  # fmt: skip
    show(report, as_json, out, report["texts"])
    if not as_json:
        for text in report["texts"]:
            for s in text["stretches"]:
                click.echo(
                    f"{text['name']}, from token {s['from']}: {s['ms']:.0f} ms,"
                    f" {s['bytes_read'] / 1e6:.1f} MB in {s['requests']:.0f} requests"
                )
    end(report["texts"])
