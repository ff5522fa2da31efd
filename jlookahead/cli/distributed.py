"""Several processes, one per host, that run one command together.

Each is given the same command line but for `--process-id`, and sees the same files. All of them
compute; the first alone writes results, and each reports its own errors. Process 0 is also JAX's
coordinator, which knows who is alive.

Nobody waits forever. Processes that do not come together end after `WAIT_SECONDS`. When one dies,
collectives over TCP fail in most of the others at once; where they hang, the coordinator misses the
heartbeats, and JAX aborts what is left after `HEARTBEAT_SECONDS`; and at once without coordinator.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import jax
import typer
from rich.console import Console

from jlookahead.agreement import of_first_process
from jlookahead.model import Params

WAIT_SECONDS = 120
HEARTBEAT_SECONDS = 30
# How long process 0 outlives an error, for the others to report theirs: its end aborts them.
LINGER_SECONDS = 3
FAILED = 3  # exit status: the device, another process or a worker
AUTO = "auto"

Coordinator = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT at which process 0 listens, one process per host; or auto, where JAX finds "
        "the processes itself: on a TPU slice, under Slurm, Open MPI or Kubernetes.",
        show_default="one process",
    ),
]
NumProcesses = Annotated[
    int | None, typer.Option(help="Processes that compute together, with a coordinator.")
]
ProcessId = Annotated[int | None, typer.Option(help="Which one this is, from 0 on.")]


def connect(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the other processes, if the command line speaks of any; before a device is touched.

    Afterwards standard output belongs to process 0.

    Raises:
        ValueError: options that make no sense; `auto` where JAX finds nothing; an address at which
            process 0 cannot listen.
    """
    _check(coordinator, num_processes, process_id)
    if coordinator is None:
        return
    # By default a process that is sent SIGTERM would note a preemption to come, and go on.
    jax.config.update("jax_enable_preemption_service", False)
    with _limited(WAIT_SECONDS, f"the processes did not all come together ({coordinator})"):
        try:
            jax.distributed.initialize(
                None if coordinator == AUTO else coordinator,
                num_processes,
                process_id,
                initialization_timeout=2 * WAIT_SECONDS,  # JAX aborts then, with a stack trace
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=HEARTBEAT_SECONDS,
            )
        except (ValueError, RuntimeError) as error:
            what = "finds no processes" if coordinator == AUTO else "cannot connect"
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"coordinator: got {coordinator}, JAX {what}: {reason}") from None
        _redirect_stdout()


def _check(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    others = {"num_processes": num_processes, "process_id": process_id}
    is_address = coordinator not in (None, AUTO)
    for name, value in others.items():
        if is_address and value is None:
            raise ValueError(f"{name}: is missing, needed with coordinator {coordinator}")
        if not is_address and value is not None:
            raise ValueError(f"{name}: got {value}, allowed with a coordinator HOST:PORT only")
    if num_processes is None or process_id is None:
        return
    if not re.fullmatch(r".+:[1-9]\d{0,4}", str(coordinator)):
        raise ValueError(f"coordinator: got {coordinator!r}, allowed are HOST:PORT and {AUTO}")
    if num_processes < 1:
        raise ValueError(f"num_processes: got {num_processes}, allowed are 1 and more")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process_id: got {process_id}, allowed are 0 to {num_processes - 1}")
    if process_id == 0:
        _check_free(str(coordinator))


def _check_free(coordinator: str) -> None:
    """JAX crashes, now and then, where it cannot listen."""
    port = int(coordinator.rsplit(":", 1)[1])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except (OSError, OverflowError) as error:  # taken, not allowed, or beyond 65535
        raise ValueError(f"coordinator: cannot listen at {coordinator}: {error}") from None


@contextlib.contextmanager
def _limited(seconds: float, complaint: str) -> Iterator[None]:
    """Ends the process with a line on stderr if the body takes longer."""

    def give_up() -> None:
        print(f"error: coordinator: {complaint} within {seconds} s", file=sys.stderr, flush=True)
        os._exit(FAILED)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _redirect_stdout() -> None:
    """Leaves standard output to process 0, and to Python: gloo, for one, writes to it, too."""
    if sys.stdout is None:  # closed
        return
    sys.stdout.flush()
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if not is_first():
        os.close(own)
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    target = own if is_first() else os.devnull
    sys.stdout = open(target, "w", buffering=1, encoding=encoding, errors=errors)


def is_first() -> bool:
    """Whether this process writes results: it is the only one, or process 0."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def messages() -> Console:
    """Standard error, for progress and figures; of the first process only."""
    return Console(stderr=True, highlight=False, quiet=not is_first())


def require_same(call: Any, params: Params) -> None:
    """Raises `ValueError` where this process is about to compute another thing than process 0.

    Args:
        call: what it is about to compute, with a `repr` that says so.
        params: of the model.
    """
    digest = hashlib.sha256(repr(call).encode()).hexdigest()
    if of_first_process(digest, params) != digest:
        raise ValueError(
            "process_id: this process has another prompt or other options than process 0, must be "
            "given the same ones and see the same files"
        )


def fail(message: str, status: int) -> NoReturn:
    """Reports an error in a line on stderr and ends the process with this status.

    One of several processes ends at once: at an ordinary exit JAX waits for the others, which may
    be waiting for this one.
    """
    if not jax.distributed.is_initialized():
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(status)
    typer.echo(f"error: process {jax.process_index()}: {message}", err=True)
    if sys.stdout is not None:
        sys.stdout.flush()
    if is_first():
        time.sleep(LINGER_SECONDS)
    os._exit(status)
