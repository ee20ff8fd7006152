"""Store the times and sizes of stages: one number for all stages, or one for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any

from autopar.errors import ScheduleError, shown

PerStage = float | Iterable[float]
MOST = 1e100  # sums of it are finite


@dataclass(frozen=True)
class Times:
    """The durations of tasks and transfers, in any unit; one number, or one for each stage.

    Attributes:
        forward: F.
        backward: B, the gradient of the input.
        weight: W, the gradient of the weights; an unsplit backward takes B + W. With recomputation (``recompute``) a
            backward takes F more.
        transfer: c, sending a tensor between two stages on different ranks; one number, or one for each two
            neighbouring stages.
        rendezvous: whether a message begins only when its receiver, too, has reached it: on a CPU. A GPU has posted its
            receives before it computes, so that a message waits for its sender alone.
        overlap: the share of the shorter one that is hidden where a forward and a backward share a slot, from 0 to 1:
            they begin when the messages of both have arrived, and take F + B - overlap * min(F, B). B has W in it if W
            is in the slot, too.
    """

    forward: PerStage = 1.0
    backward: PerStage = 1.0
    weight: PerStage = 1.0
    transfer: PerStage = 0.0
    rendezvous: bool = field(default=False, kw_only=True)
    overlap: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        _keep_numbers(self)
        if not isinstance(self.overlap, float) or self.overlap > 1:
            raise ScheduleError(f"Times(overlap=…) is {shown(self.overlap)}: one number, from 0 to 1")


@dataclass(frozen=True)
class Sizes:
    """The memory of a micro-batch, in bytes or any other unit; one number, or one for each stage.

    Attributes:
        activation: kept from the begin of the forward to the end of the backward.
        for_weights: kept from the end of the backward to the end of the weight gradient, if that is computed
            separately: inputs and gradients of outputs. It may be more than ``activation``. ``None``: as much.
        boundary: a tensor between two stages, and its gradient; one number, or one for each two neighbouring stages.
        fixed: memory that a stage needs all the time: parameters, gradients, optimizer state.
        in_forward, in_backward, in_weight: what F, B and W need only while they run, beyond all this.
        pooled: whether memory for messages that are received is taken from a pool: it is in use until the last pass of
            its micro-batch, and then kept for later messages. By default it is freed when it has been read.
    """

    activation: PerStage = 1.0
    for_weights: PerStage | None = None
    boundary: PerStage = 0.0
    fixed: PerStage = 0.0
    in_forward: PerStage = field(default=0.0, kw_only=True)
    in_backward: PerStage = field(default=0.0, kw_only=True)
    in_weight: PerStage = field(default=0.0, kw_only=True)
    pooled: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _keep_numbers(self, "for_weights")


def _keep_numbers(numbers: Any, *may_be_none: str) -> None:
    """Make every field of a frozen dataclass a float, or a tuple of floats; one whose default is a bool stays.

    Raises:
        TypeError: a field is neither a number nor a list of numbers, or not a bool where it has to be one.
        ScheduleError: a number is negative, or not finite.
    """
    for member in fields(numbers):
        value, label = getattr(numbers, member.name), f"{type(numbers).__name__}({member.name}=…)"
        if isinstance(member.default, bool):
            if not isinstance(value, bool):
                raise TypeError(f"{label} is True or False, not {shown(value)}")
            continue
        if value is None and member.name in may_be_none:
            continue
        if getattr(value, "ndim", 1) == 0:  # an array or tensor without dims
            value = float(value)
        if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Set)):
            value = tuple(_number(number, label) for number in value)
        else:
            value = _number(value, label)
        object.__setattr__(numbers, member.name, value)


def _number(value: Any, label: str) -> float:
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
        raise TypeError(f"{label} is a number, or a list of one for each stage, not {shown(value)}")
    if not 0 <= value <= MOST:
        raise ScheduleError(f"{label} is {shown(value)}: a finite number from 0, to {MOST:g} at most")
    return float(value)


def per_stage(value: PerStage, count: int, label: str, of: str = "stages") -> list[float]:
    """Return the value as a list with one number for each stage, or for each two neighbouring stages.

    Raises:
        ScheduleError: the value is a list of another length than ``count``.
    """
    numbers = list(value) if isinstance(value, Iterable) else [value] * count
    if len(numbers) != count:
        raise ScheduleError(f"{label} has {len(numbers)} numbers, and there are {count} {of}")
    return numbers


def per_pair(value: PerStage, stages: int, label: str) -> list[float]:
    """Return the value as a list with one number for each two neighbouring stages; see ``per_stage``."""
    return per_stage(value, stages - 1, label, "pairs of neighbouring stages") if stages > 1 else []


def durations(times: Times, stages: int) -> tuple[list[float], list[float], list[float]]:
    """Return F, B and W of each stage."""
    forward, backward, weight = (
        per_stage(getattr(times, name), stages, name) for name in ("forward", "backward", "weight")
    )
    return forward, backward, weight


def kept(sizes: Sizes, stages: int) -> tuple[list[float], list[float]]:
    """Return what each stage keeps of a micro-batch: to the end of its backward, then of its weight gradient."""
    activation = per_stage(sizes.activation, stages, "activation")
    return activation, activation if sizes.for_weights is None else per_stage(sizes.for_weights, stages, "for_weights")
