"""gguf-flash run: text from a model, and what each token cost."""

from __future__ import annotations

import json
from typing import Any

import click

from gguf_flash.cli.options import (
    engine_options,
    json_option,
    model_argument,
    read_settings,
    threads_option,
)
from gguf_flash.errors import FlashError
from gguf_flash.sizes import format_size

MOST_TOKENS = 1 << 24  # beyond any model's context; llama.cpp counts in 32 bits


@click.command("run")
@model_argument
@click.option("--prompt", required=True, help="The text to continue.")
@click.option("--tokens", type=click.IntRange(1, MOST_TOKENS), default=64, show_default=True)
@engine_options
@threads_option
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token each time.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample among the likeliest tokens that together have this probability; with --temperature"
    " above 0 [default: 0.95].",
)
@click.option(
    "--ctx",
    type=click.IntRange(1, MOST_TOKENS),
    help="Room for prompt and text, in tokens [default: just enough].",
)
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat format.")
@json_option
def command(model: str, as_json: bool, **options: Any) -> None:
    """Continue a prompt with MODEL, a flash-GGUF or an ordinary GGUF.

    Prints the text as it comes, then one line of figures per decoded token.
    """
    from gguf_flash.generate import Generation

    settings = read_settings(options)
    with Generation(model, settings=settings, **options) as generation:
        try:
            for piece in generation:
                if not as_json:
                    click.echo(piece, nl=False)
        except FlashError:
            if not as_json:
                click.echo()  # ends the text, so that the message begins a line of its own
            raise
        figures = generation.figures()
    if as_json:
        click.echo(json.dumps(figures))
    else:
        click.echo("\n" + summary(figures))


def summary(figures: dict[str, Any]) -> str:
    """The figures in one line. The engine's part is left out for a dense model."""
    parts = [f"{figures['tokens']} tokens", f"{figures['tokens_per_s']:.2f} tokens/s"]
    if figures["memory"]:
        parts += [
            f"{format_size(figures['bytes_per_token'])}/token",
            f"{figures['requests_per_token']:.1f} requests/token",
            "hit rate "
            + ("none" if figures["hit_rate"] is None else f"{100 * figures['hit_rate']:.1f} %"),
            *([f"predictor {p:.2f} ms"] if (p := figures["predictor_ms"]) else []),
            f"I/O {figures['io_ms']:.2f} ms",
            f"management {figures['mem_ms']:.2f} ms",
            f"compute {figures['compute_ms']:.2f} ms",
        ]
    parts += [
        f"peak RSS {format_size(figures['peak_rss_bytes'])}",
        f"KV {format_size(figures['kv_bytes'])}",
        f"compute buffer {format_size(figures['compute_bytes'])}",
    ]
    return " | ".join(parts)
