"""``gguf-flash inspect``: what is in a flash-GGUF, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gguf_flash.format.layout import FlashLayout
from gguf_flash.format.reader import read_layout


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(file: Path, as_json: bool) -> None:
    """Show the bundles and totals of FILE; only headers are read."""
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
                "n_ff": b.n_ff,
                "types": [p.type.name for p in b.parts],
                "stride": b.stride,
                "file": b.file,
                "offset": b.offset,
                "bytes": b.nbytes,
            }
            for b in layout.layers
        ],
    }


def _print(layout: FlashLayout) -> None:
    from humanfriendly import format_size
    from rich.console import Console
    from rich.table import Table

    table = Table(title=str(layout.path), title_justify="left")
    for name in ("layer", "neurons", "parts", "stride", "bytes", "share"):
        table.add_column(name, justify="left" if name == "parts" else "right")
    for b in layout.layers:
        parts = " ".join(f"{p.name}:{p.type.name}" for p in b.parts)
        share = f"{100 * b.nbytes / layout.file_bytes:.1f}%"
        size = format_size(b.nbytes, binary=True)
        table.add_row(str(b.layer), str(b.n_ff), parts, str(b.stride), size, share)
    console = Console(highlight=False)
    console.print(table)
    source = layout.text("flash_ffn.source.name") or "unknown"
    outtype = layout.text("flash_ffn.source.outtype")
    rows = [
        ("on flash", format_size(layout.bundle_bytes, binary=True)),
        ("resident", format_size(layout.resident_bytes, binary=True)),
        ("select", layout.select),
        ("activation", layout.activation or "as the architecture has it"),
        ("source", f"{source} as {outtype}" if outtype else source),
    ]
    for label, value in rows:
        console.print(f"{label:10} {value}", markup=False)
