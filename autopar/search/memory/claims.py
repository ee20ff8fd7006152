"""Walk over a traced program, and claim the memory of each of its values for each state of the search's variables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import fx

from autopar.ir.layout import DistAttr, largest
from autopar.ir.nodes import element_of, is_getitem, name_of, operands, record_of, tensor_type
from autopar.plan.boundary import gradient_sums, required_dtypes
from autopar.search.memory.in_place import begins_as_zero, operand_in_place
from autopar.search.memory.memory import Claim, Gathered, MemoryModel
from autopar.search.problem.ending import Ending
from autopar.search.problem.problem import Problem, Value
from autopar.search.solver.factor_graph import Array, Interned
from autopar.search.transfer_prices.chains import State
from autopar.search.transfer_prices.classes import UNREAD


def memory_model(problem: Problem, ending: Ending | None = None) -> MemoryModel:
    """Return the claims of a problem. Linear in the program."""
    return _Walk(problem, ending).run()


@dataclass
class _Read:
    """One use of a value: the bytes that it reads, for each state of a variable."""

    position: int
    phase: str
    variable: int
    bytes: Array


@dataclass
class _Held:
    """A value, which is in memory of its own or in that of another one.

    Attributes:
        full: the bytes of its memory, for each state of its variable.
        kept: what is held at least once it has been read: a reduction or a narrowing cast may have taken its place.
        least: what is held at least where uses of the same phase follow, which may share any transfers.
        group: the values in the same memory, in their order.
    """

    variable: int
    full: Array
    kept: Array
    least: Array
    first: int
    group: list[_Held] = field(default_factory=list)
    reads: list[_Read] = field(default_factory=list)

    @property
    def last(self) -> int:
        return max((read.position for read in self.reads), default=self.first)

    def behind(self, position: int) -> Array:
        """Return the bytes that are held behind a position, while uses follow."""
        phases = {read.phase for read in self.reads if read.position <= position}
        if not phases:
            return self.full
        anew = any(read.phase not in phases for read in self.reads if read.position > position)
        return self.kept if anew else self.least


class _Walk:
    """Collects the values with their uses, and then claims the memory of each group of values.

    Attributes:
        held: (node, index of the result) → the value, if memory is counted for it.
        expanded: results of ``expand``, and views of them: their memory is smaller than they are.
    """

    def __init__(self, problem: Problem, ending: Ending | None) -> None:
        self.problem, self.ending, self.mesh = problem, ending, problem.mesh
        self.nodes = list(problem.program.nodes)
        self.end = len(self.nodes) - 1
        self.begin = next((k for k, n in enumerate(self.nodes) if n.op == "call_function"), self.end)
        self.sums = gradient_sums(problem.program)
        self.claims: list[Claim] = []
        self.gathered: dict[int, list[Gathered]] = {}
        self.held: dict[tuple[fx.Node, int], _Held] = {}
        self.staying: dict[fx.Node, Array] = {}  # what the caller holds → its bytes
        self.expanded: set[fx.Node] = set()
        self._intern = Interned()
        self._known: dict[object, Array] = {}
        self._tables: dict[object, tuple[Array, Array, Array]] = {}

    def run(self) -> MemoryModel:
        for position, node in enumerate(self.nodes):
            if node.op in ("placeholder", "get_attr"):
                self._placeholder(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._read(node, position)
                self._make(node, position)
        self._results()
        for held in self.held.values():
            if held.group and held.group[0] is held:
                self._claim(held.group)
        return MemoryModel(self.claims, self.end + 1, self.gathered)

    # -- placeholders ------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> None:
        record, variable, ending = record_of(node), self.problem.variables[node], self.ending
        full = self._bytes(tensor_type(node).shape, self.problem.value(node).states)
        held = _Held(variable, full, full, full, self.begin - 1)
        copied = ending is not None and name_of(node) in ending.kept
        if node in self.sums:
            if not begins_as_zero(ending):
                held.group = [held]
            self.held[node, 0] = held
        elif record.role == "tangent" or copied:
            held.group = [held]
            self.held[node, 0] = held
        elif record.role != "seed":
            times = ending.microbatches if ending is not None and record.role == "input" else 1
            self._stays(variable, full * times)
            self.staying[node] = full
        if ending is not None and record.role == "param":
            self._states(node, variable, ending)

    def _states(self, node: fx.Node, variable: int, ending: Ending) -> None:
        """Claim what the optimizer keeps of a parameter."""
        name, shape = name_of(node), tensor_type(node).shape
        kept = [*ending.states.get(name, ())]
        if name in ending.kept:
            kept.append(replace(tensor_type(node), dtype=ending.kept[name]))
        chosen = self.problem.chosen_states.get(node)
        if chosen is not None:
            variable, layouts = chosen.variable, chosen.layouts
        else:
            layouts = [ending.state_of(home, shape) for home in self.problem.homes[variable]] if kept else []
        for type in kept:
            whole = DistAttr.replicated(len(type.shape))
            own = [(attr if type.shape == shape else whole, type.dtype) for attr in layouts]
            self._stays(variable, self._bytes(type.shape, own))

    def _stays(self, variable: int, bytes: Array) -> None:
        self.claims.append(Claim(variable, self._intern(bytes), 0, self.end))

    # -- ops ---------------------------------------------------------------------------------------------------------

    def _of(self, node: fx.Node) -> _Held | None:
        return self.held.get(element_of(node) if is_getitem(node) else (node, 0))

    def _dtypes(self, node: fx.Node) -> tuple[torch.dtype, ...]:
        return required_dtypes(record_of(node), [self.problem.value(operand).type for operand in operands(node)])

    def _read(self, node: fx.Node, position: int) -> None:
        variable, phase = self.problem.variables[node], record_of(node).phase
        for k, (operand, dtype) in enumerate(zip(operands(node), self._dtypes(node), strict=True)):
            read = _Read(position, phase, variable, self._needs(node, k, operand, dtype))
            if operand in self.staying and operand not in operands(node)[:k]:
                self._gather(position, self.problem.variables[operand], self.staying[operand], read)
            elif (held := self._of(operand)) is not None:
                held.reads.append(read)

    def _gather(self, position: int, value: int, homes: Array, read: _Read) -> None:
        """Count the copy that an op reads of a value that stays, if the copy is larger: others may be views of it.

        Args:
            value: the variable of the value.
            homes: its bytes, infinite where a copy may take its place.
        """
        key = ("gathered", id(homes), id(read.bytes))
        if key not in self._tables:
            own, left = np.unique(homes, return_inverse=True)
            needed, right = np.unique(read.bytes, return_inverse=True)
            bytes = np.where(needed[None, :] > own[:, None], needed[None, :], 0.0)
            self._tables[key] = left, right, bytes
        left, right, bytes = self._tables[key]
        if bytes.any() and value != read.variable:
            self.gathered.setdefault(position, []).append(Gathered(value, read.variable, left, right, bytes))

    def _make(self, node: fx.Node, position: int) -> None:
        k = operand_in_place(node, self.sums, self.ending)
        under = None if k is None else self._of(operands(node)[k])
        if k is not None and under is None:
            return  # a view of what stays
        for part in range(len(parts) if isinstance(parts := record_of(node).type, tuple) else 1):
            value = self.problem.values.get((node, part))
            if value is None:
                continue
            own, kept, least = self._results_of(node, part, value)
            if k is None or under is None:
                held = _Held(value.variable, own, kept, least, position)
                held.group = [held]
            else:
                memory = self._memory(node, k)
                kept = self._intern(np.where(kept < own, np.minimum(kept, memory), memory))
                least = self._intern(np.minimum(least, memory))
                held = _Held(value.variable, memory, kept, least, position, under.group)
                under.group.append(held)
            self.held[node, part] = held

    def _memory(self, node: fx.Node, k: int) -> Array:
        """Return the bytes of the operand in whose memory a result is."""
        operand = operands(node)[k]
        memory = self._needs(node, k, operand, self._dtypes(node)[k])
        if operand in self.expanded or str(node.target).startswith("aten.expand"):
            self.expanded.add(node)
        return memory

    def _needs(self, node: fx.Node, k: int, operand: fx.Node, dtype: torch.dtype) -> Array:
        """Return the bytes of an operand as each strategy reads it."""
        placed, shape = self.problem.placed[self.problem.variables[node]], tensor_type(operand).shape
        source = operand.args[0] if is_getitem(operand) else operand
        if source in self.expanded:
            return self._intern(np.zeros(len(placed)))
        key = ("needs", id(placed), k, shape, dtype)
        if key not in self._known:
            self._known[key] = self._bytes(shape, [(p.needs[k], dtype) for p in placed])
        return self._known[key]

    def _results_of(self, node: fx.Node, part: int, value: Value) -> tuple[Array, Array, Array]:
        """Return the bytes of a result, of what is kept of it, and the least of any layout."""
        narrowest = _narrowest(value)
        key = (id(self.problem.placed[value.variable]), part, value.type.shape, value.type.dtype, narrowest)
        if ("own", key) not in self._known:
            shape, states = value.type.shape, value.states
            own = self._bytes(shape, states)
            smaller = np.array([self.mesh.count(axis for axis, _ in attr.pending) for attr, _ in states])
            kept = np.floor(own / smaller * (narrowest / value.type.dtype.itemsize))
            piece = math.floor(math.prod(shape) * narrowest / self.mesh.size)
            self._known["own", key] = own
            self._known["kept", key] = self._intern(kept)
            self._known["least", key] = self._intern(np.minimum(kept, piece))
        own, kept, least = (self._known[kind, key] for kind in ("own", "kept", "least"))
        return own, kept, least

    def _bytes(self, shape: tuple[int, ...], states: Sequence[State]) -> Array:
        sizes = [0 if a == UNREAD else largest(a, shape, self.mesh) * dtype.itemsize for a, dtype in states]
        return self._intern(np.array(sizes, dtype=np.float64))

    # -- results -----------------------------------------------------------------------------------------------------

    def _results(self) -> None:
        """Read what the program returns: at its end, and what the forward returns also at the end of the forward."""
        turn = next((k for k, n in enumerate(self.nodes) if record_of(n).phase == "backward"), self.end)
        output = self.problem.program.output
        rows = zip(operands(output), self.problem.results, record_of(output).results, strict=True)
        for node, (value, home, own, dtype), result in rows:
            held = self._of(node)
            if held is None:
                continue
            if home is None:
                variable, bytes = value.variable, self._bytes(value.type.shape, own)
            else:
                variable = home
                bytes = self._bytes(value.type.shape, [(attr, dtype) for attr in self.problem.homes[home]])
            if result.kind != "grad" and record_of(node).phase == "forward" and turn < self.end:
                held.reads.append(_Read(max(turn, held.first), "forward", variable, bytes))
            held.reads.append(_Read(self.end, "backward" if turn < self.end else "forward", variable, bytes))

    # -- claims ------------------------------------------------------------------------------------------------------

    def _claim(self, group: Sequence[_Held]) -> None:
        """Claim the memory of a group, at each position for one of its values."""
        begin = len(self.claims)
        events = sorted({position for held in group for position in (held.first, *(r.position for r in held.reads))})
        base = group[0]
        for at, after in itertools.zip_longest(events, events[1:]):
            across = next((held for held in group if held.first < at < held.last), None)
            dying = next(
                (read for held in group if held.first < at for read in held.reads if read.position == at), None
            )
            if across is not None:
                self._add(begin, across.variable, across.behind(at), at, at)
                read = next((read for read in across.reads if read.position == at), None)
                if read is not None and across.behind(at) is across.kept:
                    stays = self._intern(np.where(across.kept == across.full, across.full, math.inf))
                    self._gather(at, across.variable, stays, read)
            elif at == base.first:
                self._add(begin, base.variable, base.full, at, at)
            elif dying is not None:
                self._add(begin, dying.variable, dying.bytes, at, at)
            if after is not None and after > at + 1:
                alive = next((held for held in group if held.first <= at and held.last >= after), None)
                if alive is not None:
                    self._add(begin, alive.variable, alive.behind(at), at + 1, after - 1)

    def _add(self, begin: int, variable: int, bytes: Array, first: int, last: int) -> None:
        """Add a claim, or prolong the latest one of the group."""
        first = max(first, self.begin)
        if last < first:
            return
        latest = self.claims[-1] if len(self.claims) > begin else None
        if latest is not None and latest.variable == variable and latest.bytes is bytes and latest.last + 1 == first:
            self.claims[-1] = latest._replace(last=last)
        else:
            self.claims.append(Claim(variable, bytes, first, last))


def _narrowest(value: Value) -> int:
    """Return the bytes of an element in the narrowest dtype to which a value is cast for good."""
    sizes = [dtype.itemsize for reader in value.readers for _, dtype in reader.states[:1]] if value.computed else []
    return min([value.type.dtype.itemsize, *sizes])
