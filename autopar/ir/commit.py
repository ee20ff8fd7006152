"""Carry out on the graph what an edit has staged, and update the metadata.

Operations are replayed in the order in which they were staged, in time O(inserted). Each check that an operand is made
before it is read looks only at nodes that are new or read something new. Then one linear walk (``settle``) updates the
types that depend on changed types, and names the new nodes. The walk costs the same however much was staged, so large
batches are cheaper.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import fx

from autopar.errors import EditError
from autopar.ir import transfers
from autopar.ir.nodes import element_of, is_getitem, node_at, record_of, set_record
from autopar.ir.program_data import ProgramData
from autopar.ir.record import Record, Requirement, TensorType, ValueType
from autopar.ir.text.printer import print_type
from autopar.ir.text.tokens import can_name, legal_name
from autopar.ir.uses import UseReplacements
from autopar.torch_private import call_inserter, inputs_of, relink, rename, set_arguments, tables_of

# -- undo --------------------------------------------------------------------------------------------------------------
#
# Remember what an edit changes in a graph, and put it back.
#
# No operation is inverted. Before a node is changed for the first time, its arguments, its record and the readers of
# its operands are noted; ``restore`` writes all of that back, whatever has happened since. So an exception at any line
# of a commit, also an interrupt or a lack of memory, leaves the graph as it was. If ``restore`` itself is interrupted,
# it is called again. The notes grow with the edit. Only ``restore`` is linear in the graph.


class Undo:
    """The state of a program before an edit.

    Attributes:
        inserted: the nodes that the edit has made; a node is noted before it becomes part of the graph.
    """

    def __init__(self, program: ProgramData) -> None:
        self.program = program
        self.inserted: dict[fx.Node, Any] = {}
        self._counts = replace(program.counts)
        self._arguments: dict[fx.Node, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}  # operand of the nodes above → its readers, in order
        self._records: dict[fx.Node, Record] = {}
        self._order: Sequence[fx.Node] | None = None  # all nodes in order, once some are about to be erased
        self._tables: Mapping[Any, Sequence[fx.Node]] = {}

    def note_arguments(self, node: fx.Node) -> None:
        """Call this before the node's operands change."""
        if node in self._arguments or node in self.inserted:
            return
        readers = self._readers
        for operand in inputs_of(node):
            if operand not in readers:
                readers[operand] = list(operand.users)
        self._arguments[node] = node.args, node.kwargs

    def note_record(self, node: fx.Node) -> None:
        """Call this before the node gets another record."""
        self._records.setdefault(node, record_of(node))

    def note_erasure(self, nodes: Collection[fx.Node], order: Sequence[fx.Node]) -> None:
        """Call this before the first erasure; ``order`` has all nodes."""
        for node in nodes:
            self.note_arguments(node)
        self._tables = tables_of(self.program.graph, nodes)
        self._order = order

    def restore(self) -> None:
        """Restore the program, with the same node objects. Linear in the graph."""
        program, inserted = self.program, self.inserted
        order = [node for node in self._order or program.nodes if node not in inserted]
        relink(program.graph, order, inserted, self._tables)
        for node, (args, kwargs) in self._arguments.items():
            set_arguments(node, args, kwargs)
        present = set(order)
        for node in order:  # a node whose creation was interrupted reads operands without being part of the graph
            for reader in [reader for reader in node.users if reader not in present]:
                del node.users[reader]
        for node, readers in self._readers.items():
            kept = [reader for reader in readers if reader in present and node in inputs_of(reader)]
            if list(node.users) != kept:
                node.users.clear()
                node.users.update(dict.fromkeys(kept))
        for node, record in self._records.items():
            if node in present:
                set_record(node, record)
        vars(program.counts).update(vars(self._counts))
        program.version += 1


# -- commit ------------------------------------------------------------------------------------------------------------


NARROW = 8  # a user with no more operands gets its new arguments as soon as the next user is edited
FOLLOWERS = frozenset({operator.getitem, *transfers.BY_FUNCTION})  # ops whose type is computed from their operand's


class Staged:
    """A value that an edit will insert. Later operations of the same edit may use it like a node."""

    __slots__ = ("about", "args", "before", "edit", "hint", "kwargs", "node", "phase", "target", "type", "uses")

    def __init__(self, edit: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], type: ValueType,
                 before: Value, phase: str | None, uses: tuple[Requirement | None, ...], hint: str | None,
                 about: fx.Node | None = None) -> None:  # fmt: skip
        self.edit, self.target, self.args, self.kwargs, self.type = edit, target, args, kwargs, type
        self.before, self.phase, self.uses, self.hint = before, phase, uses, hint
        self.about = about
        self.node: fx.Node | None = None

    def __repr__(self) -> str:
        return self.node.name if self.node is not None else f"<staged {getattr(self.target, '__name__', self.target)}>"


Value = fx.Node | Staged

NONE: dict[str, Any] = {}  # shared by nodes without keyword arguments; FX copies it
_HOLDERS = (Staged, tuple, list, dict)  # classes of arguments that are staged values or may contain some


class Changes:
    """The changes that one edit makes to a program's graph, over all of its commits. All of them can be undone."""

    def __init__(self, program: ProgramData) -> None:
        self.program = program
        self.begun = False  # whether anything has been carried out that may have to be undone
        self._counted, self._before = program.counts, Undo(program)
        self._uses = UseReplacements()
        self._stale: set[fx.Node] = set()  # the next walk computes the types of these nodes
        self._changed: set[fx.Node] = set()  # the next walk computes the types of the readers of these nodes
        self._narrow: fx.Node | None = None  # the last user in the batch, if it has few operands
        # the end of each name, and whether the operand's name precedes it
        self._tails: dict[fx.Node, tuple[str, bool]] = self._before.inserted
        self._named: list[fx.Node] = []  # the inserted nodes with final names, in graph order
        self._repeats: dict[str, int] = {}  # base name → how often it has been used for them
        # base name → how often it was given on insertion; final if edits come in graph order
        self._guessed: dict[str, int] = {}
        self._order: list[fx.Node] = []  # all nodes, in the order of the last walk
        self._erase, self._call = program.graph.erase_node, call_inserter(program.graph, self._tails)

    # -- operations ----------------------------------------------------------------------------------------------

    def insert(self, staged: Staged) -> None:
        args, kwargs = staged.args, staged.kwargs
        before = _node(staged.before) if isinstance(staged.before, Staged) else staged.before
        for arg in args:
            if isinstance(arg, _HOLDERS):
                args = _resolve(args)
                break
        if kwargs:
            kwargs = _resolve(kwargs)
        tail = _tail(staged)
        base = _base(args, tail)
        times = self._guessed[base] = self._guessed.get(base, -1 if can_name(base) else 0) + 1
        staged.node = node = self._call(before, f"{base}_{times}" if times else base, staged.target, args, kwargs, tail)
        self._check_order(node)
        about, phase = None if staged.about is None else record_of(staged.about), staged.phase
        for operand in inputs_of(node) if about is None else ():
            about = record_of(operand)
            break
        if phase is None or about is None or not about.source:
            neighbour = record_of(before)
            phase = phase or neighbour.phase
            if about is None or not about.source:
                about = neighbour
        set_record(
            node, Record(staged.type, staged.uses, phase, module=about.module, source=about.source, call=about.call)
        )
        if staged.type is None:
            self._stale.add(node)
        self._counted.inserted += 1

    def replace_use(self, user: Value, old: Value, new: Value, index: int | None) -> None:
        node, before, after = _node(user), _node(old), _node(new)
        # its operands are still in the cache, and the batch stays small
        if self._narrow is not None and self._narrow is not node:
            self._set_arguments(self._narrow, *self._uses.take(self._narrow))
            self._narrow = None
        if self._uses.depends_on(node, before, index):
            self._replace_uses()
        self._uses.add(node, before, after, index)
        if len(inputs_of(node)) <= NARROW:
            self._narrow = node

    def replace_all_uses(self, old: Value, new: Value) -> None:
        before, after = _node(old), _node(new)
        if self._uses.touches(before):
            self._replace_uses()
        for user in list(before.users):
            if user is not after:
                self.replace_use(user, before, after, None)

    def annotate(self, node: fx.Node, record: Record) -> None:
        self._stale.add(node)
        self._set(node, record)

    def remove(self, values: Iterable[Value]) -> None:
        """Erase nodes that only each other read."""
        doomed = set(map(_node, values))
        for node in doomed:
            if alive := [user.name for user in node.users if user not in doomed]:
                raise EditError(f"cannot erase {node.name}: {', '.join(alive)} still read it; replace those uses first")
        self._before.note_erasure(doomed, self._order)
        for node in sorted(doomed, reverse=True):
            self._erase(node)
        self.program.counts.removed += len(doomed)

    def undo(self) -> None:
        """Restore the program. It may be called again where it was interrupted."""
        self._before.restore()

    def _replace_uses(self) -> None:
        for node, args, kwargs in self._uses.rebuilt():
            self._set_arguments(node, args, kwargs)
        self._uses.clear()
        self._narrow = None

    def _set_arguments(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before.note_arguments(node)
        set_arguments(node, args, kwargs)
        self._check_order(node)
        if node.target in FOLLOWERS:
            self._stale.add(node)
        if node in self._tails:  # its name depends on what it reads
            self._forget_names()

    def _check_order(self, node: fx.Node) -> None:
        """Check that all operands come first.

        Nodes never move, so only a new node, or one that reads a new operand, can fail.
        """
        for operand in inputs_of(node):
            if not operand < node:
                raise EditError(
                    f"{self._called(node)} would read {self._called(operand)} before it is made; insert it earlier"
                )

    def _set(self, node: fx.Node, record: Record) -> None:
        old = record_of(node)
        self._before.note_record(node)
        set_record(node, record)
        self.program.counts.record_updates += 1
        if record.type != old.type:
            self._changed.add(node)

    # -- the walk ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Walk the graph once: name the new nodes, and compute the types that depend on changed ones."""
        self._replace_uses()
        order = self._order = list(self.program.graph.nodes)
        if self._stale or self._changed:
            self._retype(order)
        self.program.counts.node_visits += len(order)
        self._name(order)

    def _retype(self, order: list[fx.Node]) -> None:
        """Compute the types that depend on changed types."""
        stale, changed = self._stale, self._changed
        for node in order:
            if node in stale or not changed.isdisjoint(inputs_of(node)):
                self._follow(node)
        stale.clear()
        changed.clear()

    def _follow(self, node: fx.Node) -> None:
        """Compute the type of a transfer or a getitem from its operand; other ops keep their type."""
        if node.target not in FOLLOWERS:
            return
        record = record_of(node)
        source = next(iter(inputs_of(node)), None)
        if source is None:
            return  # a recv on a rank that has nothing to send
        read = record_of(source).type
        if is_getitem(node):
            _, index = element_of(node)
            if not isinstance(read, tuple) or not 0 <= index < len(read):
                raise EditError(f"{node.name} reads element {index} of {source.name}, which has no such element")
            new: ValueType = read[index]
        elif isinstance(read, TensorType) and read.layout is None and self.program.coordinates is not None:
            return  # a local program: the arguments have the sizes of one rank
        else:
            new = transferred(self.program, node.target, node.args, node.kwargs, _type)
        if new != record.type:
            self._set(node, record._replace(type=new))

    # -- names ---------------------------------------------------------------------------------------------------

    def _name(self, order: list[fx.Node]) -> None:
        """Name the new nodes in graph order, whatever order the edit was made in: value + axis, then ``_1``, ``_2``, ….

        FX gives no name twice, so only names given here can clash. The names of other nodes are collected only if some
        new node does not have the name that it should have.
        """
        mine = list(filter(self._tails.__contains__, order))
        if mine[: len(self._named)] != self._named:
            self._forget_names()
        names, others = {node.name for node in self._named}, set[str]()
        for node in mine[len(self._named) :]:
            tail, behind = self._tails[node]
            if behind and node.name not in names and node.name == f"{node_at(node).name}_{tail}":
                names.add(node.name)  # it has kept the name it got when it was inserted
                continue
            others = others or {node.name for node in order if node not in self._tails}
            name = base = _base(node.args, (tail, behind))
            while name in names or name in others or not can_name(name):
                self._repeats[base] = self._repeats.get(base, 0) + 1
                name = f"{base}_{self._repeats[base]}"
            names.add(name)
            if node.name != name:
                rename(node, name)  # FX refuses a name that was used in the graph before; see make_node
                node.name = name
        self._named = mine

    def _called(self, node: fx.Node) -> str:
        """Return a node's name for errors, or the name of its op if it has only a temporary name."""
        return (
            node.name if node not in self._tails or node in self._named else getattr(node.target, "__name__", node.name)
        )

    def _forget_names(self) -> None:
        self._named, self._repeats = [], {}


def transferred(program: ProgramData, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
                type_of: Callable[[Any], ValueType]) -> ValueType:  # fmt: skip
    """Return the type of a transfer's result.

    ``EditError`` if the transfer does not apply, or the target is no transfer.
    """
    row = transfers.BY_FUNCTION.get(target)
    if row is None:
        raise EditError(
            f"insert({getattr(target, '__name__', target)}) needs type=…: only transfers know their own type"
        )
    if not args or not isinstance(args[0], Value):
        raise EditError(f"{row.name} got {args[0] if args else 'no operand'}, but needs a value of the program first")
    call_arguments, operand = transfers.arguments(target, args, kwargs), type_of(args[0])
    try:
        if not isinstance(operand, TensorType):
            raise ValueError(f"{args[0]} is several tensors; transfer its elements")
        if operand.layout is None and target not in (transfers.cast, transfers.wait):
            raise ValueError(f"{args[0]} has no Layout; transfers work on placed values")
        try:
            return row.infer(operand, call_arguments, program.meshes)
        except KeyError as missing:
            raise ValueError(f"the argument {missing} is missing") from None
        except (TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"it does not take arguments of this kind ({error})") from None
        except ValueError as error:
            raise ValueError(f"{error}; {args[0]} is {print_type(operand)}") from None
    except ValueError as error:
        raise EditError(f"{row.name}({', '.join(map(str, (args[0], *call_arguments.values())))}): {error}") from None


def _type(node: fx.Node) -> ValueType:
    return record_of(node).type


def _tail(staged: Staged) -> tuple[str, bool]:
    """Return the end of a node's name, and whether the name of its operand precedes it."""
    if staged.hint is None and staged.target in transfers.BY_FUNCTION:
        try:
            return _suffix(staged.target, staged.args[1:], tuple(staged.kwargs.items()) if staged.kwargs else ())
        except TypeError:  # lists among the arguments
            return transfers.suffix(transfers.arguments(staged.target, staged.args, staged.kwargs)), True
    return staged.hint or getattr(staged.target, "__name__", "value").partition(".")[0], False


@lru_cache(maxsize=4096)
def _suffix(target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[str, bool]:
    return transfers.suffix(transfers.arguments(target, (None, *args), dict(kwargs))), True


def _base(args: Sequence[Any], tail: tuple[str, bool]) -> str:
    text, behind = tail
    if behind:
        text = f"{args[0].name}_{text}"
    return text if text.isascii() and text.isidentifier() else legal_name(text)


def _node(value: Value) -> fx.Node:
    if isinstance(value, Staged):
        assert value.node is not None  # staged before it was used, and made in that order
        return value.node
    return value


def _resolve(value: Any) -> Any:
    """Replace the staged values in ``value`` by their nodes."""
    if isinstance(value, Staged):
        return _node(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_resolve(v) for v in value])
    if isinstance(value, dict):
        return {key: _resolve(v) for key, v in value.items()}
    return value
