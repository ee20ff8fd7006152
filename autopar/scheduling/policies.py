"""List the policies that decide an order, each with its source."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.errors import ScheduleError, shown
from autopar.scheduling import buckets, dispatch
from autopar.scheduling.graph import Graph
from autopar.scheduling.lines import Draft
from autopar.scheduling.list_scheduling import arrange, layer_keys
from autopar.scheduling.rule import Rule

P3_SLICE = 200_000  # bytes: 50,000 parameters of float32
MOST_MESSAGES = 1_000_000  # of one schedule: more take minutes and gigabytes


@dataclass(frozen=True)
class ByteScheduler:
    """A policy with its two sizes (Peng et al., SOSP 2019).

    Attributes:
        partition: bytes; collectives are cut into pieces of this size.
        credit: bytes that may be started and not yet done.
        fused: whether all pieces that fit into the credit are one message, and pay the start-up cost once.
    """

    partition: int = 4 * 2**20
    credit: int = 16 * 2**20
    fused: bool = True

    def __post_init__(self) -> None:
        for label in ("partition", "credit"):
            value = getattr(self, label)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{label}={shown(value)} is no number of bytes")
            if value < 1:
                raise ScheduleError(f"{label}={value}; give at least 1 byte")
        if self.credit < self.partition:
            raise ScheduleError(
                f"credit={self.credit} is less than partition={self.partition}, so that no piece could start; give a "
                f"credit of at least a partition"
            )

    @property
    def rule(self) -> Rule:
        """The rule of list scheduling with these sizes."""
        if self.fused:
            window = self.credit // self.partition * self.partition
            return Rule(chunk=window, window=window, piece=self.partition, program_order=True)
        return Rule(chunk=self.partition, credit=self.credit, program_order=True)


@dataclass(frozen=True)
class Policy:
    """One policy.

    Attributes:
        title: what it does, and its source.
        order: the ops → the lines; ``None`` where ``decide`` makes them.
        by_time: whether the lines come from simulated times. Then, on a CPU, each start is moved to its operand
            (``placement.hoisted``).
    """

    title: str
    order: Callable[[Graph], Draft] | None = None
    by_time: bool = False


def by_layer(graph: Graph, rule: Rule) -> Draft:
    """Return the lines in which the collective that is read first goes first, and ops compute in program order.

    Raises:
        ScheduleError: the rule cuts the collectives into more messages than can be scheduled.
    """
    assert isinstance(rule.chunk, int)
    messages = {i: -(-graph.bytes[i] // rule.chunk) for i in graph.collectives}
    if sum(messages.values()) > MOST_MESSAGES:
        most = max(messages, key=messages.__getitem__)
        raise ScheduleError(
            f"messages of {rule.chunk:,} bytes are {sum(messages.values()):,}, the most of them for "
            f"{graph.ops[most].name!r} with {graph.bytes[most]:,} bytes; at most {MOST_MESSAGES:,} are scheduled: give "
            f"ByteScheduler(partition, credit) with larger sizes"
        )
    return arrange(graph, layer_keys(graph), rule)


POLICIES: Mapping[str, Policy] = {
    "program": Policy("the order of the ops; a collective starts where it stands", dispatch.in_order),
    "today": Policy("the order of the ops; gradients in buckets as they are computed (Li et al. 2020), gathers one "
                    "ahead (Zhao et al. 2023)", buckets.fifo),
    "communication-first": Policy("what waits for communication before other computation (PaddlePaddle before #47471)",
                                  lambda graph: dispatch.two_levels(graph, blocking_first=True)),
    "compute-first": Policy("computation before what waits for communication (PaddlePaddle #47471)",
                            lambda graph: dispatch.two_levels(graph, blocking_first=False)),
    "priorities": Policy("the user's integers, smaller first, then computation first (PaddlePaddle #49275)"),
    "ddp": Policy("gradients in buckets in the reverse order of parameters (DistributedDataParallel, Li et al. 2020)",
                  buckets.reverse),
    "p3": Policy("slices of gradients, those that are read first go first (P3, Jayarajan et al. 2019)",
                 lambda graph: by_layer(graph, Rule(chunk=P3_SLICE, program_order=True)), by_time=True),
    "bytescheduler": Policy("pieces of gradients, those that are read first go first, within a credit (ByteScheduler, "
                            "Peng et al. 2019)", lambda graph: by_layer(graph, ByteScheduler().rule), by_time=True),
    "longest-tail": Policy("what the most seconds depend on goes first; messages near √(θBS)"),
    "two-streams": Policy("the same, and late collectives in a second process group, where that is faster"),
}  # fmt: skip


def named(policy: object) -> str:
    """Return the name of a policy, or raise with the nearest one."""
    if not isinstance(policy, str):
        raise TypeError(f"a policy is a name, such as 'longest-tail', or ByteScheduler(…), not {shown(policy)}")
    if policy in POLICIES:
        return policy
    near = difflib.get_close_matches(policy.lower().replace("_", "-"), POLICIES, n=1)
    raise ScheduleError(
        f"there is no policy {shown(policy)}{f'; did you mean {near[0]!r}' if near else ''}; there are "
        f"{', '.join(POLICIES)}"
    )
