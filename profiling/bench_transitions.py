"""Compare transitions between pairs of Layouts with a lower bound and DTensor's planners: steps, bytes, time.

All bytes are counted by ``transfers.received``; DTensor's plans are read as transfers, and must lead to the target. The
bound is counted element by element, from what each rank holds and wants. The choice by a machine's seconds is compared
with the same planners by price.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
import statistics
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any
from unittest import mock

import numpy as np
import torch
from profilers import positive
from rich.console import Console
from rich.table import Table
from torch import distributed

# no public way to a plan without running it; tried on 2.13
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar import transitions
from autopar.costs import exchanges, machine, prices
from autopar.ir import boxes, dtensor, layout, mesh, messages, transfers
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_dims, print_pending
from autopar.transitions import chain, reductions, states
from autopar.transitions import plan as planning

LINES = [planning._chosen, reductions.draft_reductions]
MIB = 2**20
AIM, NEW, AGAIN = 1.05, 2e-3, 5e-6  # of bytes over the bound; seconds to plan a new pair, and one planned before

# by axis of the mesh, as DTensor does: split of a dim, replicated, partial; S0.2 S0.1: tp is the major split of dim 0
PLANE = (
    Mesh(dp=8, tp=8),
    (8192, 8192),
    """
    S0 S1 > S1 S0 | S0 R > R S0 | S0 S0 > S0.2 S0.1 | S0 S1 > R R | R R > S0 S1 | S0 R > S1 R | S0 R > R S1 | S0 R > S1 S0 | S0 S1 > S0 S0
    S0 S1 > S0.2 S0.1 | S0 S1 > R S0 | S0 S1 > S1 R | S0 S0 > S0 S1 | S0 S0 > S1 S0 | S0 S0 > S1 S1 | S0 S0 > S1.2 S1.1 | S0 S0 > R S0
    S0 S0 > S0 R | R S0 > S0 S0 | R R > P R | S0 R > P R | S0 S1 > P R | S0 S1 > P S0 | R R > P P | S0 S1 > P P | S0 S0 > P P | P S0 > P S1
    P S0 > P R | P R > R R | P R > S0 R | P R > R S0 | P R > S0 S1 | P R > R P | P S0 > R R | P S0 > R S0 | P S0 > S0 R | P S0 > S0 S0
    P S0 > S0.2 S0.1 | P S0 > S0 S1 | P S0 > S1 S0 | P S1 > S0 R | P P > R R | P P > P R | P P > S0 P | P P > S0 R | P P > R S0
    P P > S0 S1 | P P > S0 S0""",  # noqa: E501
)
SPACE = (
    Mesh(a=4, b=4, c=4),
    (512, 512, 512),
    """
    S0 S1 S2 > S1 S2 S0 | S0 S1 S2 > S2 S0 S1 | S0 S1 S2 > S1 S0 S2 | S0 S1 S2 > S2 S1 S0 | S0 S1 R > S1 S0 R | S0 S1 R > R S0 S1
    S0 R R > R R S0 | S0 S0 R > R S0 S0 | S0 S0 R > S1 R S1 | S0 S0 S1 > S1 S0 S0 | S0 S0 S0 > S1 S1 S1 | S0 S0 S0 > S0.3 S0.2 S0.1
    S0 S0 S0 > S0 S1 S2 | S0 S1 S2 > S0 S0 S0 | S0 S1 S2 > R S0 S1 | S0 S1 S2 > R R R | S0 S1 S2 > P R R | S0 S0 S1 > P P R
    P S0 S1 > P S1 S0 | P R R > R R R | P S0 R > R R S0 | P S0 S1 > S0 S1 R | P S0 S1 > S0 S1 S2 | P S0 S1 > R S1 S0 | P P R > S0 S1 R
    P P S0 > R R S0 | P P S0 > S0 R R | P P P > R R R | P P P > S0 R R | P P P > S0 S1 S2""",  # noqa: E501
)
LETTERS = {"all_gather": "G", "all_to_all": "A", "slice": "c", "all_reduce": "R", "reduce_scatter": "S", "pend": "p"}
DEFAULT, LEAST = "DTensor", "DTensor, min-cost"
SECONDS = "ours, by seconds"
# beside the machine that is asked for; a network of a hundredth of the bandwidth and a hundred times the latency
OTHERS = ("generic", "cpu", "NVIDIA A100 80GB PCIe", "AMD Instinct MI300X", "slow network")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", default="NVIDIA H100 80GB HBM3", help="whose prices are shown")
    parser.add_argument("--repeat", type=positive, default=5)


# -- pairs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    mesh: Mesh
    shape: tuple[int, ...]
    sides: tuple[list[str], ...]  # "S0 R > R S0"

    @cached_property
    def ends(self) -> tuple[TensorType, ...]:
        return tuple(TensorType(self.shape, torch.float32, Layout(self.mesh, self._attr(side))) for side in self.sides)

    def _attr(self, side: list[str]) -> DistAttr:
        pairs = sorted(zip(side, self.mesh.names, strict=True), key=lambda pair: pair[0].partition(".")[2])
        dims = [[axis for place, axis in pairs if place.startswith(f"S{d}")] for d in range(len(self.shape))]
        return DistAttr.split(*dims, pending=[axis for place, axis in pairs if place == "P"])

    def __str__(self) -> str:
        return " → ".join(print_dims(self.shape, end.attr) + print_pending(end.attr) for end in self.ends)

    @cached_property
    def bound(self) -> float:
        """MiB that the worst rank receives at least; what stays pending is not reduced."""
        before, after = ({axis for axis, _ in end.attr.pending} for end in self.ends)
        kept = before & after
        # small, and split alike
        held, wanted = (masks(self.mesh, end.attr, (64,) * len(self.shape)) for end in self.ends)
        return least(self.mesh, held, wanted, before - kept, after - kept, kept) * math.prod(self.shape) * 4 / MIB


def pairs(given: tuple[Mesh, tuple[int, ...], str]) -> list[Pair]:
    return [
        Pair(*given[:2], tuple(side.split() for side in one.split(">")))
        for one in given[2].replace("\n", "|").split("|")
        if one.strip()
    ]


def masks(grid: Mesh, attr: DistAttr, shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """For every rank, which elements it holds."""
    found = {rank: np.zeros(shape, dtype=bool) for rank in grid.ranks}
    for rank, mask in found.items():
        mask[tuple(slice(a, a + n) for a, n in attr.local_parts(shape, grid, grid.coordinates(rank)))] = True
    return found


def least(
    grid: Mesh,
    held: dict[int, np.ndarray],
    wanted: dict[int, np.ndarray],
    reduced: set[str],
    new: set[str],
    kept: set[str],
) -> float:
    """The bound, as a part of the value, when these axes are reduced, made pending, and left pending."""
    value, ranks = held[grid.ranks[0]].size, grid.count(tuple(set(grid.names) - kept))
    share = value / ranks if reduced else math.inf  # of the sums, which a rank holds before it receives any
    # of ranks whose results are addends: together they need an element once
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in grid.ranks:
        at = grid.coordinates(rank)
        groups.setdefault(tuple(at[axis] for axis in grid.names if axis not in new), []).append(rank)
    worst = 0.0
    for group in groups.values():
        want, have = wanted[group[0]], np.logical_or.reduce([held[rank] for rank in group])
        worst = max(worst, (want.sum() - min(len(group) * share, (have & want).sum())) / len(group))
    return (grid.count(tuple(reduced)) - 1) / ranks + worst / value


# -- plans -------------------------------------------------------------------------------------------------------------


Move = tuple[Callable[..., Any], dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    names: list[str]
    mib: float
    seconds: float

    @staticmethod
    def of(pair: Pair, moves: list[Move], on: machine.Machine) -> Plan:
        here, goal = (
            replace(end, layout=Layout(pair.mesh, end.attr.normalize(pair.shape, pair.mesh))) for end in pair.ends
        )
        paid = seconds = 0.0
        for function, given in moves:
            after = transfers.BY_FUNCTION[function].infer(here, given, {})
            paid += transfers.received(function, here, given, after) / MIB
            seconds += prices.step_price(function, here, given, after, on)
            here = after
        assert here == goal, f"{pair}: leads to {here}"
        return Plan([function.__name__ for function, _ in moves], paid, seconds)


def chosen(pair: Pair, on: machine.Machine | None = None) -> list[Move]:
    """Our transfers with the fewest bytes, or with the fewest seconds of a machine."""
    return [(step.function, dict(step.arguments)) for step in transitions.transitions(*pair.ends, on)]


class Peer:
    """DTensor's planner on one mesh of a fake process group."""

    def __init__(self, on: Mesh, flattened: bool = False) -> None:
        self.mesh = dtensor.device_mesh_of(on, "cuda")
        with mock.patch("torch.cuda.device_count", return_value=8):  # its prices ask for it
            MeshTopoInfo.build_from_mesh(self.mesh)
        for some in {on.names, on.names[:2], on.names[-2:]} if flattened else ():
            self.mesh[some]._flatten()

    def specs(self, pair: Pair) -> tuple[DTensorSpec, ...]:
        meta = TensorMeta(torch.Size(pair.shape), torch.empty(pair.shape, device="meta").stride(), torch.float32)
        found: list[DTensorSpec] = []
        for side, end in zip(pair.sides, pair.ends, strict=True):
            placements = tuple(
                Shard(int(p[1])) if p[0] == "S" else Partial() if p == "P" else Replicate() for p in side
            )
            split = {d: tuple(map(pair.mesh.names.index, axes)) for d, ((_, axes),) in enumerate(end.attr.dims) if axes}
            found.append(
                DTensorSpec(
                    self.mesh, placements, meta, shard_order=tuple(ShardOrderEntry(*one) for one in split.items())
                )
            )
        return tuple(found)

    def infos(self, specs: tuple[DTensorSpec, ...], graph: bool, *, cached: bool = False) -> list[Any]:
        """As ``redistribute_local_tensor`` asks for them."""
        generate = _redistribute._gen_transform_infos if cached else _redistribute._gen_transform_infos_non_cached
        return _redistribute._optimize_transform_infos(
            generate(*specs, graph or None), self.mesh, *(spec.placements for spec in specs)
        )

    def plan(self, pair: Pair, graph: bool, on: machine.Machine, *, cpu: bool = False) -> Plan | None:
        """``None`` where it refuses. On CPU it gathers and slices for an all-to-all (``shard_dim_alltoall``)."""
        moves = self.moves(pair, graph, cpu=cpu)
        return None if moves is None else Plan.of(pair, moves, on)

    def moves(self, pair: Pair, graph: bool, *, cpu: bool = False) -> list[Move] | None:
        """The plan as transfers with their arguments."""
        moves: list[Move] = []
        for info in self.infos(self.specs(pair), graph):
            axes = [pair.mesh.names[k] for k in getattr(info, "original_mesh_dims", (info.mesh_dim,))]
            a, b = (getattr(end, "dim", None) for end in info.src_dst_placements)
            gather, cut = {"dim": a, "axis": axes[0]}, {"dim": b, "axis": axes[0]}
            if (kind := "".join(type(end).__name__[0] for end in info.src_dst_placements)) == "SP":
                return None
            moves += {
                "SS": [(transfers.all_gather, gather), (transfers.slice, cut)] if cpu
                else [(transfers.all_to_all, {"source": a, "target": b, "axis": axes[0]})],
                "SR": [(transfers.all_gather, gather | {"axis": axis}) for axis in reversed(axes)],
                "PS": [(transfers.reduce_scatter, cut | {"axis": axis}) for axis in axes],
                "PR": [(transfers.all_reduce, {"axis": tuple(axes)})],
                "RS": [(transfers.slice, cut)], "RP": [(transfers.pend, {"axis": axes[0]})],
            }[kind]  # fmt: skip
        return moves


def forget() -> None:
    """Clears the caches of both planners, but not the prices of a machine on a mesh."""
    for one in (
        one
        for module in (planning, chain, boxes, messages, layout, transfers, mesh, exchanges)
        for one in vars(module).values()
    ):
        getattr(one, "cache_clear", int)()
    states.rooms_of.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def timed(pair: Pair, peer: Peer, repeat: int, on: machine.Machine) -> Iterator[tuple[str, float]]:
    """Seconds of the fastest call after all caches were cleared, and of one of many calls in the fastest round."""
    specs = peer.specs(pair)
    plans: dict[str, Callable[[bool], Any]] = {
        "ours": lambda cached: transitions.transitions(*pair.ends),
        SECONDS: lambda cached: transitions.transitions(*pair.ends, on),
        DEFAULT: lambda cached: peer.infos(specs, False, cached=cached),
        LEAST: lambda cached: peer.infos(specs, True, cached=cached),
    }
    for name, plan in plans.items():
        yield f"{name}, new", min(timeit.repeat(lambda plan=plan: plan(False), forget, number=1, repeat=repeat))
        yield (
            f"{name}, again",
            min(timeit.repeat(lambda plan=plan: plan(True), lambda plan=plan: plan(True), number=50, repeat=repeat))
            / 50,
        )


# -- what is printed ---------------------------------------------------------------------------------------------------

HEADING = """MiB: what the worst rank receives. The bound: what it needs and does not hold; for reductions, what a ring receives
that first leaves each rank an equal share of the sums, (addends - 1) / ranks of the value, and then what it needs and
has no sum of; what stays pending is not reduced. Of what becomes pending all addends together need an element once, so
the bound is their average, which equal pieces do not always reach. A ratio is MiB over the bound; the aim is
{aim}. µs: the plan's price on {machine}.
DTensor's steps: G all_gather, A all_to_all, c slice, R all_reduce, S reduce_scatter, p pend; as on GPUs, 8 a node, without
flattened meshes. On CPUs it gathers and slices for every A (shard_dim_alltoall). Another order of axes than the mesh's
(8192/tp/dp), and a new pending axis, its planners know, but DTensor.redistribute has no word for the one and refuses the
other. Refused: its plan goes from Shard to Partial, which is "not supported yet".
"""  # noqa: E501
SECONDS_HEADING = """The choice by seconds of {machine}:
µs of its transfers, beside the choice by bytes and DTensor's plans.
"""
COLUMNS = (
    "from → to",
    "bound",
    *(one for name in ("ours", "DTensor", "min-cost") for one in (name, "MiB", "ratio", "µs")),
)
Row = tuple[Pair, dict[str, Plan | None]]


def ratio(row: Row, name: str) -> float:
    pair, plan = row[0], row[1][name]
    return math.nan if plan is None else plan.mib / pair.bound if pair.bound else math.inf if plan.mib else 1.0


def run(options: argparse.Namespace) -> str:
    logging.getLogger(_redistribute.__name__).setLevel(logging.ERROR)  # that a flattened mesh would help
    try:
        on = machine.machine(options.machine)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    found: list[Row] = []
    times: dict[str, list[tuple[float, str]]] = {}
    joint = ["", "DTensor, MiB where they are fewer with flattened meshes of neighbouring axes, which the user makes:"]
    out, by_seconds = io.StringIO(), io.StringIO()
    others = [on, *map(named, OTHERS)]
    dearer: dict[str, list[float]] = {}
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=PLANE[0].size)
    for given in (PLANE, SPACE):
        peer, flat = Peer(given[0]), Peer(given[0], flattened=True)
        rows: list[Row] = []
        for pair in pairs(given):
            plans: dict[str, Plan | None] = {
                "ours": Plan.of(pair, chosen(pair), on), SECONDS: Plan.of(pair, chosen(pair, on), on)
            }  # fmt: skip
            for name in (DEFAULT, LEAST):
                plans |= {
                    name: peer.plan(pair, name == LEAST, on),
                    f"{name} on CPUs": peer.plan(pair, name == LEAST, on, cpu=True),
                }
            if (one := plans[DEFAULT]) and (other := flat.plan(pair, False, on)) and other.mib < one.mib:
                joint.append(f"{pair}: {other.mib:.1f}")
            rows.append((pair, plans))
            for other in others:
                dearer.setdefault(other.name, []).append(more_than_peer(pair, peer, other))
            for name, seconds in timed(pair, peer, options.repeat, on):
                times.setdefault(name, []).append((seconds, str(pair)))
        Console(file=out, width=160).print(table_of(given, rows), "")
        Console(file=by_seconds, width=160).print(table_of_seconds(given, rows), "")
        found += rows
    distributed.destroy_process_group()
    shown = [HEADING.format(machine=on.name, aim=AIM), *(line.rstrip() for line in out.getvalue().splitlines())]
    shown += ["", *of_bytes(found), *joint, "", SECONDS_HEADING.format(machine=on.name)]
    shown += [line.rstrip() for line in by_seconds.getvalue().splitlines()]
    return "\n".join([*shown, *of_seconds(dearer), *of_times(times), ""])


def named(name: str) -> machine.Machine:
    """A known machine, or the H100 with a slow network."""
    if name != "slow network":
        return machine.machine(name)
    h100 = machine.machine("NVIDIA H100 80GB HBM3")
    return replace(h100, name=name, outside=machine.Link(h100.outside.latency * 100, h100.outside.bandwidth / 100))


def more_than_peer(pair: Pair, peer: Peer, on: machine.Machine) -> float:
    """Seconds of our choice by seconds over those of DTensor's fastest plan."""
    plans = [peer.plan(pair, graph, on, cpu=cpu) for graph in (False, True) for cpu in (False, True)]
    least = min([plan.seconds for plan in plans if plan is not None])
    return Plan.of(pair, chosen(pair, on), on).seconds / least


def table_of_seconds(given: tuple[Mesh, tuple[int, ...], str], rows: list[Row]) -> Table:
    names = ("ours", DEFAULT, LEAST)
    title = f"f32[{' '.join(map(str, given[1]))}] on {given[0]}"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="")
    for k, column in enumerate(("from → to", "ours, by seconds", "MiB", "µs", "by bytes", "DTensor", "min-cost")):
        table.add_column(column, justify="left" if k < 2 else "right", no_wrap=k != 1)
    for pair, plans in rows:
        mine = plans[SECONDS]
        assert mine is not None
        prices = ("refused" if plan is None else f"{plan.seconds * 1e6:.0f}" for plan in map(plans.get, names))
        table.add_row(str(pair), steps_of(mine), f"{mine.mib:.1f}", f"{mine.seconds * 1e6:.0f}", *prices)
    return table


def steps_of(plan: Plan) -> str:
    runs = [(one, len(list(same))) for one, same in groupby(plan.names)]
    return ", ".join(one if count == 1 else f"{count} {one}" for one, count in runs)


def of_seconds(dearer: dict[str, list[float]]) -> list[str]:
    lines = [f"{'price over that of DTensor’s cheapest plan':44}{'median':>10}{'worst':>10}   dearer, pairs"]
    for name, ratios in dearer.items():
        above = sum(ratio > 1 + 1e-9 for ratio in ratios)
        lines.append(f"{name:44}{statistics.median(ratios):10.2f}{max(ratios):10.2f}{above:10} of {len(ratios)}")
    return lines


def table_of(given: tuple[Mesh, tuple[int, ...], str], rows: list[Row]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        title=f"f32[{' '.join(map(str, given[1]))}] on {given[0]}",
        title_justify="left",
        title_style="",
    )
    for k, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if k in (0, 2, 6, 10) else "right", no_wrap=column != "ours")
    for row in rows:
        cells = [str(row[0]), f"{row[0].bound:.1f}"]
        for name in ("ours", DEFAULT, LEAST):
            plan = row[1][name]
            if plan is None:
                cells += ["refused", "", "", ""]
                continue
            cells.append(steps_of(plan) if name == "ours" else "".join(LETTERS[one] for one in plan.names))
            cells += [f"{plan.mib:.1f}", f"{ratio(row, name):.2f}", f"{plan.seconds * 1e6:.0f}"]
        table.add_row(*cells)
    return table


def of_bytes(rows: list[Row]) -> list[str]:
    lines = []
    for what, pending in (("of whole values", False), ("of pending values", True)):
        some = [(ratio(row, "ours"), str(row[0])) for row in rows if bool(row[0].ends[0].attr.pending) == pending]
        lines.append(
            f"{what}, {len(some)} pairs: the worst ratio is {max(some)[0]:.2f} ({max(some)[1]}); the aim is {AIM}: "
            f"{sum(one > AIM for one, _ in some)} above"
        )
    lines.append(
        f"\n{'ratio to the bound, where it is not 0':47} median     worst   refused   fewer MiB  lower price than "
        f"ours, pairs"
    )
    for name in [name for name in rows[0][1] if name != SECONDS]:
        ratios = [ratio(row, name) for row in rows if row[0].bound and row[1][name]]
        both = [(plan, plans["ours"]) for _, plans in rows if (plan := plans[name])]
        fewer, lower = (
            sum(getattr(plan, what) < 0.999 * getattr(mine, what) for plan, mine in both) for what in ("mib", "seconds")
        )
        lines.append(
            f"{name:44}{statistics.median(ratios):10.2f}{max(ratios):10.2f}{len(rows) - len(both):10}{fewer:12}"
            f"{lower:13}"
        )
    return lines


def of_times(times: dict[str, list[tuple[float, str]]]) -> list[str]:
    lines = [f"\n{'planning, µs, the fastest of some runs':44}{'median':>10}{'worst':>10}"]
    for name, found in times.items():
        worst, where = max(found)
        aim = {"ours, new": NEW, "ours, again": AGAIN}.get(name)
        said = "" if aim is None else f"; the aim is {aim * 1e6:.0f}: {sum(one > aim for one, _ in found)} above"
        lines.append(
            f"{name:44}{statistics.median(one for one, _ in found) * 1e6:10.1f}{worst * 1e6:10.1f}   {where}{said}"
        )
    return lines
