"""Edits: insert without sync, commit once.

    with program.edit() as edit:
        y = edit.all_gather(x, 0, "tp", before=user)
        edit.replace_use(user, x, y)

Nothing above touches the graph: operations are *staged*, and leaving the block materialises them and commits once. A
commit brings all metadata up to date in O(inserted) plus one linear walk: order and users are checked, inserted nodes
get their records and names, changed types are carried to the transfers that read them. It does not recompile, and runs
no fake tensors. An exception leaves the program exactly as it was, with the same node objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar import transfers
from autopar.errors import EditError
from autopar.program import (
    Program,
    element_type,
    is_getitem,
    make_node,
    map_operands,
    operands,
    record_of,
    set_record,
)
from autopar.record import Record, Requirement, TensorType, ValueType


class Staged:
    """A value that an edit will insert; it may be used in later operations of the same edit like a node."""

    __slots__ = ("target", "args", "kwargs", "type", "before", "phase", "uses", "hint", "node")

    def __init__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], type: ValueType, before: Value,
                 phase: str | None, uses: tuple[Requirement | None, ...], hint: str | None) -> None:  # fmt: skip
        self.target, self.args, self.kwargs, self.type = target, args, kwargs, type
        self.before, self.phase, self.uses, self.hint = before, phase, uses, hint
        self.node: fx.Node | None = None

    def __repr__(self) -> str:
        return self.node.name if self.node is not None else f"<staged {getattr(self.target, '__name__', self.target)}>"


Value = fx.Node | Staged


class Edit:
    """A batch of insertions, replacements and erasures on one program. See the module's text."""

    def __init__(self, program: Program, *, sync: bool = False) -> None:
        self.program = program
        self.sync = sync
        self._staged: list[tuple[Any, ...]] = []
        self._erased: list[fx.Node] = []
        self._inserted: list[fx.Node] = []  # nodes of this edit, in the order they were staged
        self._hints: dict[fx.Node, str | None] = {}
        self._records: dict[fx.Node, Record] = {}  # staged annotations
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __enter__(self) -> Edit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self._roll_back()
        elif self._staged or self._erased:
            self._commit(erase=True)

    # -- operations ----------------------------------------------------------------------------------------------

    def insert(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        before: Value,
        type: ValueType = None,
        phase: str | None = None,
        uses: Iterable[Requirement | None] = (),
        name: str | None = None,
    ) -> Staged:
        """Stage ``target(*args, **kwargs)`` in front of ``before``.

        Args:
            type: the type of the result; transfers know their own.
            phase: that of ``before`` when left out.
            uses: the requirements of the operands, for ops that are not transfers.
            name: what to name it after; transfers are named after their value and axis.

        Raises:
            EditError: the transfer does not apply, or a node is not the program's.
        """
        for value in (*_values(args), *_values(list((kwargs or {}).values())), before):
            self._check(value)
        kwargs = dict(kwargs or {})
        if type is None:
            type = self._infer(target, tuple(args), kwargs)
        staged = Staged(target, tuple(args), kwargs, type, before, phase, tuple(uses), name)
        self._stage("insert", staged)
        return staged

    def slice(self, x: Value, dim: int, axis: str, *, before: Value, parts: Any = None, phase: str | None = None) -> Staged:
        return self._transfer(transfers.slice, (x, dim, axis), before, phase, parts=parts)

    def all_gather(self, x: Value, dim: int, axis: str, *, before: Value, parts: Any = None, phase: str | None = None) -> Staged:
        return self._transfer(transfers.all_gather, (x, dim, axis), before, phase, parts=parts)

    def all_reduce(self, x: Value, axis: str, *, before: Value, op: str | None = None, phase: str | None = None) -> Staged:
        return self._transfer(transfers.all_reduce, (x, axis), before, phase, op=op)

    def reduce_scatter(self, x: Value, dim: int, axis: str, *, before: Value, op: str | None = None,
                       parts: Any = None, phase: str | None = None) -> Staged:  # fmt: skip
        return self._transfer(transfers.reduce_scatter, (x, dim, axis), before, phase, op=op, parts=parts)

    def all_to_all(self, x: Value, source: int, target: int, axis: str, *, before: Value, parts: Any = None,
                   phase: str | None = None) -> Staged:  # fmt: skip
        return self._transfer(transfers.all_to_all, (x, source, target, axis), before, phase, parts=parts)

    def pend(self, x: Value, axis: str, *, before: Value, phase: str | None = None) -> Staged:
        return self._transfer(transfers.pend, (x, axis), before, phase)

    def cast(self, x: Value, dtype: torch.dtype, *, before: Value, phase: str | None = None) -> Staged:
        return self._transfer(transfers.cast, (x, dtype), before, phase)

    def send(self, x: Value, stage: str, *, before: Value, phase: str | None = None) -> Staged:
        return self._transfer(transfers.send, (x, stage), before, phase)

    def recv(self, x: Value, stage: str, *, before: Value, phase: str | None = None) -> Staged:
        return self._transfer(transfers.recv, (x, stage), before, phase)

    def concat(self, xs: Sequence[Value], dim: int, *, before: Value, phase: str | None = None) -> Staged:
        """``[8 64], [24 64] → [32 64]``: join pieces along a dim that no axis splits."""
        types = [self._type(x) for x in xs]
        first = types[0]
        if not isinstance(first, TensorType) or any(
            not isinstance(t, TensorType) or t.layout != first.layout or t.dtype != first.dtype
            or t.shape[:dim] + t.shape[dim + 1 :] != first.shape[:dim] + first.shape[dim + 1 :] for t in types
        ):  # fmt: skip
            raise EditError(f"concat needs pieces that differ only in dim {dim}, got {types}")
        if any(axes for _, axes in first.attr.dims[dim]):
            raise EditError(f"concat joins along dim {dim}, which is split; gather it first")
        total = sum(t.shape[dim] for t in types)  # type: ignore[union-attr]
        joined = replace(first, shape=first.shape[:dim] + (total,) + first.shape[dim + 1 :])
        needs = tuple(None if t.layout is None else Requirement(t.layout, t.dtype) for t in types)  # type: ignore[union-attr]
        return self.insert(torch.ops.aten.cat.default, (list(xs), dim), before=before, type=joined, phase=phase, uses=needs)

    def replace_use(self, user: Value, old: Value, new: Value, *, index: int | None = None) -> None:
        """Make ``user`` read ``new`` where it read ``old``: at every occurrence, or at operand ``index`` alone."""
        for value in (user, old, new):
            self._check(value)
        self._stage("use", user, old, new, index)

    def replace_all_uses(self, old: Value, new: Value) -> None:
        """Make every user of ``old`` but ``new`` itself read ``new``."""
        for value in (old, new):
            self._check(value)
        self._stage("uses", old, new)

    def erase(self, node: fx.Node) -> None:
        """Remove a node without users; carried out when the block ends, so that until then all can be undone."""
        self._check(node)
        self._erased.append(node)

    def annotate(self, node: fx.Node, **changes: Any) -> None:
        """Replace fields of the node's record: ``type=…, uses=…, phase=…``."""
        self._check(node)
        self._records[node] = record = replace(self._records.get(node) or record_of(node), **changes)
        self._stage("record", node, record)

    def commit(self) -> None:
        """Commit what is staged now, in the middle of the block: for measuring what one commit per pass saves."""
        if self._staged:
            self._commit(erase=False)

    # -- staging -------------------------------------------------------------------------------------------------

    def _stage(self, *operation: Any) -> None:
        self._staged.append(operation)
        if self.sync:
            self.commit()

    def _transfer(self, function: Any, args: tuple[Any, ...], before: Value, phase: str | None, **kwargs: Any) -> Staged:
        given = {key: value for key, value in kwargs.items() if value is not None}
        return self.insert(function, args, given, before=before, phase=phase)

    def _check(self, value: Any) -> None:
        if isinstance(value, fx.Node) and value.graph is not self.program.graph:
            raise EditError(f"{value.name} belongs to another program; take the node from this one, as in program.node({value.name!r})")

    def _type(self, value: Value) -> ValueType:
        if isinstance(value, Staged):
            return value.type
        return (self._records.get(value) or record_of(value)).type

    def _infer(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ValueType:
        row = transfers.BY_FUNCTION.get(target)
        if row is None:
            raise EditError(f"insert({getattr(target, '__name__', target)}) needs type=…: only transfers know their own type")
        operand = self._type(args[0])
        given = transfers.arguments(target, args, kwargs)
        call = f"{row.name}({', '.join(map(str, (args[0], *given.values())))})"
        if not isinstance(operand, TensorType) or operand.layout is None and target not in (transfers.cast, transfers.wait):
            raise EditError(f"{call}: {args[0]} has no Layout; transfers work on placed values")
        try:
            return row.infer(operand, given, self.program.stages)
        except ValueError as error:
            from autopar.text.printer import print_type

            raise EditError(f"{call}: {error}; {args[0]} is {print_type(operand)}") from None

    # -- commit --------------------------------------------------------------------------------------------------

    def _commit(self, *, erase: bool) -> None:
        try:
            changed: set[fx.Node] = set()
            for kind, *what in self._staged:
                getattr(self, f"_do_{kind}")(changed, *what)
            self._settle(changed)
            if erase:
                self._remove()
        except BaseException:
            self._roll_back()
            raise
        self._staged.clear()
        self._records.clear()
        self.program.counts.commits += 1

    def _node(self, value: Value) -> fx.Node:
        if isinstance(value, Staged):
            if value.node is None:
                raise EditError(f"{value} is not part of this edit")
            return value.node
        return value

    def _do_insert(self, changed: set[fx.Node], staged: Staged) -> None:
        before = self._node(staged.before)
        args, kwargs = (_resolve(a, self._node) for a in (staged.args, staged.kwargs))
        with self.program.graph.inserting_before(before):
            staged.node = node = self.program.graph.create_node("call_function", staged.target, args, kwargs)
        served = next(iter(node.all_input_nodes), None)
        about = record_of(before if served is None else served)
        phase = staged.phase or record_of(before).phase
        set_record(node, Record(staged.type, staged.uses, phase, module=about.module, source=about.source))
        self._inserted.append(node)
        self._hints[node] = staged.hint
        self._undo.append((self._unmake, (node,)))
        self.program.counts.inserted += 1

    def _unmake(self, node: fx.Node) -> None:
        self.program.graph.erase_node(node)
        self.program.counts.inserted -= 1

    def _do_use(self, changed: set[fx.Node], user: Value, old: Value, new: Value, index: int | None) -> None:
        node, before, after = self._node(user), self._node(old), self._node(new)
        position = -1
        hits = 0

        def swap(operand: fx.Node) -> fx.Node:
            nonlocal position, hits
            position += 1
            if operand is not before or index not in (None, position):
                return operand
            hits += 1
            return after

        args, kwargs = map_operands(node.args, swap), map_operands(dict(node.kwargs), swap)
        if not hits:
            where = "" if index is None else f" as operand {index}"
            raise EditError(f"{node.name} does not read {before.name}{where}; it reads {', '.join(o.name for o in operands(node))}")
        self._undo.append((_set_args, (node, node.args, node.kwargs)))
        _set_args(node, args, kwargs)

    def _do_uses(self, changed: set[fx.Node], old: Value, new: Value) -> None:
        for user in list(self._node(old).users):
            if user is not self._node(new):
                self._do_use(changed, user, old, new, None)

    def _do_record(self, changed: set[fx.Node], node: fx.Node, record: Record) -> None:
        self._set(node, record)
        changed.add(node)

    def _set(self, node: fx.Node, record: Record) -> None:
        self._undo.append((set_record, (node, record_of(node))))
        set_record(node, record)
        self.program.counts.record_updates += 1

    def _settle(self, changed: set[fx.Node]) -> None:
        """The linear walk: order, names, and the types that follow from changed ones."""
        mine = set(self._inserted)
        seen: set[fx.Node] = set()
        taken: set[str] = set()
        for node in self.program.graph.nodes:
            for operand in node.all_input_nodes:
                if operand not in seen:
                    raise EditError(f"{node.name} would read {operand.name} before it is made; insert it earlier")
            seen.add(node)
            if node not in mine:
                taken.add(node.name)
            if changed and any(operand in changed for operand in node.all_input_nodes):
                self._follow(node, changed)
        self.program.counts.node_visits += len(seen)
        self._name(sorted(self._inserted), taken)

    def _follow(self, node: fx.Node, changed: set[fx.Node]) -> None:
        """Transfers and getitems take their type from their operand; other ops keep theirs."""
        if is_getitem(node):
            new = element_type(node)
        elif node.target in transfers.BY_FUNCTION:
            new = self._infer(node.target, node.args, node.kwargs)
        else:
            return
        record = record_of(node)
        if new != record.type:
            self._set(node, replace(record, type=new))
            changed.add(node)

    def _name(self, nodes: list[fx.Node], taken: set[str]) -> None:
        """Names in graph order, whatever order the edit was made in: value + axis, then ``_1``, ``_2``, …."""
        count: dict[str, int] = {}
        for node in nodes:
            base = self._base_name(node)
            name = base
            while name in taken:
                count[base] = count.get(base, 0) + 1
                name = f"{base}_{count[base]}"
            taken.add(name)
            if node.name != name:
                node.name = name

    def _base_name(self, node: fx.Node) -> str:
        row = transfers.BY_FUNCTION.get(node.target)
        hint = self._hints[node]
        if hint is None and row is not None:
            return f"{node.args[0]}_{transfers.suffix(transfers.arguments(node.target, node.args, node.kwargs))}"
        return hint or getattr(node.target, "__name__", "value").partition(".")[0]

    def _remove(self) -> None:
        doomed = set(self._erased)
        for node in self._erased:
            if alive := [user.name for user in node.users if user not in doomed]:
                raise EditError(f"cannot erase {node.name}: {', '.join(alive)} still read it; replace those uses first")
        for node in sorted(doomed, reverse=True):
            self.program.graph.erase_node(node)
        self.program.counts.removed += len(doomed)
        self._erased.clear()

    def _roll_back(self) -> None:
        for function, arguments in reversed(self._undo):
            function(*arguments)
        for pending in (self._undo, self._staged, self._erased, self._inserted):
            pending.clear()
        self._records.clear()


def _set_args(node: fx.Node, args: Any, kwargs: Any) -> None:
    node.args = args
    node.kwargs = kwargs


def _values(value: Any) -> Iterable[Value]:
    if isinstance(value, (fx.Node, Staged)):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _values(one)


def _resolve(value: Any, node: Callable[[Value], fx.Node]) -> Any:
    if isinstance(value, Staged):
        return node(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_resolve(v, node) for v in value)
    if isinstance(value, dict):
        return {key: _resolve(v, node) for key, v in value.items()}
    return value
