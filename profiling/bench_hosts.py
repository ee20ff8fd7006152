"""Measure reductions over two hosts, at once and level by level, on an emulated wire with slow links between the hosts.

Eight processes are two hosts of four ranks. Bandwidths are those of a DGX H100, 450 GB/s by NVLink and 50 GB/s (400 Gb/s
Ethernet or InfiniBand) for each GPU, all divided by 40,000: so that two cores keep up with the wire. 9 : 1 is a fast
network; most clusters have a slower one, and gain more. Latencies are 2 and 5 ms. Each row is a training step whose
gradients are reduced over all ranks; computing takes next to no time, and the numbers of both ways are compared.
"""  # noqa: E501

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch
from ranks import on_ranks, together
from torch import distributed

import autopar
from autopar.costs.machine import Link, Machine
from autopar.ir.mesh import MOST_RANKS
from autopar.report.hosts import bytes_between_hosts
from autopar.runtime.wire.clock import now

PROFILES_ITSELF = True  # in other processes
RANKS, PER_HOST = 8, 4
INSIDE, BETWEEN = Link(2e-3, 450e5 / 4), Link(5e-3, 50e5 / 4)
ON = Machine("two hosts", "cpu", PER_HOST, INSIDE, BETWEEN, Link(5e-6, 1e10))
AT_ONCE = replace(ON, ranks_per_node=MOST_RANKS, inside=BETWEEN)  # one level of links, the slowest
CASES = {"one gradient of 1 MiB": 1, "six gradients of 1 MiB, which overlap": 6}
WARM = 1


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace) -> str:
    lines = [
        f"{RANKS} ranks on 2 hosts; inside {INSIDE.bandwidth / 1e6:g} MB/s and {INSIDE.latency * 1e3:g} ms, between "
        f"{BETWEEN.bandwidth / 1e6:g} MB/s and {BETWEEN.latency * 1e3:g} ms; medians of {options.rounds} steps, ms",
        "",
        f"{'':40}{'at once':>10}{'by levels':>12}{'ratio':>8}{'predicted':>12}{'between hosts, bytes':>24}{'late':>12}",
    ]
    for name, layers in CASES.items():
        found = on_ranks(RANKS, _measured, layers, options.rounds, hosts=(PER_HOST, INSIDE, BETWEEN))
        once, levels = found["at once"], found["by levels"]
        assert once["losses"] == levels["losses"] or max(
            abs(a - b) for a, b in zip(once["losses"], levels["losses"], strict=True)
        ) < 1e-5 * max(once["losses"]), "the two ways have different numbers"
        seconds = [statistics.median(way["seconds"]) for way in (once, levels)]
        predicted = once["predicted"] / levels["predicted"]
        between = f"{once['between']:,} → {levels['between']:,}"
        late = ", ".join(f"{statistics.median(way['late']):.1%}" for way in (once, levels))
        lines.append(
            f"{name:40}{seconds[0] * 1e3:10.0f}{seconds[1] * 1e3:12.0f}{seconds[0] / seconds[1]:8.2f}{predicted:12.2f}"
            f"{between:>24}{late:>12}"
        )
    return "\n".join(lines) + "\n"


class Layers(torch.nn.Module):
    """Layers of 1 MiB; a batch of one row a rank makes next to nothing to compute."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _measured(layers: int, rounds: int) -> dict[str, dict[str, Any]]:
    """The seconds and losses of steps at once and level by level, in turns."""
    steps: dict[str, Any] = {}
    x = torch.randn(RANKS, 512, generator=torch.Generator().manual_seed(1))
    for name in ("at once", "by levels"):
        torch.manual_seed(0)
        parallel = autopar.parallelize(Layers(layers), autopar.Mesh(dp=RANKS), "ddp", machine=ON)
        if name == "at once":
            compiler = parallel.compiler
            parallel._calls.compiler = replace(
                compiler, machine=AT_ONCE, planner=replace(compiler.planner, machine=AT_ONCE, hosts=None)
            )
        steps[name] = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1e-2))
        steps[name].capture(x)
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": [], "losses": [], "late": [], "predicted": step.communication.makespan,
               "between": bytes_between(step)}
        for name, step in steps.items()
    }  # fmt: skip
    wire: Any = autopar.runtime.wire.emulate.present()
    for k in range(WARM + rounds):
        for name, step in steps.items():
            distributed.barrier()
            wire.reset()
            begun = now()
            found[name]["losses"].append(float(step(x)))
            if k >= WARM:
                found[name]["seconds"].append(max(together(now() - begun)))
                found[name]["late"].append(wire.report().share_late)
    return found


def bytes_between(step: Any) -> int:
    """The bytes of a rank's collectives between hosts in one step."""
    programs = (step.program.micro, step.program.update)
    return sum(bytes_between_hosts(program, ON) for program in programs)
