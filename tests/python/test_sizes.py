"""Sizes, settings, and the messages of those that cannot be."""

from __future__ import annotations

import pytest

from gguf_flash.errors import ArgumentError
from gguf_flash.settings import Settings
from gguf_flash.sizes import format_size, parse_size, ram_setting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1234, 1234),
        ("1234", 1234),
        ("200MiB", 200 * 2**20),
        ("200 MiB", 200 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("64KiB", 65536),
    ],
)
def test_bytes(text: int | str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "3X", "-5MiB", "0", 0, -1, True, "%", "60%"])
def test_no_bytes(text: int | str) -> None:
    with pytest.raises(ArgumentError):
        parse_size(text)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("60%", "60%"), (" 12.5 % ", "12.5%"), ("auto", "auto"), ("1MiB", "1048576"), (7, "7")],
)
def test_ram(given: int | str, expected: str) -> None:
    assert ram_setting(given) == expected


@pytest.mark.parametrize("given", ["0%", "101%", "-3%", "%", "60%%", "3X", 0])
def test_no_ram(given: int | str) -> None:
    with pytest.raises(ArgumentError):
        ram_setting(given)


def test_format() -> None:
    assert [format_size(n) for n in (7, 1536, 200 * 2**20)] == ["7 B", "1.5 KiB", "200.0 MiB"]


def test_only_what_was_chosen_is_overridden() -> None:
    assert Settings().overrides() == {}
    found = Settings(ram="1MiB", window=3, policy="window").overrides()
    assert found == {
        "flash_ffn.ram": "1048576",
        "flash_ffn.window": 3,
        "flash_ffn.policy": "window",
    }


def test_an_override_that_llama_cpp_would_cut() -> None:
    with pytest.raises(ArgumentError, match="127"):
        Settings(prefill="x" * 128).overrides()
