"""A Hugging Face `config.json` to a `ModelConfig` and back, for every supported architecture.

What tells an architecture from LLaMA is data, see `FAMILIES`. Known features that the network does
not implement are refused by name: a field that is silently ignored is a model that silently
degrades.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jlookahead.checks import check_int, check_number
from jlookahead.model_config import SIZES, ModelConfig, check_size
from jlookahead.rope import ROPE_TYPES, RopeConfig

# HF fields to fields of `ModelConfig`.
_Fields = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Family:
    """What tells an architecture of transformers from the others.

    Attributes:
        architecture: the class in transformers.
        fields: HF fields that turn features on, with the fields of `ModelConfig` they set.
        absent: what transformers takes for such a field that the file lacks, if not null.
        fixed: fields of `ModelConfig` that are the same in all of its checkpoints.
        required: sizes for which transformers has a default that no real checkpoint relies on.
        layered_window: whether the window is off unless `use_sliding_window` turns it on, and only
            some layers may have it.
    """

    architecture: str
    fields: _Fields = dataclasses.field(default_factory=dict)
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: tuple[str, ...] = ()
    layered_window: bool = False


_ATTENTION_BIAS: _Fields = {"attention_bias": ("qkv_bias", "o_bias")}
_MLP_BIAS: _Fields = {"mlp_bias": ("mlp_bias",)}
_SLIDING_WINDOW: _Fields = {"sliding_window": ("sliding_window",)}
_SCALES: _Fields = {
    "attention_multiplier": ("attention_scale",),
    "embedding_multiplier": ("embedding_scale",),
    "residual_multiplier": ("residual_scale",),
    "logits_scaling": ("logits_divisor",),
}
# By `model_type`.
FAMILIES = {
    "llama": Family("LlamaForCausalLM", {**_ATTENTION_BIAS, **_MLP_BIAS}),
    "mistral": Family(
        "MistralForCausalLM",
        _SLIDING_WINDOW,
        absent={"sliding_window": 4096},
        required=("num_key_value_heads",),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _SLIDING_WINDOW,
        fixed={"qkv_bias": True},
        required=("num_key_value_heads",),
        layered_window=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_ATTENTION_BIAS, **_SLIDING_WINDOW},
        fixed={"qk_norm": True},
        required=("num_key_value_heads", "head_dim"),
        layered_window=True,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        {**_ATTENTION_BIAS, **_MLP_BIAS, **_SCALES},
        absent=dict.fromkeys(_SCALES, 1.0),
    ),
}
# HF fields that change the network, with the values that do not. Each is refused where its family
# does not translate it.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    **dict.fromkeys(_SCALES, (1.0, None)),
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False, None),
    "logit_scale": (1.0, None),
}
# Parameters of the RoPE types: those that must be there, those that may.
_ROPE_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
            "mscale",
            "mscale_all_dim",
            "finetuned",  # says how the weights were made
        ),
    ),
}


def from_hf_config(hf: Mapping[str, Any], dtype: str = "float32") -> ModelConfig:
    """Translates the contents of a HF `config.json`.

    Args:
        hf: the parsed JSON of a checkpoint of one of `FAMILIES`, of any transformers version
            (`rope_scaling` and `rope_theta`, or `rope_parameters`).
        dtype: what to compute in; the checkpoint's own `torch_dtype` only says how it is stored.

    Raises:
        ValueError: another architecture, an unsupported feature or RoPE type, a missing size.
    """
    family = _family(hf)
    for name, harmless in _HARMLESS.items():
        if name in hf and name not in family.fields and hf[name] not in harmless:
            raise ValueError(f"{name}: got {hf[name]!r}, supported is {harmless[0]!r}")
    sizes = _sizes(hf, family)
    rope = _rope_from_hf(hf)
    sizes["max_position_embeddings"] = _context(sizes["max_position_embeddings"], rope)
    features = dict(family.fixed)
    for name, targets in family.fields.items():
        value = hf.get(name, family.absent.get(name))
        if name == "sliding_window" and family.layered_window:
            value = _layered_window(hf)
        if name in _SCALES:
            check_number(name, value, "1e-6 to 1e6", 1e-6, 1e6)
        if name == "attention_multiplier" and value == sizes["head_dim"] ** -0.5:
            value = None  # what it is without the field
        if value is not None:
            features |= dict.fromkeys(targets, value)
    return ModelConfig(
        **sizes,
        **features,
        rms_norm_eps=_given(hf, "rms_norm_eps", 1e-6),
        tie_word_embeddings=_given(hf, "tie_word_embeddings", False),
        rope=rope,
        dtype=dtype,
    )


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """The fields of a `config.json` that `from_hf_config` translates into `config`.

    The format says neither which ids no token has nor how int8 kernels are stored.

    Raises:
        ValueError: a combination of features that no architecture of transformers has.
    """
    config = dataclasses.replace(config, num_padding_ids=0, quantization=None)
    rope = config.rope
    common = {name: getattr(config, name) for name in SIZES}
    common |= {
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": config.dtype,
    }
    if rope.type in _ROPE_PARAMETERS:
        names = (*_ROPE_PARAMETERS[rope.type][0], *_ROPE_PARAMETERS[rope.type][1])
        fields = {name: getattr(rope, name) for name in names if hasattr(rope, name)}
        common["rope_scaling"] = {"rope_type": rope.type} | fields
    if rope.type == "dynamic":
        common["max_position_embeddings"] = rope.original_max_position_embeddings
    for model_type, family in FAMILIES.items():
        hf = {"model_type": model_type, "architectures": [family.architecture]} | common
        hf |= {name: getattr(config, targets[0]) for name, targets in family.fields.items()}
        if "attention_multiplier" in hf and config.attention_scale is None:
            hf["attention_multiplier"] = config.head_dim**-0.5
        if "sliding_window" in family.fields and config.sliding_window is not None:
            hf |= {"use_sliding_window": True, "max_window_layers": 0}
        try:
            if from_hf_config(hf, config.dtype) == config:
                return hf
        except ValueError:  # a field that this family must have
            continue
    raise ValueError(
        f"model: no architecture of {', '.join(FAMILIES)} has all features of {config}"
    )


def _family(hf: Mapping[str, Any]) -> Family:
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type: got {model_type!r}, supported architectures are: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    architectures = hf.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise ValueError(
            f"architectures: got {architectures!r}, supported is {family.architecture!r}"
        )
    return family


def _sizes(hf: Mapping[str, Any], family: Family) -> dict[str, Any]:
    for name in SIZES:
        if hf.get(name) is not None:
            check_size(name, hf[name])
        elif name == "num_key_value_heads" and (name in hf or name not in family.required):
            continue  # as many as query heads
        elif name != "head_dim" or name in family.required:
            raise ValueError(f"{name}: missing from the model configuration")
    heads = hf["num_attention_heads"]
    sizes = {name: hf.get(name) for name in SIZES}
    sizes["num_key_value_heads"] = sizes["num_key_value_heads"] or heads
    sizes["head_dim"] = sizes["head_dim"] or hf["hidden_size"] // heads
    return sizes


def _layered_window(hf: Mapping[str, Any]) -> Any:
    """The window if all layers have it, null if none has, as transformers' Qwen2Config has it."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    if window is None:
        return None
    kinds = hf.get("layer_types")
    if kinds is None:
        first = hf.get("max_window_layers", 28)
        check_int("max_window_layers", first, 0)
        slides = [layer >= first for layer in range(hf["num_hidden_layers"])]
    elif isinstance(kinds, list) and set(kinds) <= {"full_attention", "sliding_attention"}:
        slides = [kind == "sliding_attention" for kind in kinds]
    else:
        raise ValueError(
            f"layer_types: got {kinds!r}, must be a list of 'full_attention' and "
            "'sliding_attention'"
        )
    if any(slides) and not all(slides):
        raise ValueError(
            f"sliding_window: {sum(slides)} of {len(slides)} layers have it (layer_types, "
            "max_window_layers), supported are all and none"
        )
    return window if any(slides) else None


def _given(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    value = fields.get(name)
    return default if value is None else value


def _rope_from_hf(hf: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes `rope_parameters`; before that `rope_scaling` beside `rope_theta`,
    # whose type was spelled `type` before it was spelled `rope_type`. The older one wins.
    parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"rope_parameters: got {parameters!r}, must be an object")
    parameters = {name: value for name, value in parameters.items() if value is not None}
    original = "original_max_position_embeddings"
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    theta = _given(parameters, "rope_theta", _given(hf, "rope_theta", 10000.0))
    parameters.pop("rope_theta", None)
    rotated = parameters.pop("partial_rotary_factor", 1.0)
    if rotated != 1.0:
        raise ValueError(f"partial_rotary_factor: got {rotated!r}, supported is 1.0")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type: got {kind!r}, allowed are {', '.join(ROPE_TYPES)}")
    if kind == "default":  # may carry fields of other types without meaning (transformers 5 does)
        return RopeConfig(theta=theta)

    if kind in ("llama3", "yarn") and hf.get(original) is not None:
        parameters[original] = hf[original]  # where some files have it, and wins
    required, optional = _ROPE_PARAMETERS[kind]
    missing = [name for name in required if name not in parameters]
    if missing:
        raise ValueError(f"rope type {kind!r}: {', '.join(missing)} missing")
    unknown = sorted(parameters.keys() - {*required, *optional})
    if unknown:
        raise ValueError(f"rope type {kind!r}: unknown parameters {', '.join(unknown)}")
    if kind in ("dynamic", "yarn"):
        parameters.setdefault(original, hf["max_position_embeddings"])
    if kind == "dynamic" and parameters[original] != hf["max_position_embeddings"]:
        raise ValueError(
            f"rope {original}: got {parameters[original]!r}, must be max_position_embeddings "
            f"{hf['max_position_embeddings']} for type 'dynamic'"
        )
    if kind == "yarn":
        parameters = _with_attention_factor(parameters)
    return RopeConfig(type=kind, theta=theta, **parameters)


def _with_attention_factor(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of YaRN with the factor that the others imply (Peng et al. 2023, eq. 22)."""
    parameters = dict(parameters)
    parameters.pop("finetuned", None)
    for name in ("factor", "mscale", "mscale_all_dim"):
        check_number(f"rope {name}", parameters.get(name, 1.0), "0 to 1e6", 0, 1e6)
    mscale, all_dim = parameters.pop("mscale", 0), parameters.pop("mscale_all_dim", 0)

    def implied(scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(max(parameters["factor"], 1))

    ratio = implied(mscale) / implied(all_dim) if mscale and all_dim else implied(1.0)
    parameters.setdefault("attention_factor", ratio)
    return parameters


def _context(stated: int, rope: RopeConfig) -> int:
    """The context: two types of scaling extend the one that the file states."""
    if rope.type in ("dynamic", "yarn"):
        return max(stated, int(rope.original_max_position_embeddings * rope.factor))
    return stated
