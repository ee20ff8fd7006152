"""Whether a state fits a step, part by part; looked at before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch

SAVED = "save what step.state_dict() gives"


def parts_of(what: str, value: Any, wanted: Collection[str] = ()) -> Mapping[str, Any]:
    """A mapping, which has what is wanted.

    Raises:
        TypeError: it is no mapping.
        ValueError: it lacks a part.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} is {value!r:.40}, and no dict; {SAVED}")
    for part in wanted:
        if part not in value:
            raise ValueError(f"{what} has no {part!r}, but {', '.join(map(repr, value)) or 'nothing'}; {SAVED}")
    return value


def check_model(given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """``ValueError`` where parameters and buffers are not those of the model, by name and shape."""
    what, other = "the state's 'model'", "it is of another model"
    for name, tensor in own.items():
        if name not in given:
            raise ValueError(f"{what} has no {name}, which the model has: {other}")
        if not isinstance(tensor, torch.Tensor):
            continue
        value = given[name]
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{what} has {name} as {value!r:.40}, which is no tensor; {SAVED}")
        if value.shape != tensor.shape:
            raise ValueError(f"{what} has {name} of shape {list(value.shape)}, and the model's is {list(tensor.shape)}: {other}")
    if unknown := [name for name in given if name not in own]:
        raise ValueError(f"{what} has {unknown[0]}, which the model has not: {other}")


def check_groups(given: list[list[Any]], own: list[list[str]]) -> None:
    """``ValueError`` where groups are not of the optimizer's parameters, in their order."""
    if given == own:
        return
    if any(not isinstance(name, str) for group in given for name in group):
        raise ValueError(
            "the state has parameters by numbers, as optimizer.state_dict() does, and not by names: "
            "load that with optimizer.load_state_dict, or save what step.state_dict() gives"
        )
    pairs = [pair for some, others in zip(given, own, strict=False) for pair in zip(some, others, strict=False)]
    first = next((f", {a} for {b}" for a, b in pairs if a != b), "") if list(map(len, given)) == list(map(len, own)) else ""
    raise ValueError(
        f"the state has other parameter groups: {_told(given)}, and the optimizer {_told(own)}{first}; make the optimizer with the groups that were saved"
    )


def check_generator(state: Any) -> None:
    """``ValueError`` where it is no state of the generator of random numbers on the CPU."""
    try:
        torch.Generator().set_state(state.cpu())
    except (AttributeError, TypeError, RuntimeError) as error:
        kind = f"{str(state.dtype).removeprefix('torch.')}{list(state.shape)}" if isinstance(state, torch.Tensor) else f"{state!r:.40}"
        own = torch.get_rng_state()
        raise ValueError(
            f"the state's 'rng' is {kind}, and no state of this torch's random numbers, {str(own.dtype).removeprefix('torch.')}{list(own.shape)}; "
            f"give what torch.get_rng_state() gives"
        ) from error


def number_of(what: str, value: Any) -> int:
    """A count, of 0 or more; ``ValueError`` where it is none."""
    try:
        count = operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        count = -1
    if count < 0:
        raise ValueError(f"{what} is {value!r:.40}, and no number of steps; {SAVED}")
    return count


def check_scaler(state: Mapping[str, Any]) -> None:
    """``ValueError`` where a scale of the loss is no number above 0, or has been kept for no number of steps."""
    scale = state["scale"]
    if not isinstance(scale, (int, float)) or not scale > 0:
        raise ValueError(f"the state's 'scaler' has the scale {scale!r:.40}, and no number above 0; {SAVED}")
    number_of("the '_growth_tracker' of the state's 'scaler'", state["_growth_tracker"])


def _told(groups: list[list[Any]]) -> str:
    return f"{len(groups)} of {', '.join(str(len(group)) for group in groups)}"
