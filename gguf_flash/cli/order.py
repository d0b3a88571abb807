"""``gguf-flash order``: neurons that are read together, beside each other on the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gguf_flash.cli.options import force_option, json_option, threads_option
from gguf_flash.cli.progress import progress_bar

if TYPE_CHECKING:
    from gguf_flash.converters.order import Ordered


@click.command("order")
@click.argument("flash", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--recording",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="What gguf-flash collect recorded of the dense model.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Or run FLASH on this text, if it has a resident gate or predictors.",
)
@click.option(
    "--tokens",
    type=click.IntRange(10),
    default=640,
    show_default=True,
    help="Tokens to look at; the last fifth only judges the result.",
)
@click.option(
    "--cache",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.2,
    show_default=True,
    help="Share of a layer's neurons that the cache will hold.",
)
@force_option
@threads_option
@json_option
def command(flash: Path, out: Path, as_json: bool, **options: Any) -> None:
    """Write OUT, the flash-GGUF FLASH with its neurons in an order that needs fewer reads.

    Neurons that the cache misses at the same tokens become neighbours, and neighbours are read
    together. The model is the same: its sums are added in another order, nothing else. Not for
    files whose down rows are codes of Q8_0 (convert with --down-type f16).

    \b
    Examples:
      gguf-flash order model.flash.gguf ordered.flash.gguf --text book.txt
      gguf-flash order model.flash.gguf ordered.flash.gguf --recording recording --cache 0.3
    """
    if options["threads"]:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(options["threads"]))
    from gguf_flash.converters.order import order

    with progress_bar("order", as_json) as progress:
        done = order(flash, out, progress=progress, **options)
    click.echo(json.dumps(done.as_dict()) if as_json else summary(done))


def summary(done: Ordered) -> str:
    """What it gains, in one line."""
    saved = 1 - done.requests / done.requests_before if done.requests_before else 0.0
    return (
        f"wrote {done.path}: {done.requests_before:.1f} reads a token become {done.requests:.1f}"
        f" ({100 * saved:.0f} % fewer), on {done.held_out} tokens of {done.source} that the order"
        f" was not chosen by"
    )
