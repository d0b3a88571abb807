"""``gguf-flash verify``: prove a flash-GGUF equal to its source, or to what was written."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gguf_flash.cli.progress import progress_bar
from gguf_flash.errors import ArgumentError


@click.command("verify")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    help="What FILE was converted from: a dense GGUF or a Hugging Face folder.",
)
@click.option(
    "--checksums",
    is_flag=True,
    help="Compare each layer's bundles with the checksum that FILE has for them; needs no source.",
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
    against: Path | None,
    checksums: bool,
    predictor: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compare every row, tensor and key of FILE with the model it came from.

    With --checksums, its bundles with what its converter wrote, as after a copy or a download.

    Ends with status 1 and the first difference when they are not equal.

    \b
    Examples:
      gguf-flash verify model.flash.gguf --against model.gguf
      gguf-flash verify model.flash.gguf --checksums
    """
    from gguf_flash.converters import verify, verify_checksums

    if checksums == (against is not None):
        raise ArgumentError(
            "verify takes what to compare with: --against SOURCE, or --checksums, not both"
        )
    if predictor is not None and against is None:
        raise ArgumentError("verify takes --predictor with --against only")
    with progress_bar("verify", quiet) as progress:
        if against is None:
            report = verify_checksums(file, progress=progress)
        else:
            report = verify(file, against, predictor=predictor, progress=progress)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    elif not report.ok or not quiet:
        click.echo(report.summary(), err=not report.ok)
    if not report.ok:
        ctx.exit(1)
