"""`python -m checkpoints_convert to-hf SRC DST`: a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from checkpoints_convert import output
from jlookahead.checkpoints import hf_directory, loading
from jlookahead.checkpoints.defaults import Defaults
from jlookahead.checkpoints.errors import writing
from jlookahead.checkpoints.hf_config import to_hf_config
from jlookahead.checkpoints.json_file import read_json
from jlookahead.checkpoints.params import Progress, flat, hf_names, hf_tensor
from jlookahead.checkpoints.tokenizer import Tokenizer
from jlookahead.model import Params
from jlookahead.model_config import DTYPES

MAX_FILE_BYTES = 5 * 10**9


def convert(source: str, destination: Path, dtype: str) -> None:
    """Loads `source` as `jlookahead.load` does and writes it as `save_pretrained` would.

    The directory appears complete or not at all: it is written beside `destination` and renamed.

    Args:
        source: a path or hub id.
        destination: a directory that does not exist yet.
        dtype: what to store the parameters in.

    Raises:
        ValueError: the destination exists, the checkpoint cannot be used, or no architecture of
            transformers has its features.
        FileNotFoundError: no such checkpoint, or a file of it is missing.
    """
    output.require_new(destination)
    model = loading.load_with_progress(
        source, dtype=dtype, progress=output.progress("Reading tensors")
    )
    config = to_hf_config(model.config)  # refuses before anything is written
    ids = _special_ids(model.defaults)
    with output.created_whole(destination) as folder:
        _write_json(folder / hf_directory.GENERATION_CONFIG, ids)
        if model.tokenizer is not None:
            _write_tokenizer(model.tokenizer, folder)
        _write_weights(model.params, folder, output.progress("Writing files"))
        # Last: without it nothing loads. Where an id is absent, transformers takes one of the
        # first LLaMA.
        _write_json(folder / hf_directory.CONFIG, {**config, **ids})


def _write_weights(params: Params, folder: Path, progress: Progress) -> None:
    """Writes safetensors, one file up to `MAX_FILE_BYTES`, else shards with their index.

    Beside the parameters, memory holds the tensors of one file at a time.
    """
    leaves = flat(params)
    names = hf_names(leaves)
    item_size = leaves["norm.weight"].dtype.itemsize  # also of what is stored as int8
    sizes = {hf: leaves[name].size * item_size for hf, name in names.items()}
    groups = _grouped(sizes)
    names_in = {
        hf_directory.SINGLE
        if len(groups) == 1
        else f"model-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }
    for file in progress(list(names_in)):
        tensors = {hf: hf_tensor(leaves, names[hf]) for hf in names_in[file]}
        with writing(folder / file):
            save_file(tensors, folder / file, metadata={"format": "pt"})
        # safetensors lets only the owner read it.
        shutil.copymode(folder / hf_directory.GENERATION_CONFIG, folder / file)
    if len(groups) > 1:
        weight_map = {hf: file for file, group in names_in.items() for hf in group}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(folder / hf_directory.INDEX, index)


def _grouped(sizes: Mapping[str, int]) -> list[list[str]]:
    """The names in their order, cut into groups of up to `MAX_FILE_BYTES`."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = MAX_FILE_BYTES
        groups[-1].append(name)
        room -= size
    return groups


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    with writing(folder):
        tokenizer.save_pretrained(folder)
    # transformers 5 writes the name of a class that earlier ones do not know; all know this one.
    path = folder / "tokenizer_config.json"
    _write_json(path, read_json(path) | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _special_ids(defaults: Defaults) -> dict[str, Any]:
    eos = list(defaults.eos_token_ids)
    return {
        "bos_token_id": defaults.bos_token_id,
        "eos_token_id": eos if len(eos) > 1 else eos[0] if eos else None,
        "pad_token_id": defaults.pad_token_id,
    }


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of argparse."""
    parser = commands.add_parser("to-hf", help="to a Hugging Face directory for transformers")
    parser.add_argument("source", metavar="SRC", help="directory, .gguf file or hub id")
    parser.add_argument("destination", metavar="DST", type=Path, help="directory to create")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    convert(options.source, options.destination, options.dtype)
    return 0
