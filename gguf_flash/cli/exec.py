"""`gguf-flash exec -- COMMAND`: a bundled tool, or any command, on the patched libraries."""

from __future__ import annotations

import os
import shutil

import click

from gguf_flash.errors import ToolError
from gguf_flash.runtime import environment, tool_path, tools


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", metavar="COMMAND [ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> None:
    """Run a bundled tool, or any command with the variables of `gguf-flash env`.

    The exit code is passed on. Example: gguf-flash exec -- llama-bench -m MODEL
    """
    available = tools()
    if not words:
        raise click.UsageError(f"a command is missing; bundled are: {', '.join(available)}")
    name = words[0]
    if name in available:  # finds its libraries by itself
        os.execv(tool_path(name), list(words))
    path = shutil.which(name)
    if path is None:
        raise ToolError(
            f"'{name}' is neither a command on PATH nor a bundled tool: "
            f"bundled are {', '.join(available)}"
        )
    os.execve(path, list(words), {**os.environ, **environment()})
