"""`gguf-flash doctor`: what this machine offers, and what is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gguf_flash.machine import Report, examine
from gguf_flash.sizes import format_size


@click.command()
@click.option(
    "--path",
    type=click.Path(exists=True, path_type=Path),
    default=Path(),
    help="Folder (or file) whose filesystem is examined.  [default: the current folder]",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead.")
@click.pass_context
def command(ctx: click.Context, path: Path, as_json: bool) -> None:
    """Say what this machine offers and what is wrong; exit code 1 if something is."""
    report = examine(path.resolve())
    if as_json:
        names = ("kind", "what", "do")
        remarks = [dict(zip(names, remark, strict=True)) for remark in report.remarks]
        click.echo(json.dumps({**dataclasses.asdict(report), "remarks": remarks}, indent=2))
    else:
        click.echo("\n".join(_lines(report)))
    ctx.exit(0 if report.healthy else 1)


def _lines(report: Report) -> Iterator[str]:
    for name, value in _flat(report.facts):
        yield f"{name:<24} {value}"
    for kind, what, do in report.remarks:
        yield f"{kind}: {what}. do: {do}"
    if report.healthy:
        yield "nothing is wrong"


def _flat(facts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif key.endswith("_bytes"):
            yield name.removesuffix("_bytes"), "none" if value is None else format_size(value)
        elif isinstance(value, bool):
            yield name, "yes" if value else "no"
        elif value != "":
            yield name, str(value)
