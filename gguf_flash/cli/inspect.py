"""``gguf-flash inspect``: what is in a flash-GGUF, layer by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gguf_flash.cli.options import read_text
from gguf_flash.cli.sparsity import cost
from gguf_flash.format.layout import FlashLayout
from gguf_flash.format.predictor import predictor_names
from gguf_flash.format.reader import read_layout

if TYPE_CHECKING:
    from rich.table import Table

    from gguf_flash.calibrate.probe import Probed


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--probe",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="FILE is a dense GGUF: run it on this text with every activation there is.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(file: Path, probe: Path | None, as_json: bool) -> None:
    """Show the bundles and totals of FILE; only headers are read.

    Where the dense model's blocks are two stacks (T5), also which block a layer is.

    Of a file with thresholds also what it says they cost: perplexity with and without them, mean KL
    divergence, and the share of zeros in each layer (a neuron that has a threshold of its own is
    shown as "own").

    Of a file with predictors also, for each layer, their rank and threshold, and as far as it was
    calibrated: the share of neurons that are zero and that are selected, of the active ones missed
    (false negatives), of the inactive ones selected (false positives), and the cache slots that a
    window needs.

    With --probe, the share of FFN activations that are zero and the perplexity under each
    activation tell which one a model was trained with, whatever its configuration says.

    \b
    Examples:
      gguf-flash inspect model.flash.gguf
      gguf-flash inspect model.gguf --probe book.txt
    """
    if probe is not None:
        _probe(file, probe, as_json)
        return
    layout = read_layout(file)
    if as_json:
        click.echo(json.dumps(_as_dict(layout)))
    else:
        _print(layout)


def _as_dict(layout: FlashLayout) -> dict[str, Any]:
    """Everything the table shows, sizes in bytes."""
    return {
        "path": str(layout.path),
        "version": layout.version,
        "architecture": layout.text("general.architecture"),
        "select": layout.select,
        "activation": layout.activation,
        "gated": layout.gated,
        "fused": layout.fused,
        "n_embd": layout.n_embd,
        "align": layout.align,
        "parts": list(layout.part_names),
        "source": {k: layout.text(f"flash_ffn.source.{k}") for k in ("name", "sha256", "outtype")},
        "file_bytes": layout.file_bytes,
        "bundle_bytes": layout.bundle_bytes,
        "resident_bytes": layout.resident_bytes,
        "resident_tensors": len(layout.resident),
        "layers": [
            {
                "layer": b.layer,
                "block": b.block,
                "n_ff": b.n_ff,
                "types": [p.type.name for p in b.parts],
                "stride": b.stride,
                "file": b.file,
                "offset": b.offset,
                "bytes": b.nbytes,
                **_selection(layout, i),
            }
            for i, b in enumerate(layout.layers)
        ],
        "sparsity": _sparsity(layout),
        "calibration": _calibration(layout),
        "order": _order(layout),
    }


def _sparsity(layout: FlashLayout) -> dict[str, Any] | None:
    """JSON has no NaN: what the file does not say is null."""
    if layout.sparsity is None:
        return None
    found = {k: v for k, v in vars(layout.sparsity).items() if k != "zeros"}
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in found.items()}


def _calibration(layout: FlashLayout) -> dict[str, Any] | None:
    found = layout.calibration
    if found is None:
        return None
    return {name: getattr(found, name) for name in ("text", "tokens", "target", "window")}


def _order(layout: FlashLayout) -> dict[str, Any] | None:
    """What decided the order of the neurons, if the file says so."""
    text, tokens = (layout.kv.get(f"flash_ffn.order.{n}") for n in ("text", "tokens"))
    if text is None or tokens is None:
        return None
    return {"text": text.decode(), "tokens": tokens.decode()}


def _selection(layout: FlashLayout, index: int) -> dict[str, Any]:
    """What the file says about how neurons of a layer are selected, and how many of them."""
    found: dict[str, Any] = {}
    if layout.layers[index].layer in layout.neuron_thresholds:
        found["neuron_thresholds"] = True
    elif layout.thresholds:
        found["activation_threshold"] = layout.thresholds[index]
    if layout.sparsity is not None and layout.sparsity.zeros:
        found["zeros"] = layout.sparsity.zeros[index]
    if layout.predictors:
        found["rank"] = layout.predictors[index].rank
        found["threshold"] = layout.predictors[index].threshold
        names = predictor_names(layout.layers[index].layer)
        found["predictor_bytes"] = sum(t.nbytes for t in layout.resident if t.name in names)
    if layout.calibration is not None:
        c = layout.calibration
        for name, values in (*c.rates.items(), ("capacity", c.capacity)):
            if values:
                found[name] = values[index]
        if c.miss_curve:
            found["miss_curve"] = list(zip(c.miss_slots[index], c.miss_curve[index], strict=True))
    return found


# Column, key in _selection, and how it is shown.
_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("cut up to", "activation_threshold", "{:.4g}".format),
    ("cut up to", "neuron_thresholds", lambda v: "own"),
    ("zero, cut", "zeros", lambda v: f"{100 * v:.1f}%"),
    ("rank", "rank", str),
    ("threshold", "threshold", "{:.3f}".format),
    ("zero", "active", lambda v: f"{100 * (1 - v):.1f}%"),
    ("selected", "selected", lambda v: f"{100 * v:.1f}%"),
    ("missed", "false_negatives", lambda v: f"{100 * v:.1f}%"),
    ("false pos.", "false_positives", lambda v: f"{100 * v:.1f}%"),
    ("slots", "capacity", str),
)


def _bundle_table(layout: FlashLayout) -> Table:
    from humanfriendly import format_size
    from rich.table import Table

    table = Table(title=str(layout.path), title_justify="left")
    stacked = any(b.block != f"blk.{b.layer}" for b in layout.layers)
    names = ("layer", *(("block",) if stacked else ()), "neurons", "parts", "stride", "bytes")
    for name in (*names, "share"):
        table.add_column(name, justify="left" if name in ("block", "parts") else "right")
    for b in layout.layers:
        parts = " ".join(f"{p.name}:{p.type.name}" for p in b.parts)
        share = f"{100 * b.nbytes / layout.file_bytes:.1f}%"
        size = format_size(b.nbytes, binary=True)
        of = (str(b.layer), b.block) if stacked else (str(b.layer),)
        table.add_row(*of, str(b.n_ff), parts, str(b.stride), size, share)
    return table


def _selection_table(layout: FlashLayout) -> Table | None:
    from rich.table import Table

    rows = [_selection(layout, i) for i in range(len(layout.layers))]
    columns = [c for c in _COLUMNS if any(c[1] in row for row in rows)]
    if not columns:
        return None
    table = Table(title="selection", title_justify="left")
    table.add_column("layer", justify="right")
    for name, _, _ in columns:
        table.add_column(name, justify="right")
    for b, row in zip(layout.layers, rows, strict=True):
        cells = (show(row[key]) if key in row else "" for _, key, show in columns)
        table.add_row(str(b.layer), *cells)
    return table


def _print(layout: FlashLayout) -> None:
    from humanfriendly import format_size
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_bundle_table(layout))
    selection = _selection_table(layout)
    if selection is not None:
        console.print(selection)
    source = layout.text("flash_ffn.source.name") or "unknown"
    outtype = layout.text("flash_ffn.source.outtype")
    rows = [
        ("on flash", format_size(layout.bundle_bytes, binary=True)),
        ("resident", format_size(layout.resident_bytes, binary=True)),
        ("select", layout.select),
        ("activation", layout.activation or "as the architecture has it"),
        ("source", f"{source} as {outtype}" if outtype else source),
    ]
    if layout.sparsity is not None:
        rows.append(("sparsity", cost(layout.sparsity)))
    c = layout.calibration
    if c is not None:
        text = f"{c.target}; {c.tokens} tokens of {c.text}; slots for a window of {c.window} tokens"
        rows.append(("calibrated", text))
    if found := _order(layout):
        rows.append(("ordered", f"by {found['tokens']} tokens of {found['text']}"))
    for label, value in rows:
        console.print(f"{label:11}{value}", markup=False)


def _probed(p: Probed) -> dict[str, Any]:
    """JSON has no NaN: a model that runs to infinity has no figures."""
    figures = {"zeros": p.zeros, "perplexity": p.perplexity}
    return {**vars(p), **{k: v if math.isfinite(v) else None for k, v in figures.items()}}


def _probe(file: Path, text: Path, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from gguf_flash.calibrate.probe import probe
    from gguf_flash.cli.progress import progress_bar

    words = read_text(text)
    with progress_bar("probe", as_json, unit="activation") as progress:
        found = probe(file, words, progress=progress)
    if as_json:
        click.echo(json.dumps({"path": str(file), "activations": [_probed(p) for p in found]}))
        return
    table = Table(title=str(file), title_justify="left")
    for name in ("activation", "zero", "perplexity"):
        table.add_column(name, justify="left" if name == "activation" else "right")
    for p in found:
        zero = f"{100 * p.zeros:.1f}%" if math.isfinite(p.zeros) else "-"
        table.add_row(p.activation, zero, f"{p.perplexity:.4g}")
    console = Console(highlight=False)
    console.print(table)
    likeliest = found[0].activation if math.isfinite(found[0].perplexity) else "none of them"
    console.print(f"the likeliest is {likeliest}", markup=False)
