"""``gguf-flash convert``: a dense model to a flash-GGUF."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from gguf_flash.cli.progress import progress_bar
from gguf_flash.format.layout import ACTIVATIONS


@click.command("convert")
@click.argument("src", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option("--outtype", help="Bring the model to this type first: f16, bf16, q8_0, q4_k...")
@click.option(
    "--select",
    type=click.Choice(["all", "gate"]),
    default="all",
    show_default=True,
    help="all: every neuron is read; gate: the deciding matrix stays resident and chooses.",
)
@click.option("--down-type", help="Type of the down rows [default: the source's, f16 if quantized]")
@click.option("--activation", type=click.Choice(ACTIVATIONS), help="Overrides the model's own.")
@click.option(
    "--align", type=int, default=512, show_default=True, help="Multiple for the bundle stride."
)
@click.option("--quiet", is_flag=True, help="No progress bar and no summary.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    src: Path,
    out: Path,
    outtype: str | None,
    select: str,
    down_type: str | None,
    activation: str | None,
    align: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """Convert SRC to a flash-GGUF.

    SRC is a dense GGUF (of a split set the first file) or a Hugging Face model folder.
    """
    from humanfriendly import format_size

    from gguf_flash.converters import convert

    start = time.monotonic()
    with progress_bar("convert", quiet) as progress:
        layout = convert(
            src,
            out,
            outtype=outtype,
            select=select,
            down_type=down_type,
            activation=activation,
            align=align,
            progress=progress,
        )
    seconds = time.monotonic() - start
    if as_json:
        summary = {
            "path": str(out),
            "layers": len(layout.layers),
            "neurons": sum(b.n_ff for b in layout.layers),
            "bundle_bytes": layout.bundle_bytes,
            "resident_bytes": layout.resident_bytes,
            "file_bytes": layout.file_bytes,
            "seconds": round(seconds, 3),
        }
        click.echo(json.dumps(summary))
    elif not quiet:
        click.echo(
            f"wrote {out}: {len(layout.layers)} layers, "
            f"{format_size(layout.bundle_bytes, binary=True)} of bundles on flash, "
            f"{format_size(layout.resident_bytes, binary=True)} resident, in {seconds:.1f} s"
        )
