"""Register the op that runs a function of the user's on the pieces of each rank, and the op of its gradients.

    local_map : (f32[8/dp 4] +tp) = autopar::local_map([x, w], 'attend')

The function is kept here by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.ir.ops.sharded_lookup import LIBRARY, op

Function = Callable[..., tuple[torch.Tensor, ...]]

FUNCTIONS: dict[str, Function] = {}  # name in programs → the function of tensors
# by op, name, wanted gradients and mesh: the axes along which each result is neither split nor pending, so that the
# ranks have promised one value. Local programs have no layouts; the simulator compares by these
ALIKE: dict[tuple[Any, ...], tuple[tuple[str, ...], ...]] = {}


@op("local_map(Tensor[] x, str function) -> Tensor[]")
def local_map(x: Sequence[torch.Tensor], function: str) -> list[torch.Tensor]:
    """Return what the function makes of these pieces. No result shares memory with an operand."""
    return [y.clone(memory_format=torch.contiguous_format) for y in FUNCTIONS[function](*x)]


@op("local_map_backward(Tensor[] x, Tensor[] gradients, str function, bool[] wanted) -> Tensor[]")
def local_map_backward(
    x: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], function: str, wanted: Sequence[bool]
) -> list[torch.Tensor]:
    """Return the gradients of the wanted operands; the function runs once more."""
    places = [k for k, want in enumerate(wanted) if want]

    def of_wanted(*leaves: torch.Tensor) -> Any:
        operands = list(x)
        for k, leaf in zip(places, leaves, strict=True):
            operands[k] = leaf
        return tuple(y for y in FUNCTIONS[function](*operands) if y.is_floating_point() or y.is_complex())

    # a transform, because it differentiates below autograd too, where kernels run
    vjp = torch.func.vjp(of_wanted, *(x[k] for k in places))[1]
    return [gradient.clone(memory_format=torch.contiguous_format) for gradient in vjp(tuple(gradients))]


@torch.library.register_fake("autopar::local_map_backward", lib=LIBRARY)
def _(
    x: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], function: str, wanted: Sequence[bool]
) -> list[torch.Tensor]:
    return [torch.empty(y.shape, dtype=y.dtype, device=y.device) for y, want in zip(x, wanted, strict=True) if want]


class LocalMap(torch.autograd.Function):
    """``local_map`` with its gradients, as capture traces it."""

    @staticmethod
    def forward(ctx: Any, function: str, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.function, ctx.floating = function, []
        ctx.save_for_backward(*x)
        results = tuple(local_map(list(x), function))
        ctx.floating = [y.is_floating_point() or y.is_complex() for y in results]
        ctx.mark_non_differentiable(*(y for y, floats in zip(results, ctx.floating, strict=True) if not floats))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        wanted = list(ctx.needs_input_grad[1:])
        floating = [g for g, floats in zip(gradients, ctx.floating, strict=True) if floats]
        made = iter(local_map_backward(list(ctx.saved_tensors), floating, ctx.function, wanted))
        return (None, *(next(made) if want else None for want in wanted))
