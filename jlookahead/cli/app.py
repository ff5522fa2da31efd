"""The application: its commands, its version, and how errors look."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import typer
from typer.core import TyperGroup

import jlookahead
from jlookahead.cli.batch import batch
from jlookahead.cli.bench import bench
from jlookahead.cli.chat import chat
from jlookahead.cli.distributed import FAILED, fail
from jlookahead.cli.generate import generate
from jlookahead.cli.interrupt import exit_on_interrupt
from jlookahead.cli.tune import tune
from jlookahead.ray_batch import WorkerError

USER_ERROR = 2


class Commands(TyperGroup):
    """Reports what the user can mend as one line on stderr, with exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of a pipe left; typer ends quietly
            raise
        except (OSError, ValueError) as error:
            fail(_describe(error), USER_ERROR)
        except jax.errors.JaxRuntimeError as error:  # out of memory, or another process died
            fail(f"the device failed: {_describe(error)}", FAILED)
        except WorkerError as error:
            fail(f"a worker failed: {_describe(error)}", FAILED)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


app = typer.Typer(
    cls=Commands,
    name="jlookahead",
    help="Lookahead Decoding of LLaMA models: several tokens per forward pass, with exactly "
    "the output of plain decoding.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(batch)
app.command()(tune)
app.command()(bench)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jlookahead {jlookahead.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """Runs the command line.

    Exit status: 0, 1 (not identical, or divergent in the audit), 2 (user error), 3 (the device,
    another process or a worker failed), 130 (Ctrl-C).
    """
    exit_on_interrupt()
    app()
