"""Run the operations of a process group on gloo: with the same bits as gloo's own, and with futures for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from autopar.torch_private import reduction_options

# names of ProcessGroup's methods up to torch 2.12, which 2.13 keeps → the present names
OLDER = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
NEWER = {newer: older for older, newer in OLDER.items()}


class Carried(NamedTuple):
    """An operation that gloo runs.

    Attributes:
        works: the works of gloo.
        finish: called once, when all of them are done.
    """

    works: list[distributed.Work]
    finish: Callable[[], None] | None = None


def carry(group: distributed.ProcessGroup, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Carried:
    """Start an operation of a gloo group.

    Args:
        name: the method, by its name in torch 2.13.
        args, kwargs: its arguments.
    """
    if name in SPECIAL:
        return SPECIAL[name](group, *args, **kwargs)
    return Carried([_method(group, name)(*args, **kwargs)])


def _method(group: distributed.ProcessGroup, name: str) -> Callable[..., distributed.Work]:
    return getattr(group, name, None) or getattr(group, NEWER[name])


def _gathers(
    group: distributed.ProcessGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *more: Any
) -> Carried:
    """Gather one tensor after the other: gloo's own coalesced gather crashes (``torch_private.start_gather``)."""
    gather = _method(group, "all_gather_single")
    return Carried([gather(out, piece, *more) for out, piece in zip(outputs, inputs, strict=True)])


def _scatters(
    group: distributed.ProcessGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
    options: Any = None,
) -> Carried:  # fmt: skip
    """Reduce-scatter as gloo does, by an all-reduce of a copy. Gloo's own has no future."""
    for out, rows in zip(outputs, inputs, strict=True):
        if rows.numel() != group.size() * out.numel():
            raise ValueError(
                f"a reduce-scatter over {group.size()} ranks makes {rows.numel() / group.size():g} elements of "
                f"{rows.numel()}, and its output has {out.numel()}"
            )
    copies = [rows.clone(memory_format=torch.contiguous_format) for rows in inputs]
    how = reduction_options("all_reduce", options)
    works = [group.allreduce([copy], how) for copy in copies]

    def finish() -> None:
        for out, copy in zip(outputs, copies, strict=True):
            out.copy_(copy.view(-1).chunk(group.size())[group.rank()].view(out.shape))

    return Carried(works, finish)


def _scatter(group: distributed.ProcessGroup, output: torch.Tensor, rows: torch.Tensor, options: Any = None) -> Carried:
    return _scatters(group, [output], [rows], options)


def _scatter_list(
    group: distributed.ProcessGroup, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]],
    options: Any = None,
) -> Carried:  # fmt: skip
    """Reduce-scatter a list of pieces as gloo does: a reduction of each piece to its rank."""
    if len(outputs) != 1 or len(inputs) != 1 or len(inputs[0]) != group.size():
        raise ValueError(f"reduce_scatter takes one output, and one input for each of the {group.size()} ranks")
    if any(piece.shape != outputs[0].shape for piece in inputs[0]):
        raise ValueError(f"reduce_scatter takes inputs of the shape of its output, {tuple(outputs[0].shape)}")
    copies = [piece.clone(memory_format=torch.contiguous_format) for piece in inputs[0]]
    works = [group.reduce([copy], reduction_options("reduce", options, root)) for root, copy in enumerate(copies)]

    def finish() -> None:
        outputs[0].copy_(copies[group.rank()])

    return Carried(works, finish)


SPECIAL: dict[str, Callable[..., Carried]] = {
    "all_gather_single_coalesced": _gathers,
    "reduce_scatter": _scatter_list,
    "reduce_scatter_single": _scatter,
    "reduce_scatter_single_coalesced": _scatters,
}
