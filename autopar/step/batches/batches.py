"""Cut the batch of a step into micro-batches."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from autopar.capture.arguments import Arguments
from autopar.capture.provenance import warn_user
from autopar.ir.mesh import Mesh
from autopar.plan.batch import batch_axes
from autopar.runtime.dtensors import is_dtensor

Tensors = Sequence[tuple[str, torch.Tensor]]  # by name
ANSWERS = ("labels", "label", "targets", "target", "y")  # each row of a batch has one
COUNTED = "num_items_in_batch"  # Hugging Face's losses divide by this number, which counts over all micro-batches


def as_call(
    model: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments of ``forward`` for a call of the step.

    ``step(batch)`` with a dict, tuple or list passes its parts as the arguments. The container itself is the only
    argument where ``forward`` must take it whole: a dict with a key that is not a parameter of ``forward``; a tuple or
    list with more parts than ``forward`` takes, if it needs one argument. Where this is ambiguous, the user writes
    ``step((pair,))`` or ``step(pair=pair)``.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], (Mapping, tuple, list)):
        return args, dict(kwargs)
    batch = args[0]
    names, needed, most = _parameters_of_forward(
        getattr(model.forward, "__func__", model.forward), inspect.ismethod(model.forward)
    )
    if isinstance(batch, Mapping):
        by_name = all(isinstance(key, str) and (not names or key in names or None in names) for key in batch)
        return ((), dict(batch)) if by_name else (args, {})
    return (args if needed == 1 and len(batch) > most else tuple(batch)), {}


@functools.lru_cache(maxsize=256)
def _parameters_of_forward(forward: Callable[..., object], bound: bool) -> tuple[frozenset[str | None], int, float]:
    """Return the parameters of ``forward``, and how many positional arguments it needs and takes at most.

    ``None`` among the parameters stands for any keyword.
    """
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return frozenset({None}), 0, math.inf
    names = frozenset(None if p.kind is p.VAR_KEYWORD else p.name for p in parameters)
    places = [p for p in parameters[bound:] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return names, sum(p.default is p.empty for p in places), math.inf if any_number else len(places)


class MicroBatches:
    """Cuts the batches of a step into its micro-batches.

    A tensor whose dim 0 is the batch is cut into ``count`` equal pieces. Every other argument is the same for all
    micro-batches. For a tensor that the plan names, the plan decides whether dim 0 is the batch. For others it is the
    batch if it is as long as that of the first tensor. Labels of another length are refused.

    Args:
        named: is called with name → number of dims, and returns name → whether dim 0 is the batch, for the tensors that
            the plan names.

    Attributes:
        count: the number of micro-batches.
        cut: the names of the tensors that were cut at the latest call.
    """

    def __init__(self, mesh: Mesh, count: int, named: Callable[[Mapping[str, int]], Mapping[str, bool]]) -> None:
        self.count = count
        self._named, self._axes = named, batch_axes(mesh)
        # of each tensor that was cut: name, rows, number of dims, whether the plan names it
        self._latest: list[tuple[str, int, int, bool]] = []
        self._warned: set[str] = set()

    def __call__(self, arguments: Arguments) -> list[Arguments]:
        """Cut the arguments of a step's call into those of each micro-batch.

        Raises:
            ValueError: ``count`` does not divide the batch, or labels have another number of rows than the batch.
        """
        count = self.count
        rows = self._rows(arguments)
        if count == 1:
            return [arguments]
        cut: list[list[object]] = []
        tensors = zip(arguments.names, rows, strict=True)
        for value in arguments.flat:
            name, whether = next(tensors) if isinstance(value, torch.Tensor) else ("", False)
            if whether and is_dtensor(value):
                raise ValueError(
                    f"the argument {name} is a DTensor, which is not cut into micro-batches; pass plain tensors, or "
                    f"microbatches=1"
                )
            cut.append(list(value.split(len(value) // count)) if whether else [value] * count)
        pieces = [arguments.with_leaves(leaves) for leaves in zip(*cut, strict=True)]
        items = arguments.keyword(COUNTED)
        return (
            pieces
            if items is None
            else [piece.with_keyword(COUNTED, _share(piece.keyword(COUNTED), count)) for piece in pieces]
        )

    @property
    def cut(self) -> tuple[str, ...]:
        return tuple(name for name, *_ in self._latest)

    def counts(self, arguments: Arguments) -> list[int]:
        """Return the numbers that divide the batch and leave two rows or more in each micro-batch, and 1.

        In a single row autopar cannot see whether rows depend on each other.
        """
        tensors, planned, _, first = self._candidates(arguments)
        if first is None or any(is_dtensor(tensor) for _, tensor in tensors):
            return [1]
        whether = _of_the_batch(tensors, planned, first)
        rows = math.gcd(*(len(tensor) for (_, tensor), cut in zip(tensors, whether, strict=True) if cut))
        return [1, *(count for count in range(2, rows // 2 + 1) if rows % count == 0)]

    def _candidates(self, arguments: Arguments) -> tuple[Tensors, Mapping[str, bool], Tensors, torch.Tensor | None]:
        """Return all tensors by name, what the plan says of them, those that may be cut, and the first of these."""
        tensors = list(zip(arguments.names, arguments.tensors, strict=True))
        named = {name: tensor.dim() for name, tensor in tensors}
        planned = self._named(named) if self.count > 1 else {}
        candidates = [(name, tensor) for name, tensor in tensors if tensor.dim() and planned.get(name, True)]
        first = next(
            (tensor for name, tensor in candidates if name in planned), candidates[0][1] if candidates else None
        )
        return tensors, planned, candidates, first

    def _rows(self, arguments: Arguments) -> list[bool]:
        """Return whether each tensor is cut."""
        tensors, planned, candidates, first = self._candidates(arguments)
        if first is not None and not len(first):
            raise ValueError(f"a batch without rows has no loss ({_named(candidates, 0)}); leave it out")
        if self.count == 1:
            return [False] * len(tensors)
        if first is None:
            whole = [name for name, _ in tensors if name in planned]
            raise ValueError(
                f"microbatches={self.count}, but no argument of the step is a tensor with a dim that could be cut"
                + f", for no axis of the batch splits dim 0 of {', '.join(whole)} in the "
                  f"plan" * bool(whole) + "; pass microbatches=1"
            )  # fmt: skip
        rows = _of_the_batch(tensors, planned, first)
        for (name, tensor), whether in zip(tensors, rows, strict=True):
            if name in ANSWERS and tensor.dim() and not whether and name not in planned:
                raise self._other_rows(name, tensor, candidates, first)
        cut = [named for named, whether in zip(tensors, rows, strict=True) if whether]
        for length in dict.fromkeys(len(tensor) for _, tensor in cut):
            if length % self.count:
                raise _not_divided(self.count, length, _named(cut, length))
        self._latest = [(name, len(tensor), tensor.dim(), name in planned) for name, tensor in cut]
        for name, tensor in cut:
            square = tensor.dim() > 1 and tensor.shape[1] == len(tensor)
            # labels have the shape of the first tensor
            if square and name not in planned and (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
                self._warn(name, tensor)
        return rows

    def _warn(self, name: str, tensor: torch.Tensor) -> None:
        """Warn once about a tensor that may be a mask, which does not have the batch in dim 0."""
        if name not in self._warned:
            self._warned.add(name)
            warn_user(
                f"the argument {name}, {list(tensor.shape)}, was cut into {self.count} micro-batches, because its dim "
                f"0 is as long as the batch; but so is its dim 1. If dim 0 is not the batch, as in a mask that all "
                f"rows share, {self._remedy(name, tensor.dim())}"
            )

    def _other_rows(self, name: str, tensor: torch.Tensor, candidates: Tensors, first: torch.Tensor) -> ValueError:
        """Return the error of labels that have another number of rows than the batch."""
        batch = next(n for n, candidate in candidates if candidate is first)
        return ValueError(
            f"{name} has {len(tensor)} rows, and the batch has {len(first)} ({batch}), so they cannot be cut into "
            f"{self.count} micro-batches alike: give both the same number of rows; or if dim 0 of {name} is not the "
            f"batch, {self._remedy(name, tensor.dim())}"
        )

    def _remedy(self, name: str, dims: int) -> str:
        spec = f'{{"{name}": ({", ".join(["None"] * dims)}{"," * (dims == 1)})}}'
        return f"say so in the plan: {spec}" + ", on a mesh with an axis for the batch, as dp=1" * (not self._axes)

    def note(self) -> str:
        """Return a note for an error of the model: how the batch was cut."""
        cut = ", ".join(f"{name} has {rows // self.count} of {rows} rows" for name, rows, _, _ in self._latest)
        free = [(dims, name) for name, _, dims, named in self._latest[1:] if not named]
        note = f"autopar cut the batch into {self.count} micro-batches, in each of which {cut}"
        return (
            note
            if not free
            else f"{note}\n  if dim 0 of {min(free)[1]} is not the batch, {self._remedy(min(free)[1], min(free)[0])}"
        )


def _of_the_batch(tensors: Tensors, planned: Mapping[str, bool], first: torch.Tensor) -> list[bool]:
    return [bool(tensor.dim()) and planned.get(name, len(tensor) == len(first)) for name, tensor in tensors]


def _not_divided(count: int, length: int, names: str) -> ValueError:
    fitting = dict.fromkeys(n for n in (length - length % count, length + count - length % count) if n)
    fewer = max(n for n in range(1, count + 1) if length % n == 0)
    return ValueError(
        f"{count} micro-batches do not divide a batch of {length} rows ({names}): "
        f"use a batch of {' or '.join(map(str, fitting))} rows, or microbatches={fewer}; a last, shorter batch "
        f"of an epoch is left out with drop_last=True of the DataLoader"
    )


def _share(items: float | torch.Tensor, count: int) -> torch.Tensor:
    """Return the mean number of items of a micro-batch. It is a tensor, so that a new number needs no new capture."""
    return (
        torch.as_tensor(
            items,
            dtype=torch.get_default_dtype()
            if not isinstance(items, torch.Tensor) or not items.is_floating_point()
            else None,
        )
        / count
    )


def _named(tensors: Sequence[tuple[str, torch.Tensor]], length: int) -> str:
    return ", ".join(name for name, tensor in tensors if len(tensor) == length)
