"""gguf-flash bench make-model: a model whose sparsity is planted, at any size."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from gguf_flash.bench.shapes import SHAPES, TYPES, Shape, Targets, custom_shape, least_tokens
from gguf_flash.cli.options import json_option, threads_option
from gguf_flash.cli.progress import progress_bar
from gguf_flash.errors import ArgumentError
from gguf_flash.sizes import format_size

_CUSTOM = {"n_embd": 256, "n_ff": 1024, "n_layer": 4, "n_vocab": 512}


@click.command("make-model")
@click.option(
    "--shape", type=click.Choice([*SHAPES, "custom"]), required=True, help="Sizes of the model."
)
@click.option(
    "--type", "kind", type=click.Choice(TYPES), default="f16", show_default=True,
    help="Of all matrices; the down rows in the bundles too, for q8_0 as its codes (i8).",
)  # fmt: skip
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write into.")
@click.option(
    "--active", type=float, help="Share of neurons that are not zero for a token [default: 0.03]."
)
@click.option("--predicted", type=float, help="Share selected for a token [default: 0.1].")
@click.option(
    "--false-negatives", type=float, help="Share of the active not selected [default: 0.05]."
)
@click.option("--used", type=float, help="Share that five tokens select together [default: 0.24].")
@click.option(
    "--new", type=float,
    help="Share a token selects that the five before it did not [default: 0.024].",
)  # fmt: skip
@click.option("--n-embd", type=int, help="Of --shape custom [default: 256].")
@click.option("--n-ff", type=int, help="Of --shape custom [default: 1024].")
@click.option("--n-layer", type=int, help="Of --shape custom [default: 4].")
@click.option("--n-vocab", type=int, help="Of --shape custom [default: 512].")
@click.option("--gated", is_flag=True, help="Of --shape custom: Llama's FFN, not squared ReLU.")
@click.option(
    "--tokens", type=click.IntRange(least_tokens(Targets().window)), default=384, show_default=True,
    help="To measure on.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@threads_option
@click.option("--force", is_flag=True, help="Replace files that are there already.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@json_option
def command(shape: str, out: Path, kind: str, quiet: bool, as_json: bool, **options: Any) -> None:
    """Write a dense GGUF and the flash-GGUF of the same weights, sparse as planted, and measure it.

    The weights are random: the text is nonsense, but how many neurons are active, selected, and
    shared by neighbouring tokens is chosen (the defaults are the paper's OPT 6.7B). With --active
    alone the other shares keep the paper's proportions. Unpatched llama.cpp runs the dense file.
    Ends with code 1 if a measured share is off its target by more than a fifth.

    \b
    Example:
      gguf-flash bench make-model --shape opt-6.7b --type f16 --active 0.03 --out planted
      gguf-flash bench make-model --shape custom --n-embd 512 --n-ff 2048 --n-layer 8 --out small
    """
    from gguf_flash.bench.make_model import make_model

    sizes = {name: options.pop(name) for name in _CUSTOM}
    chosen = _shape(shape, sizes, options.pop("gated"))
    targets = _targets(options)
    with progress_bar("make-model", quiet or as_json) as progress:
        result = make_model(out, chosen, kind, targets, progress=progress, **options)
    click.echo(json.dumps(result) if as_json else summary(result) + "\n" + _next(out))
    sys.exit(1 if result["off"] else 0)


def _shape(name: str, sizes: dict[str, int | None], gated: bool) -> Shape:
    given = {k: v for k, v in sizes.items() if v is not None}
    if name == "custom":
        return custom_shape(**{**_CUSTOM, **given}, gated=gated)
    if given or gated:
        odd = "gated" if gated else next(iter(given)).replace("_", "-")
        raise ArgumentError(f"--{odd} is of --shape custom only; {name} has sizes of its own")
    return SHAPES[name]


def _targets(options: dict[str, Any]) -> Targets:
    active = options.pop("active")
    base = Targets() if active is None else Targets.of_active(active)
    names = ("predicted", "false_negatives", "used", "new")
    given = {n: v for n in names if (v := options.pop(n)) is not None}
    return Targets(**{**vars(base), **given})


def summary(result: dict[str, Any]) -> str:
    """Measured beside planted, a line each."""
    lines = [f"{result['planted']}, in {result['seconds']} s; measured over"
             f" {result['measured']['tokens']} tokens, planted in brackets:"]  # fmt: skip
    for name in ("active", "predicted", "false_negatives", "used", "new"):
        found, wanted = result["measured"][name], result["targets"][name]
        lines.append(f"  {name.replace('_', ' '):<16} {100 * found:5.2f} %  ({100 * wanted:g} %)")
    lines += [f"off: {text}" for text in result["off"]]
    return "\n".join(lines)


def _next(out: Path) -> str:
    """The files in `out`, and a command that runs them whatever their size."""
    from gguf_flash.bench.pair import RESERVE, Pair, whole_mib

    pair = Pair.open(out / "dense.gguf", out / "flash.gguf")
    ram = RESERVE + max(pair.least_bytes, pair.dense_bytes // 2)
    names = {
        "dense.gguf": "the dense model",
        "flash.gguf": "the flash-GGUF of the same weights",
        "predictor.safetensors": "its predictor",
        "planted.json": "what was planted and measured",
    }
    lines = ["wrote:"]
    for name, what in names.items():
        size = format_size((out / name).stat().st_size)
        lines.append(f"  {out / name}  {size}, {what}")
    files = " ".join(shlex.quote(str(out / name)) for name in ("dense.gguf", "flash.gguf"))
    lines.append("next (as root, else with --no-cgroup; without --arm beside unpatched llama.cpp):")
    lines.append(f"  gguf-flash bench decode {files} --ram {whole_mib(ram)} --arm ours")
    return "\n".join(lines)
