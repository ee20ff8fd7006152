"""Measure the generation of tokens by a small Llama: milliseconds a token, and bytes of the cache on a rank.

``generate`` of transformers on one process, with its growing cache and with its static one, beside
``parallel.generate`` on one and on two processes. Each process has one thread. All have the same tokens. The first
tokens read the prompt, and capture; medians are over the later ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from profilers import positive
from ranks import on_ranks, together
from tables import printed
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

PROFILES_ITSELF = True  # in other processes
MESHES: dict[str, tuple[dict[str, int], str]] = {
    "one process": ({"tp": 1}, "megatron"), "tp=2": ({"tp": 2}, "megatron"), "dp=2": ({"dp": 2}, "ddp"),
}  # fmt: skip
COLUMNS = ("", "prompt, ms", "a token, ms", "of eager", "slowest token", "cache on a rank, MB", "captures")

Times = tuple[float, float, float, list[int]]  # seconds of the prompt, of a token, of the slowest one; the new ids
Row = tuple[Times, int, int]  # and the bytes of the cache on a rank, and the captures


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--hidden", type=positive, default=512)
    parser.add_argument("--rows", type=positive, default=4)
    parser.add_argument("--prompt", type=positive, default=128)
    parser.add_argument("--tokens", type=positive, default=128)


class Clock:
    """A logits processor that notes when each token's logits are there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def made(layers: int, hidden: int, positions: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=8192, max_position_embeddings=positions, eos_token_id=None, pad_token_id=0,
    )).eval()  # fmt: skip


def clocked(generate: Any, rows: int, prompt: int, tokens: int, **options: Any) -> Times:
    """Generate twice, the second time with a clock."""
    ids = torch.randint(1, 8192, (rows, prompt), generator=torch.Generator().manual_seed(1))
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False, **options}
    generate(ids, **given)
    clock, start = Clock(), time.perf_counter()
    found = generate(ids, logits_processor=[clock], **given)
    gaps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return clock.times[0] - start, statistics.median(gaps), max(gaps), found[0, prompt:].tolist()


def eager(static: bool, layers: int, hidden: int, rows: int, prompt: int, tokens: int) -> Row:
    """The row of transformers' own ``generate``."""
    model = made(layers, hidden, prompt + tokens)
    options = {"cache_implementation": "static"} if static else {}
    times = clocked(model.generate, rows, prompt, tokens, **options)
    config = model.config
    size = 2 * layers * rows * config.num_key_value_heads * (prompt + tokens) * config.head_dim * 4
    return times, size, 0


def on_mesh(axes: dict[str, int], plan: str, layers: int, hidden: int, rows: int, prompt: int, tokens: int) -> Row:
    """The row of ``parallel.generate``; the bytes are those of the largest cache."""
    parallel = autopar.parallelize(made(layers, hidden, prompt + tokens), autopar.Mesh(axes), plan)
    times = clocked(parallel.generate, rows, prompt, tokens)
    return times, max(together(parallel.generation.cache_bytes)), parallel.captures


def run(options: argparse.Namespace) -> str:
    given = (options.layers, options.hidden, options.rows, options.prompt, options.tokens)
    found = {"transformers": on_ranks(1, eager, False, *given), "its static cache": on_ranks(1, eager, True, *given)}
    for name, (axes, plan) in MESHES.items():
        ranks = next(iter(axes.values()))
        found[f"autopar, {name}"] = on_ranks(ranks, on_mesh, axes, plan, *given)
    first = found["transformers"][0]
    table = [
        (name, f"{prompt * 1e3:.1f}", f"{token * 1e3:.2f}", f"{token / first[1]:.2f}", f"{slowest * 1e3:.2f}",
         f"{size / 1e6:.2f}", str(captures or "–"))
        for name, ((prompt, token, slowest, _), size, captures) in found.items()
    ]  # fmt: skip
    same = all(times[-1] == first[-1] for times, *_ in found.values())
    title = (
        f"Llama of {options.layers} layers, hidden size {options.hidden}: {options.rows} prompts of {options.prompt} "
        f"tokens, {options.tokens} new ones"
    )
    return printed(title, COLUMNS, table) + f"all have {'the same' if same else 'OTHER'} tokens\n"
