"""gguf-flash bench build-stock: the llama.cpp that benchmarks compare with."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gguf_flash.cli.options import json_option


@click.command("build-stock")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to build in.")
@click.option(
    "--checkout", type=click.Path(path_type=Path), default=Path("."), show_default=True,
    help="A checkout of gguf_flash.",
)  # fmt: skip
@json_option
def command(out: Path, checkout: Path, as_json: bool) -> None:
    """Build unpatched llama.cpp, same source and options, and print the folder for --stock.

    It takes about 8 minutes on two cores. CMAKE_ARGS adds options, as for pip install.

    \b
    Example:
      export GGUF_FLASH_STOCK=$(gguf-flash bench build-stock --out build/stock)
    """
    from gguf_flash.bench.stock import build_stock

    folder = build_stock(out, checkout)
    click.echo(json.dumps({"bench": "build-stock", "folder": str(folder)}) if as_json else folder)
