"""Figures of arms side by side."""

from __future__ import annotations

from typing import Any

from gguf_flash.sizes import format_size

_COLUMNS = (
    "arm", "tokens/s", "range", "read", "requests", "hits", "ms", "predict", "I/O", "manage",
    "compute", "other", "peak RSS",
)  # fmt: skip


def arms_table(arms: list[dict[str, Any]]) -> None:
    """Print a table of arms.summary, per token, and below it the arms that failed."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for arm in arms:
        if arm.get("runs"):
            table.add_row(*_row(arm))
    console = Console(highlight=False, width=max(150, Console().width))
    console.print(table)
    for arm in arms:
        if arm["error"]:
            console.print(f"{arm['name']}: {arm['error']}", soft_wrap=True, markup=False)


def _row(arm: dict[str, Any]) -> list[str]:
    rate = arm["tokens_per_s"] or arm["prompt_tokens_per_s"]
    read = arm["bytes_per_token"] or arm["device_bytes_per_token"]
    times = [arm[k] for k in ("predictor_ms", "io_ms", "mem_ms", "compute_ms", "other_ms")]
    engine = bool(arm["memory"])
    return [
        arm["name"],
        f"{rate['median']:.2f}",
        f"{rate['min']:.2f}..{rate['max']:.2f}",
        _size(read),
        _number(arm["requests_per_token"] if engine else None, "{:.0f}"),
        _number(arm["hit_rate"], "{:.1%}"),
        _milliseconds(arm["token_ms"]),
        *(_milliseconds(t if engine else None) for t in times),
        _size(arm["peak_rss_bytes"]),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _milliseconds(value: float | None) -> str:
    return _number(value, "{:.0f}" if (value or 0) >= 100 else "{:.1f}")


def _size(value: float | None) -> str:
    return "-" if value is None else format_size(value)
