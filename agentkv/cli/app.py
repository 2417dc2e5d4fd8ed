"""The commands under one name, and what becomes of their errors: one line, exit code 1."""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from agentkv.cli.info import info
from agentkv.cli.models import models
from agentkv.cli.serve import serve
from agentkv.cli.snapshots import restore, save, snapshots
from agentkv.cli.tree import tree
from agentkv.cli.usage import usage
from agentkv.cli.watch import watch
from agentkv.errors import AgentKVError


class OneLineErrors(TyperGroup):
    """A group whose commands fail with one clear line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command.

        Args:
            ctx: The context of the library below typer, which has had two homes so far.

        Raises:
            typer.Exit: With code 1, after an error that is the caller's or the world's.
        """
        try:
            return super().invoke(ctx)
        except AgentKVError as error:
            _complain(error.message)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "agentkv":
                raise  # our bug
            _complain(f"This needs {error.name}: install 'agentkv-runtime[server]'.")
        raise typer.Exit(1)


app = typer.Typer(
    name="agentkv",
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(serve)
app.command()(tree)
app.command()(watch)
app.command()(info)
app.command()(models)
app.command()(usage)
app.command()(save)
app.command()(restore)
app.command()(snapshots)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        try:
            typer.echo(f"agentkv {version('agentkv-runtime')}")
        except PackageNotFoundError:  # run from a checkout
            typer.echo("agentkv, not installed")
        raise typer.Exit


@app.callback()
def agentkv(
    is_version_wanted: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Contexts that fork: a model server for agents that branch.

    Start one with **agentkv serve**, then look at what its clients hold with **agentkv tree**,
    and at what happens to it with **agentkv watch**.
    """


def _complain(message: str) -> None:
    text = Text.assemble(("error: ", "bold red"), " ".join(message.split()))
    Console(stderr=True).print(text, soft_wrap=True)
