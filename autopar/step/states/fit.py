"""Check whether a saved state fits a step, part by part, before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

SAVED, OTHER = "save what step.state_dict() gives", "it is of another model"


def parts_of(what: str, value: object, wanted: Collection[str] = ()) -> Mapping[str, Any]:
    """Check that a value is a mapping with the wanted parts, and return it. ``what``: its name in errors.

    Raises:
        TypeError: it is not a mapping.
        ValueError: it lacks a part.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} is {value!r:.40}, and no dict; {SAVED}")
    for part in wanted:
        if part not in value:
            raise ValueError(f"{what} has no {part!r}, but {', '.join(map(repr, value)) or 'nothing'}; {SAVED}")
    return value


def check_model(saved: Mapping[str, object], state: Mapping[str, object]) -> None:
    """Raise ``ValueError`` if the saved parameters and buffers do not have the model's names and shapes."""
    what = "the state's 'model'"
    for name, tensor in state.items():
        if name not in saved:
            raise ValueError(f"{what} has no {name}, which the model has: {OTHER}")
        if not isinstance(tensor, torch.Tensor):
            continue
        check_tensor(what, name, saved[name], tensor.shape, "the model's")
    if unknown := [name for name in saved if name not in state]:
        raise ValueError(f"{what} has {unknown[0]}, which the model has not: {OTHER}")


def check_tensor(what: str, name: str, value: object, shape: torch.Size, whose: str) -> None:
    """Raise ``ValueError`` if a saved value is no tensor of that shape, which is that of ``whose``."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{what} has {name} as {value!r:.40}, which is no tensor; {SAVED}")
    if value.shape != shape:
        raise ValueError(f"{what} has {name} of shape {list(value.shape)}, and {whose} is {list(shape)}: {OTHER}")


def check_groups(saved: Sequence[Sequence[object]], groups: Sequence[Sequence[str]]) -> None:
    """Raise ``ValueError`` if the saved groups do not have the optimizer's parameters in their order.

    Both hold names.
    """
    if saved == groups:
        return
    if any(not isinstance(name, str) for group in saved for name in group):
        raise ValueError(
            "the state has parameters by numbers, as optimizer.state_dict() does, and not by names: "
            "load that with optimizer.load_state_dict, or save what step.state_dict() gives"
        )
    pairs = [pair for names in zip(saved, groups, strict=False) for pair in zip(*names, strict=False)]
    first = (
        next((f", {a} for {b}" for a, b in pairs if a != b), "")
        if list(map(len, saved)) == list(map(len, groups))
        else ""
    )
    raise ValueError(
        f"the state has other parameter groups: {_describe(saved)}, and the optimizer {_describe(groups)}{first}; "
        f"make the optimizer with the groups that were saved"
    )


def check_generator(state: Any) -> None:
    """Raise ``ValueError`` if it is not a state of the CPU generator of random numbers."""
    try:
        torch.Generator().set_state(state.cpu())
    except (AttributeError, TypeError, RuntimeError) as error:
        kind = (
            f"{str(state.dtype).removeprefix('torch.')}{list(state.shape)}"
            if isinstance(state, torch.Tensor)
            else f"{state!r:.40}"
        )
        expected = torch.get_rng_state()
        raise ValueError(
            f"the state's 'rng' is {kind}, and no state of this torch's random numbers, "
            f"{str(expected.dtype).removeprefix('torch.')}{list(expected.shape)}; give what torch.get_rng_state() gives"
        ) from error


def number_of(what: str, value: Any) -> int:
    """Check that a value is a count, 0 or more, and return it; else ``ValueError``."""
    try:
        count = operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        count = -1
    if count < 0:
        raise ValueError(f"{what} is {value!r:.40}, and no number of steps; {SAVED}")
    return count


def check_scaler(state: Mapping[str, object]) -> None:
    """Raise ``ValueError`` if a saved scale of the loss is not valid.

    It must be a number above 0, and its ``_growth_tracker`` a number of steps.
    """
    scale = state["scale"]
    if not isinstance(scale, (int, float)) or not scale > 0:
        raise ValueError(f"the state's 'scaler' has the scale {scale!r:.40}, and no number above 0; {SAVED}")
    number_of("the '_growth_tracker' of the state's 'scaler'", state["_growth_tracker"])


def _describe(groups: Sequence[Sequence[object]]) -> str:
    return f"{len(groups)} of {', '.join(str(len(group)) for group in groups)}"
