"""Commits: what an edit has staged, carried out on the graph, and the metadata brought up to date.

Operations are replayed in the order they were staged, O(inserted), and what they make read is looked at: it must be made
before. Then one linear walk (``settle``) carries changed types to those who follow them, and gives names. It is the same walk
however much was staged, so that it pays to stage much.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import fx

from autopar.errors import EditError
from autopar.ir import transfers
from autopar.ir.nodes import element_type, is_getitem, record_of, set_record
from autopar.ir.program_data import ProgramData
from autopar.ir.record import Record, Requirement, TensorType, ValueType
from autopar.ir.text.printer import print_type
from autopar.ir.text.tokens import can_name, legal_name
from autopar.ir.undo import Undo
from autopar.ir.uses import UseReplacements
from autopar.torch_private import call_inserter, inputs_of, rename, set_arguments

NARROW = 8  # operands: a user that has no more is given its new arguments as soon as another one is spoken of
FOLLOWERS = frozenset({operator.getitem, *transfers.BY_FUNCTION})  # ops whose type follows from their operand's


class Staged:
    """A value that an edit will insert; it may be used in later operations of the same edit like a node."""

    __slots__ = ("about", "args", "before", "edit", "hint", "kwargs", "node", "phase", "target", "type", "uses")

    def __init__(self, edit: Any, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], type: ValueType,
                 before: Value, phase: str | None, uses: tuple[Requirement | None, ...], hint: str | None, about: fx.Node | None = None) -> None:  # fmt: skip
        self.edit, self.target, self.args, self.kwargs, self.type = edit, target, args, kwargs, type
        self.before, self.phase, self.uses, self.hint = before, phase, uses, hint
        self.about = about
        self.node: fx.Node | None = None

    def __repr__(self) -> str:
        return self.node.name if self.node is not None else f"<staged {getattr(self.target, '__name__', self.target)}>"


Value = fx.Node | Staged

NONE: dict[str, Any] = {}  # the keyword arguments of those that have none; FX makes its own of them
_HOLDERS = (Staged, tuple, list, dict)  # arguments that are, or may have in them, staged values


class Changes:
    """What one edit changes in a program's graph, over all of its commits; all of it can be undone."""

    def __init__(self, program: ProgramData) -> None:
        self.program = program
        self.begun = False  # whether anything was carried out that may have to be undone
        self._counted, self._before = program.counts, Undo(program)
        self._uses = UseReplacements()
        self._stale: set[fx.Node] = set()  # nodes whose own type the next walk looks at
        self._changed: set[fx.Node] = set()  # nodes whose readers it looks at
        self._narrow: fx.Node | None = None  # the last user in the batch, if it has few operands
        self._tails: dict[fx.Node, tuple[str, bool]] = self._before.inserted  # what they are named after, and whether behind their value
        self._named: list[fx.Node] = []  # those that have their names, in graph order
        self._repeats: dict[str, int] = {}  # how often each of these names was taken
        self._guessed: dict[str, int] = {}  # how often one was given for the time being, right where edits come in graph order
        self._order: list[fx.Node] = []  # of all nodes, as the last walk met them
        self._erase, self._call = program.graph.erase_node, call_inserter(program.graph, self._tails)

    # -- operations ----------------------------------------------------------------------------------------------

    def insert(self, staged: Staged) -> None:
        before, args, kwargs = staged.before, staged.args, staged.kwargs
        if before.__class__ is Staged:
            before = _node(before)
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
            there = record_of(before)
            phase = phase or there.phase
            if about is None or not about.source:
                about = there
        set_record(node, Record(staged.type, staged.uses, phase, module=about.module, source=about.source, call=about.call))
        if staged.type is None:
            self._stale.add(node)
        self._counted.inserted += 1

    def replace_use(self, user: Value, old: Value, new: Value, index: int | None) -> None:
        node, before, after = _node(user), _node(old), _node(new)
        if self._narrow is not None and self._narrow is not node:  # near what it reads in memory, and soon forgotten
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
        """Erase nodes that nothing but each other reads."""
        doomed = set(map(_node, values))
        for node in doomed:
            if alive := [user.name for user in node.users if user not in doomed]:
                raise EditError(f"cannot erase {node.name}: {', '.join(alive)} still read it; replace those uses first")
        self._before.note_erasure(doomed, self._order)
        for node in sorted(doomed, reverse=True):
            self._erase(node)
        self.program.counts.removed += len(doomed)

    def undo(self) -> None:
        """Make the program what it was; may be called again where it was interrupted."""
        self._before.restore()

    def _replace_uses(self) -> None:
        for node, args, kwargs in self._uses.rebuilt():
            self._set_arguments(node, args, kwargs)
        self._uses.clear()
        self._narrow = None

    def _set_arguments(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before.note_arguments(node)
        set_arguments(node, args, kwargs)
        self._check_order(node)
        if node.target in FOLLOWERS:
            self._stale.add(node)
        if node in self._tails:  # it is named after what it reads
            self._forget_names()

    def _check_order(self, node: fx.Node) -> None:
        """Nodes stay where they are, so that a value can be made too late only for one that is new or reads anew."""
        for operand in inputs_of(node):
            if not operand < node:
                raise EditError(f"{self._called(node)} would read {self._called(operand)} before it is made; insert it earlier")

    def _set(self, node: fx.Node, record: Record) -> None:
        old = record_of(node)
        self._before.note_record(node)
        set_record(node, record)
        self.program.counts.record_updates += 1
        if record.type != old.type:
            self._changed.add(node)

    # -- the walk ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """The linear walk: names, and the types that follow from changed ones."""
        self._replace_uses()
        order = self._order = list(self.program.graph.nodes)
        if self._stale or self._changed:
            self._retype(order)
        self.program.counts.node_visits += len(order)
        self._name(order)

    def _retype(self, order: list[fx.Node]) -> None:
        """Carry changed types to those who follow them."""
        stale, changed = self._stale, self._changed
        for node in order:
            if node in stale or not changed.isdisjoint(inputs_of(node)):
                self._follow(node)
        stale.clear()
        changed.clear()

    def _follow(self, node: fx.Node) -> None:
        """Transfers and getitems take their type from their operand; other ops keep theirs."""
        if node.target not in FOLLOWERS:
            return
        record = record_of(node)
        source = next(iter(inputs_of(node)), None)
        if source is None:
            return  # a recv on a rank that has nothing to send
        read = record_of(source).type
        if is_getitem(node):
            if not isinstance(read, tuple) or not 0 <= node.args[1] < len(read):  # type: ignore[operator]
                raise EditError(f"{node.name} reads element {node.args[1]} of {source.name}, which has no such element")
            new = element_type(node)
        elif isinstance(read, TensorType) and read.layout is None and self.program.coordinates is not None:
            return  # of one rank: its sizes are written in its arguments
        else:
            new = transferred(self.program, node.target, node.args, node.kwargs, _type)
        if new != record.type:
            self._set(node, record._replace(type=new))

    # -- names ---------------------------------------------------------------------------------------------------

    def _name(self, order: list[fx.Node]) -> None:
        """Names in graph order, whatever order the edit was made in: value + axis, then ``_1``, ``_2``, ….

        FX gives no name twice, so that only names given here can clash; those of other nodes are looked at where a
        node has another name than it should have.
        """
        mine = list(filter(self._tails.__contains__, order))
        if mine[: len(self._named)] != self._named:
            self._forget_names()
        given, others = {node.name for node in self._named}, set[str]()
        for node in mine[len(self._named) :]:
            tail, behind = self._tails[node]
            if behind and node.name not in given and node.name == f"{node.args[0].name}_{tail}":
                given.add(node.name)  # as it was named when it was inserted
                continue
            others = others or {node.name for node in order if node not in self._tails}
            name = base = _base(node.args, (tail, behind))
            while name in given or name in others or not can_name(name):
                self._repeats[base] = self._repeats.get(base, 0) + 1
                name = f"{base}_{self._repeats[base]}"
            given.add(name)
            if node.name != name:
                rename(node, name)  # FX refuses a name that it knows from before; see make_node
                node.name = name
        self._named = mine

    def _called(self, node: fx.Node) -> str:
        """A node's name in errors; what it calls where it has none yet but FX's."""
        return node.name if node not in self._tails or node in self._named else getattr(node.target, "__name__", node.name)

    def _forget_names(self) -> None:
        self._named, self._repeats = [], {}


def transferred(program: ProgramData, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
                type_of: Callable[[Any], ValueType]) -> ValueType:  # fmt: skip
    """The type of a transfer's result; ``EditError`` where it does not apply, or the target is none."""
    row = transfers.BY_FUNCTION.get(target)
    if row is None:
        raise EditError(f"insert({getattr(target, '__name__', target)}) needs type=…: only transfers know their own type")
    if not args or not isinstance(args[0], Value):
        raise EditError(f"{row.name} is given {args[0] if args else 'nothing'}, and needs a value of the program")
    given, operand = transfers.arguments(target, args, kwargs), type_of(args[0])
    try:
        if not isinstance(operand, TensorType):
            raise ValueError(f"{args[0]} is several tensors; transfer its elements")
        if operand.layout is None and target not in (transfers.cast, transfers.wait):
            raise ValueError(f"{args[0]} has no Layout; transfers work on placed values")
        try:
            return row.infer(operand, given, program.meshes)
        except KeyError as missing:
            raise ValueError(f"the argument {missing} is missing") from None
        except (TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"the arguments are of another kind than it takes ({error})") from None
        except ValueError as error:
            raise ValueError(f"{error}; {args[0]} is {print_type(operand)}") from None
    except ValueError as error:
        raise EditError(f"{row.name}({', '.join(map(str, (args[0], *given.values())))}): {error}") from None


def _type(node: fx.Node) -> ValueType:
    return record_of(node).type


def _tail(staged: Staged) -> tuple[str, bool]:
    """What a node is named after: its value and the tail, or the tail alone."""
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
    """``value`` with the nodes of staged values."""
    if isinstance(value, Staged):
        return _node(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_resolve(v) for v in value])
    if isinstance(value, dict):
        return {key: _resolve(v) for key, v in value.items()}
    return value
