"""gguf-flash bench: one file per benchmark, each imported only when it is used."""

from __future__ import annotations

import importlib

import click

BENCHES = (
    "make-model",
    "build-stock",
    "io",
    "decode",
    "ablation",
    "memory",
    "prefill",
    "long",
)


class Benches(click.Group):
    """A group whose commands are the modules of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All benchmarks, in the order a user meets them."""
        return list(BENCHES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the benchmark's module and take its `command`."""
        if cmd_name not in BENCHES:
            return None
        module = importlib.import_module(f"gguf_flash.cli.bench.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command


@click.command("bench", cls=Benches)
def command() -> None:
    """Measure the disk, and models beside unpatched llama.cpp; make models to measure.

    \b
    Example:
      gguf-flash bench make-model --shape opt-6.7b --type f16 --out planted
      gguf-flash bench decode planted/dense.gguf planted/flash.gguf --ram 50% --stock stock/bin
    """
