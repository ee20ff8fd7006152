"""What one parameter's step is: an op, or a function of plain ops, the states it reads, and the group's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.optimizers.ops import COUNTED
from autopar.torch_private import OpOverload

RATE = "lr"  # the number that is always scheduled


@dataclass(frozen=True)
class Update:
    """The step of the parameters of a group.

    Attributes:
        function: called as ``function(param, grad, *states, lr, grad_scale, found_inf, **scheduled, **constants)``; what it returns is the new
            parameter and the new states but those that are counted, in their order, or the parameter alone where there are none.
        states: the states that it reads, in their order, by their names in torch's ``optimizer.state``.
        constants: numbers and truths of the group. Another value is another update: they may be compared with ``==``.
        counted: states that are counted before, by ``autopar::counted``; the function is given what that returns.
        elementwise: whether each element of the parameter is changed by its own gradient and states alone; ``None``: not known.
        scheduled: numbers of the group that change from step to step, as the learning rate does: each is an operand, a float64 without
            dims. Another value is the same update.
    """

    function: Callable[..., Any]
    states: tuple[str, ...]
    constants: Mapping[str, Any]
    counted: tuple[str, ...] = ()
    elementwise: bool | None = None
    scheduled: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def op(self) -> OpOverload | None:
        """The one op that it is, ``None`` where it is made of plain ones."""
        return self.function if isinstance(self.function, OpOverload) else None

    def operands(self, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """What is scheduled, as the function takes it: an op reads it on the host, so it is on the CPU; plain ops take it on ``device``."""
        place = torch.device("cpu") if device is None or self.op is not None else device
        return {name: scalar(value, place) for name, value in self.scheduled.items()}

    def __call__(self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], lr: torch.Tensor,
                 grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None,
                 scheduled: Mapping[str, torch.Tensor] | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        """The new parameter and its new state; nothing is written. Traced, it is the op behind its ``counted``, or plain ops.

        ``scheduled``: the operands of these names; those of the group's numbers if left out.
        """
        scheduled = self.operands(param.device) if scheduled is None else scheduled
        with torch.no_grad():
            given = {name: COUNTED(state[name], found_inf) if name in self.counted else state[name] for name in self.states}
            found = self.function(param, grad, *given.values(), lr, grad_scale, found_inf, **scheduled, **self.constants)
        new, *states = found if isinstance(found, (tuple, list)) else (found,)
        rest = iter(states)
        return new, {name: value if name in self.counted else next(rest) for name, value in given.items()}


def scalar(value: float, device: torch.device) -> torch.Tensor:
    """A float64 without dims. It is filled, not copied: a copy to an accelerator waits for it."""
    return torch.full((), value, dtype=torch.float64, device=device)
