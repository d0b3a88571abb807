"""Sizes as people write them: bytes with a unit, or a share of a model's weights."""

from __future__ import annotations

import re

from gguf_flash.errors import ArgumentError

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def parse_size(size: int | str) -> int:
    """Bytes meant by `size`: an int, "1234", "200MiB" or "1.5GB".

    MiB counts in powers of 1024, MB in powers of 1000. Raises ArgumentError for anything else, and
    for zero or less.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ArgumentError(f"a size is an int or a str, found {type(size).__name__} {size!r}")
    value = size if isinstance(size, int) else _with_unit(size)
    if value <= 0:
        raise ArgumentError(f"a size must be more than zero bytes, found {size!r}")
    return value


def ram_setting(size: int | str) -> str:
    """`size` as the engine takes `ram`: bytes, "auto", or a share such as "60%".

    A share means all resident weights and that share of the FFN weights on flash, so 100 % is the
    whole model and any share is enough to run. Raises ArgumentError for what is none of the three.
    """
    if isinstance(size, str):
        if size.strip() == "auto":
            return "auto"
        if match := _SHARE.fullmatch(size):
            if not 0 < float(match[1]) <= 100:
                raise ArgumentError(f"a share must be above 0% and at most 100%, found {size!r}")
            return f"{match[1]}%"
    return str(parse_size(size))


def _with_unit(text: str) -> int:
    import humanfriendly

    try:
        return int(humanfriendly.parse_size(text))
    except humanfriendly.InvalidSize as error:
        raise ArgumentError(
            f"cannot read the size {text!r}: expected bytes with a unit such as 200MiB,"
            " or for --ram a share of the weights such as 60%"
        ) from error


def format_size(size: float) -> str:
    """`size` bytes for people, in powers of 1024: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
