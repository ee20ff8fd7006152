"""Price an op on the rank with the largest pieces, from its rule and the machine's figures: a roofline.

    latency + max(work / flops(dtype), bytes / bandwidth)

The work is the rule's (``autopar.rules.registry``), for the sizes of the rank's pieces. Bytes are those of all operands
and results, each read or written once. Views cost nothing. Prices are whole nanoseconds, so that sums are exact in any
order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from autopar.costs.machine import Machine
from autopar.ir.layout import Dim
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.rules.registry import Term
from autopar.rules.strategies import Bound, Dims

# their results are in the memory of their operands. A ``reshape`` counts as one: capture writes one that copies as a
# ``clone`` and a view
VIEWS = frozenset({
    "alias", "detach", "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "squeeze.dim",
    "squeeze.dims", "t", "transpose.int", "permute", "slice.Tensor", "select.int", "diagonal", "unfold",
    "split_with_sizes", "unsafe_split_with_sizes", "unbind.int", "view_as_real", "view_as_complex", "_conj",
    "_neg_view", "positive",
})  # fmt: skip

# they read as many elements of their first operand as their first result has
LOOK_UPS = frozenset({
    "embedding", "index_select", "gather", "index.Tensor", "take", "autopar::look_up", "autopar::gather_held",
})  # fmt: skip

# they read nothing of their first operand, of which they take the shape
UNREAD = frozenset({"zeros_like", "ones_like", "full_like", "fill.Scalar", "fill.Tensor", "copy"})

Product = tuple[int, tuple[str, ...]]  # a number, and the factors that may be split


def nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds: what is added up, and compared, everywhere."""
    return round(seconds * 1e9)


def op_price(
    bound: Bound,
    split: Mapping[str, Dim],
    operands: Sequence[TensorType],
    results: Sequence[TensorType | None],
    machine: Machine,
    mesh: Mesh | None = None,
) -> int:
    """Return the nanoseconds of one op on the rank with the largest pieces.

    For many splits of one op, make an ``OpPrices`` once, which is faster.

    Args:
        bound: the op's rule, bound to the call.
        split: factor → how it is split, as ``Strategy.split`` and ``Bound.splits`` have it; others are whole.
        operands: the types of the operands that are present, which give the dtypes.
        results: the types of the results.
        machine: the machine.
        mesh: the mesh of the splits; without it, that of the first type with a Layout.

    Raises:
        ValueError: there are splits and no mesh, or there are other numbers of operands or results than the rule has.
    """
    if mesh is None:
        mesh = next((type.layout.mesh for type in (*operands, *results) if type and type.layout), None)
    reads = tuple([type.dtype for type in operands])
    writes = tuple([None if type is None else type.dtype for type in results])
    return _prices(bound, mesh, reads, writes, machine).price(split)


class OpPrices:
    """The prices of one bound op for any splits on one mesh: what does not depend on the split is computed once.

    Args:
        bound: the op's rule, bound to the call.
        mesh: the mesh of the splits; ``None`` if nothing is split.
        reads: the dtypes of the operands that are present.
        writes: the dtypes of the results; ``None`` for those that are absent.
        machine: the machine.

    Attributes:
        flops: the operations a second; 1 if the op has no work.
        compute: the dtype of the operations: that of the largest floating operand, the widest of several. Small ones,
            such as the sums of rows that the backward of an attention reads in float32, do not decide.

    Raises:
        ValueError: there are other numbers of dtypes than the rule has operands or results.
    """

    def __init__(self, bound: Bound, mesh: Mesh | None, reads: Sequence[torch.dtype],
                 writes: Sequence[torch.dtype | None], machine: Machine) -> None:  # fmt: skip
        if (len(reads), len(writes)) != (len(bound.operands), len(bound.results)):
            raise ValueError(
                f"{bound.rule.op} has {len(bound.operands)} operands and {len(bound.results)} results, not "
                f"{len(reads)} and {len(writes)}"
            )
        self._sizes, self._mesh, self._whole = bound.sizes, mesh, bound.whole
        self._pieces: dict[tuple[str, Dim], int] = {}
        self.free = bound.rule.op in VIEWS
        self._latency, self._bandwidth = machine.memory.latency, machine.memory.bandwidth
        self.compute = dtype_of_work(bound, reads)
        self.flops = machine.flops(self.compute) if bound.terms else 1.0
        self._terms = tuple(
            (term.times * size, term.over, factors) for term in bound.terms for size, factors in (self._product(term),)
        )
        values = [
            (self._elements(dims, shape), dtype.itemsize)
            for dims, shape, dtype in zip(bound.operands, bound.operand_shapes, reads, strict=True)
        ]
        made = [
            (self._elements(dims, shape), dtype.itemsize)
            for dims, shape, dtype in zip(bound.results, bound.result_shapes, writes, strict=True)
            if dims is not None and shape is not None and dtype is not None
        ]
        self._looked_up: tuple[Product, Product, int] | None = None
        if bound.rule.op in UNREAD and values:
            values = values[1:]
        elif bound.rule.op in LOOK_UPS:
            self._looked_up = (values[0][0], made[0][0], values[0][1])
            values = values[1:]
        total: dict[tuple[str, ...], int] = {}
        for (count, factors), itemsize in (*values, *made):
            total[factors] = total.get(factors, 0) + count * itemsize
        self._bytes = tuple((count, factors) for factors, count in total.items())

    def _product(self, term: Term) -> Product:
        return (
            math.prod(self._sizes[f] for f in term.factors if f in self._whole),
            tuple(sorted(f for f in term.factors if f not in self._whole)),
        )

    def _elements(self, dims: Dims, shape: Sequence[int]) -> Product:
        """Return the elements of a value: the sizes of whole factors and of dims without factors, and the others."""
        factors = [factor for dim in dims for factor in dim]
        count = math.prod(size for dim, size in zip(dims, shape, strict=True) if not dim)
        count *= math.prod(self._sizes[factor] for factor in factors if factor in self._whole)
        return count, tuple(sorted(factor for factor in factors if factor not in self._whole))

    def price(self, split: Mapping[str, Dim]) -> int:
        """Return the nanoseconds on the rank with the largest pieces; 0 for a view."""
        if self.free:
            return 0
        work, bytes = self.work_and_bytes(split)
        return nanoseconds(self._latency + max(work / self.flops, bytes / self._bandwidth))

    def work_and_bytes(self, split: Mapping[str, Dim]) -> tuple[int, int]:
        """Return the operations of the rank with the largest pieces, and the bytes that it reads and writes."""
        sizes = self._sizes
        if split:
            sizes = sizes.copy()
            for factor, dim in split.items():
                sizes[factor] = self._piece(factor, dim)
        work = bytes = 0
        for times, over, factors in self._terms:
            for factor in factors:
                times *= sizes[factor]
            work += times // over
        for count, factors in self._bytes:
            for factor in factors:
                count *= sizes[factor]
            bytes += count
        if self._looked_up is not None:
            table, result, itemsize = self._looked_up
            bytes += min(_count(table, sizes), _count(result, sizes)) * itemsize
        return work, bytes

    def _piece(self, factor: str, dim: Dim) -> int:
        """Return the size of a factor's first piece, which is a largest one."""
        size = self._pieces.get((factor, dim))
        if size is None:
            if self._mesh is None:
                raise ValueError(f"the factor {factor} is split, and there is no mesh; give the mesh of the splits")
            whole, mesh = self._sizes[factor], self._mesh
            size = math.prod(-(-(whole if part is None else part) // mesh.count(axes)) for part, axes in dim)
            self._pieces[factor, dim] = size
        return size


_prices = lru_cache(maxsize=4096)(OpPrices)  # layers repeat


def _count(product: Product, sizes: Mapping[str, int]) -> int:
    count, factors = product
    return count * math.prod([sizes[factor] for factor in factors])


def dtype_of_work(bound: Bound, dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype of an op's operations: that of its largest floating operand, the widest of several."""
    sized = [
        (math.prod(shape), dtype.itemsize, k)
        for k, (shape, dtype) in enumerate(zip(bound.operand_shapes, dtypes, strict=True))
        if dtype.is_floating_point or dtype.is_complex
    ]
    return dtypes[max(sized)[2]] if sized else torch.float32
