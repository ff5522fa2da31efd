"""Options that commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from jlookahead.checkpoints import LoadedModel
from jlookahead.checkpoints.loading import load_with_progress
from jlookahead.cli import strategies


def _of_strategies(option: str, text: str) -> Any:
    defaults = strategies.defaults_of(option)
    return typer.Option(
        help=f"{', '.join(defaults).capitalize()}: {text}",
        show_default=", ".join(dict.fromkeys(map(str, defaults.values()))),
    )


Model = Annotated[
    str | None,
    typer.Option(
        help="Hugging Face directory or hub id, .gguf file, or converted checkpoint.",
        show_default="the bundled model",
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
StrategyName = Annotated[str, typer.Option(help=f"One of {', '.join(strategies.NAMES)}.")]
Window = Annotated[int | None, _of_strategies("window", "columns of the window.")]
Ngram = Annotated[int | None, _of_strategies("ngram", "n-gram size.")]
Candidates = Annotated[int | None, _of_strategies("candidates", "drafts verified side by side.")]
MaxNgram = Annotated[int | None, _of_strategies("max_ngram", "longest suffix looked up.")]
NumDraftTokens = Annotated[int | None, _of_strategies("num_draft_tokens", "tokens per draft.")]
Block = Annotated[int | None, _of_strategies("block", "tokens iterated over together.")]
Rows = Annotated[int | None, _of_strategies("rows", "rows computed per round.")]
MaxNewTokens = Annotated[int, typer.Option(help="Budget of new tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text.")]


def load_showing(model: str | None, dtype: str, show: Callable[[str], object]) -> LoadedModel:
    """Loads a model and calls `show` with a line on every tensor."""

    def progress(names: Sequence[str]) -> Iterator[str]:
        for i, name in enumerate(names):
            show(f"Loading tensor {i + 1} of {len(names)}")
            yield name

    return load_with_progress(model, dtype=dtype, progress=progress)
