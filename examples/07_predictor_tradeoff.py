"""What bytes per token buy in accuracy, for one predictor or several of the same model.

For each share of missed active neurons: calibrate, convert, and measure. Bytes are those that a
cache of a fixed size misses, on the recording's held-out tokens (a window would grow with what is
selected, and hide its cost); divergence is from the dense model.

    python examples/07_predictor_tradeoff.py tests/data/small-opt/dense-f16.gguf \
        --recording recording --text book.txt balanced.safetensors contribution.safetensors

Prints one JSON object a line. Without arguments: a short run on the small OPT of the tests.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from gguf_flash.calibrate import collect
from gguf_flash.calibrate.calibration import Target, calibrate
from gguf_flash.calibrate.recording import Recording
from gguf_flash.calibrate.selection import miss_curve
from gguf_flash.converters import convert
from gguf_flash.perplexity import perplexity
from gguf_flash.predictor.file import Predictor

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"


def bytes_per_token(
    recording: Recording, predictor: Predictor, strides: dict[int, int], cached: float
) -> float:
    """What a cache of that share of each layer's neurons reads for a token, all layers."""
    begin, total = recording.split(), 0.0
    for x in recording.layers:
        selected = predictor.layers[x.layer].selected(np.asarray(x.x()[begin:]))
        total += miss_curve(selected, [int(cached * x.n_ff)])[0] * strides[x.layer]
    return total


def figures(model: Path, recording: Recording, predictor: Predictor, share: float, text: str,
            args: argparse.Namespace) -> dict[str, float]:  # fmt: skip
    chosen = calibrate(recording, predictor, Target("fn", share))
    found = chosen.training["calibration"]
    with tempfile.TemporaryDirectory() as folder:
        trained, flash = Path(folder) / "p.safetensors", Path(folder) / "m.gguf"
        chosen.save(trained)
        layout = convert(model, flash, predictor=trained)
        scored = perplexity(
            flash, text, against=model, ctx=args.ctx, batch=args.ctx, chunks=args.chunks
        )
    strides = {b.layer: b.stride for b in layout.layers}
    return {
        "target_missed": share,
        "selected": float(np.mean(found["selected"])),
        "false_negatives": float(np.mean(found["false_negatives"])),
        "false_positives": float(np.mean(found["false_positives"])),
        "bytes_per_token": bytes_per_token(recording, chosen, strides, args.cached),
        "layer_bytes": layout.bundle_bytes,
        "perplexity": scored["perplexity"],
        "dense_perplexity": scored["against_perplexity"],
        "mean_kl": scored["mean_kl"],
        "top1_agreement": scored["top1_agreement"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="the dense GGUF that was recorded")
    parser.add_argument("predictors", type=Path, nargs="*")
    parser.add_argument("--recording", type=Path, help="made with gguf-flash collect")
    parser.add_argument("--text", type=Path, default=DATA / "english.txt")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--cached", type=float, default=0.5, help="share of neurons with a slot")
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=4)
    args = parser.parse_args()
    model = args.model or DATA / "small-opt" / "dense-f16.gguf"
    predictors = args.predictors or [model.parent / "predictor.safetensors"]
    with tempfile.TemporaryDirectory() as folder:
        if args.recording is None:
            args.recording = Path(folder) / "recording"
            collect(model, DATA / "english.txt", tokens=4096, out=args.recording, ctx=args.ctx)
        recording, text = Recording.open(args.recording), args.text.read_text()
        for path in predictors:
            for share in args.shares:
                found = figures(model, recording, Predictor.open(path), share, text, args)
                print(json.dumps({"predictor": path.name, **found}), flush=True)


if __name__ == "__main__":
    main()
