"""Keep in the graph what forward decides by the values of tensors: rows of a mask, checks, work that is skipped.

This mode sees the functions that forward calls on tensors. It is on only for a model that reads values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.provenance import Recorder, user_line
from autopar.capture.values.classes import counted_classes
from autopar.capture.values.conditions import Conditions
from autopar.capture.values.domain import Domain, widened
from autopar.capture.values.filled import filled
from autopar.capture.values.indexed import by_numbers, known_positions
from autopar.capture.values.known import KnownValues
from autopar.capture.values.later import Evaluator, Later
from autopar.capture.values.lines import statement_at, users_frame
from autopar.capture.values.masks import mask_in, nonzero, turns
from autopar.capture.values.rows import Count, Element, Rows, Sizes
from autopar.capture.values.rowwise import MADE, RANDOM, ROWWISE, name_of
from autopar.capture.values.sums import Sums
from autopar.capture.values.truths import Truths
from autopar.capture.values.with_rows import on_rows
from autopar.errors import CaptureError, at_line
from autopar.torch_private import pytree, tensor_dict, version_of, without_function_modes

NOT_RANDOM = (ROWWISE | MADE) - RANDOM
TAKE_SIZES = frozenset({"pad", "interpolate", "narrow"})  # which read sizes out of tensors
NUMBERS: dict[str, Any] = {"__int__": int, "__float__": float, "__index__": int}
KEEPS_STATISTICS = frozenset({"batch_norm", "instance_norm"})


class ValuesInGraph(TorchFunctionMode):
    """Computes with what depends on values, for one run of a forward.

    Args:
        recorder: where the ops that it computes later are noted.
        unchecked: gets the lines of checks that are left out.
        given: stand-in → the tensor that it stands for, of arguments and buffers.
        constant: those of buffers.
        device: of the call.
    """

    def __init__(
        self,
        recorder: Recorder,
        unchecked: Callable[[str], None],
        given: Mapping[torch.Tensor, torch.Tensor],
        constant: Mapping[torch.Tensor, torch.Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.recorder, self.unchecked = recorder, unchecked
        self.evaluator = Evaluator(recorder, self.refuse, device)
        self.conditions = Conditions(self.refuse, lambda x: isinstance(x, (torch.Tensor, Rows, Element, Count)))
        self.histories: Any = tensor_dict()  # tensor → how it was made
        self.known = KnownValues(given, constant), KnownValues(constant, constant)
        self.truths = Truths(self.conditions, self.evaluator, *self.known, unchecked, self.refuse)
        self.sums = Sums(self.evaluator, self.histories, recorder)
        self.domains: Any = tensor_dict()  # mask → its version, the conditions, its domain
        self.distinct: Any = tensor_dict()  # positions → the dim along which no two of them are alike

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "__get__":
            result = func(*args, **kwargs)
            if name_of(getattr(func, "__self__", "")) in ("T", "mT"):
                self._remember(func, args, kwargs, result)
                self.conditions.note_made([result], args)
            return result
        if name.startswith("is_"):
            return func(*args, **kwargs)
        self.conditions.close_ended()
        leaves = pytree.tree_leaves((args, kwargs))
        self.conditions.check(leaves)
        if any(isinstance(leaf, (Rows, Element, Count, Sizes)) for leaf in (*leaves, *args)):
            return on_rows(self, func, tuple(args), dict(kwargs))
        self.sums.finish(leaves)
        if name in ("__getitem__", "__setitem__"):
            args = by_numbers(self, name, (args[0], self.truths.with_bounds(args[1]), *args[2:]))
            args = (args[0], self._with_known(args[1]), *args[2:])
        if name in TAKE_SIZES:
            args, kwargs = self.truths.with_sizes(args, kwargs)
        special = self.of_values(name, func, args, kwargs)
        if special is not None:
            return special[0]
        return self.plain(func, args, kwargs)

    def of_values(self, name: str, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return, in a tuple, what a function that reads values of plain tensors becomes; ``None`` for others."""
        if name == "__bool__":
            answer = self.truths.of(args[0], self._any_of(args[0]))
            return (answer,) if answer is not None else self.truths.number(args[0], bool)
        if name == "item":
            statement = statement_at(frame) if (frame := users_frame()) else None
            if statement is None or args[0].numel() != 1:
                return self.truths.number(args[0], lambda number: number)
            return (args[0].reshape(()),)
        if name in NUMBERS:
            return self.truths.number(args[0], NUMBERS[name])
        if name in ("nonzero", "where", "argwhere") and len(args) + len(kwargs) - ("as_tuple" in kwargs) == 1:
            mask = args[0] if args else next(iter(kwargs.values()))
            if mask.dim() and (known := known_positions(self, self.known[1], mask)) is not None:
                as_tuple = name == "where" or bool(kwargs.get("as_tuple"))
                return (known if as_tuple else torch.stack(known, -1),)
            return (nonzero(self, mask, name == "where" or bool(kwargs.get("as_tuple"))),)
        if name == "__getitem__" and mask_in(args[1]) is not None:
            return (on_rows(self, func, (args[0], args[1]), {}),)
        if name == "__setitem__" and filled(self, *args) is not None:
            return (None,)
        if name in ("index_put", "index_put_") and not kwargs and len(args) in (3, 4):
            into = args[0] if name == "index_put_" else self.plain(torch.Tensor.clone, args[:1], {})
            entries = tuple(slice(None) if entry is None else entry for entry in args[1])
            done = filled(self, into, entries, *args[2:])
            return None if done is None else (done,)
        if name in ("one_hot", "bincount"):
            return counted_classes(self, self.known[1], name, args, kwargs)
        return None

    def _with_known(self, index: Any) -> Any:
        """Replace a mask in an index by its positions, where these are known."""
        mask = mask_in(index)
        known = None if mask is None else known_positions(self, self.known[1], mask)
        if known is None:
            return index
        entries = index if isinstance(index, tuple) else (index,)
        return tuple(part for entry in entries for part in (known if entry is mask else (entry,)))

    def assume(self, broken: torch.Tensor, line: str) -> None:
        """Let the step raise an error for this line where a whole number is not 0."""
        self.truths.assumed.append((broken, line))

    def _any_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of which a tensor says whether it is true anywhere, if it is one."""
        made = self.histories.get(tensor)
        whole = made is not None and name_of(made.function) == "any" and len(made.args) == 1 and not made.kwargs
        return made.args[0].tensor if whole and made.still(tensor) else None

    def plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of plain tensors; under a condition, what it writes counts only then."""
        name = name_of(func)
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        outside = self.conditions.outside(target) if target is not None and _writes(name) else []
        if self.conditions.open and (name in KEEPS_STATISTICS or kwargs.get("out") is not None):
            raise self.refuse(f"calls {name} only for some values of a tensor, and it writes", "call it always")
        if _writes(name):
            self.sums.finish_all()
        if not outside:
            result = func(*args, **kwargs)
            self._remember(func, args, kwargs, result)
            if not _writes(name):
                made = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x is not target]
                self.conditions.note_made(made, pytree.tree_leaves((args, kwargs)))
            return result
        assert target is not None
        for known in self.known:
            known.forget(target)
        new = target.clone()
        func(new, *args[1:], **kwargs)
        target.copy_(torch.where(self.truths.holds(outside), new, target))
        return target

    def _remember(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note how a tensor has been made, so that equal computations of several experts are found."""
        name = name_of(func)
        writes = _writes(name)
        if writes or name == "__get__" or name in NOT_RANDOM:
            for known in self.known:
                known.follow(func, args, kwargs, result, writes)
        if name in ("topk", "sort"):
            dim = kwargs.get(
                "dim", args[2 if name == "topk" else 1] if len(args) > (2 if name == "topk" else 1) else -1
            )
            self.distinct[result[1]] = dim % result[1].dim()
        if isinstance(result, torch.Tensor) and (name == "__get__" or name in NOT_RANDOM):
            args, kwargs = pytree.tree_map_only(torch.Tensor, Later.of, (tuple(args), dict(kwargs)))
            self.histories[result] = Later(func, args, kwargs, place=self.place(), version=version_of(result))

    def place(self) -> tuple[str, str]:
        """Return the module that runs and the user's line."""
        return self.recorder.running(), user_line()

    def listed(self, tensor: torch.Tensor) -> Any:
        """Return what ``tolist()`` is: numbers that cannot be computed with, but split by."""
        if tensor.dim() != 1 or tensor.is_floating_point():
            return [part.tolist() if part.dim() else part.item() for part in tensor]
        return Sizes(self, tensor)

    def is_any(self, rows: Domain, answer: bool) -> bool:
        """Answer a question to which ``answer`` is the answer where there are rows."""
        return self.truths.of_rows(rows, answer)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``on_rows`` for a method of rows, which this mode does not see."""
        with without_function_modes():
            return on_rows(self, function, args, kwargs)

    def widened(self, rows: Rows, support: tuple[int, ...]) -> Later:
        """Return rows for each position along these dims of the mask."""
        if rows.support == support:
            return rows.value
        how = (rows.at, rows.domain.sizes, rows.support, support)
        return Later(widened, (rows.value, *how), place=self.place())

    def turns(self, rows: Rows) -> Iterator[Any]:
        """Run a loop over the positions of a mask."""
        return turns(self, rows)

    def finish(self, leaves: list[Any]) -> None:
        """Compute what is left to compute, when forward has returned these values, and check them."""
        self.conditions.close_all()
        self.conditions.check(leaves)
        if any(isinstance(leaf, (Rows, Count, Element, Sizes)) for leaf in leaves):
            line = next((leaf.domain.line for leaf in leaves if isinstance(leaf, (Rows, Count))), "")
            raise self.refuse(
                "returns rows that a mask selects, and their number is a value",
                "return the mask and all rows; select them outside of forward",
                line,
            )
        self.sums.finish_all()

    def refuse(self, problem: str, remedy: str, line: str = "") -> CaptureError:
        error = CaptureError(f"forward {problem}\n{at_line(line or user_line(), self.recorder.running())}\n  {remedy}")
        self.recorder.refused = self.recorder.refused or error
        return error


def _writes(name: str) -> bool:
    in_place = (
        name.startswith("__i")
        and name.endswith("__")
        and name not in ("__invert__", "__index__", "__iter__", "__int__")
    )
    return (name.endswith("_") and not name.endswith("__")) or in_place or name == "__setitem__"
