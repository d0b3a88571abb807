"""``gguf-flash convert``: a dense model to a flash-GGUF."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import click

from gguf_flash.cli.options import force_option
from gguf_flash.cli.progress import progress_bar
from gguf_flash.cli.sparsity import Sparsify, cost, sparsity_options, take_sparsify
from gguf_flash.errors import ArgumentError
from gguf_flash.format.layout import ACTIVATIONS, SELECTS


def thresholds(given: str | None) -> list[float] | None:
    """A number, or the numbers in a JSON file. Raises ArgumentError."""
    if given is None:
        return None
    try:
        return [float(given)]
    except ValueError:
        pass
    try:
        found = json.loads(Path(given).read_text())
        if not isinstance(found, list):
            raise TypeError("it holds no list")
        return [float(v) for v in found]
    except (OSError, ValueError, TypeError) as e:
        raise ArgumentError(
            f"--threshold takes a number or a JSON file with a list of them, found '{given}' ({e})"
        ) from e


def activation(given: str | None) -> tuple[str | None, list[float] | None]:
    """A name of ACTIVATIONS, or of fatrelu:T what it stands for. Raises ArgumentError."""
    if given is None or given in ACTIVATIONS:
        return given, None
    name, _, cut = given.partition(":")
    try:
        if name == "fatrelu":
            return "relu", [float(cut)]
    except ValueError:
        pass
    raise ArgumentError(
        f"--activation takes {', '.join(ACTIVATIONS)} or fatrelu:T with a number T, found '{given}'"
    )


def _take_activation(options: dict[str, Any]) -> None:
    """Turn fatrelu:T into its two parts. Raises ArgumentError when --threshold is given, too."""
    options["activation"], cut = options["activation"]
    if cut is not None and options["threshold"] is not None:
        raise ArgumentError(
            "--activation fatrelu:T and --threshold both give thresholds; use --activation relu"
            " with --threshold"
        )
    options["threshold"] = options["threshold"] if cut is None else cut


@click.command("convert")
@click.argument("src", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option("--outtype", help="Bring the model to this type first: f16, bf16, q8_0, q4_k...")
@click.option(
    "--select",
    type=click.Choice(SELECTS),
    help="all: every neuron is read; gate: the deciding matrix stays resident and chooses;"
    " predictor: the file of --predictor chooses [default: predictor if one is given, gate with"
    " --target-sparsity, else all].",
)
@click.option(
    "--predictor",
    type=click.Path(exists=True, dir_okay=False),
    help="What gguf-flash train or calibrate wrote for this model.",
)
@click.option(
    "--predictor-type",
    type=click.Choice(["f16", "q8_0", "q4_0"]),
    help="Of the predictors' matrices; f16 in layers that blocks of 32 do not fit. q4_0 takes half"
    " of q8_0's RAM, and selects a little worse [default: q8_0].",
)
@click.option(
    "--down-type",
    help="Type of the down rows [default: the source's if it is a float type, i8 (its codes) for"
    " q8_0, else f16].",
)
@click.option(
    "--activation",
    metavar=f"[{'|'.join((*ACTIVATIONS, 'fatrelu:T'))}]",
    callback=lambda context, parameter, value: activation(value),
    help="Overrides the model's own; fatrelu:T is relu with --threshold T.",
)
@click.option(
    "--threshold",
    metavar="T|FILE",
    callback=lambda context, parameter, value: thresholds(value),
    help="FATReLU: activation inputs up to T become zero; or a JSON list with a T for each layer.",
)
@click.option(
    "--align", type=int, default=512, show_default=True, help="Multiple for the bundle stride."
)
@click.option(
    "--checksums/--no-checksums",
    default=True,
    show_default=True,
    help="Store a checksum of each layer's bundles, for verify --checksums.",
)
@click.option(
    "--dense", is_flag=True, help="Write a dense GGUF instead, for gguf-flash collect and others."
)
@sparsity_options
@force_option
@click.option("--quiet", is_flag=True, help="No progress bar and no summary.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    src: Path,
    out: Path,
    quiet: bool,
    as_json: bool,
    dense: bool,
    **options: Any,
) -> None:
    """Convert SRC to a flash-GGUF.

    SRC is a dense GGUF (of a split set the first file) or a Hugging Face model folder. The output
    appears complete or not at all, and not if SRC changed meanwhile.

    \b
    Examples:
      gguf-flash convert model.gguf --out model.flash.gguf --select gate
      gguf-flash convert model.gguf --out sparse.gguf --target-sparsity 50% --text book.txt
    """
    from humanfriendly import format_size

    from gguf_flash.converters import convert

    _take_activation(options)
    sparsify = options["sparsify"] = take_sparsify(options, quiet or as_json)
    if dense:
        _dense(src, out, quiet, as_json, options)
        return
    start = time.monotonic()
    with progress_bar("convert", quiet) as progress:
        layout = convert(src, out, progress=progress, **options)
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
            **_told(sparsify),
        }
        click.echo(json.dumps(summary))
    elif not quiet:
        click.echo(
            f"wrote {out}: {len(layout.layers)} layers, "
            f"{format_size(layout.bundle_bytes, binary=True)} of bundles on flash, "
            f"{format_size(layout.resident_bytes, binary=True)} resident, in {seconds:.1f} s"
        )
        _say(sparsify)


def _told(sparsify: Sparsify | None) -> dict[str, Any]:
    found = sparsify.found if sparsify else None
    return {"sparsity": dataclasses.asdict(found)} if found else {}


def _say(sparsify: Sparsify | None) -> None:
    if sparsify is not None and sparsify.found is not None:
        click.echo(cost(sparsify.found))


def _dense(src: Path, out: Path, quiet: bool, as_json: bool, options: dict[str, Any]) -> None:
    from gguf_flash.converters import convert_dense

    options.pop("checksums")  # of bundles, of which there are none
    usual = {**dict.fromkeys(("select", "predictor", "predictor_type", "down_type")), "align": 512}
    for name, value in usual.items():
        if options.pop(name) != value:
            raise ArgumentError(
                f"--dense writes no bundles, so it takes no --{name.replace('_', '-')}"
            )
    with progress_bar("convert", quiet) as progress:
        convert_dense(src, out, progress=progress, **options)
    size = out.stat().st_size
    if as_json:
        click.echo(json.dumps({"path": str(out), "file_bytes": size, **_told(options["sparsify"])}))
    elif not quiet:
        click.echo(f"wrote {out}: a dense GGUF of {size} bytes")
        _say(options["sparsify"])
