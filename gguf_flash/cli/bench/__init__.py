"""gguf-flash bench: one file per benchmark, each imported only when it is used."""

from __future__ import annotations

import click

from gguf_flash.cli.modules import ModuleGroup

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


class Benches(ModuleGroup):
    """A group whose commands are the modules of this package."""

    package = __name__
    names = BENCHES


@click.command("bench", cls=Benches)
def command() -> None:
    """Measure the disk, and models beside unpatched llama.cpp; make models to measure.

    \b
    Example:
      gguf-flash bench make-model --shape opt-6.7b --type f16 --out planted
      gguf-flash bench decode planted/dense.gguf planted/flash.gguf --ram 50% --stock stock/bin
    """
