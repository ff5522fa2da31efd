"""Two real processes with two simulated devices each, on the loopback interface.

Against one process on one device: loading, greedy and sampled generation, the command line. And
what happens when a process dies, or never comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoints as files
import numpy as np
import pytest
from typer.testing import CliRunner

import jlookahead as jl
from checkpoints_convert.__main__ import main as convert
from jlookahead.checkpoints.params import flat
from jlookahead.cli import app

NUM_PROCESSES = 2
PROMPTS = [[5, 6, 7, 5, 6], [1]]
IDS = ("--prompt-ids", "5,6,7,5,6")
SAMPLINGS = {
    "greedy": jl.Sampling(),
    "sampled": jl.Sampling(temperature=0.9, top_p=0.95, seed=3),
}
CASES = [
    ("lookahead=4", "greedy"),
    ("data=2,lookahead=2", "sampled"),
    ("lookahead=2,tensor=2", "greedy"),
    ("lookahead=2,tensor=2", "sampled"),
]
PATIENCE = 240.0  # seconds, for a pair of processes on a busy machine
GLOO = re.compile(r"\[Gloo\]|peer ranks|^\d*$")


class Peers:
    """Processes that run one program together; each has files for its output."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: list[subprocess.Popen] = []

    def start(self, *command: object, **environment: object) -> None:
        index = len(self.processes)
        with (
            open(self.folder / f"{index}.out", "wb") as out,
            open(self.folder / f"{index}.err", "wb") as err,
        ):
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={
                    **os.environ,
                    "JAX_NUM_CPU_DEVICES": "2",
                    **{name: str(value) for name, value in environment.items()},
                },
            )
        self.processes.append(process)

    def out(self, index: int) -> str:
        return (self.folder / f"{index}.out").read_text()

    def err(self, index: int) -> str:
        """Without what gloo writes about its connections, at times from several threads at once."""
        lines = (self.folder / f"{index}.err").read_text().splitlines(keepends=True)
        return "".join(line for line in lines if not GLOO.search(line))

    def statuses(self) -> list[int]:
        return [process.wait(PATIENCE) for process in self.processes]

    def wait_for_output(self, index: int) -> None:
        began = time.monotonic()
        while not self.out(index):
            assert self.processes[index].poll() is None, self.err(index)
            assert time.monotonic() < began + PATIENCE, self.err(index)
            time.sleep(0.1)


@contextlib.contextmanager
def peers_in(folder: Path) -> Iterator[Peers]:
    peers = Peers(folder)
    try:
        yield peers
    finally:
        for process in peers.processes:
            process.kill()
            process.wait()


@pytest.fixture
def peers(tmp_path) -> Iterator[Peers]:
    with peers_in(tmp_path) as started:
        yield started


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    config = files.hf_config(num_key_value_heads=2, max_position_embeddings=16384)
    tensors = files.random_tensors(config)
    source = files.write_hf(folder / "hf", config, tensors, num_shards=2)
    files.write_gguf(folder / "model.gguf", config, tensors)
    assert convert(["from-hf", str(source), str(folder / "orbax")]) == 0
    assert convert(["from-hf", str(source), str(folder / "int8"), "--quantize", "int8"]) == 0
    return {"hf": source, "gguf": folder / "model.gguf", "orbax": folder / "orbax"} | {
        "int8": folder / "int8"
    }


def expected_params(source: Path, quantize: str | None) -> dict[str, np.ndarray]:
    params = flat(jl.load(source, quantize=quantize).params)
    return {name: np.asarray(leaf) for name, leaf in params.items()}


@pytest.fixture(scope="module")
def alone(sources) -> dict[str, jl.Result]:
    """What one process with one device generates, by sampling."""
    lm = jl.load(sources["hf"])
    results = {}
    for name, sampling in SAMPLINGS.items():
        cfg = lm.make_config(strategy=jl.Lookahead(4, 3, 3), max_new_tokens=24, sampling=sampling)
        results[name] = jl.generate(lm.params, PROMPTS, cfg)
        assert sum(results[name].num_rounds) < sum(map(len, results[name].tokens))
    return results


# In the library

TOGETHER = """
import json, sys
import jax, numpy as np
import jlookahead as jl
from jlookahead.checkpoints import hf_directory
from jlookahead.checkpoints.params import flat
from jlookahead.cli.mesh_option import make_mesh, parse_mesh

coordinator, process_id, task = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
jax.distributed.initialize(
    coordinator, 2, process_id, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=20
)
assert jax.device_count() == 4 and jax.local_device_count() == 2

# Parameters: every process reads what its devices keep, once.
halves = jax.make_mesh((2, 2), ("tensor", "data"))
quarters = make_mesh(parse_mesh("tensor=4"))
num_read, read = 0, hf_directory._read_part

def counted(file, name, index):
    global num_read
    part = read(file, name, index)
    num_read += part.size if "up_proj" in name else 0
    return part

hf_directory._read_part = counted
for mesh, share in ((halves, 2), (quarters, 2)):
    num_read = 0
    size = sum(leaf.size for name, leaf in flat(jl.load(task["hf"], mesh=mesh).params).items()
               if "up_proj" in name)
    assert num_read == size // share, (num_read, size)
for source, quantize, file in task["loads"]:
    expected = np.load(file)
    leaves = flat(jl.load(source, quantize=quantize, mesh=quarters).params)
    assert sorted(leaves) == sorted(expected)
    for name, leaf in leaves.items():
        assert len(leaf.sharding.device_set) == 4
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[name][shard.index], err_msg=name)

# What depends on a clock is one process's say.
from jlookahead import decoding, tuning
from jlookahead.agreement import of_first_process

lm = jl.load(task["hf"], mesh=quarters)
assert of_first_process(["of", process_id], lm.params) == ["of", 0]
assert of_first_process(process_id, {"kernel": np.ones(3)}) == process_id
model = jl.LlamaModel(lm.config)
if process_id == 0:  # the cache directory of the other process is empty
    costs = (1, 1.0), (4, 1.1), (8, 1.25), (16, 1.5), (32, 1.75)
    tuning.keep_costs(model, lm.params, costs)
kept = jl.tune(lm.params, lm.config).costs
tuning._passes = lambda *arguments: jax.numpy.zeros(())
clock = iter((1.0, 1.5 + process_id, 2.5 + process_id))
tuning._seconds = lambda program: next(clock)
tuning._SAMPLES = 1
measured = tuning.measure_costs(model, lm.params, (1, 2, 3))

texts = []
for mesh, sampling in task["cases"]:
    lm = jl.load(task["hf"], mesh=make_mesh(parse_mesh(mesh)))
    cfg = lm.make_config(
        strategy=jl.Lookahead(4, 3, 3), max_new_tokens=24, sampling=jl.Sampling(**sampling)
    )
    jl.warmup(lm.params, cfg, [max(map(len, task["prompts"]))], batch=len(task["prompts"]))
    programs = decoding._start, decoding.run_rounds
    num_compiled = [program._cache_size() for program in programs]
    out = jl.generate(lm.params, task["prompts"], cfg)
    assert [program._cache_size() for program in programs] == num_compiled
    texts.append([out.tokens, out.num_rounds])
with open(f"{task['folder']}/{process_id}.json", "w") as file:
    json.dump({"texts": texts, "kept": kept, "measured": measured}, file)
"""


@pytest.fixture(scope="module")
def found(sources, tmp_path_factory) -> list[dict]:
    """What both processes found; they agree with one process on the parameters."""
    folder = tmp_path_factory.mktemp("together")
    loads = []
    for kind in ("hf", "gguf", "orbax", "int8"):
        for quantize in (None, "int8") if kind != "int8" else (None,):
            file = folder / f"{kind}-{quantize}.npz"
            np.savez(file, **expected_params(sources[kind], quantize))
            loads.append((str(sources[kind]), quantize, str(file)))
    task = {
        "hf": str(sources["hf"]),
        "loads": loads,
        "cases": [(mesh, vars(SAMPLINGS[sampling])) for mesh, sampling in CASES],
        "prompts": PROMPTS,
        "folder": str(folder),
    }
    coordinator = f"127.0.0.1:{free_port()}"
    with peers_in(folder) as peers:
        for index in range(NUM_PROCESSES):
            cache = folder / f"cache-{index}"
            peers.start("-c", TOGETHER, coordinator, index, json.dumps(task), XDG_CACHE_HOME=cache)
        assert peers.statuses() == [0, 0], peers.err(0)[-3000:] + peers.err(1)[-3000:]
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(NUM_PROCESSES)]


@pytest.mark.parametrize(("mesh", "sampling"), CASES)
def test_two_processes_are_one(alone, found, mesh, sampling):
    for process in found:
        tokens, num_rounds = process["texts"][CASES.index((mesh, sampling))]
        assert tokens == alone[sampling].tokens
        assert num_rounds == alone[sampling].num_rounds


def test_costs_are_those_of_process_0(found):
    """Kept in a file of its machine, or measured by its clock."""
    for process in found:
        assert process["kept"] == [[1, 1.0], [8, 1.25], [32, 1.75]]
        assert process["measured"] == [[1, 1.0], [2, 1.5], [3, 2.5]]


# On the command line


def options(source: Path, coordinator: str, index: int) -> tuple[object, ...]:
    return (
        *("--model", source, "--mesh", "tensor=4", "--coordinator", coordinator),
        *("--num-processes", NUM_PROCESSES, "--process-id", index),
    )


def test_processes_that_the_environment_knows(sources, alone, peers):
    """Slurm's variables here, which JAX reads as it reads those of a TPU slice."""
    port = free_port()
    for index in range(NUM_PROCESSES):
        peers.start(
            *("-m", "jlookahead", "generate", "--json", "--audit", "--max-new-tokens", 24, *IDS),
            *("--window", 4, "--ngram", 3, "--candidates", 3, "--model", sources["hf"]),
            *("--mesh", "tensor=4", "--coordinator", "auto"),
            SLURM_JOB_ID=1,
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS=NUM_PROCESSES,
            SLURM_PROCID=index,
            SLURM_LOCALID=index,
            JAX_COORDINATOR_PORT=port,
        )
    assert peers.statuses() == [0, 0], peers.err(0) + peers.err(1)
    assert peers.err(0) + peers.err(1) + peers.out(1) == ""
    output = json.loads(peers.out(0))
    assert output["token_ids"] == alone["greedy"].tokens[0]
    assert output["num_rounds"] == alone["greedy"].num_rounds[0]
    assert output["audit"]["first_divergence"] is None


# The times that the command line allows, shortened.
HASTE = """
from jlookahead.cli import distributed, main
distributed.HEARTBEAT_SECONDS, distributed.WAIT_SECONDS = 8, {wait}
main()
"""
IN_HASTE = ("-c", HASTE.format(wait=60))
LONG = ("generate", "--no-compare", "--strategy", "autoregressive", "--max-new-tokens", 15000)


def assert_ended(peers: Peers, index: int, began: float) -> None:
    """A line and status 3, or where JAX was faster, its message and an abort."""
    status = peers.processes[index].wait(PATIENCE)
    assert time.monotonic() - began < 40, "nobody waits forever"
    error = peers.err(index)
    if status == 3:
        last_line = error.splitlines()[-1]  # what JAX logs comes before
        assert last_line.startswith(f"error: process {index}: the device failed: "), error
    else:
        assert status == -signal.SIGABRT, (status, error)
        assert "JAX distributed service detected fatal errors" in error


@pytest.mark.parametrize(("victim", "how"), [(1, signal.SIGKILL), (0, signal.SIGTERM)])
def test_a_process_that_dies_ends_the_others(sources, peers, victim, how):
    """By default JAX would note SIGTERM, as a preemption to come, and go on."""
    coordinator = f"127.0.0.1:{free_port()}"
    for index in range(NUM_PROCESSES):
        peers.start(*IN_HASTE, *LONG, *IDS, *options(sources["hf"], coordinator, index))
    peers.wait_for_output(0)
    peers.processes[victim].send_signal(how)
    began = time.monotonic()
    assert peers.processes[victim].wait(PATIENCE) == -how
    assert_ended(peers, 1 - victim, began)
    assert len(peers.out(0).split(",")) < 15000, "it was in the middle of its text"


def test_a_process_with_another_prompt_ends_both(sources, peers):
    coordinator = f"127.0.0.1:{free_port()}"
    for index in range(NUM_PROCESSES):
        ids = ("--prompt-ids", f"5,6,{7 + index}")
        peers.start(*IN_HASTE, *LONG, *ids, *options(sources["hf"], coordinator, index))
    assert peers.processes[1].wait(PATIENCE) == 2
    assert peers.err(1).startswith("error: process 1: process_id: this process has another prompt")
    assert peers.err(1).count("\n") == 1
    assert_ended(peers, 0, time.monotonic())


def test_a_process_that_never_comes(sources, peers):
    for index in range(NUM_PROCESSES):
        alone = options(sources["hf"], f"127.0.0.1:{free_port()}", index)
        peers.start("-c", HASTE.format(wait=2), *LONG, *IDS, *alone)
    assert peers.statuses() == [3, 3]
    for index in range(NUM_PROCESSES):
        assert peers.err(index).startswith("error: coordinator: the processes did not all come ")
        assert peers.err(index).count("\n") == 1


def test_an_address_that_is_taken(sources):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        coordinator = f"127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(
            app, [*map(str, LONG), *IDS, *map(str, options(sources["hf"], coordinator, 0))]
        )
    assert result.exit_code == 2
    assert f"error: coordinator: cannot listen at {coordinator}: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--mesh heads=2", "mesh: got axis 'heads', allowed are data, lookahead, tensor"),
        ("--mesh tensor=0", "mesh: got 'tensor=0', allowed is tensor=SIZE"),
        ("--mesh tensor", "mesh: got 'tensor', allowed is tensor=SIZE"),
        ("--mesh tensor=1,tensor=1", "mesh: got axis tensor twice"),
        ("--mesh tensor=16", "mesh: got tensor=16, which are 16 devices, there are 1"),
        ("--coordinator a:1", "num_processes: is missing, needed with coordinator a:1"),
        ("--coordinator a:1 --num-processes 2", "process_id: is missing"),
        ("--num-processes 2", "num_processes: got 2, allowed with a coordinator HOST:PORT only"),
        ("--coordinator auto --process-id 0", "process_id: got 0, allowed with a coordinator"),
        ("--coordinator a --num-processes 2 --process-id 0", "coordinator: got 'a', allowed are"),
        ("--coordinator a:1 --num-processes 0 --process-id 0", "num_processes: got 0, allowed"),
        ("--coordinator a:1 --num-processes 2 --process-id 2", "allowed are 0 to 1"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "bench", "tune"])
def test_options_that_make_no_sense(command, arguments, words):
    result = CliRunner().invoke(app, [command, *arguments.split()])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert words in result.stderr


def test_no_cluster_to_be_found(peers):
    peers.start(*IN_HASTE, "tune", "--coordinator", "auto")
    assert peers.statuses() == [2]
    assert peers.err(0).startswith("error: coordinator: got auto, JAX finds no processes: ")
    assert peers.err(0).count("\n") == 1
