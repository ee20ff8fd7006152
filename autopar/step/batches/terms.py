"""Find the terms of a loss, and tell which of them are means over the batch.

The mean of the losses of micro-batches is the loss of the whole batch if each term is a sum over independent rows,
divided once by a number that grows with the batch. This number is a number of rows, or a count, which is replaced by
the mean count of all micro-batches (``counts``). A term that is the same for all micro-batches, as a weight penalty,
may be added.

If all terms are sums over rows that are divided by no such number, the losses of micro-batches add up. A loss may also
add a mean, and a sum that is divided by an input. The input counts the whole batch, so each micro-batch divides by its
share of it (``counts``). A number divides by the rows if it grows with them, and a factor if it grows with their
inverse (``more_rows``). For any other term the step warns, and for any other number that follows from the rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import behind, is_getitem, name_of, node_at, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.step.batches.batch_independence import BatchIndependence, has_own_statistics
from autopar.step.batches.batches import COUNTED
from autopar.step.batches.more_rows import MoreRows
from autopar.torch_private import aten

DIVISION, PRODUCTS, SHIFTS = aten.div.Tensor, (aten.mul.Tensor,), (aten.add.Tensor, aten.sub.Tensor)
BY_NUMBER = {aten.div.Scalar: lambda c: c, aten.mul.Scalar: lambda c: 1 / c}
SHIFTED_BY_NUMBER = {aten.add.Scalar, aten.sub.Scalar}
SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default}
# their first result is a sum over their targets
WEIGHTED = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
PASSED = {  # ops that move elements, but do not mix terms
    aten.neg.default, aten._to_copy.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dims,
    aten.cat.default, aten.stack.default, aten.expand.default, aten.select.int, aten.slice.Tensor, aten.permute.default,
}  # fmt: skip
MEASURES = {  # ops on single numbers, between the sums over the batch and the divisor
    aten._to_copy.default, aten.clamp.default, aten.clamp_min.default, aten.view.default, aten.maximum.default,
    aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor, aten.add.Tensor, aten.add.Scalar,
}  # fmt: skip


@dataclass
class Terms:
    """The terms of a loss.

    Attributes:
        counts: divisor → the sums over the batch that it is computed from.
        divisions: division by a count, of the forward or the backward → the divisor.
        others: terms that are not means over the batch.
        mixings: nodes that mix rows of the batch.
        numbers: ops with a number that follows from the rows, and divides no term by them.
        adds: whether the losses of micro-batches add up, because all terms are sums over rows.
        sums: sums over rows beside other terms, which no passed number divides.
    """

    counts: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    divisions: dict[fx.Node, fx.Node] = field(default_factory=dict)
    others: tuple[fx.Node, ...] = ()
    mixings: tuple[fx.Node, ...] = ()
    numbers: tuple[fx.Node, ...] = ()
    adds: bool = False
    sums: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class _Path:
    """The divisors between the loss and one of its terms.

    Attributes:
        counted: how many of them grow with the rows: counts, and numbers of which it is known.
        numbers: the other numbers, each with the op that divides by it.
        passed: those that are the same for all micro-batches.
    """

    counted: int = 0
    numbers: tuple[tuple[float, fx.Node], ...] = ()
    passed: tuple[fx.Node, ...] = ()

    def with_number(self, number: float, op: fx.Node) -> _Path:
        return replace(self, numbers=(*self.numbers, (number, op)))

    def counted_by(self, degree: int) -> _Path:
        return replace(self, counted=self.counted + degree)

    def passed_by(self, number: fx.Node) -> _Path:
        return replace(self, passed=(*self.passed, number))


def terms_of(
    program: Program, loss: fx.Node, cut: Collection[str], device: torch.device, more_rows: MoreRows | None = None
) -> Terms:
    """Return the terms of a traced program's loss; linear in the graph.

    Args:
        cut: the names of the inputs that are cut into micro-batches.
        more_rows: tells how numbers grow with the rows; without it, each that divides their number is that of the rows.
    """
    return search(program, loss, BatchIndependence(program, [loss], cut, device), more_rows)


def search(program: Program, number: fx.Node, independence: BatchIndependence, more_rows: MoreRows | None) -> Terms:
    """Return the terms of a returned number."""
    return _Search(program, number, independence, more_rows).run()


class _Search:
    """Walks from a loss back to its terms.

    Attributes:
        from_inputs: the values that are computed from inputs and constants alone.
        sums: the terms that are sums over rows of the batch.
        added: the sums over rows that nothing divides that grows with the batch, each with what else divides it.
        fixed: what divides terms that are not added.
        is_added: whether all terms are added.
        others: the terms that are not means over the batch.
        told: the ops whose number is taken for a number of rows, or for none.
        vanishing: products with 0.
        terms: the nodes between the loss and its terms.
    """

    def __init__(
        self, program: Program, loss: fx.Node, independence: BatchIndependence, more_rows: MoreRows | None
    ) -> None:
        self.loss, self.independence, self.more_rows = loss, independence, more_rows
        self.from_inputs = _of_inputs_alone(program)
        self.result = Terms()
        self.sums: dict[fx.Node, None] = {}
        self.added: dict[tuple[fx.Node, tuple[fx.Node, ...]], None] = {}
        self.fixed: set[fx.Node] = set()
        self.is_added = True
        self.others: dict[fx.Node, None] = {}
        self.told: set[fx.Node] = set()
        self.vanishing: set[fx.Node] = set()
        self.terms: set[fx.Node] = set()

    def run(self) -> Terms:
        self.terms = self._terms()
        known: set[tuple[fx.Node, _Path]] = set()
        open_ = [(self.loss, _Path())]
        while open_:
            term = open_.pop()
            if term not in known:
                known.add(term)
                open_ += self.behind(*term)
        terms = self.result
        terms.numbers = tuple(self._numbers())
        terms.adds = bool(self.added) and self.is_added and not self.others and not terms.numbers
        terms.sums = () if terms.adds else tuple(self._without_share())
        terms.divisions = {user: count for count in terms.counts for user in count.users if self._divides(user, count)}
        terms.others, terms.mixings = tuple(self.others), tuple(self.independence.mixing_nodes(self.sums))
        return terms

    def _without_share(self) -> list[fx.Node]:
        """Let passed numbers be divided among the micro-batches; return the sums that none divides alone."""
        shared = dict.fromkeys(
            next((by for by in passed if by not in self.fixed and self._only_divides(by)), None)
            for _, passed in self.added
        )
        left = [term for term, passed in self.added if sum(by in shared for by in passed) != 1]
        if not left:
            self.result.counts |= {by: () for by in shared if by is not None}
        return left

    def _terms(self) -> set[fx.Node]:
        """Return the nodes from the loss back to its terms: ops that pass terms on."""
        passing, open_ = set(), [self.loss]
        while open_:
            node = open_.pop()
            passes = node.target in (DIVISION, *PRODUCTS, *SHIFTS, *BY_NUMBER, *SHIFTED_BY_NUMBER, *SUMS, *PASSED)
            if node not in passing and node in self.independence.varying and passes:
                passing.add(node)
                open_ += operands(node)[:1] if node.target is DIVISION else operands(node)
        return passing

    def behind(self, node: fx.Node, path: _Path) -> list[tuple[fx.Node, _Path]]:
        """Return the parts of a term, each with its path.

        A sum over rows has no parts, and neither has a value that is not a term.
        """
        values, varying = operands(node), self.independence.varying
        if node not in varying:
            self._fix(path)
            if path.counted:
                self.others[node] = None
            return []
        moving = [value for value in values if value in varying]
        if node.target is DIVISION:
            return self._divided(node, path)
        if node.target in BY_NUMBER or (node.target in PRODUCTS and len(values) == 1):
            number = node.args[1]
            if number == 0:
                self.vanishing.add(node)
                return []
            by = BY_NUMBER.get(node.target, BY_NUMBER[aten.mul.Scalar])(number)
            if self._is_of_one_row(values[0], by):
                return [(values[0], path)]
            return self._by_number(values[0], path, by, node, 1 if node.target is aten.div.Scalar else -1)
        if node.target in SHIFTS or node.target in SHIFTED_BY_NUMBER:
            if len(moving) < 2:
                self._fix(path)
            if path.counted and len(moving) < 2:
                self.others[node] = None
            return [(value, path) for value in moving]
        if node.target in PRODUCTS and len(moving) == 1:
            return self._by_constant(moving[0], path, next(v for v in values if v is not moving[0]), -1)
        if node.target in PASSED or (
            node.target in SUMS and (_is_of_numbers(values[0]) or not self.independence.has_rows(values[0]))
        ):
            return [(value, path) for value in moving]
        if not self._is_sum(node):
            self._fix(path)
            self.others[node] = None
        elif path.counted == 0 and not any(self._grows(number, self._summed(node)) for number, _ in path.numbers):
            self.added[node, path.passed] = None
        else:
            self._fix(path)
            if path.counted not in (0, 1):
                self.others[node] = None
        return []

    def _by_number(
        self, value: fx.Node, path: _Path, number: float, op: fx.Node, degree: int
    ) -> list[tuple[fx.Node, _Path]]:
        """Go on to a value that ``op`` divides by a number (``degree`` 1), or multiplies by its inverse (-1)."""
        if self.more_rows is None or not self.more_rows.has(op):
            return [(value, path.with_number(number, op))]
        growth = self.more_rows.growth(op)
        if growth is None and op.target is not aten.div.Scalar:
            return []  # ``_numbers`` has it
        self.told.add(op)
        if growth is None:  # of a mean that is taken apart, over more than the rows, or where they cannot be others
            return [(value, path.with_number(number, op))]
        return [(value, path.counted_by(degree * growth))]

    def _by_constant(self, value: fx.Node, path: _Path, by: fx.Node, degree: int) -> list[tuple[fx.Node, _Path]]:
        """The same for a tensor that is the same for all micro-batches. A constant, or an input that is computed from
        floats, may be a number of rows."""
        made = by
        while made.target in PASSED and len(operands(made)) == 1:
            (made,) = operands(made)
        growth = 0 if self.more_rows is None else self.more_rows.growth(made)
        if growth is None:
            return []  # ``_numbers`` has it
        if growth:
            self.told.add(made)
            return [(value, path.counted_by(degree * growth))]
        return [(value, path.passed_by(by) if degree > 0 else path)]

    def _numbers(self) -> list[fx.Node]:
        """Return the ops of the forward whose number follows from the rows and was not told."""
        more_rows = self.more_rows
        if more_rows is None:
            return []
        return sorted(
            node
            for node in behind([self.loss], self.vanishing)
            if not self._is_told(node)
            and record_of(node).phase == "forward"
            and not has_own_statistics(node)
            and (more_rows.growth(node) != 0 or (node not in self.independence.varying and more_rows.is_reduced(node)))
        )

    def _fix(self, path: _Path) -> None:
        """Note a term of a micro-batch that has the size of the term of the whole batch."""
        self.is_added = False
        self.fixed |= {*path.passed}

    def _is_of_one_row(self, value: fx.Node, number: float) -> bool:
        """Return whether a number divides the sum of so many elements of each row."""
        if value.target is not aten.sum.dim_IntList or not self.independence.has_rows(value):
            return False
        return _elements(operands(value)[0]) == number * _elements(value)

    def _divided(self, node: fx.Node, path: _Path) -> list[tuple[fx.Node, _Path]]:
        value = node_at(node)
        by: Any = node.args[1]
        if not isinstance(by, fx.Node):
            return self._by_number(value, path, float(by), node, 1)
        if _is_number_of_items(by):
            return [(value, path.counted_by(1))]
        if by not in self.independence.varying:
            return self._by_constant(value, path, by, 1)
        counted = self._counted(by)
        if counted is None or value not in self.independence.varying:
            self.others[node] = None
            return []
        sums, degree = counted
        self.result.counts[by] = sums
        return [(value, path.counted_by(degree))]

    def _counted(self, count: fx.Node) -> tuple[tuple[fx.Node, ...], int] | None:
        """Return the sums over the batch that a divisor is computed from, and the degree of its growth.

        The degree is 1 if it grows with the batch, 0 if it is itself a mean. ``None`` if it is not a count, or if the
        forward uses it for more than dividing terms of the loss.
        """
        if not self._only_divides(count):
            return None
        sums: dict[fx.Node, None] = {}
        degrees: set[int] = set()
        open_ = [(count, 1)]
        while open_:
            node, degree = open_.pop()
            if node not in self.independence.varying:
                if node.op == "call_function" and not _is_scalar(node):
                    return None
                continue
            if node not in self.from_inputs or not _is_scalar(node):
                return None
            if node.target in SUMS and self.independence.has_rows(operands(node)[0]):
                if self.independence.mixing_nodes([node]):
                    return None
                sums[node] = None
                degrees.add(degree)
            elif node.target in MEASURES and len(
                moving := [value for value in operands(node) if value in self.independence.varying]
            ) <= (1 if node.target in (aten.mul.Tensor, aten.div.Tensor) else 2):
                if node.target is aten.div.Tensor and operands(node)[0] not in moving:
                    return None
                more = self._degree(node)
                if more is None:
                    return None
                open_ += [(value, degree + more) for value in moving]
            else:
                return None
        return (tuple(sums), degrees.pop()) if len(degrees) == 1 and degrees <= {0, 1} else None

    def _only_divides(self, count: fx.Node) -> bool:
        """Return whether a number has no gradient, and forward uses it for nothing but dividing terms of the loss."""
        return count in self.from_inputs and all(
            record_of(user).phase != "forward"
            or (user in self.terms and user.target is DIVISION and user.args[0] is not count)
            for user in count.users
        )

    def _is_told(self, node: fx.Node) -> bool:
        return node in self.told and (node in self.independence.varying or self._only_scales(node))

    def _only_scales(self, number: fx.Node) -> bool:
        """Return whether forward uses a number for nothing but dividing and multiplying terms of the loss."""
        return all(
            record_of(user).phase != "forward"
            or (user in self.terms and user.target in (DIVISION, *PRODUCTS))
            or (user.target in PASSED and len(operands(user)) == 1 and self._only_scales(user))
            for user in number.users
        )

    def _degree(self, node: fx.Node) -> int | None:
        """Return 1 for a product with a number that grows with the batch, -1 for a division by one, else 0.

        ``None`` if it follows from the rows in another way."""
        number, elements = node.args[1] if len(node.args) > 1 else None, _elements(node)
        if not isinstance(number, (int, float)) or number == 0 or node.target not in (*BY_NUMBER, *PRODUCTS, DIVISION):
            return 0
        multiplies = node.target in (aten.mul.Scalar, *PRODUCTS)
        if self.more_rows is not None and self.more_rows.has(node):
            if (growth := self.more_rows.growth(node)) is not None:
                self.told.add(node)
            return growth if multiplies or growth is None else -growth
        divisor = 1 / number if multiplies else number
        return self._grows(1 / divisor, elements) - self._grows(divisor, elements)

    def _is_sum(self, node: fx.Node) -> bool:
        """Return whether a value is a sum over rows, of which micro-batches have parts."""
        weighted = is_getitem(node) and node_at(node).target in WEIGHTED
        if (
            not self.independence.sums_rows(node)
            or not (weighted or node.target in SUMS or self.independence.count > 1)
            or not any(map(self.independence.has_rows, _summands(node)))
        ):
            return False
        self.sums[node] = None
        return True

    def _summed(self, node: fx.Node) -> int:
        return max(_elements(value) for value in _summands(node))

    def _grows(self, number: object, elements: int) -> bool:
        """Return whether a divisor may be a number of rows, or of elements of all rows: it divides them."""
        if (
            not isinstance(number, (int, float))
            or not math.isfinite(number)
            or abs(number - round(number)) > 1e-6 * abs(number)
            or round(number) == 0
        ):
            return False
        return not (round(number) % self.independence.count or elements % round(number))

    def _divides(self, user: fx.Node, count: fx.Node) -> bool:
        """Return whether a count divides here: a term of the loss, or its gradient."""
        return (
            user.target is DIVISION
            and user.args[1] is count
            and (user in self.terms or record_of(user).phase == "backward")
        )


def _is_number_of_items(node: fx.Node) -> bool:
    """Return whether a value is the number that Hugging Face's losses are divided by.

    Each micro-batch gets its share (``batches``).
    """
    while node.op == "call_function" and node.target in PASSED and len(operands(node)) == 1:
        (node,) = operands(node)
    return node.op == "placeholder" and name_of(node) == COUNTED


def _is_of_numbers(node: fx.Node) -> bool:
    """Return whether a value is a tensor of several numbers, as ``torch.stack`` makes of terms."""
    while node.target in PASSED and operands(node):
        node = operands(node)[0]
    return node.op == "call_function" and _is_scalar(node)


def _summands(node: fx.Node) -> list[fx.Node]:
    weighted = is_getitem(node) and node_at(node).target in WEIGHTED
    return operands(node_at(node)) if weighted else operands(node)


def _elements(node: fx.Node) -> int:
    """Return the number of elements of a value; for a number, of the largest value that it is computed from."""
    if _is_scalar(node) and node.op == "call_function":
        return max((_elements(value) for value in operands(node)), default=1)
    type = record_of(node).type
    return torch.Size(type.shape).numel() if isinstance(type, TensorType) else 1


def _is_scalar(node: fx.Node) -> bool:
    type = record_of(node).type
    return isinstance(type, TensorType) and not type.shape


def _of_inputs_alone(program: Program) -> set[fx.Node]:
    """Return the values that are computed from inputs and constants alone, without randomness."""
    nodes: set[fx.Node] = set()
    for node in program.nodes:
        is_input = (
            node.op == "placeholder"
            and record_of(node).role in ("input", "buffer")
            and isinstance(record_of(node).type, TensorType)
        )
        if is_input or node.op == "get_attr" or (node.op == "call_function" and nodes.issuperset(operands(node))):
            nodes.add(node)
    return nodes
