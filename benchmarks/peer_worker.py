"""One decoder of another project, answering requests on standard input; see `peers.py`.

    python benchmarks/peer_worker.py SYSTEM MODEL_DIRECTORY

A request is a line of JSON, `{"ids": [...], "max_new_tokens": n}`; the answer holds `tokens` and
the `seconds` of the whole generation, prompt included. Imports nothing of jlookahead: it runs in
the virtual environment of the peer. Two threads, float32, greedy, end-of-text ids ignored.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

NUM_THREADS, CONTEXT = 2, 4096
Decode = Callable[[list[int], int], list[int]]


def transformers(folder: Path, **options: object) -> Decode:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(NUM_THREADS)
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def decode(ids: list[int], max_new_tokens: int) -> list[int]:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        return output[0, len(ids) :].tolist()

    return decode


def lade(folder: Path) -> Decode:
    import os

    os.environ["USE_LADE"] = "1"
    import lade

    lade.augment_all()
    lade.config_lade(LEVEL=5, WINDOW_SIZE=7, GUESS_SET_SIZE=7, DEBUG=0)
    return transformers(folder)


def tunix(folder: Path) -> Decode:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from tunix.generate import sampler as sampler_lib
    from tunix.models.llama3 import model as model_lib
    from tunix.models.llama3 import params

    fields = json.loads((folder / "config.json").read_text())
    config = model_lib.ModelConfig(
        num_layers=fields["num_hidden_layers"],
        vocab_size=fields["vocab_size"],
        embed_dim=fields["hidden_size"],
        hidden_dim=fields["intermediate_size"],
        num_heads=fields["num_attention_heads"],
        head_dim=fields["hidden_size"] // fields["num_attention_heads"],
        num_kv_heads=fields["num_key_value_heads"],
        rope_theta=fields["rope_theta"],
        norm_eps=fields["rms_norm_eps"],
        weight_tying=True,
    )
    # It reads rope_theta from the default of a function, whatever the configuration says.
    model_lib.apply_rope = functools.partial(model_lib.apply_rope, rope_theta=config.rope_theta)
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=axes)
    model = params.create_model_from_safe_tensors(str(folder), config, mesh, jnp.float32)

    class Ids:
        """A tokenizer for texts that are ids already."""

        encode = decode = staticmethod(lambda ids, **_: ids)
        bos_id = eos_id = pad_id = staticmethod(lambda: 0)

    cache = sampler_lib.CacheConfig(
        cache_size=CONTEXT,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    sampler = sampler_lib.Sampler(model, Ids(), cache)
    sampler.tokenize = np.array

    def decode(ids: list[int], max_new_tokens: int) -> list[int]:
        output = sampler([ids], max_generation_steps=max_new_tokens, eos_tokens=[-1])
        return np.asarray(output.tokens[0]).tolist()

    return decode


def llama_cpp(folder: Path, num_drafts: int = 0) -> Decode:
    import ctypes

    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    float32 = folder / "model-float32.gguf"
    if not float32.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
        source = str(folder / "model.gguf").encode()
        llama_cpp.llama_model_quantize(source, str(float32).encode(), ctypes.byref(options))
    llama = llama_cpp.Llama(
        str(float32),
        n_ctx=CONTEXT,
        n_threads=NUM_THREADS,
        n_threads_batch=NUM_THREADS,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=num_drafts) if num_drafts else None,
        logits_all=bool(num_drafts),
        verbose=False,
    )

    def decode(ids: list[int], max_new_tokens: int) -> list[int]:
        llama.reset()
        new = llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0, reset=False)
        return [next(new) for _ in range(max_new_tokens)]

    return decode


SYSTEMS: dict[str, Callable[[Path], Decode]] = {
    "transformers": transformers,
    "transformers prompt lookup": functools.partial(transformers, prompt_lookup_num_tokens=10),
    "lade": lade,
    "tunix": tunix,
    "llama.cpp": llama_cpp,
    "llama.cpp prompt lookup": functools.partial(llama_cpp, num_drafts=10),
}


def main() -> None:
    decode = SYSTEMS[sys.argv[1]](Path(sys.argv[2]))
    # Libraries print to standard output, too.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        tokens = decode(request["ids"], request["max_new_tokens"])
        seconds = time.perf_counter() - began
        print(json.dumps({"tokens": tokens, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
