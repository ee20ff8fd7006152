"""Find the updates and sums that a program can compute in place, in memory that the caller donates to it.

    b_grad_sum : f32[8] = add.Tensor(b_grad, view)      b_grad_sum = torch.ops.aten.add_.Tensor(b_grad, view)
    mm : f32[8 4] = mm(t, x)                            w_grad_sum = torch.ops.aten.addmm_.default(w_grad, t, x)
    w_grad_sum : f32[8 4] = add.Tensor(w_grad, mm)
    adamw = autopar::adamw(w, g, m, v, step, …)    →    adamw_in_place = update([w, w_1], [g, g_1], [[m, m_1], …], …)
    adamw_1 = autopar::adamw(w_1, g_1, m_1, …)

Gradients are added to their sums in place; if a sum starts as zeros, the first gradient takes its place. A product that
only the next line reads, to add it, is added as it is computed, and never stored. The updates of
parameters whose optimizer has the same numbers are one fused kernel (``optimizers.IN_PLACE``). A value is overwritten
only if nothing reads it afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import called_op, element_of, is_getitem, node_at, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.optimizers import IN_PLACE, SHARED
from autopar.report.liveness import HIDDEN_VIEWS
from autopar.rules.registry import rule_of
from autopar.torch_private import OpOverload, aten, present, returns_alias
from autopar.verify.pieces import Subject

# -- memory readers ----------------------------------------------------------------------------------------------------
#
# Find the ops that read the memory of a value, through its views too.
#
# w_dp : f32[4 8] = slice(w, 0, dp, …)       the memory of w is read by mm and by adamw
# t : f32[8 8] = t(w)
# mm : f32[2 8] = mm(x, t)
# adamw : … = autopar::adamw(w_dp, …)


# transfers whose result may be in the memory of their operand, such as the first piece of a dim
LOCAL_VIEWS = (transfers.slice, transfers.pend, transfers.cast)


class MemoryReaders:
    """The readers of memory in a program. Linear in the graph.

    Attributes:
        home: value → the value whose memory it may share: itself, or the value that it is a view of.
    """

    def __init__(self, program: Program) -> None:
        self.home: dict[fx.Node, fx.Node] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        for node in program.nodes:
            self.home[node] = self.home[node_at(node)] if is_getitem(node) else self._home(node)

    def of(self, value: fx.Node) -> Sequence[fx.Node]:
        """Return the ops, transfers and the output that read the memory of a value, in their order. Views do not
        read."""
        return self._readers.get(self.home[value], ())

    def _home(self, node: fx.Node) -> fx.Node:
        values = operands(node)
        if values and may_be_view(node):
            return self.home[values[0]]
        for home in dict.fromkeys(self.home[value] for value in values):
            self._readers.setdefault(home, []).append(node)
        return node


def may_be_view(node: fx.Node) -> bool:
    """Return whether the result of an op or a transfer may be in the memory of its first operand."""
    if node.op != "call_function" or node.target in transfers.BY_FUNCTION:
        return node.target in LOCAL_VIEWS
    if not isinstance(node.target, OpOverload):
        return False
    return returns_alias(node.target) or node.target in HIDDEN_VIEWS or rule_of(node.target).view


# -- donated -----------------------------------------------------------------------------------------------------------


ADD = aten.add.Tensor
# product → the op that adds it to a sum, in place
ADDING: dict[Any, OpOverload] = present({aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default})
SHARED_BY_UPDATES = 3  # their last operands: the rate, the scale of gradients and the flag of an overflow


@dataclass(frozen=True)
class Donated:
    """The memory that a program may write to.

    Attributes:
        placeholders: the placeholders whose memory the program may reuse.
        sums: an addition to one of them, which nothing else reads → that placeholder.
        products: a product that the next line adds to a sum of its dtype, and nothing else reads → that addition.
        zeros: placeholders of sums that are not passed, because they are zero.
        buckets: the last of several updates → all of them, which run as one op, in place.
        offloaded: whether the updates run on the host, where the optimizer's state is.
    """

    placeholders: frozenset[fx.Node] = frozenset()
    sums: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    products: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    zeros: frozenset[fx.Node] = frozenset()
    buckets: Mapping[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    offloaded: bool = False

    @property
    def updates(self) -> set[fx.Node]:
        """All updates that run in place."""
        return {node for bucket in self.buckets.values() for node in bucket}

    def within(self, nodes: Collection[fx.Node]) -> Donated:
        """Return it for a function that has only some lines: a product and its addition may be in two functions."""
        lines = set(nodes)
        return replace(self, products={value: sum for value, sum in self.products.items() if {value, sum} <= lines})

    @staticmethod
    def of(program: Program, names: Collection[str], zeros: Collection[str] = (), offloaded: bool = False) -> Donated:
        """Analyse a program. Linear in the graph.

        In an explicit program, updates are grouped that can run as one op. In a scheduled program, only updates that
        stand side by side are grouped.

        Args:
            names: the placeholders that are donated.
            zeros: the placeholders of sums that begin as zeros.
            offloaded: whether the updates run on the host.

        Raises:
            VerifyError: of a scheduled program: a line reads memory that an update has overwritten.
        """
        donated = frozenset(node for node in program.placeholders if node.name in names)
        sums = {}
        for node in donated:
            value = next(iter(node.users), node)
            if (
                len(node.users) == 1
                and value.target is ADD
                and value.args[0] is node
                and isinstance(value.args[1], fx.Node)
                and not value.kwargs
                and value.args[1] is not node
            ):
                sums[value] = node
        empty = frozenset(node for node in sums.values() if node.name in zeros)
        products = {operands(sum)[1]: sum for sum, start in sums.items() if start not in empty and _adds_product(sum)}
        readers = MemoryReaders(program)
        if program.level == "scheduled":
            groups = _side_by_side(program, donated, readers)
            check_not_overwritten(program, groups, readers)
        else:
            groups = _update_groups(program, donated, readers)
        return Donated(donated, sums, products, empty, {updates[-1]: tuple(updates) for updates in groups}, offloaded)


def _adds_product(sum: fx.Node) -> bool:
    """Return whether an addition reads a product that may be added as it is computed.

    If there were lines between both, the operands of the product would live longer.
    """
    value = operands(sum)[1]
    if value.target not in ADDING or len(value.users) > 1 or value.next is not sum:
        return False
    return tensor_type(value).dtype == tensor_type(sum).dtype


def _update_groups(program: Program, donated: frozenset[fx.Node], readers: MemoryReaders) -> list[list[fx.Node]]:
    """Group updates with the same numbers that can run as one op at the place of the last one.

    Nothing may read a result earlier.
    """
    open_: dict[object, list[fx.Node]] = {}
    done: list[list[fx.Node]] = []
    keys: dict[fx.Node, object] = {}
    for node in program.nodes:
        for value in operands(node) if not is_getitem(node) else ():
            update = node_at(value) if is_getitem(value) else value
            if keys.get(update) in open_:
                done.append(open_.pop(keys[update]))
        if node.target in IN_PLACE and all(_is_last(value, node, donated, readers) for value in written(node)):
            keys[node] = key = numbers_of(node)
            open_.setdefault(key, []).append(node)
    return [*done, *open_.values()]


def _side_by_side(program: Program, donated: frozenset[fx.Node], readers: MemoryReaders) -> list[list[fx.Node]]:
    """Group updates with the same numbers that stand side by side; only their results may stand between them."""
    groups: list[list[fx.Node]] = []
    last: object = None
    for node in program.nodes:
        if node.target in IN_PLACE and all(_is_last(value, node, donated, readers) for value in written(node)):
            if (key := numbers_of(node)) != last:
                groups.append([])
            groups[-1].append(node)
            last = key
        elif not is_getitem(node):
            last = None
    return groups


def written(update: fx.Node) -> Sequence[fx.Node]:
    """Return the values that an update in place overwrites: the parameter, and as many states as the op has further
    results."""
    results = record_of(update).type
    count = len(results) if isinstance(results, tuple) else 1
    parameter, _, *states = operands(update)
    return parameter, *states[: count - 1]


def written_over(update: fx.Node) -> Sequence[fx.Node]:
    """Return the values whose memory an update in place may change: those in ``written``, and a gradient that it
    divides by a scale."""
    scaled = SHARED[called_op(update)] == SHARED_BY_UPDATES and isinstance(update.args[-2], fx.Node)
    return *written(update), *operands(update)[1:2] * scaled


def _is_last(value: fx.Node, update: fx.Node, donated: frozenset[fx.Node], readers: MemoryReaders) -> bool:
    """Return whether an update may write to a value: its memory may be reused, and no other op of the phases ``finish``
    and ``update`` reads it.

    Ops of other phases must read it before the update (``check_not_overwritten``).
    """
    home = readers.home[value]
    if is_getitem(value) or [readers.home[operand] for operand in operands(update)].count(home) != 1:
        return False
    others = [reader for reader in readers.of(value) if reader is not update]
    if any(reader.op == "output" or record_of(reader).phase in ("finish", "update") for reader in others):
        return False
    if value is not home and value.target not in transfers.BY_FUNCTION:
        return False  # a view of it may be a copy
    return home in donated if home.op == "placeholder" else home.op == "call_function" and not is_getitem(home)


def numbers_of(update: fx.Node) -> object:
    """Return what updates that run as one op have in common: the op, numbers, shared operands and dtypes."""
    dtypes = tuple(tensor_type(value).dtype for value in written(update))
    return update.target, update.args[-SHARED[called_op(update)] :], tuple(update.kwargs.items()), dtypes


def updated_together(updates: Sequence[fx.Node]) -> tuple[list[list[Any]], tuple[Any, ...]]:
    """Return the arguments of updates that run as one op: a list for each operand, and the shared operands."""
    first = updates[0]
    count = len(first.args) - SHARED[called_op(first)]
    columns = [[update.args[k] for update in updates] for k in range(count)]
    return columns, first.args[count:]


def overwritten(result: fx.Node) -> fx.Node:
    """Return the operand of an update that one of its results overwrites: the parameter, or a state, which stand
    before and after the gradient."""
    update, element = element_of(result) if is_getitem(result) else (result, 0)
    value = update.args[element and element + 1]
    assert isinstance(value, fx.Node)
    return value


def check_not_overwritten(program: Program, groups: Sequence[Sequence[fx.Node]], readers: MemoryReaders) -> None:
    """Check that nothing reads what an update in place has overwritten. Linear in the graph.

    Args:
        groups: updates that run as one op, at the place of the last.

    Raises:
        VerifyError: a line after an update reads the old value, or a collective that reads it is started before the
            update and waited for after it. The error quotes both.
    """
    place = {node: k for k, node in enumerate(program.nodes)}
    for updates in groups:
        at = place[updates[-1]]
        for update in updates:
            for value in written_over(update):
                for reader in readers.of(value):
                    is_started = record_of(reader).started
                    last = max(reader.users, key=place.__getitem__, default=reader) if is_started else reader
                    if place[last] > at and reader not in updates:
                        _refuse(program, update, value, reader, last)


def _refuse(program: Program, update: fx.Node, value: fx.Node, reader: fx.Node, last: fx.Node) -> NoReturn:
    under_way = "" if last is reader else f", which is under way until {last.name}"
    raise Subject(program, "").error(
        last, f"{update.name} overwrites the memory of {value.name}, which {reader.name} reads{under_way}: "
        f"put {last.name} before {update.name}", *dict.fromkeys((update, reader))
    )  # fmt: skip
