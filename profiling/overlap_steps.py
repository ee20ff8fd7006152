"""Make the steps of ``overlap`` without a model: ops with seconds, from tables of tensors, and at random."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.scheduling import Op

MODELS: dict[str, Any] = json.loads(Path(__file__).with_name("model_tensors.json").read_text())
SAMPLES = {"vgg16": 32, "resnet50": 64, "transformer_base": 4096, "transformer_big": 4096, "bert_large": 2048,
           "gpt2_small": 4096}  # images or tokens a GPU and step  # fmt: skip
FLOPS = 12e12  # of a GPU, reached: a V100 in float32 and mixed precision
BYTES = 4  # of an element


@dataclass(frozen=True)
class Network:
    """An all-reduce of n bytes takes ``startup + n / bandwidth`` seconds, n being that of one replica."""

    bandwidth: float
    startup: float


def layers_of(model: str) -> list[tuple[list[int], int]]:
    """The elements of each tensor of a layer, and its multiply-adds a sample; layers in the order of the forward."""
    return [([math.prod(shape) for shape in layer["tensors"]], layer["macs"]) for layer in MODELS[model]["layers"]]


def data_parallel(model: str, network: Network) -> list[Op]:
    """A step from its first gradient to the end of the next forward: each layer needs its own parameters."""
    layers = layers_of(model)
    seconds = [2 * macs * SAMPLES[model] / FLOPS for _, macs in layers]
    return _step(layers, [2 * s for s in seconds], seconds, network)


def _step(
    layers: list[tuple[list[int], int]], backward: list[float], forward: list[float], network: Network
) -> list[Op]:
    """Backward from the last layer, an all-reduce for each tensor, forward from the first."""
    ops, before = [], ()
    for k in reversed(range(len(layers))):
        ops.append(Op(f"backward{k}", "compute", backward[k], before))
        before = (f"backward{k}",)
        ops += [
            Op(f"sum{k}.{t}", "dp", network.startup + BYTES * size / network.bandwidth, before, bytes=BYTES * size)
            for t, size in enumerate(layers[k][0])
        ]
    for k, (tensors, _) in enumerate(layers):
        ops.append(Op(f"forward{k}", "compute", forward[k], (*before, *(f"sum{k}.{t}" for t in range(len(tensors))))))
        before = (f"forward{k}",)
    return ops


def tensor_parallel(draw: random.Random, layers: int, startup: float) -> list[Op]:
    """A step of tensor and data parallelism on one stream, with random seconds.

    A layer has two all-reduces forward and two backward, which block, and two weight gradients with all-reduces over
    the replicas, which do not. ``startup``: a share of the mean all-reduce.
    """
    theta = startup
    ops: list[Op] = []

    def compute(name: str, *after: str) -> str:
        ops.append(Op(name, "compute", draw.uniform(0.5, 1.5), after))
        return name

    def reduce(name: str, kind: str, low: float, high: float, *after: str) -> str:
        seconds = draw.uniform(low, high)
        ops.append(Op(name, "link", theta + seconds, after, bytes=max(1, round(seconds * 1e6)), kind=kind))
        return name

    last: tuple[str, ...] = ()
    for k in range(layers):
        for part in ("attention", "mlp"):
            last = (reduce(f"f{k}.{part}.sum", "tp", 0.3, 0.7, compute(f"f{k}.{part}", *last)),)
    gradients = []
    for k in reversed(range(layers)):
        for part in ("mlp", "attention"):
            weight = compute(f"w{k}.{part}", *last)
            inputs = compute(f"b{k}.{part}", *last)
            gradients.append(reduce(f"w{k}.{part}.sum", "dp", 0.5, 1.5, weight))
            last = (reduce(f"b{k}.{part}.sum", "tp", 0.3, 0.7, inputs),)
    for k, name in enumerate(gradients):
        ops.append(Op(f"update{k}", "compute", 0.05, (name,)))
    return ops


def networks() -> Iterator[tuple[str, Network]]:
    """Three bandwidths of an all-reduce, and two start-up costs."""
    for gbit in (10, 25, 100):
        for startup in (50e-6, 500e-6):
            yield f"{gbit} Gbit/s, {startup * 1e6:.0f} µs", Network(gbit * 1e9 / 8 / 2, startup)


@dataclass(frozen=True)
class Published:
    """A row of ByteScheduler's table: MXNet with a parameter server, images a second.

    ``linear`` is what the computation alone reaches.
    """

    model: str
    gpus: int
    base: float
    scheduled: float
    linear: float


PUBLISHED = (
    Published("vgg16", 16, 673, 1511, 1579), Published("vgg16", 32, 1416, 2832, 3157),
    Published("resnet50", 16, 2535, 2934, 3316), Published("resnet50", 32, 5195, 5785, 6633),
)  # fmt: skip


def push_and_pull(row: Published, bandwidth: float, piece: float = math.inf) -> list[Op]:
    """A step on two streams, for one image a GPU; a tensor, or each piece of it, is pushed and then pulled.

    ``bandwidth``: bytes in the time of an image, one way.
    """
    layers, whole = layers_of(row.model), row.gpus / row.linear
    work = sum(macs for _, macs in layers)
    ops, before = [], ()
    for k in reversed(range(len(layers))):
        ops.append(Op(f"backward{k}", "compute", whole * 2 / 3 * layers[k][1] / work, before))
        before = (f"backward{k}",)
    pulls: dict[int, list[str]] = {}
    for k in reversed(range(len(layers))):
        for t, elements in enumerate(layers[k][0]):
            count = max(1, math.ceil(elements * BYTES / piece))
            for n in range(count):
                name, seconds = f"{k}.{t}.{n}", elements * BYTES / count / bandwidth
                ops.append(Op(f"push{name}", "push", seconds, (f"backward{k}",), bytes=BYTES * elements // count))
                ops.append(Op(f"pull{name}", "pull", seconds, (f"push{name}",), bytes=BYTES * elements // count))
                pulls.setdefault(k, []).append(f"pull{name}")
    for k in range(len(layers)):
        ops.append(Op(f"forward{k}", "compute", whole / 3 * layers[k][1] / work, (*before, *pulls.get(k, ()))))
        before = (f"forward{k}",)
    return ops
