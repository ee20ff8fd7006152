"""Measure steps of varying sizes: how often they are captured anew, and what a new and a known size cost.

A small Llama takes training steps with batches and lengths drawn from a few values. With ``--dynamic false`` each size
is captured by itself; by default the second size is captured with symbols, and with ``true`` the first. The last line
is the capture of a large Llama on meta, with numbers and with symbols.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.capture import capture
from autopar.capture.arguments import bind_arguments
from autopar.capture.symbolic.captured import capture_with_symbols
from autopar.capture.symbolic.tracer import SymbolicTracer
from autopar.ir.at_values import at_values

LINES = [SymbolicTracer.settled, at_values]
DYNAMIC = {"false": False, "default": None, "true": True}
BATCHES, LENGTHS = (2, 3, 4, 5, 8), (7, 16, 33, 64)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=2, help="of the model that takes the steps")
    parser.add_argument("--dynamic", nargs="*", choices=DYNAMIC, default=list(DYNAMIC))
    parser.add_argument("--large", type=int, default=8, help="layers of the Llama-2-7B whose capture is measured")


def small(layers: int) -> torch.nn.Module:
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=layers, vocab_size=64,
                                        num_attention_heads=4, num_key_value_heads=4, use_cache=False))  # fmt: skip


def row(name: str, options: argparse.Namespace) -> str:
    """Take the steps; return what they took, in milliseconds."""
    torch.manual_seed(0)
    drawn = random.Random(0)
    model = small(options.layers)
    parallel = autopar.parallelize(model, autopar.Mesh(dp=2), "ddp", dynamic=DYNAMIC[name])
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters(), lr=1e-3))
    traced: list[float] = []
    new: list[float] = []
    known: list[float] = []
    seen: set[tuple[int, int]] = set()
    for _ in range(options.steps):
        size = drawn.choice(BATCHES), drawn.choice(LENGTHS)
        ids = torch.randint(0, 64, size)
        before = step.captures
        start = time.perf_counter()
        step.simulate({"input_ids": ids, "labels": ids})
        ms = (time.perf_counter() - start) * 1e3
        (traced if step.captures > before else known if size in seen else new).append(ms)
        seen.add(size)
    cells = [f"{statistics.median(times):10.1f}" if times else f"{'–':>10}" for times in (traced, new, known)]
    return f"{name:10}{len(seen):8}{step.captures:10}{step.captures - 1:12}{''.join(cells)}"


def large(layers: int) -> str:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False))
    ids = torch.zeros(8, 64, dtype=torch.int64)
    given = {"input_ids": ids, "labels": ids}
    seconds = []
    for function in (
        lambda: capture(model, (), given),
        lambda: capture_with_symbols(model, bind_arguments(model, (), given)),
    ):
        start = time.perf_counter()
        made = function()
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    made.captured.program.at_sizes(s0=3, s1=100)  # type: ignore[union-attr]
    other = time.perf_counter() - start
    return (
        f"Llama-2-7B, {layers} layers on meta: captured with numbers in {seconds[0]:.2f} s, with symbols in "
        f"{seconds[1]:.2f} s; its program at other sizes in {other * 1e3:.1f} ms\n"
    )


def run(options: argparse.Namespace) -> str:
    torch.set_num_threads(2)
    head = (
        f"{options.steps} training steps of a Llama of {options.layers} layers on dp=2, simulated; batches "
        f"{', '.join(map(str, BATCHES))}, lengths {', '.join(map(str, LENGTHS))}; medians in ms\n"
        f"{'dynamic':10}{'sizes':>8}{'captures':>10}{'recaptures':>12}{'traced':>10}{'new size':>10}{'known':>10}\n"
    )
    large(1)  # imports, and torch's own tables
    return head + "\n".join(row(name, options) for name in options.dynamic) + "\n\n" + large(options.large)
