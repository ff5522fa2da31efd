"""Hugging Face Hub ids: the local cache first, then a download of the needed files only."""

from __future__ import annotations

import re
from pathlib import Path

from jlookahead.checkpoints import hf_directory
from jlookahead.checkpoints.errors import first_line

_REPO_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_SMALL_FILES = (
    hf_directory.CONFIG,
    hf_directory.GENERATION_CONFIG,
    hf_directory.INDEX,
    *_TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def is_repo_id(text: str) -> bool:
    """Whether the text is spelled like `organisation/name` and not like a `.gguf` path."""
    return _REPO_ID.fullmatch(text) is not None and not text.endswith(".gguf")


def snapshot(repo_id: str) -> Path:
    """The local directory of a hub repository, downloaded unless the cache has all of it.

    Honours `HF_HUB_OFFLINE`, `HF_HUB_CACHE` and the stored login of huggingface_hub.

    Raises:
        FileNotFoundError: no such repository, or it is not cached and the hub is out of reach.
        ValueError: the repository is gated and its terms have not been accepted, or the download
            fails.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        cached = _cached_snapshot(repo_id)
        if cached is not None and any((cached / name).is_file() for name in _TOKENIZERS):
            return cached
        try:
            return _snapshot(repo_id, local_files_only=False)
        except Exception:
            if cached is None:
                raise
            return cached  # of a repository without a tokenizer, or all there is offline
    except GatedRepoError as error:
        raise ValueError(
            f"{repo_id}: a gated repository; accept its terms on its hub page and log in with "
            "`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id}: no such file or directory, and no such hub repository (a private one "
            "needs `hf auth login`)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id}: no such file or directory, not all in the local hub cache, and the hub "
            "is out of reach or switched off"
        ) from error
    except Exception as error:  # of HTTP, of the disk, of a malformed id
        raise ValueError(f"{repo_id}: not fetched from the hub: {first_line(error)}") from error


def _cached_snapshot(repo_id: str) -> Path | None:
    """The snapshot in the local cache, or None if that lacks what a model needs."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(repo_id, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    names = [hf_directory.CONFIG, *hf_directory.weight_files(folder)]
    return folder if all((folder / name).is_file() for name in names) else None


def _snapshot(repo_id: str, *, local_files_only: bool) -> Path:
    """Config and tokenizer first: the index, if there is one, says which weights to fetch."""
    from huggingface_hub import snapshot_download

    def fetch(names: list[str]) -> Path:
        folder = snapshot_download(repo_id, allow_patterns=names, local_files_only=local_files_only)
        return Path(folder)

    folder = fetch(list(_SMALL_FILES))
    return fetch(hf_directory.weight_files(folder))
