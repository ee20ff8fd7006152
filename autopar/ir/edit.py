"""Edit a program: stage operations in a block, and commit them once when it ends.

    with program.edit() as edit:
        y = edit.all_gather(x, 0, "tp", before=user)
        edit.replace_use(user, x, y)

Nothing above touches the graph: operations are *staged*, and the end of the block carries them out and commits once. A
commit updates all metadata in O(inserted) plus one linear walk: it checks that every new operand is made before it is
read, gives inserted nodes records and names, and updates the types of transfers that read changed types. It does not
recompile, and runs no fake tensors. An exception leaves the program exactly as it was, with the same node objects, and
so does an interrupt at any line of a commit. A program has one open edit at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.errors import EditError, shown
from autopar.ir import transfers
from autopar.ir.commit import FOLLOWERS, NONE, Changes, Staged, Value, transferred
from autopar.ir.nodes import record_of
from autopar.ir.program_data import ProgramData
from autopar.ir.record import Record, Requirement, TensorType, ValueType
from autopar.ir.text.printer import print_type
from autopar.ir.text.tokens import can_name
from autopar.torch_private import aten, is_erased

NOT_BEGUN = "this edit has not begun; call its operations inside its block: with program.edit() as edit:"
OVER = "this edit is over; begin another one with program.edit()"
OPEN = (
    "another edit of this program is open; add the operations to that one, or begin this one when its block has "
    "ended; if an interrupt has ended the block, del the name of that edit"
)
HALF_DONE = "an edit of this program was interrupted, and so was its undoing: the program is half edited; make it anew"

# graph → its open edit, or ``HALF_DONE`` while an edit is carried out or undone; an edit without references is undone
_OPEN: weakref.WeakKeyDictionary[fx.Graph, weakref.ref[Edit] | str] = weakref.WeakKeyDictionary()


def is_half_done(program: ProgramData) -> bool:
    """Return whether an edit of the program could neither be carried out nor be undone."""
    return _OPEN.get(program.graph) == HALF_DONE


def _undo(changes: Changes) -> None:
    if changes.begun:
        _OPEN[changes.program.graph] = HALF_DONE
        changes.undo()


def _abandoned(changes: Changes) -> None:
    """Undo an edit that has no references any more, and whose block was never left."""
    _undo(changes)
    _OPEN.pop(changes.program.graph, None)


class Edit:
    """A batch of insertions, replacements and erasures on one program. The module's docstring shows an example."""

    _closed = NOT_BEGUN  # why nothing can be staged; empty inside the block

    def __init__(self, program: ProgramData, *, sync: bool = False) -> None:
        self.program = program
        self.sync = sync
        self._graph = program.graph
        self._staged: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # functions with their arguments
        self._erased: list[Value] = []
        self._records: dict[fx.Node, Record] = {}  # staged annotations
        self._retypes = False  # whether a staged operation may change the type of an existing transfer
        self._this: weakref.ref[Edit] | None = None

    def __enter__(self) -> Edit:
        if self._closed != NOT_BEGUN:
            raise EditError(self._closed or OPEN)
        if self.program.fixed:
            raise EditError(self.program.fixed)
        try:
            self._changes = changes = Changes(self.program)
            self._insert, self._replace = changes.insert, changes.replace_use
            # an interrupt may come before the first line of __exit__
            self._this = weakref.ref(self, lambda _: _abandoned(changes))
            holder = _OPEN.setdefault(self._graph, self._this)
            if isinstance(holder, str) or (holder is not self._this and holder() is not None):
                raise EditError(HALF_DONE if holder == HALF_DONE else OPEN)
            _OPEN[self._graph] = self._this
            self._closed = ""
            return self
        except BaseException:
            if self._this is not None and _OPEN.get(self._graph) is self._this:
                _OPEN.pop(self._graph, None)
            self._this, self._closed = None, OVER
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is not None:
                self._roll_back()
                return
            if not self._closed and (self._staged or self._erased):
                self._commit(erase=True)
            self._close()
        except BaseException:
            self._roll_back()
            raise

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
        about: fx.Node | None = None,
    ) -> Staged:
        """Stage ``target(*args, **kwargs)`` in front of ``before``.

        Args:
            type: the type of the result; only transfers infer theirs.
            phase: the phase of the new node; by default that of ``before``.
            uses: the requirements of the operands, for ops that are not transfers.
            name: the base of the new name. By default, a transfer is named after its operand and axis, another op after
                itself.
            about: the node from which the module path and source line are taken; by default the first operand.

        Raises:
            EditError: the transfer does not apply, a node is not the program's, or the grammar reserves the name.
        """
        self._check((before, *args, *kwargs.values()) if kwargs else (before, *args))
        if name is not None and not can_name(name):
            raise EditError(f"{name!r} cannot name a value: Python, FX or the program's text has a meaning for it")
        kwargs = dict(kwargs) if kwargs else NONE
        if type is None:
            try:
                type = transferred(self.program, target, args, kwargs, self._type)
            except EditError:
                if not self._retypes or target not in transfers.BY_FUNCTION:
                    raise  # otherwise the commit infers it, from the changed types
        staged = Staged(self._changes, target, tuple(args), kwargs, type, before, phase, tuple(uses), name, about)
        self._stage(self._insert, staged)
        return staged

    def slice(
        self, x: Value, dim: int, axis: str, *, before: Value, parts: Any = None, phase: str | None = None
    ) -> Staged:
        return self._transfer(transfers.slice, (x, dim, axis), before, phase, parts=parts)

    def all_gather(
        self, x: Value, dim: int, axis: str, *, before: Value, parts: Any = None, phase: str | None = None
    ) -> Staged:
        return self._transfer(transfers.all_gather, (x, dim, axis), before, phase, parts=parts)

    def all_reduce(
        self, x: Value, axis: str, *, before: Value, op: str | None = None, phase: str | None = None
    ) -> Staged:
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
        """Join pieces along a dim that no axis splits: ``[8 64], [24 64] → [32 64]``."""
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
            raise EditError(
                f"concat needs pieces that differ only in dim {dim}, got {', '.join(map(print_type, types))}"
            )
        needs = tuple(Requirement(t.layout, t.dtype) for t in types if t.layout is not None)
        return self.insert(aten.cat.default, (list(xs), dim), before=before, type=joined, phase=phase, uses=needs)

    def replace_use(self, user: Value, old: Value, new: Value, *, index: int | None = None) -> None:
        """Make ``user`` read ``new`` where it read ``old``: at every occurrence, or at operand ``index`` alone."""
        self._check((user, old, new))
        if not isinstance(new, Value):
            raise EditError(f"{user} cannot read {shown(new)}, which is no value of the program")
        if getattr(user, "target", None) in FOLLOWERS:
            self._retypes |= self._type(old) != self._type(new)
        self._stage(self._replace, user, old, new, index)

    def replace_all_uses(self, old: Value, new: Value) -> None:
        """Make every user of ``old`` but ``new`` itself read ``new``."""
        self._check((old, new))
        self._retypes |= self._type(old) != self._type(new)
        self._stage(self._changes.replace_all_uses, old, new)

    def erase(self, node: Value) -> None:
        """Remove a node without users. The end of the block does it, so that until then all can be undone."""
        self._check((node,))
        if node is self.program.output:
            raise EditError("the output cannot be erased")
        self._erased.append(node)

    def annotate(self, node: fx.Node, **changes: Any) -> None:
        """Replace fields of the node's record, as in ``type=…, uses=…, phase=…``. Equal values change nothing.

        The type of a transfer and of an element is always computed from its operand, whatever ``type`` is.
        """
        self._check((node,))
        if isinstance(node, Staged):
            raise EditError(f"annotate takes a node of the program; give insert all facts about {node}")
        if unknown := sorted(changes.keys() - set(Record._fields)):
            raise TypeError(f"a record has no {', '.join(unknown)}; it has {', '.join(Record._fields)}")
        old = self._records.get(node) or record_of(node)
        new = old._replace(**changes)
        if new != old:
            self._records[node] = new
            self._retypes |= new.type != old.type
            self._stage(self._changes.annotate, node, new)

    def commit(self) -> None:
        """Commit the staged operations now, inside the block, to measure what one commit per pass saves."""
        self._check(())
        if self._staged:
            self._commit(erase=False)

    # -- staging -------------------------------------------------------------------------------------------------

    def _stage(self, function: Callable[..., None], *arguments: Any) -> None:
        self._staged.append((function, arguments))
        if self.sync:
            self.commit()

    def _transfer(
        self, function: Any, args: tuple[Any, ...], before: Value, phase: str | None, **kwargs: Any
    ) -> Staged:
        arguments = {key: value for key, value in kwargs.items() if value is not None}
        return self.insert(function, args, arguments, before=before, phase=phase)

    def _check(self, values: Iterable[Any]) -> None:
        """Raise ``EditError`` for values that no commit could carry out; other arguments pass."""
        if self._closed:
            raise EditError(self._closed)
        graph = self._graph
        for value in values:
            kind = value.__class__  # these classes have no subclasses
            if kind is int or kind is str:
                continue
            node = value.node if kind is Staged else value
            if node.__class__ is fx.Node:
                if node.graph is not graph:
                    raise EditError(
                        f"{node.name} belongs to another program; take the node from this one, as in "
                        f"program.node({node.name!r})"
                    )
                if is_erased(node):
                    raise EditError(f"{node.name} has been erased from the program")
            elif kind is Staged:
                if value.edit is not self._changes:
                    raise EditError(f"{value} is not part of this edit")
            elif isinstance(value, (tuple, list)):
                self._check(value)
            elif isinstance(value, dict):
                self._check(value.values())

    def _type(self, value: Value) -> ValueType:
        node = value.node if isinstance(value, Staged) else value
        return value.type if node is None else (self._records.get(node) or record_of(node)).type

    def _commit(self, *, erase: bool) -> None:
        try:
            _OPEN[self._graph] = HALF_DONE
            self._changes.begun = True
            staged = self._staged
            staged.reverse()
            while staged:
                function, arguments = staged.pop()
                function(*arguments)
            self._changes.settle()
            if erase:
                self._changes.remove(self._erased)
            self._records.clear()
            self._retypes = False
            self.program.counts.commits += 1
            self.program.version += 1
            assert self._this is not None
            _OPEN[self._graph] = self._this
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        """Restore the program as it was when the block began. It may be called again where it was interrupted."""
        if not self._closed:
            _undo(self._changes)
        self._close()

    def _close(self) -> None:
        self._staged.clear()
        self._erased.clear()
        if not self._closed:
            _OPEN.pop(self._graph, None)
            self._this, self._closed, self._changes.begun = None, OVER, False
