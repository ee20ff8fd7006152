"""Convert the state of a training between the forms of ``TrainStep``, of torch's ``get_state_dict``, and of torchtitan.

step.state_dict(), get_state_dict()     {"model": {"up.weight": w}, "optimizer": {"state": {"up.weight": {"exp_avg": m}}, "param_groups": […]}, "step": 7}
torchtitan                              {"up.weight": w, "optimizer": {"state.up.weight.exp_avg": m, "param_groups.up.weight.lr": 1e-3, …}, "train_state": {"step": 7}}
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

State = dict[str, Any]


def as_saved(state: State) -> State:
    """Convert any of these forms to that of ``TrainStep.state_dict``.

    A single wrapper key, as in ``{"app": {…}}``, is removed.
    """
    inner = next(iter(state.values()), None)
    if len(state) == 1 and isinstance(inner, dict) and {"model", "optim", "optimizer"} & set(inner):
        state = inner
    state = dict(state)
    if "optim" in state and "optimizer" not in state:
        state["optimizer"] = state.pop("optim")
    if "model" not in state:
        model = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        state = {"model": model, **{name: value for name, value in state.items() if name not in model}}
    optimizer = state.get("optimizer")
    if (
        isinstance(optimizer, dict)
        and optimizer
        and all(name.startswith(("state.", "param_groups.")) for name in optimizer)
    ):
        state["optimizer"] = _nested(optimizer, list(state["model"]))
    state = {name: value if name in ("model", "optimizer") else _plain(value) for name, value in state.items()}
    if "optimizer" in state:
        state.setdefault("step", _steps(state))
        state.setdefault("rng", torch.Generator().get_state())
    return state


def as_torchtitan(state: State) -> State:
    """Convert a state in the form of ``TrainStep.state_dict`` to the names of torchtitan.

    Raises:
        ValueError: it has no model, or the model has a name that torchtitan uses for another part.
    """
    if not isinstance(state.get("model"), Mapping):
        raise ValueError("the checkpoint has no 'model'; export it without torchtitan")
    model, others = (
        dict(state["model"]),
        {name: value for name, value in state.items() if name not in ("model", "optimizer", "step")},
    )
    flat: State = {**model, **others}
    if "optimizer" in state:
        flat["optimizer"] = _flattened(state["optimizer"])
    if "step" in state:
        flat["train_state"] = {"step": torch.tensor(state["step"], dtype=torch.int32)}
    if doubled := set(model) & {*others, "optimizer", "train_state"}:
        raise ValueError(
            f"the model has {min(doubled)}, which torchtitan has for another part; export it without torchtitan"
        )
    return flat


def _flattened(optimizer: Mapping[str, Any]) -> State:
    flat = {
        f"state.{name}.{key}": value for name, values in optimizer["state"].items() for key, value in values.items()
    }
    for group in optimizer["param_groups"]:
        flat |= {
            f"param_groups.{name}.{key}": value
            for name in group["params"]
            for key, value in group.items()
            if key != "params"
        }
    return flat


def _nested(flat: Mapping[str, Any], order: list[str]) -> State:
    """Nest a flattened optimizer by names of parameters, in the order of the model.

    Parameters with the same options are one group.
    """
    parts: dict[str, dict[str, State]] = {"state": {}, "param_groups": {}}
    parameters = set(order)
    for full, value in flat.items():
        part, _, path = full.partition(".")
        name, key = _split(path, parameters)
        parts[part].setdefault(name, {})[key] = value
    place = {name: k for k, name in enumerate(order)}
    groups: list[State] = []
    for name in sorted(parts["param_groups"], key=lambda name: place.get(name, len(place))):
        options = parts["param_groups"][name]
        group = next(
            (known for known in groups if {key: value for key, value in known.items() if key != "params"} == options),
            None,
        )
        if group is None:
            groups.append(group := {**options, "params": []})
        group["params"].append(name)
    return {"state": parts["state"], "param_groups": groups}


def _split(path: str, names: Iterable[str]) -> tuple[str, str]:
    """Split ``up.weight.exp_avg`` into ``up.weight``, the longest parameter name at its start, and ``exp_avg``."""
    cut = len(path)
    while (cut := path.rfind(".", 0, cut)) > 0:
        if path[:cut] in names:
            return path[:cut], path[cut + 1 :]
    name, _, key = path.rpartition(".")
    return name, key


def _plain(value: Any) -> Any:
    """Replace tensors without dims by numbers, such as a count of steps or the last learning rate."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.dim() == 0 else value
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _steps(state: State) -> int:
    train_state = state.get("train_state")
    if isinstance(train_state, dict) and isinstance(train_state.get("step"), (int, float)):
        return int(train_state["step"])
    states = state["optimizer"].get("state", {}) if isinstance(state["optimizer"], dict) else {}
    return max(
        (int(values["step"]) for values in states.values() if isinstance(values, dict) and "step" in values), default=0
    )
