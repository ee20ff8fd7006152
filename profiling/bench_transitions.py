"""Transitions between pairs of Layouts: steps, bytes and planning time, against a lower bound and DTensor's planners.

MiB are what the worst rank receives, f32, counted for all by ``transfers.received``; DTensor's plans are read as
transfers, and must lead to the target. The bound is counted element by element, from what each rank holds and wants.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, groupby
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import distributed

# no public way to a plan without running it; tried on 2.13
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar import boxes, cost, dtensor, layout, machine, mesh, transfers, transitions
from autopar.layout import DistAttr, Layout
from autopar.mesh import Mesh
from autopar.record import TensorType
from autopar.text.printer import print_dims, print_pending

LINES = [transitions._cheapest, transitions._exchange]
MIB = 2**20
AIM, NEW, AGAIN = 1.05, 2e-3, 5e-6  # of bytes over the bound; seconds to plan a new pair, and one planned before

# by axis of the mesh, as DTensor does: split of a dim, replicated, partial; S0.2 S0.1: tp is the major split of dim 0
PLANE = Mesh(dp=8, tp=8), (8192, 8192), """
    S0 S1 > S1 S0 | S0 R > R S0 | S0 S0 > S0.2 S0.1 | S0 S1 > R R | R R > S0 S1 | S0 R > S1 R | S0 R > R S1 | S0 R > S1 S0
    S0 S1 > S0 S0 | S0 S1 > S0.2 S0.1 | S0 S1 > R S0 | S0 S1 > S1 R | S0 S0 > S0 S1 | S0 S0 > S1 S0 | S0 S0 > S1 S1
    S0 S0 > S1.2 S1.1 | S0 S0 > R S0 | S0 S0 > S0 R | R S0 > S0 S0
    R R > P R | S0 R > P R | S0 S1 > P R | S0 S1 > P S0 | R R > P P | S0 S1 > P P | S0 S0 > P P | P S0 > P S1 | P S0 > P R
    P R > R R | P R > S0 R | P R > R S0 | P R > S0 S1 | P R > R P | P S0 > R R | P S0 > R S0 | P S0 > S0 R | P S0 > S0 S0
    P S0 > S0.2 S0.1 | P S0 > S0 S1 | P S0 > S1 S0 | P S1 > S0 R | P P > R R | P P > P R | P P > S0 P | P P > S0 R | P P > R S0
    P P > S0 S1 | P P > S0 S0"""
SPACE = Mesh(a=4, b=4, c=4), (512, 512, 512), """
    S0 S1 S2 > S1 S2 S0 | S0 S1 S2 > S2 S0 S1 | S0 S1 S2 > S1 S0 S2 | S0 S1 S2 > S2 S1 S0 | S0 S1 R > S1 S0 R
    S0 S1 R > R S0 S1 | S0 R R > R R S0 | S0 S0 R > R S0 S0 | S0 S0 R > S1 R S1 | S0 S0 S1 > S1 S0 S0 | S0 S0 S0 > S1 S1 S1
    S0 S0 S0 > S0.3 S0.2 S0.1 | S0 S0 S0 > S0 S1 S2 | S0 S1 S2 > S0 S0 S0 | S0 S1 S2 > R S0 S1 | S0 S1 S2 > R R R
    S0 S1 S2 > P R R | S0 S0 S1 > P P R | P S0 S1 > P S1 S0
    P R R > R R R | P S0 R > R R S0 | P S0 S1 > S0 S1 R | P S0 S1 > S0 S1 S2 | P S0 S1 > R S1 S0 | P P R > S0 S1 R
    P P S0 > R R S0 | P P S0 > S0 R R | P P P > R R R | P P P > S0 R R | P P P > S0 S1 S2"""
LETTERS = {"all_gather": "G", "all_to_all": "A", "slice": "c", "all_reduce": "R", "reduce_scatter": "S", "pend": "p"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", default="NVIDIA H100 80GB HBM3", help="whose prices are told")
    parser.add_argument("--repeat", type=int, default=5)


# -- pairs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    mesh: Mesh
    shape: tuple[int, ...]
    text: str  # "S0 R > R S0"

    @cached_property
    def ends(self) -> tuple[TensorType, TensorType]:
        source, target = (TensorType(self.shape, torch.float32, Layout(self.mesh, self._attr(side))) for side in self.sides)
        return source, target

    @cached_property
    def sides(self) -> list[list[str]]:
        return [side.split() for side in self.text.split(">")]

    def _attr(self, side: list[str]) -> DistAttr:
        dims: list[list[str]] = [[] for _ in self.shape]
        for place, axis in sorted(zip(side, self.mesh.names, strict=True), key=lambda pair: pair[0].partition(".")[2]):
            if place[0] == "S":
                dims[int(place[1])].append(axis)
        pending = [axis for place, axis in zip(side, self.mesh.names, strict=True) if place == "P"]
        return DistAttr.split(*dims, pending=pending)

    @property
    def reduces(self) -> bool:
        return bool(self.ends[0].attr.pending)

    def __str__(self) -> str:
        return " → ".join(print_dims(self.shape, end.attr) + print_pending(end.attr) for end in self.ends)


def pairs(given: tuple[Mesh, tuple[int, ...], str]) -> list[Pair]:
    on, shape, text = given
    return [Pair(on, shape, one.strip()) for line in text.split("\n") for one in line.split("|") if one.strip()]


def bound(pair: Pair) -> float:
    """MiB that the worst rank receives at least, as the heading says; an axis that stays pending may be reduced and made anew."""
    before, after = ({axis for axis, _ in end.attr.pending} for end in pair.ends)
    both = sorted(before & after)
    kept = [set(some) for count in range(len(both) + 1) for some in combinations(both, count)]
    held, wanted = (masks(pair.mesh, end.attr, (64,) * len(pair.shape)) for end in pair.ends)  # small, and split alike
    worst = min(_bound(pair.mesh, held, wanted, before - some, after - some, some) for some in kept)
    return worst * math.prod(pair.shape) * 4 / MIB


def masks(grid: Mesh, attr: DistAttr, shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """For every rank, which elements it holds."""
    found = {}
    for rank in grid.ranks:
        found[rank] = np.zeros(shape, dtype=bool)
        found[rank][tuple(slice(a, a + n) for a, n in attr.local_parts(shape, grid, grid.coordinates(rank)))] = True
    return found


def _bound(grid: Mesh, held: dict[int, np.ndarray], wanted: dict[int, np.ndarray], reduced: set[str], new: set[str], kept: set[str]) -> float:
    """As a part of the value."""
    value = held[grid.ranks[0]].size
    ranks = grid.count(tuple(set(grid.names) - kept))
    share = value / ranks if reduced else math.inf  # of the sums, which a rank holds before it receives any
    groups: dict[tuple[int, ...], list[int]] = {}  # of ranks whose results are addends: together they need an element once
    for rank in grid.ranks:
        at = grid.coordinates(rank)
        groups.setdefault(tuple(at[axis] for axis in grid.names if axis not in new), []).append(rank)
    worst = 0.0
    for group in groups.values():
        want, have = wanted[group[0]], np.logical_or.reduce([held[rank] for rank in group])
        worst = max(worst, (want.sum() - min(len(group) * share, (have & want).sum())) / len(group))
    return (grid.count(tuple(reduced)) - 1) / ranks + worst / value


# -- plans -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Transfers, with what the worst rank receives, MiB, and their price."""

    names: list[str]
    mib: float
    seconds: float

    @staticmethod
    def of(pair: Pair, moves: list[tuple[Callable[..., Any], dict[str, Any]]], on: machine.Machine) -> Plan:
        here, goal = (replace(end, layout=Layout(pair.mesh, end.attr.normalize(pair.shape, pair.mesh))) for end in pair.ends)
        paid = seconds = 0.0
        for function, given in moves:
            after = transfers.BY_FUNCTION[function].infer(here, given, {})
            paid += transfers.received(function, here, given, after) / MIB
            seconds += cost.step_price(function, here, given, after, on)
            here = after
        if here != goal:
            raise AssertionError(f"{pair}: leads to {here}")
        return Plan([function.__name__ for function, _ in moves], paid, seconds)


def ours(pair: Pair, on: machine.Machine) -> Plan:
    return Plan.of(pair, [(step.function, dict(step.arguments)) for step in transitions.transitions(*pair.ends)], on)


class Peer:
    """DTensor's planner on one mesh of a fake process group."""

    def __init__(self, on: Mesh, flattened: bool = False) -> None:
        self.mesh = dtensor.device_mesh_of(on, "cuda")
        with mock.patch("torch.cuda.device_count", return_value=8):  # its prices ask for it
            MeshTopoInfo.build_from_mesh(self.mesh)
        names = on.names
        for some in (names, *([names[:2], names[1:]] if len(names) > 2 else [])) if flattened else ():
            self.mesh[some]._flatten()

    def specs(self, pair: Pair) -> tuple[DTensorSpec, DTensorSpec]:
        strides = torch.empty(pair.shape, device="meta").stride()
        meta = TensorMeta(torch.Size(pair.shape), strides, torch.float32)
        found = []
        for side, end in zip(pair.sides, pair.ends, strict=True):
            placements: list[Placement] = [Shard(int(p[1])) if p[0] == "S" else Partial() if p == "P" else Replicate() for p in side]
            order = tuple(
                ShardOrderEntry(d, tuple(map(pair.mesh.names.index, axes))) for d, ((_, axes),) in enumerate(end.attr.dims) if axes
            )
            found.append(DTensorSpec(self.mesh, tuple(placements), meta, shard_order=order))
        return found[0], found[1]

    def infos(self, specs: tuple[DTensorSpec, DTensorSpec], graph: bool, *, cached: bool = False) -> list[Any]:
        """As ``redistribute_local_tensor`` asks for them."""
        generate = _redistribute._gen_transform_infos if cached else _redistribute._gen_transform_infos_non_cached
        source, target = specs
        return _redistribute._optimize_transform_infos(generate(source, target, graph or None), self.mesh, source.placements, target.placements)

    def plan(self, pair: Pair, graph: bool, on: machine.Machine, *, cpu: bool = False) -> Plan | None:
        """``None`` where it refuses. On CPU it gathers and slices for an all-to-all (``shard_dim_alltoall``)."""
        moves: list[tuple[Callable[..., Any], dict[str, Any]]] = []
        for info in self.infos(self.specs(pair), graph):
            source, target = info.src_dst_placements
            axes = [pair.mesh.names[k] for k in getattr(info, "original_mesh_dims", (info.mesh_dim,))]
            axis = axes[0]
            match source, target:
                case Shard(dim=a), Shard(dim=b) if cpu:
                    moves += [(transfers.all_gather, {"dim": a, "axis": axis}), (transfers.slice, {"dim": b, "axis": axis})]
                case Shard(dim=a), Shard(dim=b):
                    moves.append((transfers.all_to_all, {"source": a, "target": b, "axis": axis}))
                case Shard(dim=a), Replicate():
                    moves += [(transfers.all_gather, {"dim": a, "axis": axis}) for axis in reversed(axes)]
                case Replicate(), Shard(dim=b):
                    moves.append((transfers.slice, {"dim": b, "axis": axis}))
                case Partial(), Replicate():
                    moves.append((transfers.all_reduce, {"axis": tuple(axes) if len(axes) > 1 else axis}))
                case Partial(), Shard(dim=b):
                    moves += [(transfers.reduce_scatter, {"dim": b, "axis": axis}) for axis in axes]
                case Replicate(), Partial():
                    moves.append((transfers.pend, {"axis": axis}))
                case _:
                    return None
        return Plan.of(pair, moves, on)


# -- times -------------------------------------------------------------------------------------------------------------


def forget() -> None:
    for module in (transitions, boxes, layout, transfers, mesh):
        for one in vars(module).values():
            if hasattr(one, "cache_clear"):
                one.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def new(function: Callable[[], Any], repeat: int) -> float:
    """Seconds of the fastest call after all caches were cleared."""
    best = spent = 0.0
    for k in range(repeat):
        forget()
        start = time.perf_counter()
        function()
        seconds = time.perf_counter() - start
        best, spent = seconds if k == 0 else min(best, seconds), spent + seconds
        if spent > 2:
            break
    return best


def again(function: Callable[[], Any], repeat: int) -> float:
    """Seconds of one of many calls, in the fastest round."""
    function()
    return min(timeit.repeat(function, number=50, repeat=repeat)) / 50


# -- what is printed ---------------------------------------------------------------------------------------------------

HEADING = """MiB: what the worst rank receives. The bound: what it needs and does not hold; for reductions, what a ring receives
that first leaves each rank an equal share of the sums, (addends - 1) / ranks of the value, and then what it needs and
has no sum of. A ratio is MiB over the bound; the aim is {aim}. µs: the plan's price on {machine}.
DTensor's steps: G all_gather, A all_to_all, c slice, R all_reduce, S reduce_scatter, p pend; as on GPUs, 8 a node, without
flattened meshes. Another order of axes than the mesh's (8192/tp/dp) it has in its private specs alone.

"""
COLUMNS = ("from → to", "bound", "ours", "MiB", "ratio", "µs", "DTensor", "MiB", "ratio", "µs", "min-cost", "MiB", "ratio", "µs")
DEFAULT, LEAST = "DTensor", "DTensor, min-cost"


def run(options: argparse.Namespace) -> str:
    logging.getLogger(_redistribute.__name__).setLevel(logging.ERROR)  # that a flattened mesh would help
    on = machine.machine(options.machine)
    found: list[Row] = []
    times: dict[str, list[tuple[float, str]]] = {}
    out = io.StringIO()
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=PLANE[0].size)
    try:
        for given in (PLANE, SPACE):
            peer, flat = Peer(given[0]), Peer(given[0], flattened=True)
            rows = []
            for pair in pairs(given):
                graphs = {DEFAULT: False, LEAST: True}
                plans = {f"{name}{there}": some.plan(pair, graph, on, cpu=there == ON_CPU) for name, graph in graphs.items()
                         for there, some in (("", peer), (ON_CPU, peer), (FLAT, flat))}  # fmt: skip
                rows.append(Row(pair, bound(pair), {"ours": ours(pair, on), **plans}))
                for name, seconds in timed(pair, peer, options.repeat):
                    times.setdefault(name, []).append((seconds, str(pair)))
            Console(file=out, width=160).print(table_of(given, rows), "")
            found += rows
    finally:
        distributed.destroy_process_group()
    shown = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    return "\n".join([HEADING.format(machine=on.name, aim=AIM) + shown, *of_bytes(found), *of_times(times)]) + "\n"


ON_CPU, FLAT = ", on CPUs", ", flattened meshes"


@dataclass(frozen=True)
class Row:
    pair: Pair
    bound: float
    plans: dict[str, Plan | None]

    def ratio(self, name: str) -> float:
        plan = self.plans[name]
        return math.nan if plan is None else plan.mib / self.bound if self.bound else math.inf if plan.mib else 1.0


def table_of(given: tuple[Mesh, tuple[int, ...], str], rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, title=f"f32[{' '.join(map(str, given[1]))}] on {given[0]}", title_justify="left", title_style="")
    for column in COLUMNS:
        left = column in ("from → to", "ours", "DTensor", "min-cost")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "ours")
    for row in rows:
        cells = [str(row.pair), f"{row.bound:.1f}"]
        for name in ("ours", DEFAULT, LEAST):
            plan = row.plans[name]
            if plan is None:
                cells += ["refused", "", "", ""]
            else:
                steps = told(plan.names) if name == "ours" else "".join(LETTERS[one] for one in plan.names)
                cells += [steps, f"{plan.mib:.1f}", f"{row.ratio(name):.2f}", f"{plan.seconds * 1e6:.0f}"]
        table.add_row(*cells)
    return table


def told(names: list[str]) -> str:
    """``2 all_gather, slice``."""
    runs = [(name, len(list(same))) for name, same in groupby(names)]
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in runs)


def of_bytes(rows: list[Row]) -> list[str]:
    lines = [""]
    for what, some in (("re-layouts", [row for row in rows if not row.pair.reduces]), ("of pending values", [row for row in rows if row.pair.reduces])):
        worst, above = max(some, key=lambda row: row.ratio("ours")), sum(row.ratio("ours") > AIM for row in some)
        said = f"missed by {above} of {len(some)}" if above else "met"
        lines.append(f"{what}: the worst ratio is {worst.ratio('ours'):.2f} ({worst.pair}); the aim is {AIM}: {said}")
    lines.append(f"\n{'ratio to the bound, where it is not 0':44}{'median':>10}{'worst':>10}{'refused':>10}{'fewer MiB':>12}{'lower price':>12}   than ours")
    for name in rows[0].plans:
        ratios = [row.ratio(name) for row in rows if row.bound and row.plans[name]]
        both = [(plan, mine) for row in rows if (plan := row.plans[name]) and (mine := row.plans["ours"])]
        counts = (len(rows) - len(both), *(sum(getattr(plan, what) < 0.999 * getattr(mine, what) for plan, mine in both) for what in ("mib", "seconds")))
        lines.append(f"{name:44}{statistics.median(ratios):10.2f}{max(ratios):10.2f}{counts[0]:10}{counts[1]:12}{counts[2]:12}")
    return lines


def of_times(times: dict[str, list[tuple[float, str]]]) -> list[str]:
    lines = [f"\n{'planning, µs, the fastest of some runs':44}{'median':>10}{'worst':>10}"]
    for name, found in times.items():
        worst, where = max(found)
        aim = {"ours, new": NEW, "ours, again": AGAIN}.get(name)
        said = "" if aim is None else f"; the aim is {aim * 1e6:.0f}: {'met' if worst <= aim else 'missed'}"
        lines.append(f"{name:44}{statistics.median(one for one, _ in found) * 1e6:10.1f}{worst * 1e6:10.1f}   {where}{said}")
    return lines


def timed(pair: Pair, peer: Peer, repeat: int) -> Iterator[tuple[str, float]]:
    specs = peer.specs(pair)
    for name, plan in (
        ("ours", lambda cached: transitions.transitions(*pair.ends)),
        (DEFAULT, lambda cached: peer.infos(specs, False, cached=cached)),
        (LEAST, lambda cached: peer.infos(specs, True, cached=cached)),
    ):
        yield f"{name}, new", new(lambda plan=plan: plan(False), repeat)
        yield f"{name}, again", again(lambda plan=plan: plan(True), repeat)
