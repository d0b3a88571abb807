"""The options by which convert makes a model sparse without training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gguf_flash.cli.options import read_text, threads_option, together
from gguf_flash.cli.progress import progress_bar
from gguf_flash.errors import ArgumentError
from gguf_flash.format.thresholds import CRITERIA, Sparsity

if TYPE_CHECKING:
    from gguf_flash.calibrate.sparsity import FoundThresholds
    from gguf_flash.converters.dense import DenseModel


# --target-sparsity --criterion --text --tokens --threads
sparsity_options = together(
    click.option(
        "--target-sparsity",
        metavar="SHARE",
        help="Make the model sparse without training: thresholds by which SHARE (50% or"
        " 0.5) of each layer's activations become zero on --text. It costs quality, which"
        " is measured on the text's last quarter and noted in the file.",
    ),
    click.option(
        "--criterion",
        type=click.Choice(CRITERIA),
        default=CRITERIA[0],
        show_default=True,
        help="With --target-sparsity: small is an activation by its own size, or times"
        " the norm of its down row.",
    ),
    click.option(
        "--text",
        "text_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="With --target-sparsity: a UTF-8 text like what the model will read.",
    ),
    click.option(
        "--tokens",
        type=click.IntRange(1),
        default=4096,
        show_default=True,
        help="With --target-sparsity: tokens of the text to choose thresholds on, in whole"
        " windows of 512.",
    ),
    threads_option,
)


class Sparsify:
    """What `convert` calls to find thresholds; keeps what was found."""

    def __init__(self, share: float, text: Path, quiet: bool, options: dict[str, Any]) -> None:
        self._share, self._text, self._quiet, self._options = share, text, quiet, options
        self.found: Sparsity | None = None

    def __call__(self, dense: DenseModel, activation: str | None) -> FoundThresholds:
        """Find them; `activation` is what the file itself does not say."""
        from gguf_flash.calibrate.sparsity import find_thresholds

        words = read_text(self._text)
        with progress_bar("thresholds", self._quiet, unit="window") as progress:
            thresholds = find_thresholds(
                dense.paths[0], self._share, words, shown=dense.path, text_name=self._text.name,
                activation=activation, progress=progress, **self._options,
            )  # fmt: skip
        self.found = thresholds.sparsity
        return thresholds


def take_sparsify(options: dict[str, Any], quiet: bool) -> Sparsify | None:
    """Takes the options above out of a verb's `options`; None if no share of zeros is asked for."""
    names = ("criterion", "tokens", "threads")
    share, text = options.pop("target_sparsity"), options.pop("text_file")
    others = {name: options.pop(name) for name in names}
    if share is None:
        source = click.get_current_context().get_parameter_source
        for name, option in (("text_file", "text"), *((n, n) for n in names)):
            if source(name) not in (None, ParameterSource.DEFAULT):
                raise ArgumentError(f"--{option} goes with --target-sparsity SHARE")
        return None
    from gguf_flash.calibrate.sparsity import parse_share

    found = parse_share(share)
    if text is None:
        raise ArgumentError("--target-sparsity needs a text to measure on: give --text FILE")
    if options.get("predictor"):
        raise ArgumentError(
            "a predictor belongs to a model that has its thresholds already: write it with"
            " 'gguf-flash convert --dense --target-sparsity ...', then collect, train, and convert"
            " that file with --predictor"
        )
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # each costs memory, and none is used
    return Sparsify(found, text, quiet, others) if found > 0 else None


def cost(found: Sparsity) -> str:
    """What thresholds cost, in one line."""
    zeros = f"{100 * sum(found.zeros) / len(found.zeros):.1f}" if found.zeros else "?"
    return (
        f"{100 * found.target:g} % zeros asked for, {zeros} % found ({found.criterion}):"
        f" perplexity {found.dense_perplexity:.4g} to {found.perplexity:.4g}, mean KL"
        f" {found.mean_kl:.3g}, on {found.held_out} tokens of {found.text}; chosen on"
        f" {found.tokens} others"
    )
