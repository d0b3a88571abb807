"""A group whose commands are modules of a package, each imported only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import ClassVar

import click

__all__ = ["ModuleGroup"]


class ModuleGroup(click.Group):
    """Command `a-b` is `command` of the module `a_b` of `package`."""

    package: ClassVar[str]
    names: ClassVar[Sequence[str]]  # in the order a user meets them

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order of `names`."""
        return list(self.names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and take its `command`."""
        if cmd_name not in self.names:
            return None
        module = importlib.import_module(f"{self.package}.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command
