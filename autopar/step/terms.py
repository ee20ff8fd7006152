"""Terms: what a loss is made of, and which of its parts are means over the batch.

The mean of the losses of micro-batches is that of the whole batch where each term is a sum over rows, of which none reads another, that is
divided once by what grows with the batch: a number of rows, or a count, which is replaced by the mean count of all micro-batches
(``counts``). A part that all micro-batches have alike, as a penalty of weights, may be added. Of all else that is said.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.nodes import is_getitem, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.step.batch_independence import BatchIndependence
from autopar.step.batches import COUNTED

aten = torch.ops.aten

DIVISION, PRODUCTS, SHIFTS = aten.div.Tensor, (aten.mul.Tensor,), (aten.add.Tensor, aten.sub.Tensor)
BY_NUMBER = {aten.div.Scalar: lambda c: c, aten.mul.Scalar: lambda c: 1 / c}
SHIFTED_BY_NUMBER = {aten.add.Scalar, aten.sub.Scalar}
SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default}
WEIGHTED = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}  # their first result is a sum over their targets
PASSED = {  # the whole of the result is made so of the whole of the operands
    aten.neg.default, aten._to_copy.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.cat.default, aten.stack.default,
    aten.expand.default, aten.select.int, aten.slice.Tensor, aten.permute.default,
}  # fmt: skip
MEASURES = {  # ops between sums and what divides, on single numbers
    aten._to_copy.default, aten.clamp.default, aten.clamp_min.default, aten.view.default, aten.maximum.default, aten.mul.Scalar, aten.mul.Tensor,
    aten.div.Scalar, aten.div.Tensor, aten.add.Tensor, aten.add.Scalar,
}  # fmt: skip


@dataclass
class Terms:
    """The terms of a loss.

    Attributes:
        counts: divisor → the sums over the batch that it is made of.
        divisions: those by a count, of the forward and of the backward → the divisor.
        others: terms that are no means over the batch.
        meetings: where rows meet.
    """

    counts: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    divisions: dict[fx.Node, fx.Node] = field(default_factory=dict)
    others: tuple[fx.Node, ...] = ()
    meetings: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class _Way:
    """From the loss to a part of it: how often a count has divided, and by which numbers it was."""

    counted: int = 0
    numbers: tuple[float, ...] = ()


def terms_of(program: Program, loss: fx.Node, cut: Collection[str], device: torch.device) -> Terms:
    """The terms of a traced program's loss; linear in the graph. ``cut``: the inputs of which a micro-batch has its rows, by name."""
    return _Search(program, loss, BatchIndependence(program, [loss], cut, device)).run()


def search(program: Program, number: fx.Node, rows: BatchIndependence) -> tuple[Terms, set[fx.Node]]:
    """The terms of a number that the program returns, and those values among them that are sums over rows."""
    looked = _Search(program, number, rows)
    return looked.run(), set(looked.sums)


class _Search:
    def __init__(self, program: Program, loss: fx.Node, rows: BatchIndependence) -> None:
        self.loss, self.rows = loss, rows
        self.told = _of_inputs_alone(program)
        self.found = Terms()
        self.sums: dict[fx.Node, None] = {}  # the terms' sums over rows
        self.others: dict[fx.Node, None] = {}
        self.terms: set[fx.Node] = set()

    def run(self) -> Terms:
        self.terms = self._terms()
        known: set[tuple[fx.Node, _Way]] = set()
        open_ = [(self.loss, _Way())]
        while open_:
            one = open_.pop()
            if one not in known:
                known.add(one)
                open_ += self.behind(*one)
        found = self.found
        found.divisions = {user: count for count in found.counts for user in count.users if self._divides(user, count)}
        found.others, found.meetings = tuple(self.others), tuple(self.rows.meet(self.sums))
        return found

    def _terms(self) -> set[fx.Node]:
        """What the loss is made of by ops that terms pass."""
        found, open_ = set(), [self.loss]
        while open_:
            node = open_.pop()
            passes = node.target in (DIVISION, *PRODUCTS, *SHIFTS, *BY_NUMBER, *SHIFTED_BY_NUMBER, *SUMS, *PASSED)
            if node not in found and node in self.rows.varying and passes:
                found.add(node)
                open_ += operands(node)[:1] if node.target is DIVISION else operands(node)
        return found

    def behind(self, node: fx.Node, way: _Way) -> list[tuple[fx.Node, _Way]]:
        """The parts of a term, each with its way; a sum over rows, and what is no term, has none."""
        values, varying = operands(node), self.rows.varying
        if node not in varying:
            if way.counted:
                self.others[node] = None
            return []
        moving = [value for value in values if value in varying]
        if node.target is DIVISION:
            return self._divided(node, way)
        if node.target in BY_NUMBER or (node.target in PRODUCTS and len(values) == 1):
            number = node.args[1]
            if number == 0:
                return []
            by = BY_NUMBER.get(node.target, BY_NUMBER[aten.mul.Scalar])(number)  # type: ignore[arg-type]
            return [(values[0], _Way(way.counted, (*way.numbers, by)))]
        if node.target in SHIFTS or node.target in SHIFTED_BY_NUMBER:
            if way.counted and len(moving) < 2:
                self.others[node] = None
            return [(value, way) for value in moving]
        if node.target in PRODUCTS and len(moving) == 1:
            return [(moving[0], way)]
        if node.target in PASSED or (node.target in SUMS and (_is_of_numbers(values[0]) or not self.rows.are_in(values[0]))):
            return [(value, way) for value in moving]
        if not self._is_mean(node, way):
            self.others[node] = None
        return []

    def _divided(self, node: fx.Node, way: _Way) -> list[tuple[fx.Node, _Way]]:
        value, by = node.args[:2]
        assert isinstance(value, fx.Node)
        if not isinstance(by, fx.Node):
            return [(value, _Way(way.counted, (*way.numbers, float(by))))]  # type: ignore[arg-type]
        if _is_number_of_items(by):
            return [(value, _Way(way.counted + 1, way.numbers))]
        if by not in self.rows.varying:
            return [(value, way)]
        counted = self._counted(by)
        if counted is None or value not in self.rows.varying:
            self.others[node] = None
            return []
        sums, degree = counted
        self.found.counts[by] = sums
        return [(value, _Way(way.counted + degree, way.numbers))]

    def _counted(self, count: fx.Node) -> tuple[tuple[fx.Node, ...], int] | None:
        """The sums over the batch that a divisor is made of, and 1 if it grows with the batch, 0 if it is itself a mean. None where it is no count,
        or where more than terms of the loss are made of it."""
        if any(record_of(user).phase == "forward" and not (user in self.terms and user.target is DIVISION and user.args[0] is not count) for user in count.users):
            return None
        found: dict[fx.Node, None] = {}
        degrees: set[int] = set()
        open_ = [(count, 1)]
        while open_:
            node, degree = open_.pop()
            if node not in self.rows.varying:
                if node.op == "call_function" and not _is_scalar(node):
                    return None
                continue
            if node not in self.told or not _is_scalar(node):
                return None
            if node.target in SUMS and self.rows.are_in(operands(node)[0]):
                if self.rows.meet([node]):
                    return None
                found[node] = None
                degrees.add(degree)
            elif node.target in MEASURES and len(moving := [value for value in operands(node) if value in self.rows.varying]) <= (
                1 if node.target in (aten.mul.Tensor, aten.div.Tensor) else 2
            ):
                if node.target is aten.div.Tensor and operands(node)[0] not in moving:
                    return None
                open_ += [(value, degree + self._degree(node)) for value in moving]
            else:
                return None
        return (tuple(found), degrees.pop()) if len(degrees) == 1 and degrees <= {0, 1} else None

    def _degree(self, node: fx.Node) -> int:
        """Of a product with a number, 1 where that grows with the batch, of a quotient -1."""
        number, elements = node.args[1] if len(node.args) > 1 else None, _elements(node)
        if not isinstance(number, (int, float)) or number == 0 or node.target not in (*BY_NUMBER, *PRODUCTS, DIVISION):
            return 0
        divisor = 1 / number if node.target in (aten.mul.Scalar, *PRODUCTS) else number
        return self._grows(1 / divisor, elements) - self._grows(divisor, elements)

    def _is_mean(self, node: fx.Node, way: _Way) -> bool:
        """Whether a value is a sum over rows, and is divided once by what grows with the batch."""
        weighted = is_getitem(node) and node.args[0].target in WEIGHTED  # type: ignore[union-attr]
        values = operands(node.args[0]) if weighted else operands(node)  # type: ignore[arg-type]
        if not self.rows.are_added_in(node) or not (weighted or node.target in SUMS or self.rows.count > 1) or not any(map(self.rows.are_in, values)):
            return False
        self.sums[node] = None
        elements = max(_elements(value) for value in values)
        return way.counted == 1 or (way.counted == 0 and any(self._grows(number, elements) for number in way.numbers))

    def _grows(self, number: object, elements: int) -> bool:
        """Whether a number may be one of rows, or of elements of all rows."""
        if not isinstance(number, (int, float)) or abs(number - round(number)) > 1e-6 * abs(number) or round(number) == 0:
            return False
        return round(number) % self.rows.count == 0 and elements % round(number) == 0

    def _divides(self, user: fx.Node, count: fx.Node) -> bool:
        """Whether a count divides here: a term of the loss, or its gradient."""
        return user.target is DIVISION and user.args[1] is count and (user in self.terms or record_of(user).phase == "backward")


def _is_number_of_items(node: fx.Node) -> bool:
    """What Hugging Face's losses are divided by; each micro-batch is given its share (``batches``)."""
    while node.op == "call_function" and node.target in PASSED and len(operands(node)) == 1:
        (node,) = operands(node)
    return node.op == "placeholder" and name_of(node) == COUNTED


def _is_of_numbers(node: fx.Node) -> bool:
    """Whether a value is several numbers that were put beside one another, as terms are by ``torch.stack``."""
    while node.target in PASSED and operands(node):
        node = operands(node)[0]
    return node.op == "call_function" and _is_scalar(node)


def _elements(node: fx.Node) -> int:
    """Of a value, or of the largest of those that a number is made of."""
    if _is_scalar(node) and node.op == "call_function":
        return max((_elements(value) for value in operands(node)), default=1)
    type = record_of(node).type
    return torch.Size(type.shape).numel() if isinstance(type, TensorType) else 1


def _is_scalar(node: fx.Node) -> bool:
    type = record_of(node).type
    return isinstance(type, TensorType) and not type.shape


def _of_inputs_alone(program: Program) -> set[fx.Node]:
    """The values that are computed from inputs and constants alone, without randomness."""
    found: set[fx.Node] = set()
    for node in program.nodes:
        given = node.op == "placeholder" and record_of(node).role in ("input", "buffer") and isinstance(record_of(node).type, TensorType)
        if given or node.op == "get_attr" or (node.op == "call_function" and found.issuperset(operands(node))):
            found.add(node)
    return found
