"""Keep in the graph what forward decides by the values of tensors: rows that a mask selects, checks, work that is skipped.

This mode sees the functions that forward calls on tensors. It is on only for a model that reads values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.provenance import Recorder, user_line
from autopar.capture.values.conditions import Condition, Conditions
from autopar.capture.values.domain import Domain, coordinate, widened
from autopar.capture.values.known import KnownValues
from autopar.capture.values.later import Evaluator, Later
from autopar.capture.values.lines import adds_at, block_at, leaves_early, loop_at, statement_at, stored_names, users_frame
from autopar.capture.values.rows import Count, Element, Rows, Sizes
from autopar.capture.values.rowwise import MADE, RANDOM, ROWWISE, Mixed, name_of, results
from autopar.capture.values.selected import gathered
from autopar.capture.values.split import pieces, put_together
from autopar.capture.values.written import Sums, written
from autopar.errors import CaptureError, at_line
from autopar.torch_private import pytree, tensor_dict, version_of, without_function_modes

NOT_RANDOM = (ROWWISE | MADE) - RANDOM
TAKE_SIZES = frozenset({"pad", "interpolate", "narrow"})  # which read sizes out of tensors
MOST_TURNS = 1024  # of a loop over what nonzero finds
READS: dict[str, Any] = {"__int__": int, "__float__": float, "__index__": int}
KEEPS_STATISTICS = frozenset({"batch_norm", "instance_norm"})


class ValuesInGraph(TorchFunctionMode):
    """Computes with what depends on values, for one run of a forward.

    Args:
        recorder: where the ops that it computes later are noted.
        unchecked: gets the lines of checks that are left out.
        real: stand-in → the tensor of the call that it stands for; no parameters.
        device: of the call.

    Attributes:
        assumed: for each value of the inputs that forward reads: a whole number that is 0 where it is the same, and the
            user's line.
    """

    def __init__(
        self,
        recorder: Recorder,
        unchecked: Callable[[str], None],
        real: Mapping[torch.Tensor, torch.Tensor],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.recorder, self.unchecked = recorder, unchecked
        self.evaluator = Evaluator(recorder.placed, self.refuse, recorder.spread, device)
        self.conditions = Conditions(self.refuse, lambda x: isinstance(x, (torch.Tensor, Rows, Element, Count)))
        self.sums = Sums(self)
        self.histories: Any = tensor_dict()  # tensor → how it was made
        self.known = KnownValues(real)
        self.assumed: list[tuple[torch.Tensor, str]] = []
        self.domains: Any = tensor_dict()  # mask → its version, the conditions, its domain
        self.distinct: Any = tensor_dict()  # positions → the dim along which no two of them are alike

    # -- what forward calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "__get__":
            result = func(*args, **kwargs)
            if name_of(getattr(func, "__self__", "")) in ("T", "mT"):
                self._remember(func, args, kwargs, result)
                self.conditions.note_made([result])
            return result
        if name.startswith("is_"):
            return func(*args, **kwargs)
        self.conditions.close_ended()
        leaves = pytree.tree_leaves((args, kwargs))
        self.conditions.check(leaves)
        if any(isinstance(leaf, (Rows, Element, Count, Sizes)) for leaf in (*leaves, *args)):
            return self.on_rows(func, tuple(args), dict(kwargs))
        self.sums.finish(leaves)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._with_bounds(args[1]), *args[2:])
        if name in TAKE_SIZES:
            args, kwargs = self._with_sizes(args, kwargs)
        special = self._of_values(name, func, args, kwargs)
        if special is not None:
            return special[0]
        return self.plain(func, args, kwargs)

    def _of_values(self, name: str, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return, in a tuple, what a function that reads values of plain tensors becomes; ``None`` for others."""
        if name == "__bool__":
            answer = self._truth(args[0])
            return (answer,) if answer is not None else self._assumed(args[0], bool)
        if name == "item":
            statement = statement_at(frame) if (frame := users_frame()) else None
            if statement is None or args[0].numel() != 1:
                return self._assumed(args[0], lambda number: number)
            return (args[0].reshape(()),)
        if name in READS:
            return self._assumed(args[0], READS[name])
        if name in ("nonzero", "where", "argwhere") and len(args) + len(kwargs) - ("as_tuple" in kwargs) == 1:
            mask = args[0] if args else next(iter(kwargs.values()))
            return (self._nonzero(mask, name == "where" or bool(kwargs.get("as_tuple"))),)
        if name == "__getitem__" and (mask := _mask_in(args[1])) is not None:
            return (self.on_rows(func, (args[0], self._with_positions(args[1], mask)), {}),)
        if name == "__setitem__" and (mask := _mask_in(args[1])) is not None and args[1] is mask:
            return self._filled(args[0], mask, args[2])
        return None

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
                self.conditions.note_made(
                    leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf is not target
                )
            return result
        assert target is not None
        self.known.forget(target)
        new = target.clone()
        func(new, *args[1:], **kwargs)
        target.copy_(torch.where(self.holds(outside), new, target))
        return target

    def _remember(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note how a tensor has been made, so that equal computations of several experts are found."""
        name = name_of(func)
        writes = _writes(name)
        if writes or name == "__get__" or name in NOT_RANDOM:
            self.known.follow(func, args, kwargs, result, writes)
        if name in ("topk", "sort"):
            dim = kwargs.get("dim", args[2 if name == "topk" else 1] if len(args) > (2 if name == "topk" else 1) else -1)
            self.distinct[result[1]] = dim % result[1].dim()
        if isinstance(result, torch.Tensor) and (name == "__get__" or name in NOT_RANDOM):
            args, kwargs = pytree.tree_map_only(torch.Tensor, Later.of, (tuple(args), dict(kwargs)))
            self.histories[result] = Later(func, args, kwargs, place=self.place(), version=version_of(result))

    def place(self) -> tuple[str, str]:
        return self.recorder.running(), user_line()

    # -- truths

    def _truth(self, tensor: torch.Tensor) -> bool | None:
        frame = users_frame()
        statement = statement_at(frame) if frame is not None else None
        if frame is None or statement is None:
            return None
        if statement.kind == "check":
            self.unchecked(user_line())
            return statement.answer
        names = stored_names(block_at(frame, statement.first, statement.last))
        if names & frame.f_locals.keys() and (assumed := self._assumed(tensor, bool)) is not None:
            return assumed[0]  # type: ignore[no-any-return]  # the work changes variables
        self._open(frame, statement, tensor if statement.answer else ~tensor.bool())
        return statement.answer

    def _assumed(self, tensor: torch.Tensor, kind: Callable[[Any], Any]) -> tuple[Any] | None:
        """Return the value that a tensor has in this call, if it depends on the inputs alone: the step is for this value."""
        number = None if self.conditions.open or tensor.numel() != 1 else self.known.number(tensor)
        if number is None:
            return None
        differs = (tensor.detach().reshape(()) != number).long()
        self.assumed.append((differs, user_line()))
        return (kind(number),)

    def _with_sizes(self, args: Any, kwargs: Any) -> Any:
        """Replace numbers in tensors among the sizes that a function takes by what they are in this call."""

        def number(x: Any) -> Any:
            assumed = None if x.dim() or x.is_floating_point() else self._assumed(x, int)
            return x if assumed is None else assumed[0]

        rest = pytree.tree_map_only(torch.Tensor, number, (tuple(args[1:]), dict(kwargs)))
        return (*args[:1], *rest[0]), rest[1]

    def _with_bounds(self, index: Any) -> Any:
        """Replace tensors in the bounds of slices by what they are in this call."""

        def bound(x: Any) -> Any:
            assumed = self._assumed(x, int) if isinstance(x, torch.Tensor) else None
            return x if assumed is None else assumed[0]

        def entry(x: Any) -> Any:
            return slice(bound(x.start), bound(x.stop), bound(x.step)) if isinstance(x, slice) else x

        return tuple(map(entry, index)) if isinstance(index, tuple) else entry(index)

    def is_empty(self, rows: Domain) -> bool:
        """Answer whether there are no rows, and capture what follows under the condition that there are some."""
        frame = users_frame()
        statement = statement_at(frame) if frame is not None else None
        if frame is None or statement is None:
            raise self.refuse("decides by the number of rows that a mask selects", "compute for no rows too")
        if statement.kind == "check":
            self.unchecked(user_line())
            return False
        self._open(frame, statement, self.evaluator.now(rows.mask).any())
        return False

    def _open(self, frame: Any, statement: Any, value: torch.Tensor) -> None:
        block = block_at(frame, statement.first, statement.last)
        if leaves_early(block):
            raise self.refuse("returns or breaks only for some values of a tensor", "do it always")
        value = value.reshape(()).bool()
        names = stored_names(block)
        self.conditions.add(Condition(Later.of(value), user_line(), frame, statement, names))

    def holds(self, conditions: list[Condition]) -> torch.Tensor:
        truths = [self.evaluator.now(condition.value) for condition in conditions]
        result = truths[0]
        for truth in truths[1:]:
            result = result & truth
        return result

    # -- rows

    def listed(self, tensor: torch.Tensor) -> Any:
        """Return what ``tolist()`` is: numbers that cannot be computed with, but split by."""
        if tensor.dim() != 1 or tensor.is_floating_point():
            return [part.tolist() if part.dim() else part.item() for part in tensor]
        return Sizes(self, tensor)

    def _nonzero(self, mask: torch.Tensor, as_tuple: bool) -> Any:
        domain = self.domain_of(mask)
        rows = [self.positions(domain, d) for d in domain.dims]
        if as_tuple:
            return tuple(rows)
        table = Later(_columns, tuple(row.value for row in rows), place=self.place())
        whole = Rows(self, domain, table, (None, len(rows)), 0, domain.dims, rows[0].like, domain.dims)
        self.conditions.note_made([whole])
        return whole

    def domain_of(self, mask: torch.Tensor) -> Domain:
        if not mask.dim():
            raise self.refuse("asks for the nonzero positions of a number", "compare it with zero")
        key = (version_of(mask), *self.conditions.open)
        if mask in self.domains and self.domains[mask][0] == key:
            return self.domains[mask][1]  # type: ignore[no-any-return]
        value = Later(_truths, (Later.of(mask),), place=self.place())
        for condition in self.conditions.open:
            value = Later(operator.and_, (value, condition.value), place=self.place())
        domain = Domain(value, tuple(mask.shape), user_line(), source=mask)
        self.domains[mask] = key, domain
        return domain

    def positions(self, domain: Domain, dim: int) -> Rows:
        value = Later(coordinate, (domain.mask,), {"dim": dim}, place=self.place())
        like = torch.empty(0, dtype=torch.long, device=self._device(domain))
        rows = Rows(self, domain, value, (None,), 0, (dim,), like, (dim,))
        self.conditions.note_made([rows])
        return rows

    def _device(self, domain: Domain) -> torch.device:
        value = domain.mask
        while value.tensor is None:
            value = value.args[0]
        device: torch.device = value.tensor.device
        return device

    def _with_positions(self, index: Any, mask: torch.Tensor) -> Any:
        domain = self.domain_of(mask)
        rows = tuple(self.positions(domain, d) for d in domain.dims)
        index = index if isinstance(index, tuple) else (index,)
        return tuple(part for one in index for part in (rows if one is mask else (one,)))

    def _filled(self, x: torch.Tensor, mask: torch.Tensor, value: Any) -> tuple[Any] | None:
        """Put rows of a plain tensor at the positions of a mask, in order: their number must be that of the positions."""
        if not isinstance(value, torch.Tensor) or value.dim() <= x.dim() - mask.dim() or value.shape[0] == 1:
            return None
        self.unchecked(user_line())
        self.sums.finish_all()
        whole = mask.reshape(*mask.shape, *(1 for _ in range(x.dim() - mask.dim()))).expand_as(x)
        self.plain(torch.Tensor.copy_, (x, x.masked_scatter(whole, value.to(x.dtype))), {})
        return (None,)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``on_rows`` for a method of rows, which this mode does not see."""
        with without_function_modes():
            return self.on_rows(function, args, kwargs)

    def on_rows(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that has rows, their number, or the element of a loop among its arguments."""
        self.conditions.close_ended()
        leaves = pytree.tree_leaves((args, kwargs))
        self.conditions.check(leaves)
        self.sums.finish([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], self._adds(function, args))
        name = name_of(function)
        if name in ("__getitem__", "__setitem__") and (mask := _mask_in(args[1])) is not None:
            args = (args[0], self._with_positions(args[1], mask), *args[2:])
        if name == "__getitem__" and isinstance(args[1], Element) and isinstance(args[0], torch.Tensor):
            args = (args[0], self._possible(args[1], args[0].shape[0]))
        args, kwargs = _with_numbers(name, args, kwargs)
        rows = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Rows)]
        if not rows and not any(isinstance(arg, Sizes) for arg in (*args, *kwargs.values())):
            again = self._of_values(name, function, args, kwargs)
            return again[0] if again is not None else self._element(name, function, args, kwargs)
        if name in ("split", "split_with_sizes") and not rows:
            return pieces(self, *args, **kwargs)
        if any(one.domain is not rows[0].domain for one in rows):
            together = put_together(self, name, args, kwargs)
            if together is not None:
                return together
            raise self.refuse(f"combines rows that different masks select, with {name}", "select them by one mask")
        if name == "__getitem__" and not isinstance(args[0], Rows):
            return gathered(self, args[0], args[1])
        if (done := written(self, name, args, kwargs)) is not None:
            return done[0]
        if name == "__getitem__" and (column := _column(*args)) is not None:
            return self.positions(rows[0].domain, column)
        if name in ("squeeze", "flatten", "view", "reshape") and rows[0].coordinates and rows[0].sizes == (None, 1):
            return self.positions(rows[0].domain, rows[0].coordinates[0])
        return self.rowwise(function, args, kwargs, rows)

    def _adds(self, function: Any, args: Any) -> Any:
        """Return the tensor that a call only adds to, so that earlier sums into it need not be finished."""
        name = name_of(function)
        frame = users_frame() if name in ("__getitem__", "__setitem__") else None
        return args[0] if name == "index_add_" or (frame is not None and adds_at(frame)) else None

    def _possible(self, element: Element, size: int) -> Element:
        """Return an element below ``size``. A turn of an element that is not cannot count: eager raises an error."""
        if element.item() < size:
            return element
        self.unchecked(user_line())
        element.made_under[-1].impossible = True
        return Element((size - 1,), element.shape)

    def _element(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        if name == "__getitem__" and isinstance(args[1], _One):
            selected = self.plain(torch.Tensor.__getitem__, (args[0], args[1].number), {})
            return self.plain(torch.Tensor.unsqueeze, (selected, 0), {})
        return self.plain(function, args, kwargs)

    def rowwise(self, function: Any, args: Any, kwargs: Any, rows: list[Rows]) -> Any:
        """Call a function that computes each row by itself."""
        name = name_of(function)
        try:
            spec, found = results(function, args, kwargs)
        except Mixed:
            raise self.refuse(
                f"computes {name} of the rows that a mask selects, and it may mix rows",
                "compute with all rows, and choose with torch.where",
            ) from None
        support = tuple(sorted({d for one in rows for d in one.support}))
        domain = rows[0].domain
        new_args, new_kwargs = pytree.tree_map_only(
            (Rows, torch.Tensor, Count), lambda x: self.operand(x, support, domain), (args, kwargs)
        )
        in_place = name.startswith("__i") and name.endswith("__") and name != "__invert__"
        function = getattr(torch.Tensor, "__" + name[3:]) if in_place else function
        random = name in RANDOM and kwargs.get("training", args[2] if len(args) > 2 else True)
        count = domain.count(support)
        whole = Later(function, new_args, new_kwargs, place=self.place(), random=bool(random), rows=count)
        made = []
        for k, result in enumerate(found):
            value = whole if spec.is_leaf() else Later(_leaf, (whole, k), place=self.place())
            like = torch.empty(0, dtype=result.dtype, device=rows[0].device)
            made.append(Rows(self, domain, value, result.sizes, result.at, support, like))
        self.conditions.note_made(made)
        if in_place:
            if args[0].shared or args[0].sizes != made[0].sizes:
                raise self.refuse("writes into rows that other values view", "write x = x + 1 instead of x += 1")
            args[0].value, args[0].support, args[0].coordinates = made[0].value, support, None
            return args[0]
        for one in (*rows, *made):
            one.shared = one.shared or name not in ("linear", "matmul", "mul", "add", "dropout")
        return pytree.tree_unflatten(made, spec)

    def operand(self, x: Any, support: tuple[int, ...], domain: Domain) -> Any:
        """Return what a value is in a computation with rows that depend on these dims of the mask."""
        if isinstance(x, Count):
            return domain.count(support)
        return self.widened(x, support) if isinstance(x, Rows) else Later.of(x)

    def widened(self, rows: Rows, support: tuple[int, ...]) -> Later:
        if rows.support == support:
            return rows.value
        how = (rows.at, rows.domain.sizes, rows.support, support)
        return Later(widened, (rows.value, *how), place=self.place())

    def turns(self, rows: Rows) -> Iterator[Any]:
        """Run a loop over the positions of a mask: a turn for each, under the condition that it counts."""
        sizes, frame = rows.domain.sizes, users_frame()
        loop = loop_at(frame) if frame is not None else None
        if frame is None or loop is None or rows.coordinates is None or rows.at or len(sizes) != 1:
            raise self.refuse("loops over rows that a mask selects", "compute with all of them at once")
        if sizes[0] > MOST_TURNS or leaves_early(loop.body):
            raise self.refuse("loops over positions of a mask, and may leave the loop", "loop over all positions")
        mask = Later(_same, (rows.domain.mask,))
        for turn in range(sizes[0]):
            hit = Later(torch.Tensor.__getitem__, (mask, turn), place=self.place())
            condition = Condition(hit, user_line(), frame, None, stored_names(loop.body))
            self.conditions.add(condition)
            element = Element((turn,), (1,) if len(rows.sizes) == 2 else ())
            self.conditions.note_made([element])
            yield element
            if condition.impossible:
                self.sums.drop(condition)
            self.conditions.close(condition)

    def finish(self, leaves: list[Any]) -> None:
        """Compute what is left to compute, when forward has returned these values, and check them."""
        self.conditions.close_all()
        self.conditions.check(leaves)
        if any(isinstance(leaf, (Rows, Count, Element, Sizes)) for leaf in leaves):
            raise self.refuse(
                "returns rows that a mask selects, and their number is a value",
                "return the mask and all rows; select them outside of forward",
            )
        self.sums.finish_all()

    def refuse(self, problem: str, remedy: str, line: str = "") -> CaptureError:
        error = CaptureError(
            f"forward {problem}\n{at_line(line or user_line(), self.recorder.running())}\n  {remedy}"
        )
        self.recorder.refused = self.recorder.refused or error
        return error


class _One:
    """The index of one position, which keeps its dim."""

    def __init__(self, number: int) -> None:
        self.number = number


def _with_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace elements of loops by their numbers."""
    if name == "__getitem__" and isinstance(args[1], Element) and args[1].shape:
        return (args[0], _One(args[1].item())), kwargs
    if name in ("__getitem__", "__setitem__") and isinstance(args[1], tuple):
        index = tuple((x.item() if not x.shape else [x.item()]) if isinstance(x, Element) else x for x in args[1])
        args = (args[0], index, *args[2:])
    return pytree.tree_map_only(Element, Element.item, (args, kwargs))  # type: ignore[no-any-return]


def _mask_in(index: Any) -> torch.Tensor | None:
    """Return the mask of truths in an index, if there is one."""
    index = index if isinstance(index, tuple) else (index,)
    masks = [x for x in index if isinstance(x, torch.Tensor) and x.dtype is torch.bool and x.dim()]
    return masks[0] if len(masks) == 1 else None


def _column(x: Any, index: Any) -> int | None:
    """Return which dim of the mask ``x[:, index]`` has the positions of, for the result of ``nonzero``."""
    if isinstance(x, Rows) and x.coordinates and len(x.sizes) == 2 and isinstance(index, tuple) and len(index) == 2:
        if index[0] == slice(None) and type(index[1]) is int:
            return x.coordinates[index[1]]
    return None


def _writes(name: str) -> bool:
    in_place = name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__iter__", "__int__")
    return (name.endswith("_") and not name.endswith("__")) or in_place or name == "__setitem__"


def _truths(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype is torch.bool else mask != 0


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _columns(*positions: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.flatten() for x in torch.meshgrid(*positions, indexing="ij")], -1)


def _leaf(results: Any, index: int) -> Any:
    return pytree.tree_leaves(results)[index]
