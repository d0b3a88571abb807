"""gguf-flash bench io: what the disk gives by request size and depth."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from gguf_flash.bench.device import DEPTHS, READERS, SIZES
from gguf_flash.cli.options import json_option, report_options, threads_option
from gguf_flash.cli.progress import progress_bar
from gguf_flash.errors import ArgumentError
from gguf_flash.sizes import format_size, parse_size


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [parse_size(item) for item in value.split(",")]
    except ArgumentError as e:
        raise ArgumentError(
            f"--sizes takes sizes with commas such as 4KiB,64KiB, found '{value}'"
        ) from e


def _depths(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        return [int(item) for item in value.split(",")]
    except ValueError as e:
        raise ArgumentError(
            f"--depths takes numbers with commas such as 1,32, found '{value}'"
        ) from e


@click.command("io")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--sizes", callback=_sizes, default=",".join(map(str, SIZES)), show_default=True,
    help="Bytes per request.",
)  # fmt: skip
@click.option(
    "--depths", callback=_depths, default=",".join(map(str, DEPTHS)), show_default=True,
    help="Requests in flight.",
)  # fmt: skip
@click.option("--reader", type=click.Choice(READERS), multiple=True, help="[default: both]")
@click.option(
    "--seconds", type=click.FloatRange(0, 60, min_open=True), default=0.25, show_default=True,
    help="For each combination.",
)  # fmt: skip
@click.option(
    "--file-size",
    default="1GiB",
    show_default=True,
    help="Of the file written when PATH is a folder.",
)
@threads_option
@report_options
@json_option
def command(
    path: Path,
    sizes: list[int],
    depths: list[int],
    reader: tuple[str, ...],
    file_size: str,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Read PATH, a file or a folder on the disk in question, with the engine's readers.

    Random reads of every size at every depth, io_uring and pread, direct and buffered (the paper's
    Figure 2b), reads in sequence, and the memory's bandwidth. Nothing is written but, for a folder,
    one file that is gone afterwards.

    \b
    Example:
      gguf-flash bench io model.flash.gguf --json
    """
    from gguf_flash.bench.device import check_requests, measure_device, test_file
    from gguf_flash.bench.environment import environment
    from gguf_flash.predictor.publish import publish
    from gguf_flash.session import default_threads

    threads = options.pop("threads") or default_threads()
    nbytes = parse_size(file_size) if path.is_dir() else None
    check_requests(path, sizes, depths, nbytes)  # before a file is written, that takes a while
    head = {"bench": "io", "environment": environment(path), "threads": threads}
    with ExitStack() as stack:
        file = path if nbytes is None else stack.enter_context(test_file(path, nbytes))
        with progress_bar("io", as_json, unit="step") as progress:
            found = measure_device(
                file, sizes=sizes, depths=depths, readers=reader or READERS, threads=threads,
                progress=progress, **options,
            )  # fmt: skip
    report = {**head, **found, "file": str(path)}
    if out:
        publish(out, (json.dumps(report, indent=1) + "\n").encode())
    if as_json:
        click.echo(json.dumps(report))
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from gguf_flash.cli.bench.options import heading

    console = Console(highlight=False)
    click.echo(heading(report))
    rows = report["random"]
    for way in sorted({(r["reader"], r["direct"]) for r in rows}, reverse=True):
        some = [r for r in rows if (r["reader"], r["direct"]) == way]
        title = f"{way[0]}, {'direct' if way[1] else 'buffered'}: MB/s (requests/s) by depth"
        depths = sorted({r["depth"] for r in some})
        table = Table("request", *map(str, depths), title=title)
        for size in sorted({r["size"] for r in some}):
            line = {r["depth"]: r for r in some if r["size"] == size}
            cells = [
                f"{line[d]['bytes_per_s'] / 1e6:.0f} ({line[d]['requests_per_s']:.0f})"
                for d in depths
            ]
            table.add_row(format_size(size), *cells)
        console.print(table)
    for r in report["sequential"]:
        kind = "direct" if r["direct"] else "buffered"
        click.echo(f"in sequence, {r['reader']}, {kind}: {r['bytes_per_s'] / 1e6:.0f} MB/s")
    click.echo(f"memory: {report['memory_bytes_per_s'] / 1e9:.1f} GB/s")
    for name, reason in report["skipped"].items():
        click.echo(f"{name} cannot be used: {reason}")
