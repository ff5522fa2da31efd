"""Lookahead Decoding for LLaMA-family models in JAX: several tokens per forward pass, with
exactly the output of plain decoding."""

from jlookahead import processors
from jlookahead.auditing import Audit, audit
from jlookahead.auto import Auto
from jlookahead.batching import generate_many
from jlookahead.checkpoints import Defaults, LoadedModel, load
from jlookahead.config import Config, Sampling
from jlookahead.decoding import generate, iter_rounds
from jlookahead.jacobi import Jacobi
from jlookahead.lookahead import Lookahead
from jlookahead.model import KVCache, LlamaModel, TargetModel
from jlookahead.model_config import ModelConfig
from jlookahead.prompt_lookup import PromptLookup
from jlookahead.recycling import Recycling
from jlookahead.results import Result
from jlookahead.rope import RopeConfig
from jlookahead.session import Session
from jlookahead.sharding import shard
from jlookahead.state import RoundInfo, RoundState
from jlookahead.strategy import Autoregressive, Strategy
from jlookahead.streaming import StreamedToken, stream
from jlookahead.tuning import tune
from jlookahead.warming import warmup

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Auto",
    "Autoregressive",
    "Config",
    "Defaults",
    "Jacobi",
    "KVCache",
    "LlamaModel",
    "LoadedModel",
    "Lookahead",
    "ModelConfig",
    "PromptLookup",
    "Recycling",
    "Result",
    "RopeConfig",
    "RoundInfo",
    "RoundState",
    "Sampling",
    "Session",
    "Strategy",
    "StreamedToken",
    "TargetModel",
    "audit",
    "generate",
    "generate_many",
    "iter_rounds",
    "load",
    "processors",
    "shard",
    "stream",
    "tune",
    "warmup",
]
