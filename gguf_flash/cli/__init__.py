"""The command `gguf-flash`: one file per verb, each imported only when its verb is used."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

import click

from gguf_flash import __version__
from gguf_flash.cli.modules import ModuleGroup
from gguf_flash.errors import FlashError
from gguf_flash.interrupt import signals_interrupt

VERBS = (
    "convert",
    "verify",
    "order",
    "inspect",
    "run",
    "plan",
    "perplexity",
    "collect",
    "train",
    "calibrate",
    "doctor",
    "env",
    "exec",
    "demo",
    "bench",
)
_REFUSED = 2
_INTERRUPTED = 130


class Verbs(ModuleGroup):
    """A group whose commands are the modules of this package; known errors end in one sentence."""

    package = __name__
    names = VERBS

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """As click's, which prints --help and --version here, maybe to a disk that is full."""
        try:
            return super().make_context(*args, **extra)
        except BrokenPipeError:
            raise
        except OSError as error:
            _drop_output()
            _say(f"cannot write what was asked for: {error.strerror or error}")
            raise SystemExit(_REFUSED) from error

    def invoke(self, ctx: click.Context) -> object:
        """Run the verb; exit code 2 for a FlashError or a refused file, 130 for Ctrl-C."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)  # so that temporary files go and children end
        try:
            return self._invoke(ctx)
        except BrokenPipeError:
            raise  # click ends quietly when the reader of our output has gone
        except FlashError as error:
            _say(str(error))
        except OSError as error:
            _drop_output()
            name = f" '{error.filename}'" if error.filename else ""
            _say(f"the system refused an operation on a file{name}: {error.strerror or error}")
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(_INTERRUPTED)
        ctx.exit(_REFUSED)

    def _invoke(self, ctx: click.Context) -> object:
        """Run the verb, and let a signal end a decode as if its handler had."""
        with signals_interrupt((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)) as received:
            try:
                return super().invoke(ctx)
            except FlashError:
                if received.number == signal.SIGINT:
                    raise KeyboardInterrupt from None
                if received.number:
                    _end(received.number, None)
                raise


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _drop_output() -> None:
    """If stdout cannot be written, drop what it holds: it would fail once more when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    click.echo(f"gguf-flash: {message}", err=True)


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gguf-flash")
def main() -> None:
    """Run GGUF models larger than RAM, their FFN weights on the SSD."""
