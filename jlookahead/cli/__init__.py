"""The command line, `jlookahead COMMAND`."""

from jlookahead.cli.app import app, main

__all__ = ["app", "main"]
