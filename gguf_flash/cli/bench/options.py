"""Options that the benchmarks of a pair of models share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from gguf_flash.bench.arms import Work, stock_folder
from gguf_flash.bench.pair import RESERVE, STOCK_ARMS, Pair, Plan
from gguf_flash.cli.options import json_option, report_options, threads_option, together
from gguf_flash.sizes import format_size, parse_size

stock_option = click.option(
    "--stock",
    metavar="DIR",
    help="Folder of unpatched llama.cpp's libraries [default: $GGUF_FLASH_STOCK].",
)


# DENSE FLASH --ram --reserve --threads --no-cgroup --out --force --json
pair_arguments = together(
    click.argument("dense", type=click.Path(exists=True, dir_okay=False)),
    click.argument("flash", type=click.Path(exists=True, dir_okay=False)),
    click.option(
        "--ram",
        default="50%",
        show_default=True,
        metavar="SIZE",
        help="The limit: 7GB, 6.5GiB, or a share of the dense model's weights.",
    ),
    click.option(
        "--reserve",
        metavar="SIZE",
        default=format_size(RESERVE).replace(" ", ""),
        show_default=True,
        help="Of the limit, for Python and the libraries; the rest is the run's --ram.",
    ),
    threads_option,
    click.option(
        "--no-cgroup",
        is_flag=True,
        help="Set no limit, so that no root is needed; the mmap arm then has all the RAM.",
    ),
    report_options,
    json_option,
)


# --prompt --tokens --warmup --seconds --seed: what each arm decodes
decode_arguments = together(
    click.option("--prompt", default="", help="A text [default: 16 random tokens]."),
    click.option(
        "--tokens", type=click.IntRange(2), default=32, show_default=True,
        help="Tokens to decode and time, one by one.",
    ),
    click.option(
        "--warmup", type=click.IntRange(0), default=16, show_default=True,
        help="Tokens decoded before them, that fill the cache.",
    ),
    click.option(
        "--seconds", type=click.FloatRange(0, min_open=True), default=60.0,
        show_default=True,
        help="An arm stops after so long, with two tokens at least.",
    ),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
)  # fmt: skip


def make_plan(options: dict[str, Any], *, stock: bool, **work: Any) -> Plan:
    """Take the pair's options out of `options`; `stock`: the plan needs unpatched llama.cpp."""
    made = Work("", threads=options.pop("threads"), **work)
    pair = Pair.open(options.pop("dense"), options.pop("flash"), made)
    limit, reserve = pair.limit(options.pop("ram")), parse_size(options.pop("reserve"))
    given = options.pop("stock", None)
    folder = stock_folder(given) if stock else ""
    return Plan(pair, folder, limit, reserve, made)


def take_work(options: dict[str, Any]) -> dict[str, Any]:
    """The options of decode_arguments, as Work takes them."""
    return {name: options.pop(name) for name in ("prompt", "tokens", "warmup", "seconds", "seed")}


def show(
    report: dict[str, Any], as_json: bool, out: Path | None, rows: list[dict[str, Any]]
) -> None:
    """Write the JSON to `out`, then print it, or a table of `rows` (arms.summary) for people."""
    from gguf_flash.cli.bench.table import arms_table
    from gguf_flash.predictor.publish import publish

    text = json.dumps(report, indent=None if as_json else 1)
    if out:
        publish(out, (text + "\n").encode())
    if as_json:
        click.echo(text)
        return
    click.echo(heading(report))
    arms_table(rows)
    for name, reason in report.get("unavailable", {}).items():
        click.echo(f"{name}: {reason}")


def end(arms: Iterable[dict[str, Any]], unavailable: Iterable[str] = ()) -> None:
    """Exit with code 1 if no arm (arms.summary), or none of ours where some were asked for, ran.

    unavailable: names of arms that were asked for and that the files cannot run.
    """
    ran = {arm.get("name", ""): bool(arm.get("runs")) for arm in arms}
    ran = {**dict.fromkeys(unavailable, False), **ran}
    ours = [gave for name, gave in ran.items() if name not in STOCK_ARMS]
    if any(ours) or (not ours and any(ran.values())):
        return
    what = "no arm of ours" if any(ran.values()) else "no arm"
    click.echo(f"gguf-flash: {what} gave a figure; the report says why", err=True)
    sys.exit(1)


def heading(report: dict[str, Any]) -> str:
    """What a table is about, in a line or two; planted models are called so."""
    env = report["environment"]
    lines = [
        f"bench {report['bench']}: {env['machine']}, {env['cores']} cores, --threads"
        f" {report['threads']}, {env['simd']}, kernel {env['kernel']}, disk"
        f" {env['disk'].get('device', '')}, load {env['load'][0]}, {env['time']}"
    ]
    if report.get("planted"):
        shares = {k: v for k, v in report["model"]["measured"].items() if k != "tokens"}
        found = ", ".join(f"{k.replace('_', ' ')} {100 * v:.2g} %" for k, v in shares.items())
        lines.append(f"PLANTED model, no trained weights: {report['planted']}; measured: {found}")
    if report.get("limit_bytes"):
        lines.append(f"limit {format_size(report['limit_bytes'])}")
    return "\n".join(lines)
