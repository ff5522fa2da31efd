"""What several devices cost and save, on paper: seconds of a round from bytes and operations.

    python -m benchmarks.scaling

A round takes the longer of reading the weights and computing the rows, and then the exchange:

    round    = max(weight_bytes / tensor / memory, 2 weights rows / tensor / peak) + exchange
    exchange = (told + kv) over the devices that share the round
             + (2 sums per layer and 1 for the embedding) over the devices along `tensor`
    all-gather of n bytes from each of P devices:  latency + (P - 1) n / link
    sum of n bytes over P devices:                 latency + 2 (P - 1) / P n / link

`told` is the one gathering of integers, `kv` the one broadcast of accepted K/V (a sum), both per
round and not per layer; the tests compare them with the compiled program. Left out are attention,
the overlap of communication with computation, and single numbers: what finds the likeliest token
along `tensor`, and, beside another axis, when loops end.
"""

from __future__ import annotations

import dataclasses

import jlookahead as jl
from jlookahead.division import divide
from jlookahead.layout import Layout


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator: data sheets, and an assumed latency of a collective."""

    peak: float  # bfloat16 operations per second
    memory: float  # bytes per second
    link: float  # bytes per second, out of one device
    latency: float  # seconds of a collective of few bytes


DEVICES = {
    "H200": Device(peak=989e12, memory=4.8e12, link=450e9, latency=12e-6),
    "TPU v5e": Device(peak=197e12, memory=819e9, link=200e9, latency=8e-6),
    "TPU v5p": Device(peak=459e12, memory=2765e9, link=600e9, latency=8e-6),
}

LLAMA_8B = jl.ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    dtype="bfloat16",
)


def told_bytes(layout: Layout, num_devices: int) -> int:
    """What a device tells the others, per batch row: accepted length and winner; token, source and
    packed row of everything that may be emitted; its columns. 4 bytes each."""
    division = divide(layout, num_devices)
    return 0 if division is None else 4 * (2 + 3 * layout.max_emitted + division.num_columns)


def kv_bytes(model: jl.ModelConfig, layout: Layout, itemsize: int = 2) -> int:
    """K/V of everything that may be emitted, per batch row."""
    values = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    return values * layout.max_emitted * itemsize


def num_sums(model: jl.ModelConfig) -> int:
    """Sums over the devices along `tensor` in one forward pass, of `rows * hidden_size` values."""
    return 1 + 2 * model.num_hidden_layers


def rows_of_a_device(layout: Layout, num_devices: int) -> int:
    """Packed rows that each of the devices computes."""
    division = divide(layout, num_devices)
    return layout.num_rows if division is None else division.rows.shape[2]


def num_weights(model: jl.ModelConfig) -> int:
    """Weights that a forward pass reads: all but the table of embeddings."""
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    layer = heads * model.head_dim * model.hidden_size
    layer += 3 * model.hidden_size * model.intermediate_size
    return model.num_hidden_layers * layer + model.vocab_size * model.hidden_size


def round_seconds(
    device: Device,
    model: jl.ModelConfig,
    layout: Layout,
    *,
    batch: int,
    lookahead: int,
    tensor: int,
    publish: str = "broadcast",
) -> float:
    """Seconds of a round by the formula above."""
    rows = rows_of_a_device(layout, lookahead)
    if publish == "refeed":
        rows += layout.max_accepted
    weights = num_weights(model) / tensor
    seconds = max(2 * weights / device.memory, 2 * weights * batch * rows / device.peak)
    if divide(layout, lookahead) is not None:
        told = batch * told_bytes(layout, lookahead)
        seconds += device.latency + (lookahead - 1) * told / device.link
        if publish == "broadcast":
            seconds += _sum_seconds(device, lookahead, batch * kv_bytes(model, layout) / tensor)
    if tensor > 1:
        summed = 2 * batch * rows * model.hidden_size
        seconds += num_sums(model) * _sum_seconds(device, tensor, summed)
    return seconds


def _sum_seconds(device: Device, num_devices: int, size: float) -> float:
    return device.latency + 2 * (num_devices - 1) / num_devices * size / device.link


def main() -> None:
    model = LLAMA_8B
    plain = jl.Autoregressive().layout
    wide = jl.Lookahead(window=15, ngram=5, candidates=15, prompt_lookup=False).layout
    gigabytes = 2 * num_weights(model) / 1e9
    print(f"LLaMA 8B in bfloat16, {gigabytes:.1f} GB of weights read per pass.")
    print(f"A round of {wide.num_rows} rows against one of plain decoding on one device:\n")
    columns = "device, batch, lookahead x tensor, GB of weights held, rows, broadcast, refeed"
    print(f"| {columns.replace(', ', ' | ')} |")
    print("|---" * 7 + "|")
    for name, device in DEVICES.items():
        for batch in (1, 8):
            base = round_seconds(device, model, plain, batch=batch, lookahead=1, tensor=1)
            for lookahead, tensor in ((1, 1), (4, 1), (8, 1), (1, 8), (2, 4)):
                costs = [
                    round_seconds(
                        device,
                        model,
                        wide,
                        batch=batch,
                        lookahead=lookahead,
                        tensor=tensor,
                        publish=publish,
                    )
                    / base
                    for publish in ("broadcast", "refeed")
                ]
                held = gigabytes * lookahead
                rows = rows_of_a_device(wide, lookahead)
                print(
                    f"| {name} | {batch} | {lookahead} x {tensor} | {held:.0f} | {rows} | "
                    f"{costs[0]:.2f} | {costs[1]:.2f} |"
                )


if __name__ == "__main__":
    main()
