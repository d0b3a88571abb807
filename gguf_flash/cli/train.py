"""gguf-flash train: the predictors of active neurons from a recording."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from gguf_flash.cli.options import json_option, threads_option
from gguf_flash.cli.progress import progress_bar
from gguf_flash.errors import ArgumentError
from gguf_flash.predictor.settings import BALANCES, DEVICES, LOSSES, TrainSettings

_DEFAULT = TrainSettings()


@click.command("train")
@click.argument("recording", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--rank",
    default="auto",
    show_default=True,
    help="A number, one for each layer with commas, or auto: n_embd/32 (n_embd/4 in the last four"
    " layers), doubled until the targets are met or it no longer helps.",
)
@click.option(
    "--target-fn",
    type=float,
    default=_DEFAULT.target_fn,
    show_default=True,
    help="Share of the active neurons that a layer's threshold may miss.",
)
@click.option(
    "--target-fp",
    type=float,
    default=_DEFAULT.target_fp,
    show_default=True,
    help="With --rank auto: share of the inactive neurons that may be selected then.",
)
@click.option("--max-rank", type=click.IntRange(1), help="Where auto stops [default: n_embd].")
@click.option(
    "--loss",
    type=click.Choice(LOSSES),
    default=_DEFAULT.loss,
    show_default=True,
    help="balanced: each miss costs the same; contribution: as much as the neuron adds to the"
    " output (needs a recording with --magnitudes).",
)
@click.option(
    "--balance",
    type=click.Choice(BALANCES),
    default=_DEFAULT.balance,
    show_default=True,
    help="Active and inactive entries weigh the same over a layer, or over each neuron.",
)
@click.option(
    "--fp-cost",
    type=float,
    help="Loss contribution: what reading all inactive neurons costs, missing all active ones"
    f" costing 1 [default: {_DEFAULT.fp_cost:g}].",
)
@click.option("--epochs", type=int, default=_DEFAULT.epochs, show_default=True)
@click.option(
    "--batch", type=int, default=_DEFAULT.batch, show_default=True, help="Tokens in a step."
)
@click.option("--lr", type=float, default=_DEFAULT.lr, show_default=True, help="Learning rate.")
@click.option(
    "--patience",
    type=int,
    default=_DEFAULT.patience,
    show_default=True,
    help="Epochs without a smaller held-out loss before a layer stops.",
)
@click.option(
    "--held-out",
    type=float,
    default=_DEFAULT.held_out,
    show_default=True,
    help="Share of the tokens, the last ones, that is not trained on but measured.",
)
@click.option("--seed", type=int, default=_DEFAULT.seed, show_default=True)
@threads_option
@click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
@click.option(
    "--force",
    is_flag=True,
    help="Replace a file that is there already, and start over in place of resuming.",
)
@click.option("--quiet", is_flag=True, help="No progress bar and no lines.")
@json_option
def command(
    recording: Path, out: Path, force: bool, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Train a predictor of active neurons on DIR, a recording by gguf-flash collect.

    \b
        gguf-flash collect model.gguf --text corpus.txt --tokens 100000 --out recording
        gguf-flash train recording --out predictor.safetensors

    Each layer's threshold is chosen on held-out tokens for --target-fn. Finished layers are kept in
    OUT.parts until the end: run an interrupted training again and it goes on, to the same bytes.
    The same seed and --threads give the same file on the same machine.

    Memory beside torch itself: one layer at a time, 24 bytes per weight (A and B with gradients,
    optimizer and the best so far), 16 bytes per entry of a batch (--batch x n_ff) and about 200 MiB
    for chunks of held-out tokens. The recording is mapped, not loaded.
    """
    settings = read_settings(options)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(settings.threads))  # before numpy loads it
    # Before torch loads OpenMP: threads that spin while they wait take a busy machine's cores from
    # those that work, and training then takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from gguf_flash.predictor.train import train

    with progress_bar("train", quiet or as_json, unit="epoch") as progress:
        try:
            layers = train(
                recording,
                out,
                settings,
                force=force,
                progress=progress,
                layer_done=None if quiet or as_json else _say,
            )
        except KeyboardInterrupt:
            click.echo("\nfinished layers are kept; the same command goes on from there", err=True)
            raise
    if as_json:
        click.echo(json.dumps({"path": str(out), "layers": layers}))
    elif not quiet:
        click.echo(f"wrote {out}: {len(layers)} layers")


def read_settings(options: dict[str, Any]) -> TrainSettings:
    """The settings that the verb's `options` mean. Raises ArgumentError."""
    if options["fp_cost"] is None:
        options["fp_cost"] = _DEFAULT.fp_cost
    elif options["loss"] != "contribution":
        raise ArgumentError(
            "--fp-cost belongs to --loss contribution; leave one out or add the other"
        )
    options["ranks"] = _ranks(options.pop("rank"))
    options["max_rank"] = options["max_rank"] or 0
    options["threads"] = options["threads"] or len(os.sched_getaffinity(0))
    settings = TrainSettings(**options)
    settings.check()
    return settings


def summary(entry: dict[str, Any]) -> str:
    """One line about a layer."""
    return (
        f"layer {entry['layer']}: rank {entry['rank']}, "
        f"FN {100 * entry['false_negatives']:.2f} %, FP {100 * entry['false_positives']:.2f} % "
        f"at threshold {entry['threshold']:.4g}, active {100 * entry['active']:.1f} %, "
        f"selected {100 * entry['predicted']:.1f} %, {entry['seconds']:.1f} s"
    )


def _say(entry: dict[str, Any]) -> None:
    from tqdm import tqdm

    tqdm.write(summary(entry))  # above the bar


def _ranks(text: str) -> tuple[int, ...]:
    if text.strip() == "auto":
        return ()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise ArgumentError(
            f"--rank must be auto, a number, or numbers with commas, found '{text}'"
        ) from error
