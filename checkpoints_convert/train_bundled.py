"""Trains the bundled model: a small LLaMA on the sources of Python's standard library.

    python -m checkpoints_convert.train_bundled --out DIR [--minutes M | --steps N]

The corpus is the standard library of the Python that runs the script. Every 20th file is held
out for validation; the tokenizer is learned on the others. For a given corpus and number of
steps, the run is a function of `--seed`. `DIR` becomes a Hugging Face checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from safetensors.numpy import save_file
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from jlookahead.checkpoints.params import hf_tensors
from jlookahead.model import LlamaModel, Params
from jlookahead.model_config import ModelConfig

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
MAX_POSITIONS = 1024
# Tests, tables, generated files, and some modules under notices other than Python's licence.
EXCLUDED = """
    site-packages test tests idle_test encodings pydoc_data lib2to3 ensurepip msilib tomllib
    __phello__ html/entities.py http/cookies.py stringprep.py this.py trace.py uu.py
    xmlrpc/client.py
""".split()
VALIDATION_STRIDE = 20
# Words with the one space or dot before them, single digits, punctuation, line ends, indents.
PIECES = r"[ .]?[\p{L}\p{M}_]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}_]+|\n+| +|\s"
# (part of the steps done at its end, tokens in a window): every position gets trained.
STAGES = ((0.7, 256), (0.9, 512), (1.0, MAX_POSITIONS))


def read_corpus(max_files: int | None = None) -> tuple[list[str], list[str]]:
    """Texts of the training and of the validation files, in the order of their paths."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        generated = name.startswith(("_sysconfigdata", "config-"))
        if not generated and {name, *name.split("/")}.isdisjoint(EXCLUDED):
            texts.append(path.read_text(encoding="utf-8"))
        if len(texts) == max_files:
            break
    return [t for i, t in enumerate(texts) if i % VALIDATION_STRIDE], texts[::VALIDATION_STRIDE]


def train_tokenizer(texts: list[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE whose decoding returns the encoded text exactly."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> np.ndarray:
    """One int32 stream: every text followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts)]
    return np.concatenate([np.asarray(piece, np.int32) for piece in pieces])


def windows(stream: np.ndarray, length: int, rows: int, seed: int) -> Iterator[np.ndarray]:
    """Endless `[rows, length + 1]` batches; each epoch cuts the stream at another offset."""
    if len(stream) < 2 * length:
        raise ValueError(f"corpus: got {len(stream)} tokens, needs {2 * length}")
    rng = np.random.default_rng(seed)
    queue: list[np.ndarray] = []
    span = np.arange(length + 1)
    while True:
        while len(queue) < rows:
            starts = np.arange(rng.integers(length), len(stream) - length, length)
            queue.extend(rng.permutation(starts))
        yield stream[np.asarray(queue[:rows])[:, None] + span]
        del queue[:rows]


def mean_loss(params: Params, batch: jax.Array, model: LlamaModel) -> jax.Array:
    """Mean cross entropy, in nats per token, of the tokens of `batch [B, T + 1]` but the first."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    rows, length = inputs.shape
    positions = jnp.broadcast_to(jnp.arange(length), inputs.shape)
    causal = jnp.tril(jnp.ones((length, length), bool))
    # Without slots there is no loop over the cache, which could not be differentiated.
    cache, lengths = model.init_cache(rows, 0), jnp.zeros(rows, jnp.int32)
    hidden, _ = model.forward(params, inputs, positions, causal, cache, lengths)
    logits = model.logits(params, hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_step(
    model: LlamaModel, learning_rate: float, num_steps: int
) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    """The optimizer and `(params, opt_state, batch) -> (params, opt_state, loss)`, compiled.

    AdamW with warm-up, linear decay to zero and clipping; norm weights do not decay.
    """
    warmup = min(200, num_steps // 10)
    rise = optax.linear_schedule(0.0, learning_rate, warmup)
    fall = optax.linear_schedule(learning_rate, 0.0, num_steps - warmup)
    schedule = optax.join_schedules([rise, fall], [warmup])
    is_matrix = functools.partial(jax.tree.map, lambda p: p.ndim > 1)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.1, mask=is_matrix),
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, opt_state: optax.OptState, batch: jax.Array):
        loss, grads = jax.value_and_grad(mean_loss)(params, batch, model)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return optimizer, step


def train(
    model: LlamaModel,
    stream: np.ndarray,
    args: argparse.Namespace,
    num_steps: int,
    repeats: int = 1,
) -> Iterator[tuple[int, Params, jax.Array]]:
    """Yields the number, parameters (valid until the next) and loss of every step."""
    optimizer, step = make_step(model, args.learning_rate, num_steps)
    for _ in range(repeats):
        params = model.init_params(jax.random.key(args.seed))
        opt_state, done = optimizer.init(params), 0
        for stage_end, length in STAGES:
            rows = max(1, args.batch_tokens // length)
            batches = windows(stream, length, rows, args.seed + length)
            while done < round(stage_end * num_steps):
                params, opt_state, loss = step(params, opt_state, next(batches))
                done += 1
                yield done, params, loss


def steps_in(
    minutes: float, model: LlamaModel, stream: np.ndarray, args: argparse.Namespace
) -> int:
    """How many steps fit into `minutes`, by the speed of a run of 20 steps, once compiled."""
    times = []
    for _, _, loss in train(model, stream, args, num_steps=20, repeats=2):
        loss.block_until_ready()
        times.append(time.monotonic())
    return max(1, int(60 * minutes * 20 / (times[-1] - times[19])))


def evaluate(params: Params, stream: np.ndarray, model: LlamaModel, length: int = 512) -> float:
    """Mean loss over windows of `stream`, each read without the one before it."""
    loss_of = jax.jit(mean_loss, static_argnums=2)
    length = min(length, len(stream) - 1)
    starts = np.arange(0, len(stream) - length, length)
    rows = min(4, len(starts))
    groups = starts[: len(starts) // rows * rows].reshape(-1, rows, 1) + np.arange(length + 1)
    return float(np.mean([loss_of(params, stream[group], model) for group in groups]))


def save(
    out: pathlib.Path, params: Params, config: ModelConfig, tokenizer: tokenizers.Tokenizer
) -> None:
    """Writes a Hugging Face checkpoint directory."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(hf_tensors(params), out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    end, pad = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(PAD)
    special_ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}
    sizes = dataclasses.asdict(config)
    rope, dtype = sizes.pop("rope"), sizes.pop("dtype")
    contents = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **sizes,
            "rope_theta": rope["theta"],
            "hidden_act": "silu",
            "torch_dtype": dtype,
            **special_ids,
        },
        "generation_config.json": {"do_sample": False, **special_ids},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
        },
    }
    for name, content in contents.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, help="directory to write")
    add("--steps", type=int, help="optimizer steps; without it, what fits into --minutes")
    add("--minutes", type=float, default=50.0, help="used to fix the steps, at the start")
    add("--max-files", type=int, help="use only so many files")
    add("--batch-tokens", type=int, default=2048)
    add("--learning-rate", type=float, default=3e-3)
    add("--vocab-size", type=int, default=2048)
    add("--hidden-size", type=int, default=192)
    add("--intermediate-size", type=int, default=448)
    add("--layers", type=int, default=4)
    add("--seed", type=int, default=0)
    add("--checkpoint", type=pathlib.Path, help="directory for interim models")
    add("--checkpoint-minutes", type=float, default=8.0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    train_texts, validation_texts = read_corpus(args.max_files)
    tokenizer = train_tokenizer(train_texts, args.vocab_size)
    train_stream = encode(tokenizer, train_texts)
    validation_stream = encode(tokenizer, validation_texts)
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
    )
    model = LlamaModel(config)
    num_params = sum(p.size for p in jax.tree.leaves(model.abstract_params()))
    num_bytes = sum(len(text.encode()) for text in train_texts)
    print(f"{len(train_texts)} + {len(validation_texts)} files, {num_bytes} training bytes")
    print(f"{len(train_stream)} + {len(validation_stream)} tokens, {num_params} parameters")

    num_steps = args.steps or steps_in(args.minutes, model, train_stream, args)
    start = last_saved = time.monotonic()
    losses = []
    for done, params, loss in train(model, train_stream, args, num_steps):
        losses.append(loss)
        if done % 100 == 0 or done == num_steps:
            minutes = (time.monotonic() - start) / 60
            mean = float(np.mean(losses[-100:]))
            print(f"step {done}/{num_steps} {minutes:.1f} min loss {mean:.4f}", flush=True)
        if args.checkpoint and time.monotonic() - last_saved > 60 * args.checkpoint_minutes:
            save(args.checkpoint, params, config, tokenizer)
            last_saved = time.monotonic()
    save(args.out, params, config, tokenizer)
    print(f"validation loss {evaluate(params, validation_stream, model):.4f}")


if __name__ == "__main__":
    main()
