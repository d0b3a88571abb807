"""``gguf-flash verify``: prove a flash-GGUF equal to its source."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gguf_flash.cli.progress import progress_bar


@click.command("verify")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--against",
    required=True,
    type=click.Path(path_type=Path),
    help="What FILE was converted from: a dense GGUF or a Hugging Face folder.",
)
@click.option(
    "--predictor",
    type=click.Path(exists=True, dir_okay=False),
    help="The predictor FILE was converted with; else its tensors are not compared.",
)
@click.option("--quiet", is_flag=True, help="No progress bar and no line when equal.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    file: Path,
    against: Path,
    predictor: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compare every row, tensor and key of FILE with the model it came from.

    Ends with status 1 and the first difference when they are not equal.

    \b
    Example:
      gguf-flash verify model.flash.gguf --against model.gguf
    """
    from gguf_flash.converters import verify

    with progress_bar("verify", quiet) as progress:
        report = verify(file, against, predictor=predictor, progress=progress)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    elif not report.ok or not quiet:
        click.echo(report.summary(), err=not report.ok)
    if not report.ok:
        ctx.exit(1)
