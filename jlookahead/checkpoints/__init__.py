"""Reading checkpoints: Hugging Face directories and hub ids, GGUF files, converted directories."""

from jlookahead.checkpoints.defaults import Defaults
from jlookahead.checkpoints.loaded_model import LoadedModel
from jlookahead.checkpoints.loading import load

__all__ = ["Defaults", "LoadedModel", "load"]
