"""Define one parameter's update: an op or a function of plain ops, the states it reads, and the group's numbers."""

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
        function: called as ``function(param, grad, *states, lr, grad_scale, found_inf, **scheduled, **constants)``. It
            returns the new parameter and the new states, in their order, without the counted ones; or the parameter
            alone if there are no such states.
        states: the states that it reads, in their order, by their names in torch's ``optimizer.state``.
        constants: numbers and truths of the group. Another value is another update: they may be compared with ``==``.
        counted: states that ``autopar::counted`` updates before; the function gets the updated values.
        elementwise: whether each element of the parameter depends only on its own gradient and states; ``None``: not
            known.
        scheduled: numbers of the group that change from step to step, like the learning rate. Each is an operand, a
            float64 without dims. Another value is the same update.
    """

    function: Callable[..., Any]
    states: tuple[str, ...]
    constants: Mapping[str, Any]
    counted: tuple[str, ...] = ()
    elementwise: bool | None = None
    scheduled: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def op(self) -> OpOverload | None:
        """The op, or ``None`` if the update consists of plain ops."""
        return self.function if isinstance(self.function, OpOverload) else None

    def operands(self, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """Return the scheduled numbers as operands.

        They are on the CPU for an op, which reads them on the host; on ``device`` for plain ops.
        """
        place = torch.device("cpu") if device is None or self.op is not None else device
        return {name: scalar(value, place) for name, value in self.scheduled.items()}

    def __call__(self, param: torch.Tensor, grad: torch.Tensor, state: Mapping[str, torch.Tensor], lr: torch.Tensor,
                 grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None,
                 scheduled: Mapping[str, torch.Tensor] | None = None
                 ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        """Return the new parameter and its new state; nothing is written.

        Traced, it is ``counted`` and then the op, or plain ops. ``scheduled``: the operands of these names; by default
        the group's numbers.
        """
        scheduled = self.operands(param.device) if scheduled is None else scheduled
        with torch.no_grad():
            states_by_name = {
                name: COUNTED(state[name], found_inf) if name in self.counted else state[name] for name in self.states
            }
            results = self.function(
                param, grad, *states_by_name.values(), lr, grad_scale, found_inf, **scheduled, **self.constants
            )
        new, *states = results if isinstance(results, (tuple, list)) else (results,)
        other_states = iter(states)
        return new, {
            name: value if name in self.counted else next(other_states) for name, value in states_by_name.items()
        }


def scalar(value: float, device: torch.device) -> torch.Tensor:
    """Return a float64 without dims. It is filled, not copied, because a copy to an accelerator would wait for it."""
    return torch.full((), value, dtype=torch.float64, device=device)
