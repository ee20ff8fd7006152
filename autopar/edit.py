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

import operator
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
    record_of,
    set_record,
)
from autopar.record import Record, Requirement, TensorType, ValueType
from autopar.text.printer import print_type
from autopar.text.tokens import can_name, legal_name
from autopar.torch_private import rename
from autopar.uses import UseReplacements


class Staged:
    """A value that an edit will insert; it may be used in later operations of the same edit like a node."""

    __slots__ = ("args", "before", "edit", "hint", "kwargs", "node", "phase", "target", "type", "uses")

    def __init__(self, edit: Edit, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], type: ValueType,
                 before: Value, phase: str | None, uses: tuple[Requirement | None, ...], hint: str | None) -> None:  # fmt: skip
        self.edit, self.target, self.args, self.kwargs, self.type = edit, target, args, kwargs, type
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
        self._erased: list[Value] = []
        self._inserted: list[fx.Node] = []  # nodes of this edit, in the order they were staged
        self._hints: dict[fx.Node, str | None] = {}
        self._uses = UseReplacements()
        self._records: dict[fx.Node, Record] = {}  # staged annotations
        self._retypes = False  # whether what is staged may change the type of an existing transfer
        self._stale: set[fx.Node] = set()  # nodes whose own type the next commit looks at
        self._changed: set[fx.Node] = set()  # nodes whose readers it looks at
        self._undo: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._counts = replace(program.counts)
        self._over = False

    def __enter__(self) -> Edit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self._roll_back()
        elif self._staged or self._erased:
            self._commit(erase=True)
        self._over = True

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
            EditError: the transfer does not apply, a node is not the program's, or the name is taken by the grammar.
        """
        for value in (*_values(args), *_values(list((kwargs or {}).values())), before):
            self._check(value)
        if name is not None and not can_name(name):
            raise EditError(f"{name!r} cannot name a value: Python, FX or the program's text has a meaning for it")
        kwargs = dict(kwargs or {})
        if type is None:
            try:
                type = self._infer(target, tuple(args), kwargs)
            except EditError:
                if not self._retypes or target not in transfers.BY_FUNCTION:
                    raise  # otherwise the commit decides, which knows the changed types
        staged = Staged(self, target, tuple(args), kwargs, type, before, phase, tuple(uses), name)
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
        types = [t for t in map(self._type, xs) if isinstance(t, TensorType)]
        if not types or len(types) < len(xs):
            raise EditError("concat needs pieces, each one tensor")
        first = types[0]
        if not 0 <= dim < len(first.shape):
            raise EditError(f"concat along dim {dim} of a value of {len(first.shape)}")
        if any(axes for _, axes in first.attr.dims[dim]):
            raise EditError(f"concat joins along dim {dim}, which is split; gather it first")
        joined = replace(first, shape=(*first.shape[:dim], sum(t.shape[dim] for t in types), *first.shape[dim + 1 :]))
        if any(replace(t, shape=(*t.shape[:dim], joined.shape[dim], *t.shape[dim + 1 :])) != joined for t in types):
            raise EditError(f"concat needs pieces that differ only in dim {dim}, got {', '.join(map(print_type, types))}")
        needs = tuple(Requirement(t.layout, t.dtype) for t in types if t.layout is not None)
        return self.insert(torch.ops.aten.cat.default, (list(xs), dim), before=before, type=joined, phase=phase, uses=needs)

    def replace_use(self, user: Value, old: Value, new: Value, *, index: int | None = None) -> None:
        """Make ``user`` read ``new`` where it read ``old``: at every occurrence, or at operand ``index`` alone."""
        for value in (user, old, new):
            self._check(value)
        if getattr(user, "target", None) in _FOLLOWERS:
            self._retypes |= self._type(old) != self._type(new)
        self._stage("use", user, old, new, index)

    def replace_all_uses(self, old: Value, new: Value) -> None:
        """Make every user of ``old`` but ``new`` itself read ``new``."""
        for value in (old, new):
            self._check(value)
        self._retypes |= self._type(old) != self._type(new)
        self._stage("uses", old, new)

    def erase(self, node: Value) -> None:
        """Remove a node without users; carried out when the block ends, so that until then all can be undone."""
        self._check(node)
        if node is self.program.output:
            raise EditError("the output cannot be erased")
        self._erased.append(node)

    def annotate(self, node: fx.Node, **changes: Any) -> None:
        """Replace fields of the node's record: ``type=…, uses=…, phase=…``; nothing happens where nothing changes.

        The type of a transfer and of an element follows from what it reads, whatever is said here.
        """
        self._check(node)
        if isinstance(node, Staged):
            raise EditError(f"annotate takes a node of the program; insert was told all that is known of {node}")
        old = self._records.get(node) or record_of(node)
        new = replace(old, **changes)
        if new != old:
            self._records[node] = new
            self._retypes |= new.type != old.type
            self._stage("record", node, new)

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
        if self._over:
            raise EditError("this edit is over; begin another one with program.edit()")
        node = value.node if isinstance(value, Staged) else value
        if node is None and value.edit is not self:
            raise EditError(f"{value} is not part of this edit")
        if isinstance(node, fx.Node) and node.graph is not self.program.graph:
            raise EditError(f"{node.name} belongs to another program; take the node from this one, as in program.node({node.name!r})")
        if isinstance(node, fx.Node) and node.prev.next is not node:
            raise EditError(f"{node.name} has been erased from the program")

    def _type(self, value: Value) -> ValueType:
        node = value.node if isinstance(value, Staged) else value
        return value.type if node is None else (self._records.get(node) or record_of(node)).type

    def _infer(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ValueType:
        row = transfers.BY_FUNCTION.get(target)
        if row is None:
            raise EditError(f"insert({getattr(target, '__name__', target)}) needs type=…: only transfers know their own type")
        operand = self._type(args[0])
        given = transfers.arguments(target, args, kwargs)
        call = f"{row.name}({', '.join(map(str, (args[0], *given.values())))})"
        if not isinstance(operand, TensorType):
            raise EditError(f"{call}: {args[0]} is several tensors; transfer its elements")
        if operand.layout is None and target not in (transfers.cast, transfers.wait):
            raise EditError(f"{call}: {args[0]} has no Layout; transfers work on placed values")
        try:
            return row.infer(operand, given, self.program.meshes)
        except KeyError as missing:
            raise EditError(f"{call}: the argument {missing} is missing") from None
        except ValueError as error:
            raise EditError(f"{call}: {error}; {args[0]} is {print_type(operand)}") from None

    # -- commit --------------------------------------------------------------------------------------------------

    def _commit(self, *, erase: bool) -> None:
        try:
            for kind, *what in self._staged:
                getattr(self, f"_do_{kind}")(*what)
            self._replace_uses()
            self._staged.clear()
            self._records.clear()
            self._retypes = False
            self._settle()
            if erase:
                self._remove()
        except BaseException:
            self._roll_back()
            raise
        self.program.counts.commits += 1

    def _node(self, value: Value) -> fx.Node:
        if isinstance(value, Staged):
            assert value.node is not None  # staged before it was used, and made in that order
            return value.node
        return value

    def _do_insert(self, staged: Staged) -> None:
        before = self._node(staged.before)
        args, kwargs = (_resolve(a, self._node) for a in (staged.args, staged.kwargs))
        with self.program.graph.inserting_before(before):
            staged.node = node = self.program.graph.create_node("call_function", staged.target, args, kwargs)
        self._undo.append((self.program.graph.erase_node, (node,)))
        served = next(iter(node.all_input_nodes), None)
        about = record_of(served if served is not None and record_of(served).source else before)
        phase = staged.phase or record_of(before).phase
        set_record(node, Record(staged.type, staged.uses, phase, module=about.module, source=about.source))
        self._inserted.append(node)
        self._hints[node] = staged.hint
        if staged.type is None:
            self._stale.add(node)
        self.program.counts.inserted += 1

    def _do_use(self, user: Value, old: Value, new: Value, index: int | None) -> None:
        node, before, after = self._node(user), self._node(old), self._node(new)
        if self._uses.depends_on(node, before, index):
            self._replace_uses()
        self._uses.add(node, before, after, index)

    def _do_uses(self, old: Value, new: Value) -> None:
        before, after = self._node(old), self._node(new)
        if self._uses.touches(before):
            self._replace_uses()
        for user in list(before.users):
            if user is not after:
                self._do_use(user, before, after, None)

    def _replace_uses(self) -> None:
        for node, args, kwargs in self._uses.rebuilt():
            self._undo.append((_set_args, (node, node.args, node.kwargs)))
            _set_args(node, args, kwargs)
            self._stale.add(node)
        self._uses.clear()

    def _do_record(self, node: fx.Node, record: Record) -> None:
        self._stale.add(node)
        self._set(node, record)

    def _set(self, node: fx.Node, record: Record) -> None:
        old = record_of(node)
        self._undo.append((set_record, (node, old)))
        set_record(node, record)
        self.program.counts.record_updates += 1
        if record.type != old.type:
            self._changed.add(node)

    def _settle(self) -> None:
        """The linear walk: order, names, and the types that follow from changed ones."""
        mine = set(self._inserted)
        new: list[fx.Node] = []
        seen: set[fx.Node] = set()
        taken: set[str] = set()
        for node in self.program.graph.nodes:
            read = node.all_input_nodes
            for operand in read:
                if operand not in seen:
                    raise EditError(f"{node.name} would read {operand.name} before it is made; insert it earlier")
            seen.add(node)
            if node in mine:
                new.append(node)
            else:
                taken.add(node.name)
            if node in self._stale or not self._changed.isdisjoint(read):
                self._follow(node)
        self.program.counts.node_visits += len(seen)
        self._stale.clear()
        self._changed.clear()
        self._name(new, taken)

    def _follow(self, node: fx.Node) -> None:
        """Transfers and getitems take their type from their operand; other ops keep theirs."""
        record = record_of(node)
        if node.target not in _FOLLOWERS:
            return
        source = node.all_input_nodes[0]
        read = record_of(source).type
        if is_getitem(node):
            if not isinstance(read, tuple) or not 0 <= node.args[1] < len(read):  # type: ignore[operator]
                raise EditError(f"{node.name} reads element {node.args[1]} of {source.name}, which has no such element")
            new = element_type(node)
        elif isinstance(read, TensorType) and read.layout is None and self.program.coordinates is not None:
            return  # of one rank: its sizes are written in its arguments
        else:
            new = self._infer(node.target, node.args, node.kwargs)
        if new != record.type:
            self._set(node, replace(record, type=new))

    def _name(self, nodes: list[fx.Node], taken: set[str]) -> None:
        """Names in graph order, whatever order the edit was made in: value + axis, then ``_1``, ``_2``, …."""
        count: dict[str, int] = {}
        for node in nodes:
            base = legal_name(self._base_name(node))
            name = base
            while name in taken or not can_name(name):
                count[base] = count.get(base, 0) + 1
                name = f"{base}_{count[base]}"
            taken.add(name)
            if node.name != name:
                rename(node, name)  # FX refuses a name that it knows from before; see make_node
                node.name = name

    def _base_name(self, node: fx.Node) -> str:
        row = transfers.BY_FUNCTION.get(node.target)
        hint = self._hints[node]
        if hint is None and row is not None:
            return f"{node.args[0]}_{transfers.suffix(transfers.arguments(node.target, node.args, node.kwargs))}"
        return hint or getattr(node.target, "__name__", "value").partition(".")[0]

    def _remove(self) -> None:
        doomed = set(map(self._node, self._erased))
        for node in doomed:
            if alive := [user.name for user in node.users if user not in doomed]:
                raise EditError(f"cannot erase {node.name}: {', '.join(alive)} still read it; replace those uses first")
        for node in sorted(doomed, reverse=True):
            self.program.graph.erase_node(node)
        self.program.counts.removed += len(doomed)
        self._erased.clear()

    def _roll_back(self) -> None:
        for function, arguments in reversed(self._undo):
            function(*arguments)
        self._undo.clear()
        vars(self.program.counts).update(vars(self._counts))
        self._over = True


_FOLLOWERS = {operator.getitem, *transfers.BY_FUNCTION}  # ops whose type follows from their operand's


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
