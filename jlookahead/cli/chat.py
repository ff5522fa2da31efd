"""`jlookahead chat`: one line in, one answer out, as it comes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from jlookahead.cli import options
from jlookahead.cli.mesh_option import make_mesh, parse_mesh
from jlookahead.cli.strategies import LOOKAHEAD, make_strategy, measured
from jlookahead.config import Sampling
from jlookahead.session import Session


def chat(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Option(help="A model with a chat template; see jlookahead generate.")
    ],
    dtype: options.Dtype = "float32",
    mesh: options.Mesh = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    strategy: options.StrategyName = LOOKAHEAD,
    window: options.Window = None,
    ngram: options.Ngram = None,
    candidates: options.Candidates = None,
    max_ngram: options.MaxNgram = None,
    num_draft_tokens: options.NumDraftTokens = None,
    block: options.Block = None,
    rows: options.Rows = None,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = 0,
) -> None:
    """Chat: every line of standard input is a message. Ends with the input."""
    drafts = make_strategy(strategy, ctx.params)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    axes = parse_mesh(mesh)
    with Console(stderr=True).status("Loading") as status:
        lm = options.load_showing(model, dtype, make_mesh(axes), status.update)
        status.update("Measuring this device")
        drafts = measured(drafts, lm)
    if not getattr(lm.tokenizer, "chat_template", None):
        raise ValueError(f"model: {model} has no chat template, see jlookahead generate")
    cfg = lm.make_config(strategy=drafts, sampling=sampling, max_new_tokens=max_new_tokens)
    session = Session(lm.params, cfg, tokenizer=lm.tokenizer)
    if system is not None:
        session.messages.append({"role": "system", "content": system})

    while line := _read_line():
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        try:
            _answer(session, text)
        except ValueError as error:  # a line that cannot be read, a conversation that is full
            typer.echo(f"error: {error}", err=True)


def _answer(session: Session, text: str) -> None:
    """Shows the answer as it comes; both join the conversation when it is there."""
    messages = [*session.messages, {"role": "user", "content": text}]
    tokens = []
    for token in session.stream(messages):
        tokens.append(token)
        typer.echo(token.text, nl=False)
    typer.echo()
    answer = "".join(token.text or "" for token in tokens)
    session.messages = [*messages, {"role": "assistant", "content": answer}]
    num_rounds = tokens[-1].num_rounds if tokens else 0
    typer.echo(
        f"{len(tokens)} new tokens in {num_rounds} rounds, prompt of {session.num_reused} reused "
        f"and {session.num_prefilled} prefilled tokens",
        err=True,
    )


def _read_line() -> str:
    """The next line; empty at the end of the input."""
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        typer.echo("> ", nl=False, err=True)
    return sys.stdin.readline()
