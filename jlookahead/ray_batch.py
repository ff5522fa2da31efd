"""Batch jobs on Ray Data: a model per worker, prompts in, answers out.

Ray places the workers, hands them tasks, starts a new one for each that dies and gives its tasks to
others. A task returns all of its answers or none. Needs the extra `jlookahead[ray]`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jlookahead.batching import answer_of, generate_many
from jlookahead.checkpoints import LoadedModel
from jlookahead.config import Config

if TYPE_CHECKING:
    import pyarrow

# Prompts of a task for each row of the batch: more of them leave fewer rows idle at its end, and
# are lost together when a worker dies.
_PROMPTS_PER_ROW = 4


class WorkerError(RuntimeError):
    """A worker raised an exception, or none can be started."""


class BatchGenerator:
    """A callable class for `ray.data.Dataset.map_batches`, with `batch_format="pyarrow"`.

    Holds the parameters and the compiled programs, once per worker. Batches have the columns
    `index` (integers, which key the sampling) and `prompt_ids` (lists of ids). In their place come
    `index`, `text` (null without a tokenizer), `token_ids`, `num_rounds`, `tokens_per_round` and
    `finish_reason`, in the order of the batch.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        make_config: Callable[[LoadedModel], Config],
        batch_size: int = 8,
    ):
        """Runs on the worker.

        Args:
            load: gives the model, such as `functools.partial(jlookahead.load, path)`.
            make_config: gives the configuration. With a `cache_len` all batches share their
                programs; without one the longest prompt of a batch decides.
            batch_size: rows that are decoded together; a batch should have several times as many.
        """
        self._lm = load()
        self._cfg = make_config(self._lm)
        self._batch_size = batch_size

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        import pyarrow

        indices = batch["index"].to_pylist()
        results = generate_many(
            self._lm.params,
            batch["prompt_ids"].to_pylist(),
            self._cfg,
            batch_size=self._batch_size,
            tokenizer=self._lm.tokenizer,
            row_ids=indices,
        )
        answers = [answer_of(result) for _, result in sorted(results, key=lambda pair: pair[0])]
        rows = [{"index": i} | answer for i, answer in zip(indices, answers, strict=True)]
        return pyarrow.Table.from_pylist(rows, schema=_schema())


def _schema() -> pyarrow.Schema:
    import pyarrow

    return pyarrow.schema(
        {
            "index": pyarrow.int64(),
            "text": pyarrow.string(),
            "token_ids": pyarrow.list_(pyarrow.int32()),
            "num_rounds": pyarrow.int64(),
            "tokens_per_round": pyarrow.float64(),
            "finish_reason": pyarrow.string(),
        }
    )


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Joins the cluster of the environment variable `RAY_ADDRESS`, or one started on this machine.

    To be entered before JAX computes anything here, since Ray forks what it starts. Within, Ray's
    messages and what workers print go to standard error, and Ray Data shows no progress.

    Raises:
        ValueError: Ray Data is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError(
            "ray: needs Ray Data, which is not installed: pip install 'jlookahead[ray]'"
        ) from error
    with contextlib.redirect_stdout(sys.stderr):
        is_ours = not ray.is_initialized()
        try:
            if is_ours:
                ray.init()
            ray.data.DataContext.get_current().enable_progress_bars = False
            yield
        finally:
            if is_ours:
                ray.shutdown()


def generate_on_ray(
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    load: Callable[[], LoadedModel],
    make_config: Callable[[LoadedModel], Config],
    *,
    batch_size: int = 8,
    num_workers: int | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the index and the answer of every prompt, each exactly once, a task at a time.

    Runs on the cluster of `connected`.

    Args:
        prompts: ids.
        indices: an id for each prompt, which keys its sampling.
        load, make_config, batch_size: see `BatchGenerator`. The workers run these functions.
        num_workers: models in the cluster; by default one for each GPU, or for each machine if
            there is no GPU.

    Raises:
        WorkerError: with the last line of what Ray says.
    """
    import pyarrow
    import ray

    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    num_workers = num_workers or num_gpus or sum(node["Alive"] for node in ray.nodes())
    if num_gpus and num_workers > num_gpus:
        raise ValueError(f"workers: got {num_workers}, allowed are 1 to {num_gpus}, the GPUs there")
    # Every worker has something to do in a short job, too.
    per_task = max(1, min(_PROMPTS_PER_ROW * batch_size, -(-len(prompts) // num_workers)))
    tasks = [
        pyarrow.table(
            {
                "index": pyarrow.array(indices[first : first + per_task], pyarrow.int64()),
                "prompt_ids": pyarrow.array(
                    prompts[first : first + per_task], pyarrow.list_(pyarrow.int32())
                ),
            }
        )
        for first in range(0, len(prompts), per_task)
    ]
    answered = ray.data.from_arrow(tasks).map_batches(
        BatchGenerator,
        fn_constructor_args=(load, make_config, batch_size),
        batch_size=None,  # a task is a table
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=num_workers),
        num_gpus=1 if num_gpus else None,
    )
    batches: Any = answered.iter_batches(batch_size=None, batch_format="pyarrow")
    try:
        for batch in batches:
            for row in batch.to_pylist():
                yield row.pop("index"), row
    except ray.exceptions.RayError as error:
        raise WorkerError(str(error).strip().splitlines()[-1]) from error
