"""gguf-flash calibrate: thresholds for a target, and what they cost."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gguf_flash.cli.options import force_option, json_option, read_text, threads_option
from gguf_flash.cli.progress import progress_bar
from gguf_flash.errors import ArgumentError

if TYPE_CHECKING:
    from gguf_flash.calibrate.recording import Recording
    from gguf_flash.predictor.file import Predictor

_existing = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("calibrate")
@click.argument("recording", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--predictor", required=True, type=_existing, help="What gguf-flash train wrote.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--target",
    default="fn=5%",
    show_default=True,
    help="fn=SHARE of the active neurons of each layer that may be missed; bytes=SIZE read per"
    " token by a window of --window tokens, of bundles as convert writes them by default, without"
    " --outtype, --down-type and --align (needs --model); kl=NATS of mean divergence from the dense"
    " model (needs --model and --text).",
)
@click.option(
    "--window",
    type=click.IntRange(1, 100_000),
    default=5,
    show_default=True,
    help="Tokens of the sliding window that capacities and bytes are counted for.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1),
    help="Share of the recording, its last tokens, to measure on [default: what train held out].",
)
@click.option("--model", type=_existing, help="The dense GGUF that was recorded.")
@click.option("--text", type=_existing, help="A UTF-8 text to measure the divergence on.")
@click.option(
    "--ctx", type=int, default=512, show_default=True, help="Tokens in a window of the text."
)
@click.option(
    "--chunks", type=click.IntRange(1), default=4, show_default=True, help="Windows of the text."
)
@threads_option
@force_option
@json_option
def command(
    recording: Path,
    predictor: Path,
    out: Path,
    force: bool,
    as_json: bool,
    target: str,
    **options: Any,
) -> None:
    """Choose the thresholds of a predictor by the recording DIR, and store what they cost.

    Beside the thresholds, the file gets for each layer the share of active and selected neurons and
    of errors, the most neurons a window selects, and the misses per token against cache slots;
    convert copies them, inspect shows them. Tokens that the predictor was trained on are refused:
    the first ones of a text of the same name. Memory: 6 bytes for each held-out token and neuron of
    one layer.

    For a target in divergence, the converted model lies in a temporary folder beside OUT, which
    needs room for a file as large as MODEL, and up to four times both models, dense and converted,
    are run over the text.

    \b
    Example:
      gguf-flash calibrate recording --predictor predictor.safetensors --out calibrated.safetensors
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from gguf_flash.calibrate.calibration import Target, calibrate
    from gguf_flash.calibrate.recording import Recording
    from gguf_flash.predictor.file import Predictor
    from gguf_flash.predictor.publish import check_target

    inputs = [recording, predictor, options["model"], options["text"]]
    wanted = Target.parse(target)
    given_inputs = [path for path in inputs if path is not None]
    folder = check_target(out, given_inputs, force=force).parent
    recorded, given = Recording.open(recording), Predictor.open(predictor)
    model, text = options.pop("model"), options.pop("text")
    limits: dict[str, Any] = {name: options.pop(name) for name in ("ctx", "chunks", "threads")}
    with contextlib.ExitStack() as stack:
        if wanted.kind == "bytes":
            options["strides"] = _strides(model, recorded)
        if wanted.kind == "kl":
            limits["folder"] = folder
            options["measure_kl"] = stack.enter_context(_divergence(model, given, text, limits))
        progress = stack.enter_context(progress_bar("calibrate", as_json, unit="layer"))
        found = calibrate(recorded, given, wanted, progress=progress, **options)
    found.save(out)
    click.echo(json.dumps(_figures(found)) if as_json else _summary(found, out))


def _strides(model: Path | None, recording: Recording) -> dict[int, int]:
    """Bytes of a bundle of each layer of the dense `model`, the recorded one."""
    from gguf_flash.converters.bundle import plan_layer
    from gguf_flash.converters.dense import DenseModel, find_layers

    if model is None:
        raise ArgumentError("a target in bytes needs the dense model; give --model")
    with DenseModel(model) as dense:
        if dense.sha256() != recording.model_sha256:
            raise ArgumentError(
                f"'{model}' is another model than the recorded '{recording.model_name}'; give that"
                " one as --model"
            )
        plans = [plan_layer(x, "predictor", None, 512) for x in find_layers(dense)]
    return {p.ffn.layer: p.stride for p in plans}


def _divergence(
    model: Path | None, predictor: Predictor, text: Path | None, limits: dict[str, Any]
) -> Any:
    from gguf_flash.calibrate.divergence import divergence_of

    if model is None or text is None:
        raise ArgumentError("a target in divergence needs --model and --text")
    words = read_text(text)
    return divergence_of(model, predictor, words, **limits)


def _figures(predictor: Predictor) -> dict[str, Any]:
    """One entry for each layer, and what holds for all."""
    found = predictor.training["calibration"]
    layers = [
        {
            "layer": number,
            "rank": layer.rank,
            "threshold": layer.threshold,
            **{name: value[i] for name, value in found.items() if isinstance(value, list)},
        }
        for i, (number, layer) in enumerate(sorted(predictor.layers.items()))
    ]
    head = {name: value for name, value in found.items() if not isinstance(value, list)}
    return {**head, "layers": layers}


def _summary(predictor: Predictor, out: Path) -> str:
    found = predictor.training["calibration"]

    def mean(name: str) -> float:
        return 100.0 * float(sum(found[name])) / len(found[name])

    return (
        f"wrote {out}: {len(predictor.layers)} layers for {found['target']}, on {found['tokens']}"
        f" tokens {mean('active'):.1f} % active, {mean('selected'):.1f} % selected,"
        f" {mean('false_negatives'):.1f} % of the active missed,"
        f" {mean('false_positives'):.1f} % of the inactive selected"
    )
