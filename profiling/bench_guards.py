"""Measure how long each call checks the Python values that forward reads: a Llama of 32 layers, on meta.

``look`` is what a call does where nothing has changed; ``equal`` where a float is another object of the same value,
``changed`` what finding out costs where one has changed. ``inventory`` is the walk over the modules that a call makes
anyway, whose list of modules the look compares. Each is the fastest of ``--times``, so that what else the machine does
is not part of it.
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.capture import capture
from autopar.capture.guards import Guards
from autopar.capture.guards.reads import Reads
from autopar.capture.model_state import model_state

LINES = [Guards.hold, Reads.guards]
LIMIT = 300.0  # microseconds


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--times", type=int, default=5000)


def fastest(function: Callable[[], object], times: int) -> float:
    """Microseconds."""
    return min(timeit.repeat(function, number=1, repeat=times)) * 1e6


def run(options: argparse.Namespace) -> str:
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers))
    ids = torch.zeros(1, 16, dtype=torch.int64)
    start = time.perf_counter()
    guards = capture(model, (), {"input_ids": ids, "labels": ids}).guards
    seconds = time.perf_counter() - start
    modules = model_state(model).modules
    look = fastest(lambda: guards.hold(modules), options.times)
    norm = model.model.norm

    def equal() -> None:
        norm.variance_epsilon = float(repr(norm.variance_epsilon))
        assert guards.hold(modules)

    equally = fastest(equal, max(1, options.times // 10))
    norm.variance_epsilon *= 2
    changed = fastest(lambda: guards.hold(modules), max(1, options.times // 10))
    assert not guards.hold(modules)
    walk = fastest(lambda: model_state(model), max(1, options.times // 10))
    verdict = "within" if look <= LIMIT else "above"
    return (
        f"{len(modules)} modules, {len(guards.entries)} values of {len(guards._reads)} objects; captured in "
        f"{seconds:.1f} s\n\n"
        f"look      {look:8.1f} us   {verdict} the {LIMIT:.0f} us that were asked for\n"
        f"equal     {equally:8.1f} us\nchanged   {changed:8.1f} us\ninventory {walk:8.1f} us\n"
    )
