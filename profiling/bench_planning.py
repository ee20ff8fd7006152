"""Measure how long it takes to plan random new transitions on meshes of three and four axes.

It counts functions called and milliseconds of the processor. A *new* pair was never planned before, in a process that
has planned others; a *first* one has all caches cleared before it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_transitions import forget
from profilers import positive

from autopar import transitions
from autopar.errors import TransitionError
from autopar.examples.function_calls import function_calls
from autopar.ir.layout import Dim, DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType

MESHES = (Mesh(a=4, b=4, c=4), Mesh(a=2, b=2, c=2, d=2), Mesh(a=4, b=2, c=2, d=2), Mesh(a=4, b=4, c=2, d=2))
SHAPES = ((512, 512, 512), (100, 130, 7), (4096, 4096), (64, 96))
AIM = 2.0  # milliseconds
OTHERS = 100  # pairs that a process has planned before


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=positive, default=600, help="of each mesh")
    parser.add_argument("--repeat", type=positive, default=5, help="times each is planned; the fastest counts")


def run(options: argparse.Namespace) -> str:
    rows = [f"{'mesh':20} {'':12} {'median':>8} {'99 %':>8} {'worst':>8}   above {AIM:g} ms"]
    for mesh in MESHES:
        rng = random.Random(7)
        pairs = [_pair(rng, mesh) for _ in range(options.pairs)]
        others = [_pair(rng, mesh) for _ in range(OTHERS)]
        rounds = [_new(others, pairs, _milliseconds) for _ in range(options.repeat)]
        seen = {
            "calls, new": _new(others, pairs, _calls),
            "ms, new": [min(times) for times in zip(*rounds, strict=True)],
            "ms, first": [min(_new([], [pair], _milliseconds)[0] for _ in range(options.repeat)) for pair in pairs],
        }
        for name, values in seen.items():
            form, ordered = ",.0f" if name.startswith("calls") else ".2f", sorted(values)
            median, high, worst = (format(ordered[int(len(ordered) * q)], form) for q in (0.5, 0.99, 1 - 1e-9))
            above = f"{sum(value > AIM for value in values)} of {len(values)}" if name.startswith("ms") else ""
            rows.append(f"{mesh!s:20} {name:12} {median:>8} {high:>8} {worst:>8}   {above}".rstrip())
    return "\n".join([*rows, ""])


def _pair(rng: random.Random, mesh: Mesh) -> tuple[TensorType, TensorType]:
    shape, kind = rng.choice(SHAPES), rng.choice(["sum", "sum", "sum", "max", ""])
    first, second = (TensorType(shape, torch.float32, Layout(mesh, _attr(rng, mesh, shape, kind))) for _ in range(2))
    return first, second


def _attr(rng: random.Random, mesh: Mesh, shape: tuple[int, ...], kind: str) -> DistAttr:
    """Each axis splits a dim, waits to be reduced, or does neither; some dims are merged."""
    axes: list[list[str]] = [[] for _ in shape]
    pending = []
    for axis in rng.sample(mesh.names, len(mesh.names)):
        if (drawn := rng.random()) < 0.55:
            rng.choice(axes).append(axis)
        elif drawn < 0.8 and kind:
            pending.append((axis, kind))
    return DistAttr(tuple(_dim(rng, n, tuple(own)) for n, own in zip(shape, axes, strict=True)), tuple(sorted(pending)))


def _dim(rng: random.Random, size: int, axes: tuple[str, ...]) -> Dim:
    major, at = rng.choice([2, 4, 8]), rng.randrange(len(axes) + 1)
    merged = axes and size % major == 0 and rng.random() < 0.15
    return ((major, axes[:at]), (size // major, axes[at:])) if merged else ((None, axes),)


def _plan(source: TensorType, target: TensorType) -> Any:
    try:
        return transitions.transitions(source, target)
    except TransitionError:
        return ()


def _new(others: list[Any], pairs: list[Any], measure: Callable[[TensorType, TensorType], float]) -> list[float]:
    """Of each pair, what ``measure`` says after the others and the pairs before it."""
    forget()
    for pair in others:
        _plan(*pair)
    return [measure(*pair) for pair in pairs]


def _calls(source: TensorType, target: TensorType) -> int:
    return function_calls(lambda: _plan(source, target), builtins=True)


def _milliseconds(source: TensorType, target: TensorType) -> float:
    start = time.process_time()
    _plan(source, target)
    return (time.process_time() - start) * 1e3
