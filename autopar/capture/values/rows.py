"""Define the stand-ins for what depends on the values of a mask: rows, their number, and the element of a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import torch

from autopar.capture.provenance import Recorder
from autopar.capture.values.conditions import Conditions
from autopar.capture.values.domain import Domain
from autopar.capture.values.later import Evaluator, Later
from autopar.capture.values.lines import answer_of_length, users_frame
from autopar.capture.values.sums import Sums


class Keeper(Protocol):
    """The mode that computes with rows."""

    recorder: Recorder
    evaluator: Evaluator
    conditions: Conditions
    sums: Sums
    unchecked: Callable[[str], None]
    histories: Any
    domains: Any
    distinct: Any

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def plain(self, func: Any, args: Any, kwargs: Any) -> Any: ...

    def of_values(self, name: str, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None: ...

    def widened(self, rows: Rows, support: tuple[int, ...]) -> Later: ...

    def place(self) -> tuple[str, str]: ...

    def refuse(self, problem: str, remedy: str) -> Exception: ...

    def is_any(self, rows: Domain, answer: bool) -> bool: ...

    def turns(self, rows: Rows) -> Iterator[Any]: ...

    def assume(self, broken: torch.Tensor, line: str) -> None: ...


REMEDY = "compute with all rows, and choose with torch.where"


class Count:
    """The number of rows that count: it can be compared with zero, and be a size of a view of these rows."""

    def __init__(self, keeper: Keeper, domain: Domain) -> None:
        self.keeper, self.domain = keeper, domain

    def __eq__(self, other: object) -> bool:
        return self._same(other) or self._asked(other, 0, False)

    def __ne__(self, other: object) -> bool:
        return not self._same(other) and self._asked(other, 0, True)

    def _same(self, other: object) -> bool:
        return isinstance(other, Count) and other.domain is self.domain

    def __gt__(self, other: object) -> bool:
        return self._asked(other, 0, True)

    def __ge__(self, other: object) -> bool:
        return self._asked(other, 1, True)

    def __lt__(self, other: object) -> bool:
        return self._asked(other, 1, False)

    def __le__(self, other: object) -> bool:
        return self._asked(other, 0, False)

    def __bool__(self) -> bool:
        return self.keeper.is_any(self.domain, True)

    def _asked(self, other: object, bound: int, answer: bool) -> bool:
        if type(other) is not int or other != bound:
            self._refuse()
        return self.keeper.is_any(self.domain, answer)

    def _refuse(self, *_: Any) -> NoReturn:
        raise self.keeper.refuse("computes with the number of rows that a mask selects, which is a value", REMEDY)

    __hash__ = __int__ = __index__ = __float__ = __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __neg__ = _refuse


class Element:
    """A position that a loop over ``nonzero`` is at: its numbers are known, and whether it counts is not.

    Args:
        shape: ``(1,)`` as a row of ``nonzero``, or ``()``.
    """

    def __init__(self, numbers: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.numbers, self.shape = numbers, shape
        self.made_under: tuple[Any, ...] = ()

    def _of(self, numbers: tuple[int, ...]) -> Element:
        element = Element(numbers, ())
        element.made_under = self.made_under
        return element

    def __getitem__(self, index: Any) -> Element:
        return self._of((self.numbers[index],))

    def __iter__(self) -> Iterator[Element]:
        return (self._of((number,)) for number in self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def item(self) -> int:
        (number,) = self.numbers
        return number

    def squeeze(self, *_: Any) -> Element:
        return self._of(self.numbers) if len(self.numbers) == 1 else self

    def tolist(self) -> Any:
        return list(self.numbers) if self.shape else self.item()

    __int__ = __index__ = item

    def __float__(self) -> float:
        return float(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.tolist(), spec)

    def __str__(self) -> str:
        return str(self.tolist())

    def __hash__(self) -> int:
        return hash(self.numbers)


def _numeric(name: str) -> Callable[[Element, Any], Any]:
    return lambda self, other: getattr(self.item(), name)(int(other) if isinstance(other, Element) else other)


for _name in ["eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "mod", "floordiv", "radd", "rsub", "rmul"]:
    setattr(Element, f"__{_name}__", _numeric(f"__{_name}__"))


class Sizes(list[Any]):
    """What ``tolist`` gives of a tensor of sizes: pieces of these sizes can be split off, one for each.

    Attributes:
        tensor: the sizes.
        whole: the domains of the pieces, when something has been split by these sizes; by its length.
    """

    def __init__(self, keeper: Keeper, tensor: torch.Tensor) -> None:
        self.keeper, self.tensor = keeper, tensor
        self.whole: dict[int, list[Domain]] = {}
        super().__init__([Size(keeper) for _ in range(tensor.shape[0])])


class Size:
    """One number that ``tolist`` gives."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper

    def _refuse(self, *_: Any) -> NoReturn:
        raise self.keeper.refuse(
            "computes in Python with a number that tolist() reads", "stay in torch, or split by all of them"
        )

    __hash__ = __int__ = __index__ = __float__ = __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = _refuse
    __ge__ = __add__ = __sub__ = __mul__ = __radd__ = __rsub__ = __rmul__ = _refuse


class Rows:
    """A tensor with one dim for the rows that a mask selects.

    Attributes:
        at: which dim has the rows.
        support: the dims of the mask that a row depends on.
        value: the tensor, with a row for each position along these dims.
        sizes: the sizes, ``None`` for the rows.
        coordinates: for positions, the dims of the mask that they are along: one, or one for each column.
        shared: whether another value may be a view of it.
    """

    def __init__(
        self,
        keeper: Keeper,
        domain: Domain,
        value: Later,
        sizes: tuple[int | None, ...],
        at: int,
        support: tuple[int, ...],
        like: torch.Tensor,
        coordinates: tuple[int, ...] | None = None,
    ) -> None:
        self.keeper, self.domain, self.value = keeper, domain, value
        self.sizes, self.at, self.support = sizes, at, support
        self.like = like  # of the dtype and device
        self.coordinates = coordinates
        self.shared = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rows = next(value for value in (*args, *(kwargs or {}).values(), *_members(args)) if isinstance(value, Rows))
        return rows.keeper.called(function, tuple(args), dict(kwargs or {}))

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(Count(self.keeper, self.domain) if size is None else size for size in self.sizes)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.sizes)

    ndim = property(dim)
    dtype = property(lambda self: self.like.dtype)
    device = property(lambda self: self.like.device)
    is_cuda = property(lambda self: self.like.is_cuda)
    T = property(lambda self: self._call(torch.t))
    mT = property(lambda self: self._call(torch.transpose, -2, -1))
    layout = torch.strided
    is_nested = is_sparse = is_quantized = False

    def is_floating_point(self) -> bool:
        return self.like.is_floating_point()

    def numel(self) -> Any:
        if any(size == 0 for size in self.sizes):
            return 0
        return Count(self.keeper, self.domain)  # is zero exactly if there are no rows

    nelement = numel

    def __len__(self) -> int:
        if self.at:
            size = self.sizes[0]
            assert size is not None
            return size
        frame = users_frame()
        answer = None if frame is None else answer_of_length(frame)
        if answer is None:
            raise self.keeper.refuse("computes with the number of rows that a mask selects, which is a value", REMEDY)
        self.keeper.is_any(self.domain, answer)
        return 1

    def __iter__(self) -> Iterator[Any]:
        return self.keeper.turns(self)

    def __bool__(self) -> bool:
        raise self.keeper.refuse("reads the truth of the rows that a mask selects", REMEDY)

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.keeper.called(function, (self, *args), kwargs)

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch.Tensor, name, None)
        if name.startswith("__") or not callable(function):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._call(function, *args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return self._call(torch.Tensor.__getitem__, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._call(torch.Tensor.__setitem__, index, value)

    __hash__ = object.__hash__


def _members(args: Any) -> list[Any]:
    return [member for value in args if isinstance(value, (list, tuple)) for member in value]


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)
    return lambda self, *other: self._call(function, *other)


OPERATORS = (
    "add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rpow matmul eq ne lt le gt ge neg abs and or xor "
    "invert iadd isub imul itruediv"
)
for _name in OPERATORS.split():
    setattr(Rows, f"__{_name}__", _operator(f"__{_name}__"))
