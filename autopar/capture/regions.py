"""Keep the functions that run on the pieces of each rank, and refuse what they may not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import CaptureError, class_of
from autopar.ir.ops.local_map import Function
from autopar.torch_private import FakeTensorMode, TorchDispatchMode, draws_random, without_modes

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# for each axis of the mesh, in order, or by its name: axes that are left out replicate
Placements = Sequence["Placement"] | Mapping[str, "Placement"]


@dataclass(frozen=True)
class Region:
    """A function on pieces, as one call of it is captured.

    Attributes:
        name: of the function, which errors quote.
        results, operands, gradients: the placements of each; ``gradients`` is ``None`` if they follow.
        source: the user's line.
    """

    name: str
    results: tuple[Placements, ...]
    operands: tuple[Placements, ...]
    gradients: tuple[Placements | None, ...] | None
    source: str


REGIONS: dict[str, Region] = {}  # name in programs → the region


class _Refusing(TorchDispatchMode):
    """Refuses what ranks would do differently, or in vain."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_random(func, args, kwargs):
            raise CaptureError(
                f"{self.name} draws random numbers with {func.__name__}, and its backward would draw others\n  draw "
                f"them outside of local_map, and pass them in"
            )
        if "c10d" in func.namespace:
            raise CaptureError(
                f"{self.name} communicates with {func.__name__}, which autopar would not see\n  return the partial "
                f"result with Partial(), and autopar reduces it; or let another placement bring the operands together"
            )
        return func(*args, **(kwargs or {}))


def tried(name: str, function: Function, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the results of a function on tensors without values, and refuse what it may not do."""
    with without_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        fakes = [torch.empty([int(n) for n in t.shape], dtype=t.dtype, device=t.device) for t in tensors]
        try:
            with _Refusing(name):
                results = function(*fakes)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{name} fails on tensors of {', '.join(str(list(t.shape)) for t in fakes)}: {type(error).__name__}: "
                f"{error}\n  it may use what it is given alone: pass tensors of the model as arguments"
            ) from error
    for result in results:
        if not isinstance(result, torch.Tensor):
            raise CaptureError(f"{name} returns {class_of(result)}; a function of local_map returns tensors alone")
        if result.requires_grad:
            raise CaptureError(
                f"{name} uses a tensor from outside that requires a gradient, which would be lost\n  pass it as an "
                f"argument, with its placements"
            )
    return results
