"""Estimate the memory of a plan on the rank with the largest pieces, with the copies that transfers make.

The walk is that of ``report.liveness`` over the explicit program of the plan, which is not made for it. What a runtime
adds is not counted: buckets, buffers of collectives, and collectives that start early.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.ir import transfers
from autopar.ir.layout import DistAttr, largest
from autopar.ir.nodes import element_of, is_getitem, name_of, operands, record_of, tensor_type
from autopar.plan.boundary import gradient_sums, required_dtypes
from autopar.report.liveness import KINDS, OF_ROLE
from autopar.search.memory.in_place import begins_as_zero, operand_in_place, sum_of
from autopar.search.problem.ending import Ending
from autopar.search.problem.problem import Problem, Reader, Value
from autopar.search.transfer_prices.chains import State
from autopar.search.transfer_prices.sharing import Path

FOREVER = 2**62


@dataclass(frozen=True)
class Usage:
    """The peak of a plan.

    Attributes:
        bytes: of one rank.
        phase: ``forward``, ``backward`` or ``update``.
        kinds: parameters, activations, … → bytes at the peak, the most first.
        source, module: the user's line at the peak, and its module.
        position: of the op at the peak among the nodes of the program; of the output for the update.
    """

    bytes: int
    phase: str
    kinds: Mapping[str, int]
    source: str = ""
    module: str = ""
    position: int = -1


def usage_of(problem: Problem, states: Sequence[int], ending: Ending | None = None) -> Usage:
    """Return the peak of an assignment. Linear in the program."""
    return _Walk(problem, [int(state) for state in states], ending).run()


@dataclass(eq=False)
class _Storage:
    bytes: int
    kind: str
    born: int
    dies: int

    def read(self, tick: int) -> None:
        self.dies = max(self.dies, tick)


@dataclass
class _Copies:
    """The copies of a value, by the transfers that make them; ``()`` stands for the value itself.

    Attributes:
        paths: the transfers before each use.
    """

    value: Value
    home: State
    made: dict[Path, _Storage]
    paths: dict[int, Path] = field(default_factory=dict)  # id of the reader →


class _Walk:
    """Runs over the program; each op and each transfer is a tick."""

    def __init__(self, problem: Problem, states: Sequence[int], ending: Ending | None) -> None:
        self.problem, self.states, self.ending, self.mesh = problem, states, ending, problem.mesh
        self.chains, self.reduced = problem.chains, problem.views_of_reduced(states)
        self.sums = gradient_sums(problem.program)
        self.storages: list[_Storage] = []
        self.copies: dict[tuple[fx.Node, int], _Copies] = {}
        # the phase of each tick, and the op that it is for; the first one is before all ops
        self.ticks: list[tuple[str, fx.Node]] = [("forward", problem.program.output)]

    def run(self) -> Usage:
        turned = False
        for node in self.problem.program.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._placeholder(node)
            elif node.op == "call_function" and not is_getitem(node):
                if not turned and record_of(node).phase == "backward":
                    turned = True
                    self._results(node, early=True)
                self._op(node)
        output = self.problem.program.output
        if not turned:
            self._results(output, early=True)
        self._results(output, early=False)
        return self._peak()

    # -- values ------------------------------------------------------------------------------------------------------

    def _size(self, shape: tuple[int, ...], state: State) -> int:
        return largest(state[0], shape, self.mesh) * state[1].itemsize

    def _store(self, bytes: int, kind: str, born: int, dies: int) -> _Storage:
        self.storages.append(_Storage(bytes, kind, born, dies))
        return self.storages[-1]

    def _add(self, key: tuple[fx.Node, int], storage: _Storage) -> None:
        value = self.problem.values[key]
        self.copies[key] = _Copies(value, value.states[self.states[value.variable]], {(): storage})

    def _placeholder(self, node: fx.Node) -> None:
        record, value, ending = record_of(node), self.problem.value(node), self.ending
        bytes = self._size(value.type.shape, value.states[self.states[value.variable]])
        name, kind = name_of(node), OF_ROLE.get(record.role, "inputs")
        if node in self.sums:
            self._add((node, 0), self._store(0 if begins_as_zero(ending) else bytes, "gradients", 0, 0))
            return
        copied = ending is not None and name in ending.kept
        times = ending.microbatches if ending is not None and record.role == "input" else 1
        stays = record.role not in ("tangent", "seed") and not copied
        self._add((node, 0), self._store(bytes * times, kind, 0, FOREVER if stays else 0))
        if ending is not None and record.role == "param":
            self._kept(node, value, ending)

    def _kept(self, node: fx.Node, value: Value, ending: Ending) -> None:
        name, shape = name_of(node), value.type.shape
        layout = self.problem.state_of(node, self.states)
        for type in ending.states.get(name, ()):
            pieces = largest(layout, shape, self.mesh) if type.shape == shape else math.prod(type.shape)
            self._store(pieces * type.dtype.itemsize, "optimizer state", 0, FOREVER)
        if name in ending.kept:
            self._store(self._size(shape, (layout, ending.kept[name])), "parameters", 0, FOREVER)

    # -- ops and transfers -------------------------------------------------------------------------------------------

    def _tick(self, phase: str, node: fx.Node) -> int:
        self.ticks.append((phase, node))
        return len(self.ticks) - 1

    def _op(self, node: fx.Node) -> None:
        record, variable = record_of(node), self.problem.variables[node]
        placed, read = self.problem.placed[variable][self.states[variable]], operands(node)
        dtypes = required_dtypes(record, [self.problem.value(operand).type for operand in read])
        used = []
        for operand, attr, dtype in zip(read, placed.needs, dtypes, strict=True):
            used.append(self._moved(operand, variable, (attr, dtype), record.phase, node))
        tick = self._tick(record.phase, node)
        for storage in used:
            storage.read(tick)
        if placed.inside is not None:
            self._store(placed.inside.bytes, "activations", tick, tick)
        k = operand_in_place(node, self.sums, self.ending)
        shared, kind = None if k is None else used[k], "activations"
        if sum_of(node, self.sums) is not None:
            kind = "gradients"
            if shared is not None:
                shared.kind = kind
        for part in range(len(parts) if isinstance(parts := record.type, tuple) else 1):
            value = self.problem.values.get((node, part))
            if value is not None:
                bytes = self._size(value.type.shape, value.states[self.states[variable]])
                self._add((node, part), shared or self._store(bytes, kind, tick, tick))

    def _moved(self, operand: fx.Node, variable: int, need: State, phase: str, node: fx.Node) -> _Storage:
        """Return the copy of a value that a use reads; make it if no use before has done so."""
        copies = self.copies[element_of(operand) if is_getitem(operand) else (operand, 0)]
        value, state = copies.value, self.states[variable]
        reader = next(r for r in value.readers if r.variable == variable and r.states[state] == need)
        path = self._path(copies, reader)
        before: Path = ()
        for k in range(1, len(path) + 1):
            if path[:k] not in copies.made:
                tick, source = self._tick(phase, node), copies.made[before]
                source.read(tick)
                copies.made[path[:k]] = self._made(copies, path[:k], source, tick)
            before = path[:k]
        return copies.made[path]

    def _path(self, copies: _Copies, reader: Reader) -> Path:
        if not copies.paths:
            paths = copies.value.paths(self.chains, self.states, self.reduced)
            copies.paths.update(zip(map(id, copies.value.readers), paths, strict=True))
        return copies.paths[id(reader)]

    def _made(self, copies: _Copies, path: Path, source: _Storage, tick: int) -> _Storage:
        step, value = path[-1], copies.value
        before = path[-2].state if len(path) > 1 else copies.home
        if step.function is transfers.all_reduce and source.born > 0 and self._reads_alone(copies, path):
            return source
        if step.function is transfers.slice and _is_of_rows(before[0], step.state[0]):
            return source
        return self._store(self._size(value.type.shape, step.state), "transfers", tick, tick)

    def _reads_alone(self, copies: _Copies, path: Path) -> bool:
        """Return whether no other transfer and no op reads the operand of the last transfer."""
        paths = [self._path(copies, reader) for reader in copies.value.readers]
        return all(p[: len(path)] == path for p in paths if p[: len(path) - 1] == path[:-1])

    def _results(self, at: fx.Node, *, early: bool) -> None:
        """Move the results of the forward at its end, or the others at the end of the program."""
        output = self.problem.program.output
        rows = zip(operands(output), self.problem.results, record_of(output).results, strict=True)
        begins = next((p for p, _ in self.ticks[1:]), "forward")
        for node, (value, home, own, dtype), result in rows:
            if early != (result.kind != "grad" and record_of(node).phase == "forward" == begins):
                continue
            variable = value.variable if home is None else home
            need = own[self.states[variable]] if home is None else (self.problem.homes[home][self.states[home]], dtype)
            storage = self._moved(node, variable, need, "forward" if early else "backward", at)
            storage.read(FOREVER)
            if result.kind == "grad" and storage.kind in ("activations", "transfers"):
                storage.kind = "gradients"

    # -- the peak ----------------------------------------------------------------------------------------------------

    def _peak(self) -> Usage:
        changes = [0] * (len(self.ticks) + 2)
        for storage in self.storages:
            changes[storage.born] += storage.bytes
            changes[min(storage.dies, len(self.ticks)) + 1] -= storage.bytes
        held, total = [], 0
        for change in changes[:-1]:
            total += change
            held.append(total)
        peak = max(range(min(1, len(held) - 1), len(held)), key=held.__getitem__)
        phase, node = self.ticks[min(peak, len(self.ticks) - 1)]
        output = self.problem.program.output
        live = [storage for storage in self.storages if storage.born <= peak <= storage.dies]
        kinds = {kind: sum(s.bytes for s in live if s.kind == kind) for kind in KINDS}
        bytes = held[peak]
        if self.ending is not None:
            last = [storage for storage in self.storages if storage.dies == FOREVER]
            extra = self._update(self.ending)
            if sum(storage.bytes for storage in last) + extra > bytes:
                phase, node, bytes = "update", output, sum(storage.bytes for storage in last) + extra
                kinds = {kind: sum(s.bytes for s in last if s.kind == kind) for kind in KINDS}
                kinds["transfers"] += extra
        kinds = dict(sorted(((k, n) for k, n in kinds.items() if n), key=lambda row: -row[1]))
        record, position = record_of(node), list(self.problem.program.nodes).index(node)
        return Usage(bytes, phase, kinds, record.source, record.module, position)

    def _update(self, ending: Ending) -> int:
        """Return what the update needs beside what is there when it begins.

        Reduced gradients take the place of the sums one by one. Then parameters that are not in the layout of the
        optimizer's state are gathered one by one, and the new ones are beside the old ones until the end.
        """
        more, most, gathered = 0, 0, 0
        for sum_, parameter in self.sums.items():
            if parameter is None or name_of(parameter) not in ending.updates:
                continue
            type, name = tensor_type(parameter), name_of(parameter)
            home, state = self._home(parameter), self.problem.state_of(parameter, self.states)
            own, need = (self._home(sum_), tensor_type(sum_).dtype), (state, tensor_type(sum_).dtype)
            if own != need:
                reduced = self._size(type.shape, need)
                most = max(most, more + reduced)
                more += reduced - self._size(type.shape, own)
            if home != state and name not in ending.kept:
                gathered += self._size(type.shape, (home, type.dtype)) + self._size(type.shape, (state, type.dtype))
        return max(most, more + gathered)

    def _home(self, node: fx.Node) -> DistAttr:
        variable = self.problem.variables[node]
        return self.problem.homes[variable][self.states[variable]]


def _is_of_rows(before: DistAttr, after: DistAttr) -> bool:
    """Return whether a slice takes rows of dim 0, which lie side by side."""
    return before.dims[1:] == after.dims[1:] and len(before.dims[0]) == len(after.dims[0]) == 1
