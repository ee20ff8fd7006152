"""Keep the position in the data: that of the global batch, once, on any mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from autopar.errors import class_of
from autopar.torch_private import pytree


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be saved and loaded, as in ``torch.distributed.checkpoint``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Listed:
    """A list of batches, which begins again at its end. Its position is the number of batches that it gave."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches, self._given = batches, 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for index in range(self._given % len(self._batches), len(self._batches)):
            self._given += 1
            yield self._batches[index]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, "batches": len(self._batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("batches") != len(self._batches):
            raise ValueError(
                f"the position is in {state.get('batches', 'no list of')} batches, and here are {len(self._batches)}; "
                f"give the batches as they were"
            )
        self._given = state["given"]


def stateful(data: Any) -> Any:
    """Return the data with ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: it cannot say where it is.
        ValueError: it is an empty list.
    """
    if isinstance(data, (list, tuple)):
        if not data:
            raise ValueError("the list of batches is empty; give one batch or more")
        return Listed(data)
    if isinstance(data, Stateful) and isinstance(data, Iterable):
        return data
    raise TypeError(
        f"the data is {class_of(data)}, which cannot say where it is and go on there: it has no state_dict and "
        f"load_state_dict; use torchdata's StatefulDataLoader in the place of DataLoader, or a list of batches"
    )


# -- positions as plain values ------------------------------------------------------------------------------------

TENSOR = "tensor as bytes"


def plain(position: Any) -> Any:
    """Return a position without tensors: those of loaders come and go, and a checkpoint compares the tensors it has."""
    if isinstance(position, torch.Tensor):
        array = position.detach().cpu().contiguous()
        data = array.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {TENSOR: [str(array.dtype).removeprefix("torch."), list(array.shape), data]}
    if isinstance(position, Mapping):
        return {key: plain(value) for key, value in position.items()}
    if isinstance(position, (list, tuple)):
        return type(position)(map(plain, position)) if type(position) in (list, tuple) else list(map(plain, position))
    return position


def with_tensors(position: Any) -> Any:
    """Return a position as its loader gave it."""
    if isinstance(position, dict):
        if set(position) == {TENSOR}:
            dtype, shape, data = position[TENSOR]
            if not data:
                return torch.empty(shape, dtype=getattr(torch, dtype))
            return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
        return {key: with_tensors(value) for key, value in position.items()}
    if isinstance(position, (list, tuple)):
        return type(position)(map(with_tensors, position))
    return position


def rows_of(batch: Any) -> int | None:
    """Return the rows of a batch: dim 0 of its first tensor; ``None`` if it has none."""
    leaves = pytree.tree_leaves(batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
