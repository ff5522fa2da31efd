"""What a strategy is worth: speed against plain decoding, accepted lengths, time by phase."""

from __future__ import annotations

import collections
import dataclasses
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np

from jlookahead.call import prepare
from jlookahead.checkpoints import LoadedModel
from jlookahead.config import Sampling
from jlookahead.decoding import generate, run_rounds, start
from jlookahead.results import Result
from jlookahead.state import OWN_SOURCES
from jlookahead.strategy import Autoregressive, Strategy

BASELINE = "plain"  # the name of plain decoding in a comparison
PHASES = ("propose", "pack", "forward", "verify", "publish", "observe")

_PROFILED_ROUNDS = 32
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(")
_CALLS = re.compile(r"calls=%?([\w.-]+)")
_CONTAINERS = ("while", "conditional", "call")  # their time is that of what they hold
_PHASE = re.compile(rf"op_name=\"[^\"]*/({'|'.join(PHASES)})/")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt under plain decoding and under other strategies, side by side.

    Attributes:
        results: of every strategy, by name.
        seconds: of whole generations on compiled programs, prefill included; medians.
        speedups: medians over repeats of (seconds of plain decoding) / (the strategy's).
        identical: whether the ids are plain decoding's.
    """

    results: dict[str, Result]
    seconds: dict[str, float]
    speedups: dict[str, float]
    identical: dict[str, bool]


def compare_speed(
    lm: LoadedModel,
    prompt: object,
    strategies: dict[str, Strategy],
    *,
    max_new_tokens: int,
    repeats: int,
    temperature: float = 0.0,
    publish: str = "broadcast",
) -> Comparison:
    """Decodes a prompt under every strategy, which take turns, so that noise hits all of them.

    Args:
        lm: the model.
        prompt: see `generate`.
        strategies: by name; plain decoding is measured beside them.
        max_new_tokens: of a generation.
        repeats: turns.
        temperature: of all of them; 0 is greedy.
        publish: see `Config`.
    """
    sampling = Sampling(temperature=temperature)
    entrants: dict[str, Strategy] = {BASELINE: Autoregressive(), **strategies}

    def run(name: str) -> Result:
        cfg = lm.make_config(
            strategy=entrants[name],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            publish=publish,
        )
        return generate(lm.params, prompt, cfg, tokenizer=lm.tokenizer)

    results = {name: run(name) for name in entrants}  # compiles
    turns = []
    for _ in range(repeats):
        seconds = {}
        for name in entrants:
            began = time.perf_counter()
            run(name)
            seconds[name] = time.perf_counter() - began
        turns.append(seconds)
    return Comparison(
        results=results,
        seconds={name: statistics.median(turn[name] for turn in turns) for name in entrants},
        speedups={
            name: statistics.median(turn[BASELINE] / turn[name] for turn in turns)
            for name in strategies
        },
        identical={name: results[name].tokens == results[BASELINE].tokens for name in strategies},
    )


def accepted_lengths(sources: Iterable[str]) -> list[int]:
    """Accepted draft tokens of every round of one text; the last round may have been cut."""
    lengths, accepted = [], 0
    for source in sources:
        if source in OWN_SOURCES:  # the last token of a round
            lengths.append(accepted)
            accepted = 0
        else:
            accepted += 1
    return [*lengths, accepted - 1] if accepted else lengths


def time_by_phase(
    lm: LoadedModel,
    prompt: object,
    strategy: Strategy,
    *,
    max_new_tokens: int,
    publish: str = "broadcast",
) -> dict[str, float] | None:
    """Shares of the device's busy time that the phases of a round take, and `other`; None where the
    profiler does not name operations.

    Runs up to 32 rounds under JAX's profiler, and tells from the compiled program which phase
    an operation belongs to. Fused operations count as the matrix product among them, if there is
    one, and as the last of them otherwise.
    """
    cfg = lm.make_config(strategy=strategy, max_new_tokens=max_new_tokens, publish=publish)
    call = prepare(lm.params, prompt, cfg, lm.tokenizer)
    state = jax.block_until_ready(start(call, lm.params))
    rounds = np.int32(_PROFILED_ROUNDS)
    loop = run_rounds.lower(call.model, strategy, call.mesh, lm.params, state, rounds).compile()
    phase_of = _phases(loop.as_text() or "")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(loop(lm.params, state, rounds))
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    busy: collections.Counter[str] = collections.Counter()
    events = (e for plane in profile.planes for line in plane.lines for e in line.events)
    for event in events:
        name = dict(event.stats).get("hlo_op")
        if name in phase_of:
            busy[phase_of[name]] += event.duration_ns
    total = sum(busy.values())
    if not total:
        return None
    return {phase: busy[phase] / total for phase in (*PHASES, "other")}


def _phases(program: str) -> dict[str, str]:
    """The phase of every instruction of a compiled and scheduled program's text.

    The compiler drops some scopes. Matrix products are the forward pass: no other phase has any.
    What else has no scope counts as what runs before it in its computation.
    """
    computations: dict[str, list[tuple[str, str, str]]] = {}
    for line in program.splitlines():
        if header := _COMPUTATION.match(line):
            instructions = computations.setdefault(header[1], [])
        elif instruction := _INSTRUCTION.match(line):
            instructions.append((instruction[1], instruction[2], line))
    with_product = {
        computation
        for computation, instructions in computations.items()
        if any(opcode == "dot" for _, opcode, _ in instructions)
    }
    phase_of: dict[str, str] = {}
    for computation, instructions in computations.items():
        phase = "forward" if computation in with_product else "other"
        for name, opcode, line in instructions:
            called, found = _CALLS.search(line), _PHASE.search(line)
            if opcode == "dot" or (called and called[1] in with_product):
                phase = "forward"
            elif found:
                phase = found[1]
            if opcode not in _CONTAINERS:
                phase_of[name] = phase
    return phase_of


def histogram(lengths: Sequence[int]) -> dict[str, float]:
    """Shares of rounds by accepted length: 0, 1, 2, 3, 4 to 7, 8 to 15, 16 and more."""
    bounds = {"0": 0, "1": 1, "2": 2, "3": 3, "4-7": 4, "8-15": 8, "16+": 16}
    edges = [*bounds.values(), np.inf]
    counts, _ = np.histogram(lengths, bins=edges)
    return dict(zip(bounds, (counts / max(1, len(lengths))).round(4).tolist(), strict=True))
