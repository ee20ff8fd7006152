"""Answer when forward asks for the truth or the number in a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.capture.provenance import user_line
from autopar.capture.values.conditions import Condition, Conditions
from autopar.capture.values.domain import Domain
from autopar.capture.values.known import KnownValues
from autopar.capture.values.later import Evaluator, Later
from autopar.capture.values.lines import Statement, block_at, leaves_early, statement_at, stored_names, users_frame
from autopar.torch_private import pytree


class Truths:
    """Answers by what the statement does that asks, and else by the value in this call.

    Args:
        known: the values that depend on the inputs and buffers of the call alone.
        constant: those that depend on buffers alone.
        unchecked: gets the lines of checks that are left out.

    Attributes:
        assumed: for each value of the inputs that forward reads: a whole number that is 0 where it is the same, and the
            user's line.
    """

    def __init__(
        self,
        conditions: Conditions,
        evaluator: Evaluator,
        known: KnownValues,
        constant: KnownValues,
        unchecked: Callable[[str], None],
        refuse: Callable[..., Exception],
    ) -> None:
        self.conditions, self.evaluator, self.known, self.constant = conditions, evaluator, known, constant
        self.unchecked, self.refuse = unchecked, refuse
        self.assumed: list[tuple[torch.Tensor, str]] = []

    def of(self, tensor: torch.Tensor, mask: torch.Tensor | None) -> bool | None:
        """Return the answer for a tensor; ``None`` if there is none.

        Args:
            mask: the mask of which the tensor says whether it is true anywhere.
        """
        frame = users_frame()
        statement = statement_at(frame) if frame is not None else None
        if frame is None or statement is None:
            return None
        if statement.kind == "check":
            self.unchecked(user_line())
            return statement.answer
        names = stored_names(block_at(frame, statement.first, statement.last))
        if names & set(frame.f_locals) and (assumed := self.number(tensor, bool)) is not None:
            return assumed[0]  # the work changes variables
        self._open(frame, statement, tensor if statement.answer else ~tensor.bool(), mask)
        return statement.answer

    def number(self, tensor: torch.Tensor, kind: Callable[[Any], Any]) -> tuple[Any] | None:
        """Return the value that a tensor has in this call, in a tuple; ``None`` if the step cannot be for this value.

        It can be for a truth that depends on the inputs and buffers alone, and for a number that depends on buffers.
        """
        known = self.known if tensor.dtype is torch.bool else self.constant
        number = None if self.conditions.open or tensor.numel() != 1 else known.number(tensor)
        if number is None:
            return None
        differs = (tensor.detach().reshape(()) != number).long()
        self.assumed.append((differs, user_line()))
        return (kind(number),)

    def with_sizes(self, args: Any, kwargs: Any) -> Any:
        """Replace numbers in tensors among the sizes that a function takes by what they are in this call."""

        def number(x: Any) -> Any:
            assumed = None if x.dim() or x.is_floating_point() else self.number(x, int)
            return x if assumed is None else assumed[0]

        rest = pytree.tree_map_only(torch.Tensor, number, (tuple(args[1:]), dict(kwargs)))
        return (*args[:1], *rest[0]), rest[1]

    def with_bounds(self, index: Any) -> Any:
        """Replace tensors in the bounds of slices by what they are in this call."""

        def bound(x: Any) -> Any:
            assumed = self.number(x, int) if isinstance(x, torch.Tensor) else None
            return x if assumed is None else assumed[0]

        def entry(x: Any) -> Any:
            return slice(bound(x.start), bound(x.stop), bound(x.step)) if isinstance(x, slice) else x

        return tuple(map(entry, index)) if isinstance(index, tuple) else entry(index)

    def of_rows(self, rows: Domain, answer: bool) -> bool:
        """Return the answer to whether there are rows, and capture what follows under the condition that there are.

        Args:
            answer: what the question has for an answer where there are rows; for none it has the other.
        """
        frame = users_frame()
        statement = statement_at(frame) if frame is not None else None
        if frame is None or statement is None or statement.answer != answer:
            raise self.refuse(
                "decides by the number of rows that a mask selects",
                "if the line only skips work, leave it out, because no rows add nothing; else choose with torch.where",
            )
        if statement.kind == "check":
            self.unchecked(user_line())
        else:
            self._open(frame, statement, self.evaluator.now(rows.mask).any(), rows.source)
        return answer

    def _open(self, frame: Any, statement: Statement, value: torch.Tensor, mask: torch.Tensor | None) -> None:
        block = block_at(frame, statement.first, statement.last)
        if leaves_early(block):
            raise self.refuse(
                "returns or breaks only for some values of a tensor",
                "keep the choice inside the graph with torch.where, or move it out of forward",
            )
        value = value.reshape(()).bool()
        names = stored_names(block)
        self.conditions.add(Condition(Later.of(value), user_line(), frame, statement, names, of=mask))

    def holds(self, conditions: list[Condition]) -> torch.Tensor:
        """Return whether all conditions hold."""
        truths = [self.evaluator.now(condition.value) for condition in conditions]
        result: torch.Tensor = truths[0]
        for truth in truths[1:]:
            result = result & truth
        return result
