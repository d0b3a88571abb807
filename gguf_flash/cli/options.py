"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gguf_flash.errors import ArgumentError
from gguf_flash.settings import LOOKAHEADS, POLICIES, PREFILLS, READERS, WATCHES, Settings

_Function = TypeVar("_Function", bound=Callable[..., Any])

model_argument = click.argument("model", type=click.Path(exists=True, dir_okay=False))
threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), help="Threads [default: all this process may use]."
)
force_option = click.option("--force", is_flag=True, help="Replace a file that is there already.")


def _remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    context.meta[f"{__name__}.force"] = value


def _new_file(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    from gguf_flash.predictor.publish import check_target

    if value is not None:  # before the work, that may take hours
        check_target(value, force=context.meta[f"{__name__}.force"])
    return value


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def together(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """A decorator that adds `options` and arguments in this order."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def read_text(path: Path) -> str:
    """The text in a file. Raises ArgumentError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ArgumentError(
            f"'{path}' is not UTF-8 text: found 0x{e.object[e.start]:02x} at byte {e.start}; give a"
            " text, or convert it with iconv"
        ) from e


# --out --force of a verb that measures; the verb gets `out` when it may be written
report_options = together(
    click.option(
        "--out", type=click.Path(path_type=Path), callback=_new_file,
        help="Write the JSON there too.",
    ),
    click.option(
        "--force", is_flag=True, is_eager=True, expose_value=False, callback=_remember,
        help="Replace a file that is there already.",
    ),
)  # fmt: skip

# --ram --watch-memory --window --policy --reader --depth --prefill --lookahead
engine_options = together(
    click.option(
        "--ram",
        metavar="SIZE",
        help="RAM in all, KV cache and buffers included, beside some 32 MiB for the program itself:"
        " 200MiB, 1.5GB, or 60% of the weights on flash beside all the rest [default: automatic].",
    ),
    click.option(
        "--watch-memory",
        "watch",
        type=click.Choice(WATCHES),
        help="Give neuron cache back while the system or the cgroup is short of memory, and take it"
        " again later [default: off].",
    ),
    click.option(
        "--window",
        type=click.IntRange(1, 1_000_000),
        help="Tokens whose neurons stay cached under policy window [default: 5].",
    ),
    click.option(
        "--policy",
        type=click.Choice(POLICIES),
        help="What leaves the cache: the longest unused when room is needed (budget), what no"
        " token of the window used (window), or what scored lowest of late when room is needed"
        " (score) [default: budget].",
    ),
    click.option(
        "--reader",
        type=click.Choice(READERS),
        help="How the SSD is read [default: auto].",
    ),
    click.option(
        "--depth",
        type=click.IntRange(1, 4096),
        help="Reads in flight [default: 224 by io_uring, 32 by pread].",
    ),
    click.option(
        "--prefill",
        type=click.Choice(PREFILLS),
        help="How a prompt reads a layer [default: auto, by what is missing].",
    ),
    click.option(
        "--lookahead",
        type=click.Choice(LOOKAHEADS),
        help="Read what the next layer will probably need before its turn [default: on].",
    ),
)


def read_settings(options: dict[str, Any]) -> Settings:
    """Take the engine's options out of a verb's `options`."""
    names = ("ram", "watch", "window", "policy", "reader", "depth", "prefill", "lookahead")
    return Settings(**{name: options.pop(name) for name in names})
