"""Tokenizers through transformers, without PyTorch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jlookahead.checkpoints.errors import first_line

# A transformers `PreTrainedTokenizerFast`. Not imported for the annotation: that takes a second.
Tokenizer = Any


def import_transformers() -> Any:
    """The transformers package, imported without its advice to install PyTorch."""
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    previous = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        import transformers
    finally:
        if previous is None:
            del os.environ[variable]
        else:
            os.environ[variable] = previous
    return transformers


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory, or None if it has none.

    Raises:
        ValueError: the tokenizer files cannot be read.
    """
    fast = (folder / "tokenizer.json").is_file()
    if not fast and not (folder / "tokenizer.model").is_file():
        return None
    transformers = import_transformers()
    # The class that `tokenizer_config.json` names may rebuild the pipeline from the vocabulary;
    # the generic one takes `tokenizer.json` as it is.
    kind = transformers.PreTrainedTokenizerFast if fast else transformers.AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the parsers of several libraries raise
        name = "tokenizer.json" if fast else "tokenizer.model (needs the sentencepiece package)"
        message = f"{folder}: cannot read {name}: {first_line(error)}"
        raise ValueError(message) from error
    if not len(tokenizer):
        raise ValueError(f"{folder}: the tokenizer has no tokens")
    return tokenizer
