"""Measure recurrent layers: the time to parallelize one, and the functions that Python calls for it, by steps."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

import autopar
from autopar import Mesh
from autopar.examples.function_calls import function_calls

MOST = 64  # steps of which calls are counted, which is slow
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", default="LSTM", help=f"of {', '.join(KINDS)}, with commas")
    parser.add_argument("--steps", default="16,64,256", help="lengths of the sequence, with commas")


def run(options: argparse.Namespace) -> str:
    """Seconds are those of the processor, so that other programs on the machine count less."""
    rows = [f"{'layer':6} {'steps':>6} {'lines':>7} {'calls':>12} {'calls/step':>11} {'seconds':>8} {'ms/step':>8}"]
    for kind in options.kinds.split(","):
        _parallel(kind, 2)  # what is found out once
        for steps in map(int, options.steps.split(",")):
            start = time.process_time()
            made = _parallel(kind, steps)
            seconds = time.process_time() - start
            calls = function_calls(lambda kind=kind, steps=steps: _parallel(kind, steps)) if steps <= MOST else 0
            lines, shown = (
                len(list(made.program.nodes)),
                f"{calls:12,} {calls / steps:11,.0f}" if calls else f"{'–':>12} {'–':>11}",
            )
            rows.append(f"{kind:6} {steps:6} {lines:7,} {shown} {seconds:8.2f} {seconds / steps * 1e3:8.1f}")
    return "\n".join([*rows, ""])


def _parallel(kind: str, steps: int) -> Any:
    torch.manual_seed(0)
    return autopar.parallelize(
        KINDS[kind](8, 16, batch_first=True), Mesh(dp=2), "ddp", example=(torch.randn(4, steps, 8),)
    )
