"""What a run looks like: streamed text, texts side by side, figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jlookahead.cli.runs import Run
from jlookahead.state import OWN_SOURCES
from jlookahead.streaming import StreamedToken

Show = Callable[[StreamedToken], None]

TITLES = {
    "autoregressive": "plain decoding",
    "lookahead": "lookahead",
    "prompt-lookup": "prompt lookup",
    "jacobi": "Jacobi",
    "recycling": "recycling",
    "auto": "auto",
}
ACCEPTED = "green"

_FIGURES_HEIGHT = 4  # lines of a terminal kept free of text while it grows


def piece_of(token: StreamedToken) -> str:
    """A token's text; its id and a comma, for a model without a tokenizer."""
    if token.text is not None:
        return token.text
    return str(token.token) if token.finish_reason else f"{token.token}, "


def style_of(token: StreamedToken) -> str:
    return "" if token.source in OWN_SOURCES else ACCEPTED


def is_coloured(console: Console) -> bool:
    return console.is_terminal and not console.no_color


def writer() -> Show:
    """Writes tokens to standard output as they come; in colour on a terminal."""
    coloured = is_coloured(Console())

    def show(token: StreamedToken) -> None:
        style = style_of(token) if coloured else ""
        text = typer.style(piece_of(token), fg=style) if style else piece_of(token)
        typer.echo(text, nl=False, color=coloured)

    return show


class Columns:
    """Texts side by side; on a terminal they can be watched growing."""

    def __init__(self, console: Console, strategies: Sequence[str]):
        self._console = console
        self._texts = {name: Text() for name in strategies}

    def live(self) -> Live:
        """A context that shows the last lines of the texts and clears them at its end."""
        return Live(
            console=self._console,
            get_renderable=lambda: self._table(self._console.height - _FIGURES_HEIGHT),
            refresh_per_second=4,
            transient=True,
        )

    def show(self, strategy: str, token: StreamedToken) -> None:
        self._texts[strategy].append(piece_of(token), style_of(token))

    def print(self) -> None:
        self._console.print(self._table(None))

    def _table(self, max_lines: int | None) -> Table:
        table = Table(box=box.SIMPLE, expand=True)
        width = self._console.width // len(self._texts) - 3
        for strategy in self._texts:
            table.add_column(TITLES[strategy], ratio=1, overflow="fold")
        texts = list(self._texts.values())
        if max_lines is not None:
            texts = [_last_lines(text, self._console, width, max_lines) for text in texts]
        table.add_row(*texts)
        return table


def _last_lines(text: Text, console: Console, width: int, count: int) -> Text:
    return Text("\n").join(text.copy().wrap(console, width, overflow="fold")[-count:])


def figures(runs: Sequence[Run]) -> Table:
    """The figures of several runs, one column each."""
    table = Table(box=box.SIMPLE)
    table.add_column()
    for run in runs:
        table.add_column(TITLES[run.strategy], justify="right")
    for name, values in {
        "new tokens": [str(len(run.streamed)) for run in runs],
        "rounds": [str(run.num_rounds) for run in runs],
        "tokens per round": [f"{run.tokens_per_round:.2f}" for run in runs],
        "seconds": [f"{run.seconds:.3f}" for run in runs],
        "tokens per second": [f"{run.tokens_per_second:.1f}" for run in runs],
        "compile seconds": [f"{run.compile_seconds:.1f}" for run in runs],
        "finish reason": [str(run.finish_reason) for run in runs],
    }.items():
        table.add_row(name, *values)
    return table


def identity(plain: Run, other: Run) -> str:
    """One line that says whether two runs emitted the same ids."""
    if plain.token_ids == other.token_ids:
        return f"identical: yes, all {len(other.token_ids)} ids are those of plain decoding"
    pairs = list(zip(plain.token_ids, other.token_ids, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return f"identical: NO, the first difference is at new token {first}"


def summary(run: Run) -> str:
    """The figures of one run in one line."""
    return (
        f"{TITLES[run.strategy]}: {len(run.streamed)} new tokens in {run.num_rounds} rounds, "
        f"{run.tokens_per_round:.2f} tokens per round, {run.seconds:.3f} s, "
        f"{run.tokens_per_second:.1f} tokens per second, compiled in {run.compile_seconds:.1f} s, "
        f"finish reason {run.finish_reason}"
    )
