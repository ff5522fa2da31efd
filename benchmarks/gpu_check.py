"""What an accelerator makes of this: bandwidth, cost of rows, overhead of a round, exactness.

    python -m benchmarks.gpu_check --out result.json

Downloads nothing: a 7B-shaped network with random bfloat16 weights, and the bundled model. Takes
some minutes on one GPU with 24 GB or more; `--small` tries the script itself anywhere. A section
that fails leaves its error in the result.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jlookahead as jl
from benchmarks.report import versions
from jlookahead.attention import attend
from jlookahead.call import prepare
from jlookahead.decoding import run_rounds, start
from jlookahead.measuring import time_by_phase
from jlookahead.tuning import measure_costs

SEVEN_B = jl.ModelConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
    dtype="bfloat16",
)
SMALL = jl.ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 120, 128)
CONTEXT, NUM_ROUNDS, REPEATS = 256, 32, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tiny network, for a trial")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = jax.devices()[0]
    report: dict[str, Any] = {
        "device": device.device_kind,
        "platform": device.platform,
        "versions": versions(),
    }
    config = SMALL if args.small else SEVEN_B
    params = random_params(config)
    sections: dict[str, Callable[[], Any]] = {
        "exactness": exactness,
        "bandwidth": functools.partial(bandwidth, config, params),
        "relative_cost_of_rows": lambda: dict(measure_costs(jl.LlamaModel(config), params, ROWS)),
        "time_by_phase": functools.partial(phases, config, params),
        "attention": functools.partial(attention, config),
    }
    for name, section in sections.items():
        began = time.perf_counter()
        try:
            report[name] = section()
        except Exception:  # the other sections still tell something
            report[name] = {"error": traceback.format_exc(limit=-3)}
        report[name]["seconds"] = round(time.perf_counter() - began, 1)
        print(name, report[name], flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def random_params(config: jl.ModelConfig) -> Any:
    """Weights of the right size, norms too; a leaf at a time, so that nothing is held twice."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    leaves, tree = jax.tree.flatten(jl.LlamaModel(config).abstract_params())
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        tree, [normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    )


def median_seconds(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    samples = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def exactness() -> dict[str, bool]:
    """Whether every strategy's text is plain decoding's, on the bundled model."""
    lm, same = jl.load(), {}
    prompts = ["def flatten(items):\n", "class Node:\n    def __init__(self):\n", "import os\n"]
    strategies = (jl.Lookahead(7, 5, 7), jl.Recycling(56), jl.PromptLookup(), jl.Auto())
    for temperature in (0.0, 0.8):
        sampling = jl.Sampling(temperature=temperature)

        def run(strategy: jl.Strategy, sampling: jl.Sampling = sampling) -> list[list[int]]:
            cfg = lm.make_config(strategy=strategy, sampling=sampling, max_new_tokens=256)
            return jl.generate(lm.params, prompts, cfg, tokenizer=lm.tokenizer).tokens

        expected = run(jl.Autoregressive())
        for strategy in strategies:
            name = f"{type(strategy).__name__}, temperature {temperature}"
            same[name] = run(strategy) == expected
    return same


def bandwidth(config: jl.ModelConfig, params: Any) -> dict[str, float]:
    """Bytes that plain decoding reads per second, beside a plain sum over memory."""
    size = 1 << (24 if config is SMALL else 31)
    numbers = jnp.ones(size // 2, jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    per_sum = median_seconds(lambda: total(numbers))
    model, plain = jl.LlamaModel(config), jl.Autoregressive()
    cfg = jl.Config(model=config, strategy=plain, max_new_tokens=CONTEXT)
    call = prepare(params, [list(range(CONTEXT))], cfg)
    rounds = jnp.int32(NUM_ROUNDS)

    def measured() -> float:
        state = jax.block_until_ready(start(call, params))
        began = time.perf_counter()
        jax.block_until_ready(run_rounds(model, plain, None, params, state, rounds))
        return (time.perf_counter() - began) / NUM_ROUNDS

    measured()
    per_round = statistics.median(measured() for _ in range(REPEATS))
    embedding = 0 if config.tie_word_embeddings else params["embed_tokens"]["weight"].nbytes
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - embedding
    return {
        "gigabytes_per_second_sum": size / per_sum / 1e9,
        "gigabytes_per_second_plain": read / per_round / 1e9,
        "share": (read / per_round) / (size / per_sum),
        "milliseconds_per_token": 1e3 * per_round,
    }


def phases(config: jl.ModelConfig, params: Any) -> dict[str, Any]:
    """Shares of busy time by phase; what is not `forward` is the overhead of a round."""
    lm = jl.LoadedModel(params, config, None, jl.Defaults())
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, CONTEXT).tolist()
    strategies = (jl.Autoregressive(), jl.Lookahead(7, 5, 7), jl.Recycling(56))
    return {
        type(strategy).__name__: time_by_phase(lm, prompt, strategy, max_new_tokens=64)
        for strategy in strategies
    }


def attention(config: jl.ModelConfig) -> dict[str, Any]:
    """Microseconds of one layer's attention, this project's and JAX's own, by rows and prefix."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim, dtype = config.head_dim, jnp.dtype(config.dtype)
    found: dict[str, Any] = {}
    for prefix in (512, 4096):
        for rows in (1, 56):
            q = jnp.ones((1, kv_heads, heads // kv_heads, rows, dim), dtype)
            new = jnp.ones((1, kv_heads, rows, dim), dtype)
            slots = jnp.ones((1, kv_heads, prefix, dim), dtype)
            mask = jnp.tri(rows, dtype=bool)
            positions = prefix + jnp.arange(rows)[None]
            own = (q, new, new, positions, mask, slots, slots, jnp.array([prefix]))
            times: dict[str, Any] = {"chunks": microseconds(attend, *own)}
            whole = q.reshape(1, heads, rows, dim).transpose(0, 2, 1, 3)
            both = jnp.concatenate([slots, new], axis=2).transpose(0, 2, 1, 3)
            seen = jnp.concatenate([jnp.ones((rows, prefix), bool), mask], axis=1)[None, None]
            for kind in ("xla", "cudnn"):
                program = functools.partial(jax.nn.dot_product_attention, implementation=kind)
                try:
                    times[kind] = microseconds(program, whole, both, both, None, seen)
                except Exception as error:  # what cuDNN does not have
                    times[kind] = str(error).splitlines()[0][:200]
            found[f"{rows} rows, {prefix} slots"] = times
    return found


def microseconds(program: Callable[..., jax.Array], q: jax.Array, *others: Any) -> float:
    """Of one call, in a chain of them: the output has the shape of the queries."""

    def chain(q: jax.Array, *others: Any) -> jax.Array:
        return jax.lax.fori_loop(0, NUM_ROUNDS, lambda _, q: program(q, *others), q)

    compiled = jax.jit(chain)
    return 1e6 * median_seconds(lambda: compiled(q, *others)) / NUM_ROUNDS


if __name__ == "__main__":
    main()
