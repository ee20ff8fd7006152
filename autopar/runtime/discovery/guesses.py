"""Guess the factors of an op from the dependence of its results on its operands, and prove a rule of them.

The search changes one slice of an operand. If a result changes in one slice only, the two dims are one factor. The
other dims of operands may be summed over. Each guess is proven as registered rules are (``proof``), on calls of several
sizes and values. The factors are written as a pattern in the notation of rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.record import TensorType
from autopar.rules.binding import slots
from autopar.rules.notation import ELLIPSIS
from autopar.rules.registry import Rule
from autopar.runtime.discovery.proof import prove
from autopar.runtime.discovery.scaled import FILLS, REACTED_TO, Arguments, Scale, drawn, scales
from autopar.torch_private import OpOverload, pytree

Dim = tuple[int, int]  # (tensor, dim): operands by slot of the schema, results by position
Shapes = Sequence[Sequence[int] | None]

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Factor:
    """Dims of operands, and of results that are not pending, along which an op can be split."""

    operands: tuple[Dim, ...]
    results: tuple[Dim, ...] = ()


def pattern_of(factors: Sequence[Factor], operands: Shapes, results: Shapes, kind: str = "sum") -> str:
    """Return a pattern such as ``... c! -> ... c!``.

    Dims that belong to no factor stay whole, and share a name if they have the same size.
    """
    letters = iter([*LETTERS, *(f"{letter}{number}" for number in range(2, 100) for letter in LETTERS)])
    names: dict[object, str] = {}

    def row(tensor: int, shape: Sequence[int], side: str) -> list[str]:
        dims, met = [], dict.fromkeys(shape, 0)
        for d, n in enumerate(shape):
            index = next((k for k, factor in enumerate(factors) if (tensor, d) in getattr(factor, side)), None)
            key: object = ("whole", n, met[n]) if index is None else index
            met[n] += index is None
            if n != 1 and key not in names:
                names[key] = next(letters) + "!" * (index is None)
            dims.append("1" if n == 1 else names[key])
        return dims

    left = [row(k, shape or (), "operands") for k, shape in enumerate(operands)]
    right = [row(k, shape or (), "results") for k, shape in enumerate(results)]
    rows = [dims for dims in (*left, *right) if dims]
    leading = _leading(rows)
    for dims in rows if leading else ():
        dims[:leading] = [ELLIPSIS]
    text = " -> ".join(", ".join(" ".join(dims) or "()" for dims in side) for side in (left, right))
    return text if kind == "sum" else f"{text} by {kind}"


def _leading(rows: Sequence[Sequence[str]]) -> int:
    """Return how many leading dims are factors of all tensors, so that ``...`` can stand for them."""
    alike = itertools.takewhile(
        lambda names: len(set(names)) == 1 and names[0] != "1" and not names[0].endswith("!"), zip(*rows, strict=False)
    )
    return len(list(alike))


GUESSES = 48  # the most guesses that are tested for one call
SHARED = 16  # the most groups of dims of one size that are tried as sums
COMPLETIONS = 4  # the most ways to complete a guess with dims of other operands
KINDS = ("sum", "max", "min")

Influence = Mapping[Dim, Sequence[Sequence[int] | None]]
Results = tuple[torch.Tensor | None, ...]


class NothingError(Exception):
    """No rule can be discovered; the message is the reason."""


def raised(error: Exception) -> str:
    """Return the reason why an op that raises has no rule."""
    return f"on small operands it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"


class Search:
    """The search for one call's rule.

    Attributes:
        together: whether dims of the same size are split together in all operands, and sizes that may be related stay
            related.
    """

    together = False

    def __init__(self, rule: Rule, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any],
                 results: Sequence[TensorType | None]) -> None:  # fmt: skip
        self.rule, self.op, self.args, self.kwargs, self.types = rule, op, args, kwargs, results
        arguments = slots(op, args, kwargs)
        self.shapes = [value.shape if isinstance(value, TensorType) else None for value in arguments]
        self.results = [None if result is None else result.shape for result in results]
        self.tried = 0

    def run(self) -> Rule:
        """Return the rule; ``NothingError`` if there is none."""
        candidates = scales(self.args, self.kwargs, related=self.together)
        scale = self._scale(candidates)
        self.calls = self._calls(scale, candidates[-1])
        self._check_values()
        influence = {dim: self._influence(dim) for dim in self._dims()}
        guesses = (
            next((factor for factor in self._completed(factor) if self._holds([factor])), None)
            for factor in self._carried_over(influence)
        )
        factors = [factor for factor in guesses if factor is not None]
        kind, summed = "sum", list(self._summed(influence, factors, "sum"))
        if not summed and all(len(factor.results) == self._count() for factor in factors):  # nothing is pending yet
            for other in KINDS[1:]:
                if not summed and (summed := list(self._summed(influence, factors, other))):
                    kind = other
        factors += summed
        rule = self._proven(factors, kind)
        if rule is None:
            factors = [factor for factor in factors if self._holds([factor], kind, self.calls)]
            rule = self._proven(factors, kind)
        if rule is None:
            raise NothingError(
                "it cannot be split along all of its dims at once" if factors else "it can be split along no dim"
            )
        return rule

    def _proven(self, factors: Sequence[Factor], kind: str) -> Rule | None:
        """Return the rule that holds on all calls; ``None`` if there is no factor.

        No operand is linear in it: samples cannot show that sums pass through an op for all values.
        """
        return self._rule(factors, kind) if factors and self._holds(factors, kind, self.calls) else None

    # -- small calls -----------------------------------------------------------------------------------------------

    def _scale(self, candidates: Sequence[Scale]) -> Scale:
        why = ""
        for scale in candidates:
            try:
                self.first = self._steady(drawn(scale(self.args, self.kwargs), FILLS[0]))
            except NothingError:
                raise
            except Exception as error:  # an op may raise anything on operands of other sizes
                why = raised(error)
                continue
            if scale.fits(self.types, self.first):
                return scale
            why = "on small operands its results have other sizes"
        raise NothingError(why)

    def _steady(self, call: Arguments) -> Results:
        """Return the results of a call, if it is deterministic and has no side effects."""
        before, state = _copied(call), torch.random.get_rng_state()
        first = _copied(self._run(call))
        if not torch.equal(state, torch.random.get_rng_state()):
            raise NothingError("it draws random numbers")
        if not _same(call, before):
            raise NothingError("it writes to its arguments")
        if not _same(first, self._run(before)):
            raise NothingError("it gives another result the second time")
        return first

    def _run(self, call: Arguments) -> Results:
        results = self.op(*call[0], **call[1])
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def _calls(self, scale: Scale, last: Scale) -> list[Arguments]:
        """Return the calls on which a rule is tested; guesses are made from the first."""
        calls = [drawn(scale(self.args, self.kwargs), fill) for fill in FILLS]
        calls += [drawn(other(self.args, self.kwargs), FILLS[1]) for other in (scale.odd(), last) if other != scale]
        calls += [drawn(scale(self.args, self.kwargs), fill) for fill in REACTED_TO]
        return [call for call in calls if self._takes(call)]

    def _takes(self, call: Arguments) -> bool:
        """Return whether the op accepts the sizes and values of a call."""
        try:
            self._run(call)
        except Exception:
            return False
        return True

    def _check_values(self) -> None:
        """Refuse an op with a result that is always zero or not finite: it would be right for any pieces."""
        runs = [self._run(call) for call in self.calls]
        for position, shape in enumerate(self.results):
            if shape is not None and not any(
                (result := run[position]) is not None and bool((result.isfinite() & (result != 0)).any())
                for run in runs
            ):
                raise NothingError(f"its result {position} is zero for all operands")

    # -- guesses ---------------------------------------------------------------------------------------------------

    def _count(self) -> int:
        return sum(shape is not None for shape in self.results)

    def _dims(self) -> list[Dim]:
        return [(slot, d) for slot, shape in enumerate(self.shapes) for d, n in enumerate(shape or ()) if n > 1]

    def _size(self, dim: Dim) -> int:
        shape = self.shapes[dim[0]]
        assert shape is not None
        return shape[dim[1]]

    def _influence(self, dim: Dim) -> list[list[int] | None]:
        """Return, for each result, the dims in which a slice of an operand changes only the same slice.

        ``None`` if it changes nothing.
        """
        confined: list[set[int] | None] = [None] * len(self.results)
        for call, index in itertools.product(self.calls[: len(FILLS)], (1, -2)):
            operand = slots(self.op, *call)[dim[0]]
            if operand.shape != slots(self.op, *self.calls[0])[dim[0]].shape:
                continue
            index %= operand.shape[dim[1]]
            other = _with_other_slice(operand, dim[1], index)
            changed = self._run(pytree.tree_map(lambda leaf: other if leaf is operand else leaf, call))  # noqa: B023
            for position, (before, after) in enumerate(zip(self._run(call), changed, strict=True)):
                shape = self.results[position]
                if before is None or after is None or shape is None or before.shape != after.shape:
                    continue
                differs = ~((before == after) | ((before != before) & (after != after)))
                if bool(differs.any()):
                    alike = {
                        e
                        for e, n in enumerate(shape)
                        if n == self._size(dim) and before.shape[e] == operand.shape[dim[1]]
                    }
                    alone = {e for e in alike if not bool(differs.index_fill(e, torch.tensor(index), False).any())}
                    known = confined[position]
                    confined[position] = alone if known is None else alone & known
        return [None if dims is None else sorted(dims) for dims in confined]

    def _carried_over(self, influence: Influence) -> list[Factor]:
        """Return a factor for each group of operand dims that influence the same dims of results."""
        groups: dict[tuple[Dim, ...], list[Dim]] = {}
        for (slot, d), influenced in influence.items():
            from_right = d - len(self.shapes[slot] or ())
            result_dims = []
            for position, dims in enumerate(influenced):
                if dims:
                    aligned = from_right + len(self.results[position] or ())
                    result_dims.append((position, d if d in dims else aligned if aligned in dims else dims[0]))
            if result_dims:
                group = groups.setdefault(tuple(result_dims), [])
                if slot not in {other for other, _ in group}:
                    group.append((slot, d))
        return [Factor(tuple(dims), result_dims) for result_dims, dims in groups.items()]

    def _completed(self, factor: Factor) -> Iterator[Factor]:
        """Yield a guess, alone and with dims of other operands; the gradient of a weight is summed over such dims."""
        size, used_slots = self._size(factor.operands[0]), {slot for slot, _ in factor.operands}
        others = [[dim for dim in self._dims() if dim[0] == slot and self._size(dim) == size]
                  for slot in range(len(self.shapes)) if slot not in used_slots]  # fmt: skip
        for more in [(), *itertools.islice(itertools.product(*filter(None, others)), COMPLETIONS)]:
            if self._fits(group := (*factor.operands, *more)) and (more or not self.together):
                yield Factor(group, factor.results)

    def _fits(self, group: Sequence[Dim]) -> bool:
        """Return whether the op may be run on pieces along these dims."""
        return not self.together or {dim for dim in self._dims() if self._size(dim) == self._size(group[0])} == set(
            group
        )

    def _summed(self, influence: Influence, factors: Sequence[Factor], kind: str) -> Iterator[Factor]:
        """Yield factors of operand dims that no result has, and that can be proven; no dim twice.

        For max and min, all results must depend on them.
        """
        taken = {dim for factor in factors for dim in factor.operands}
        positions = [position for position, shape in enumerate(self.results) if shape is not None]
        enough = any if kind == "sum" else all
        free = [
            dim
            for dim, influenced in influence.items()
            if enough(influenced[position] is not None for position in positions)
        ]
        for size in dict.fromkeys(map(self._size, free)):
            choices = [
                [None, *(dim for dim in free if dim[0] == slot and self._size(dim) == size)]
                for slot in range(len(self.shapes))
            ]
            groups = [tuple(dim for dim in group if dim is not None) for group in itertools.product(*choices)]
            for group in sorted(groups, key=len, reverse=True)[:SHARED]:
                if (
                    group
                    and not taken & set(group)
                    and self._fits(group)
                    and self._holds([factor := Factor(group)], kind)
                ):
                    taken |= set(group)
                    yield factor

    # -- the rule --------------------------------------------------------------------------------------------------

    def _holds(self, factors: Sequence[Factor], kind: str = "sum", calls: Sequence[Arguments] = ()) -> bool:
        """Return whether a rule with these factors can be proven on ``calls``; by default on the first small call."""
        self.tried += not calls
        if not calls and self.tried > GUESSES:
            return False
        rule = self._rule(factors, kind)
        try:
            for args, kwargs in calls or self.calls[:1]:
                prove(self.op, args, kwargs, rule)
        except Exception:  # the proof fails, or the op raises
            return False
        return True

    def _rule(self, factors: Sequence[Factor], kind: str) -> Rule:
        return replace(self.rule, pattern=pattern_of(factors, self.shapes, self.results, kind), empty=False)


# -- tensors -------------------------------------------------------------------------------------------------------


def _copied(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, values)


def _same(left: Any, right: Any) -> bool:
    pairs = zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True)
    return all(
        not isinstance(a, torch.Tensor) or (a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
        for a, b in pairs
    )


def _with_other_slice(operand: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """Return the operand with other values in one slice, in the same range."""
    changed = operand.clone()
    place = changed.select(dim, index)
    if operand.dtype == torch.bool:
        place.logical_not_()
    elif operand.is_floating_point() or operand.is_complex():
        place.copy_(1 - 0.9 * (place.flip(0) if place.dim() else place))
    else:
        place.copy_(torch.where(place > 0, place - 1, place + 1))
    return changed
