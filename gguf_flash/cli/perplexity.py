"""gguf-flash perplexity: how well a model predicts a text, and how far it is from another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from gguf_flash.cli.options import (
    engine_options,
    json_option,
    model_argument,
    read_settings,
    read_text,
    threads_option,
)
from gguf_flash.perplexity import SCORED


@click.command("perplexity")
@model_argument
@click.option(
    "--text",
    "text_file",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A UTF-8 text of at least two windows.",
)
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False),
    help="A reference model with the same vocabulary, for KL divergence and agreement.",
)
@click.option("--ctx", type=int, default=512, show_default=True, help="Tokens in a window.")
@click.option("--batch", type=int, default=512, show_default=True, help="Tokens in a decode.")
@click.option("--ubatch", type=click.IntRange(1), help="Tokens in a graph [default: --batch].")
@click.option(
    "--against-ubatch", type=click.IntRange(1), help="The reference's [default: --ubatch]."
)
@click.option(
    "--score",
    type=click.Choice(SCORED),
    default=SCORED[0],
    show_default=True,
    help="Tokens of each window to score.",
)
@click.option("--chunks", type=click.IntRange(1), help="Windows to score [default: all].")
@engine_options
@threads_option
@json_option
def command(model: str, text_file: Path, as_json: bool, **options: Any) -> None:
    """Score MODEL on a text by the method of llama-perplexity.

    \b
    Example:
      gguf-flash perplexity model.gguf --text book.txt --ctx 1024 --score all --chunks 4
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each costs memory, and none is used
    from gguf_flash.perplexity import perplexity

    settings = read_settings(options)
    text = read_text(text_file)
    figures = perplexity(model, text, settings=settings, progress=not as_json, **options)
    click.echo(json.dumps(figures) if as_json else summary(figures))


def summary(figures: dict[str, Any]) -> str:
    """The figures in one line, or two with a reference."""
    line = (
        f"perplexity {figures['perplexity']:.4f} +/- {figures['perplexity_error']:.4f}"
        f" over {figures['tokens']} tokens"
    )
    if "mean_kl" in figures:
        line += (
            f"\nagainst {figures['against_perplexity']:.4f}: mean KL {figures['mean_kl']:.3g},"
            f" 99th percentile {figures['p99_kl']:.3g},"
            f" same top token {100 * figures['top1_agreement']:.2f} %"
        )
    return line
