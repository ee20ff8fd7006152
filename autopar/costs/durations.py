"""Return the seconds of each op and transfer of an explicit program: by a machine's figures, or measured.

    found = durations(program, "profile.json")       # or a machine, its name or file
    found.seconds["mm_1"], found.seconds["mm_1_tp"], found.startup["mm_1_tp"]

All scheduling takes its durations from here. They are those of the largest pieces, a pure function of the program and
the figures, and so the same on all ranks. Linear in the graph.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from autopar.costs.calls import EXCHANGE, kind_of
from autopar.costs.machine import Machine, machine_from
from autopar.costs.prices import step_price
from autopar.costs.profile import Profile
from autopar.costs.program_price import node_prices
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, name_of, operands, tensor_type
from autopar.ir.program import Program
from autopar.torch_private import aten

ADD = aten.add.Tensor


@dataclass(frozen=True)
class Durations:
    """The seconds of the ops and transfers of a program.

    Attributes:
        seconds: value → the seconds of the op that computes it; 0 for elements of results with several values.
        startup: value → θ, the start-up seconds of an exchange, which each further chunk costs again. It is 0 for ops
            and local transfers, and at most ``seconds``.
        launch: the seconds of launching one call.
        interference: how much slower ops compute while a collective runs: 0.5 means 1.5 times as long.
        source: where the figures are from, in words.
        start: the seconds of the host for each start of a collective, where the host computes itself.
    """

    seconds: Mapping[str, float] = field(repr=False)
    startup: Mapping[str, float] = field(repr=False)
    launch: float
    interference: float
    source: str
    start: float = 0.0

    def together(self, names: Collection[str]) -> float:
        """Return the seconds of one kernel that does the work of several ops with a single launch.

        An optimizer updates many parameters in this way. The work of each op is its seconds without a launch, and at
        least 0.
        """
        longest = max((self.seconds[name] for name in names), default=0.0)
        work = sum(max(self.seconds[name] - self.launch, 0.0) for name in names)
        return max(longest, work + self.launch) if names else 0.0

    @property
    def digest(self) -> str:
        """The digest of all figures: equal durations have equal digests."""
        figures = json.dumps([dict(self.seconds), dict(self.startup), self.launch, self.interference, self.start],
                             sort_keys=True)  # fmt: skip
        return hashlib.blake2b(figures.encode(), digest_size=16).hexdigest()


def durations(
    program: Program, source: Machine | Profile | str | Path, *, zeros: Iterable[str] = (), strict: bool = True
) -> Durations:
    """Return the seconds of each op and transfer of an explicit program. Linear in the graph.

    Args:
        source: a machine or a profile, or the name of a machine, or the path of a file of either.
        zeros: the names of states that begin as zeros, as sums of gradients do in the first micro-batch. Adding to one
            takes no time, because the first gradient takes the place of the sum.
        strict: whether to refuse a profile of another program; else equal calls have its times.

    Raises:
        ProfileError: the profile belongs to another program, or has no time of a call.
        ValueError: the program is not explicit, or there is no machine of that name, or its file is malformed.
        OSError: a file cannot be read.
        TypeError: ``source`` is neither.
    """
    return durations_by(program, figures_from(source), zeros, strict)


def durations_by(program: Program, figures: Machine | Profile, zeros: Iterable[str], strict: bool) -> Durations:
    """Return ``durations`` by figures that are known to be sound."""
    free = dict.fromkeys((node.name for node in program.nodes if is_getitem(node)), 0.0)
    free |= dict.fromkeys(free_additions(program, frozenset(zeros)), 0.0)
    if isinstance(figures, Profile):
        rows = figures.rows_of(program, strict=strict)
        seconds = {node.name: row.seconds for node, row in rows}
        startup = {node.name: row.startup for node, row in rows}
        words = f"{figures.name}, measured on {figures.measured_on}"
        return Durations({**seconds, **free}, {**startup, **dict.fromkeys(free, 0.0)}, figures.launch,
                         figures.interference, words, figures.machine.start)  # fmt: skip
    prices = list(node_prices(program, figures))
    seconds = {node.name: cost / 1e9 for node, cost in prices}
    startup = {node.name: min(startup_of(node, figures), seconds[node.name]) for node, _ in prices}
    return Durations({**seconds, **free}, {**startup, **dict.fromkeys(free, 0.0)}, figures.memory.latency,
                     figures.interference, f"the figures of {figures.name}", figures.start)  # fmt: skip


def startup_of(node: fx.Node, machine: Machine) -> float:
    """Return the start-up seconds θ of a node of an explicit program: the price of its transfer without bytes.

    It is 0 for ops and local transfers.
    """
    if kind_of(node) != EXCHANGE:
        return 0.0
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    source, result = tensor_type(operands(node)[0]), tensor_type(node)
    return step_price(node.target, source, arguments, result, machine, empty=True)


def figures_from(source: Machine | Profile | str | Path) -> Machine | Profile:
    """Return a machine or a profile that is given by itself, by the name of a machine, or by the path of a file.

    Errors are those of ``durations``.
    """
    if isinstance(source, Profile):
        return source
    if isinstance(source, (str, Path)) and Path(source).is_file() and _has_rows(Path(source)):
        return Profile.load(source)
    return machine_from(source)


def _has_rows(path: Path) -> bool:
    """Return whether a file is JSON with ``rows``, as profiles are and machines are not. Damage is reported later."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "rows" in content


def free_additions(program: Program, zeros: frozenset[str]) -> list[str]:
    """Return the values of the additions to states that begin as zeros, where nothing else reads the state."""
    return [
        next(iter(node.users)).name
        for node in program.placeholders
        if name_of(node) in zeros and len(node.users) == 1 and _adds_to(next(iter(node.users)), node)
    ]


def _adds_to(sum: fx.Node, state: fx.Node) -> bool:
    """Return whether a value is a state plus another value."""
    return sum.target is ADD and operands(sum)[0] is state and operands(sum)[1:] not in ([], [state]) and not sum.kwargs
