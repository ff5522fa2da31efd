"""Options that commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from jax.sharding import Mesh as JaxMesh

from jlookahead.checkpoints import LoadedModel
from jlookahead.checkpoints.loading import load_with_progress
from jlookahead.cli import strategies
from jlookahead.config import Sampling
from jlookahead.processors import (
    FrequencyPenalty,
    PresencePenalty,
    Processor,
    RepetitionPenalty,
)


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
Mesh = Annotated[
    str | None,
    typer.Option(
        help="Devices to share the work, by axis: data=2,lookahead=2,tensor=2.",
        show_default="one device",
    ),
]
Publish = Annotated[
    str,
    typer.Option(
        help="How devices along lookahead come by accepted K/V: broadcast sends them, refeed "
        "computes them with the next round."
    ),
]
StrategyName = Annotated[str, typer.Option(help=f"One of {', '.join(strategies.NAMES)}.")]
Window = Annotated[int | None, _of_strategies("window", "columns of the window.")]
Ngram = Annotated[int | None, _of_strategies("ngram", "n-gram size.")]
Candidates = Annotated[int | None, _of_strategies("candidates", "drafts verified side by side.")]
MaxNgram = Annotated[int | None, _of_strategies("max_ngram", "longest suffix looked up.")]
NumDraftTokens = Annotated[int | None, _of_strategies("num_draft_tokens", "tokens per draft.")]
Block = Annotated[int | None, _of_strategies("block", "tokens iterated over together.")]
Rows = Annotated[int | None, _of_strategies("rows", "rows computed per round.")]
Raw = Annotated[bool, typer.Option("--raw", help="Do not wrap texts in the model's chat template.")]
MinNewTokens = Annotated[int, typer.Option(help="New tokens before the text may end.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="A text that ends the output; may be repeated.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Budget of new tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text.")]
Verify = Annotated[
    str, typer.Option(help="How drafts are accepted in sampling: coupled or residual.")
]
Repetition = Annotated[
    float, typer.Option(help="Divides logits of tokens in prompt or output; 1 is none.")
]
Presence = Annotated[float, typer.Option(help="Subtracted from logits of tokens in the output.")]
Frequency = Annotated[float, typer.Option(help="Subtracted once per occurrence in the output.")]


def config_fields(params: Mapping[str, Any]) -> dict[str, Any]:
    """What the options of a command say of a `Config`, except for the strategy.

    Args:
        params: of the command, by name, all options above that concern a call among them.

    Raises:
        ValueError: a value out of range. Penalties are checked by the call.
    """
    penalties: list[Processor] = []
    if params["repetition_penalty"] != 1:
        penalties.append(RepetitionPenalty(params["repetition_penalty"]))
    if params["presence_penalty"] != 0:
        penalties.append(PresencePenalty(params["presence_penalty"]))
    if params["frequency_penalty"] != 0:
        penalties.append(FrequencyPenalty(params["frequency_penalty"]))
    sampling = ("temperature", "top_k", "top_p", "min_p", "seed", "verify")
    return {
        "sampling": Sampling(**{name: params[name] for name in sampling}),
        "max_new_tokens": params["max_new_tokens"],
        "min_new_tokens": params["min_new_tokens"],
        "stop_strings": tuple(params["stop"] or ()),
        "processors": tuple(penalties),
    }


def load_showing(
    model: str | None, dtype: str, mesh: JaxMesh | None, show: Callable[[str], object]
) -> LoadedModel:
    """Loads a model and calls `show` with a line on every tensor."""

    def progress(names: Sequence[str]) -> Iterator[str]:
        for i, name in enumerate(names):
            show(f"Loading tensor {i + 1} of {len(names)}")
            yield name

    return load_with_progress(model, dtype=dtype, mesh=mesh, progress=progress)
