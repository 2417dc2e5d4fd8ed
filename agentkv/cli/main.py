"""The entry point of the command. It only makes sure that the libraries of a terminal are there."""

import sys


def main() -> None:
    """Runs the command line and exits.

    The base install is the client and has no terminal libraries; the command is there all the
    same, so it must say what it lacks.
    """
    try:
        from agentkv.cli.app import app  # imported here: it needs what may not be installed
    except ModuleNotFoundError as error:
        sys.exit(
            f"agentkv: this command needs {error.name}; install 'agentkv-runtime[cli]' to look at "
            "servers, or 'agentkv-runtime[server]' to run one."
        )
    app()
