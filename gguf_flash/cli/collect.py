"""gguf-flash collect: record what a dense model's FFNs do on a text, to train predictors on."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from gguf_flash.cli.options import json_option, model_argument, threads_option
from gguf_flash.cli.progress import progress_bar

if TYPE_CHECKING:
    from gguf_flash.calibrate.collector import Collected


@click.command("collect")
@model_argument
@click.option(
    "--text",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A UTF-8 text of at least one window.",
)
@click.option(
    "--tokens",
    required=True,
    type=click.IntRange(1),
    help="Tokens to record, rounded up to whole windows.",
)
@click.option("--out", required=True, type=click.Path(), help="Folder of the recording.")
@click.option(
    "--ctx", type=click.IntRange(1), default=512, show_default=True, help="Tokens in a window."
)
@click.option("--magnitudes", is_flag=True, help="Record how active each neuron is, a byte each.")
@click.option("--force", is_flag=True, help="Replace a recording of something else.")
@threads_option
@json_option
def command(model: str, text: str, as_json: bool, **options: Any) -> None:
    """Record the FFN inputs and the active neurons of MODEL, a dense GGUF, on a text.

    Interrupt it at any time: the same command goes on where it stopped, and a larger --tokens
    extends a recording. Another model, text, --ctx or --magnitudes needs another --out, or --force.

    An activation or a threshold must be in the file (convert --dense --activation, --threshold):
    it refuses to record while GGUF_FLASH_ACTIVATION or GGUF_FLASH_THRESHOLD is set, or
    GGUF_FLASH_DISABLE=1, without which neither is obeyed.

    Beside the model, its KV cache, 128 rows of logits and the text, memory holds one window: the
    sum over layers of ctx * (2 * n_embd + n_ff / 8) bytes, with --magnitudes ctx * n_ff more.

    \b
    Example:
      gguf-flash collect model.gguf --text book.txt --tokens 100000 --out recording
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each costs memory, and none is used
    from gguf_flash.calibrate.collector import collect

    with progress_bar("collect", as_json, unit="token") as progress:
        try:
            done = collect(model, text, progress=progress, **options)
        except KeyboardInterrupt:
            click.echo("\nwhat is recorded is kept; the same command goes on from there", err=True)
            raise
    click.echo(json.dumps(_figures(done)) if as_json else summary(done, options["tokens"]))


def _figures(done: Collected) -> dict[str, Any]:
    return {
        "tokens": done.tokens,
        "new_tokens": done.new_tokens,
        "text_tokens": done.text_tokens,
        "layers": [vars(layer) for layer in done.layers],
        "bytes": done.bytes,
        "seconds": round(done.seconds, 3),
        "peak_buffer_bytes": done.peak_buffer_bytes,
    }


def summary(done: Collected, wanted: int) -> str:
    """The figures in one line, and another before it if the text was too short."""
    from gguf_flash.sizes import format_size

    share = sum(layer.active_share for layer in done.layers) / len(done.layers)
    line = (
        f"{done.tokens} tokens of {len(done.layers)} layers in '{done.path}':"
        f" {100 * share:.1f} % of the neurons active, {format_size(done.bytes)},"
        f" {done.new_tokens} tokens now at {done.new_tokens / done.seconds:.1f} tokens/s,"
        f" buffers {format_size(done.peak_buffer_bytes)}"
    )
    if done.tokens < wanted:
        line = (
            f"the text has {done.text_tokens} tokens, in whole windows {done.tokens} of the"
            f" {wanted} wanted\n{line}"
        )
    return line
