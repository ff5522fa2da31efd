"""`python -m checkpoints_convert COMMAND`: converting, comparing and inspecting checkpoints.

Exit status 2, with one line on stderr, for anything wrong with the arguments or the checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import jax

from checkpoints_convert import compare, from_hf, inspection, to_hf
from jlookahead.checkpoints.errors import first_line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="checkpoints_convert", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (from_hf, to_hf, compare, inspection):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    # Orbax's threads log the tracebacks of what becomes one line here.
    logging.getLogger("absl").setLevel(logging.CRITICAL + 1)
    try:
        return options.run(options)
    except (OSError, ValueError) as error:
        print(f"checkpoints_convert: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:  # out of memory, most often
        print(f"checkpoints_convert: the device failed: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(": ".join(["checkpoints_convert: interrupted", *error.args]), file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
