"""Ctrl-C: an exit that neither JAX's callbacks can swallow nor its teardown can crash."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

INTERRUPTED = 130
_SHOW_CURSOR = "\x1b[?25h"


def exit_on_interrupt() -> None:
    """Makes SIGINT end the process at once with status 130.

    A KeyboardInterrupt that is raised inside a callback of XLA is printed and dropped, and
    one during a compilation ends in a segmentation fault as the interpreter shuts down.
    """
    signal.signal(signal.SIGINT, _exit)


def _exit(signum: int, frame: object) -> None:
    with contextlib.suppress(Exception):
        if sys.stdout.isatty():
            sys.stdout.write(_SHOW_CURSOR + "\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(INTERRUPTED)
