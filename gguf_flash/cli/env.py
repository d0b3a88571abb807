"""`gguf-flash env`: the variables that make llama_cpp use the patched libraries."""

from __future__ import annotations

import json
import shlex

import click

from gguf_flash.runtime import environment


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object instead.")
def command(as_json: bool) -> None:
    """Print shell lines for `eval "$(gguf-flash env)"`.

    After that every Python that this shell starts, such as `python -m llama_cpp.server`, runs
    flash-GGUF files.
    """
    variables = environment()
    if as_json:
        click.echo(json.dumps(variables, indent=2))
        return
    for name, value in variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")
