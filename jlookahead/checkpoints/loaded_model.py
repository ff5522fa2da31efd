"""What loading a checkpoint gives."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jlookahead.checkpoints.defaults import Defaults
from jlookahead.checkpoints.tokenizer import Tokenizer
from jlookahead.model import Params
from jlookahead.model_config import ModelConfig

if TYPE_CHECKING:
    from jlookahead.config import Config


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A checkpoint in memory.

    Attributes:
        params: nested dict of arrays, as `LlamaModel` names them.
        config: the network.
        tokenizer: a transformers `PreTrainedTokenizerFast`, or None if the checkpoint has none.
        defaults: generation defaults.
    """

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer | None
    defaults: Defaults

    def make_config(self, **overrides: Any) -> Config:
        """A `Config` for this model that starts from its defaults.

        Args:
            **overrides: fields of `Config`; they win over the defaults.
        """
        from jlookahead.config import Config

        fields: dict[str, Any] = {
            "model": self.config,
            "eos_token_ids": self.defaults.eos_token_ids,
        }
        if self.defaults.pad_token_id is not None:
            fields["pad_token_id"] = self.defaults.pad_token_id
        return Config(**(fields | overrides))
