"""Scale the loss dynamically (Micikevicius et al., arXiv:1710.03740, section 3.2), as ``torch.amp.GradScaler`` does.

The loss is multiplied by a scale, so that small gradients are not lost in fp16, and gradients are divided by it. A step
whose gradients overflow changes no parameter and lowers the scale; after ``interval`` steps without an overflow, the
scale rises. In the update program this is one op on scalars, which every rank computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import OverflowingError, shown
from autopar.ir.ops.sharded_lookup import LIBRARY
from autopar.rules.registry import rule


@dataclass(frozen=True)
class LossScaling:
    """The rule by which the scale changes.

    Attributes:
        initial: the first scale.
        growth: the factor after ``interval`` steps without an overflow.
        backoff: the factor after an overflow.
        interval: a number of steps.
        minimum: a scale below it is an error, because gradients that overflow at any scale are not finite anyway.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 2.0**-14

    def __post_init__(self) -> None:
        if not self.growth > 1:
            raise ValueError(f"growth={shown(self.growth)}: the scale rises, by a factor above 1")
        if not 0 < self.backoff < 1:
            raise ValueError(f"backoff={shown(self.backoff)}: the scale falls, by a factor between 0 and 1")
        if isinstance(self.interval, bool) or not isinstance(self.interval, int) or self.interval < 1:
            raise ValueError(f"interval={shown(self.interval)}: the scale rises after a number of steps, at least 1")
        if not (0 < self.minimum <= self.initial < math.inf):
            raise ValueError(
                f"initial={shown(self.initial)}, minimum={shown(self.minimum)}: a scale is finite, and begins at its "
                f"minimum or above"
            )

    @property
    def constants(self) -> dict[str, float | int]:
        """The keyword arguments of ``updated_scale``."""
        return {"growth": self.growth, "backoff": self.backoff, "interval": self.interval}

    def state(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first scale (float32) and the steps since its last change (int32), both without dims."""
        return torch.full((), self.initial, device=device), torch.zeros((), dtype=torch.int32, device=device)

    def check(self, scale: torch.Tensor | float) -> None:
        """Raise ``OverflowingError`` if the scale has fallen below the minimum."""
        if float(scale) < self.minimum:
            raise OverflowingError(
                f"the loss scale has fallen to {float(scale):g}, below {self.minimum:g}: gradients overflow at every "
                f"scale\n"
                f'  look for inf or nan in the loss or the data; amp="bf16-O1" has the range of float32 and needs no '
                f"scale"
            )

    def state_dict(self, scale: torch.Tensor, growth_tracker: torch.Tensor) -> dict[str, float | int]:
        """Return the state in the form of ``torch.amp.GradScaler.state_dict``."""
        return {"scale": float(scale), "growth_factor": self.growth, "backoff_factor": self.backoff,
                "growth_interval": self.interval, "_growth_tracker": int(growth_tracker)}  # fmt: skip

    @staticmethod
    def load_state_dict(
        state: Mapping[str, Any], minimum: float | None = None, device: torch.device | str = "cpu"
    ) -> tuple[LossScaling, torch.Tensor, torch.Tensor]:
        """Return the scaling, the scale and the steps since its last change from a saved state.

        The state is one of ``state_dict`` or of a ``GradScaler``.

        Raises:
            ValueError: the state lacks an entry; the state of a ``GradScaler`` with ``enabled=False`` is empty.
        """
        required = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        if missing := [name for name in required if name not in state]:
            raise ValueError(
                f"the state of a loss scale has {', '.join(required)}; this one lacks {', '.join(missing)}"
            )
        minimum = LossScaling.minimum if minimum is None else minimum
        scale = float(state["scale"])
        scaling = LossScaling(
            max(scale, minimum), state["growth_factor"], state["backoff_factor"], state["growth_interval"], minimum
        )
        scaling.check(scale)
        return (
            scaling,
            torch.full((), scale, device=device),
            torch.full((), state["_growth_tracker"], dtype=torch.int32, device=device),
        )


LIBRARY.define(
    "updated_scale(Tensor scale, Tensor growth_tracker, Tensor found_inf, *, float growth, float backoff, int "
    "interval) -> (Tensor, Tensor)"
)


def _updated_scale(scale: torch.Tensor, growth_tracker: torch.Tensor, found_inf: torch.Tensor, *, growth: float,
                   backoff: float, interval: int) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the next scale and the steps since its last change; ``found_inf`` is not 0 if a gradient is inf or nan."""
    overflow = found_inf != 0
    steps = growth_tracker + 1
    rises = steps == interval
    exact = scale.double()  # as in torch, the factors have double precision
    grown = (exact * growth).to(scale.dtype)
    grown = torch.where(rises & grown.isfinite(), grown, scale)
    lowered = (exact * backoff).to(scale.dtype)
    return torch.where(overflow, lowered, grown), torch.where(overflow | rises, 0, steps).to(growth_tracker.dtype)


LIBRARY.impl("updated_scale", _updated_scale, "CompositeExplicitAutograd")
updated_scale = torch.ops.autopar.updated_scale.default

rule("(), (), () -> (), ()", "autopar::updated_scale")
