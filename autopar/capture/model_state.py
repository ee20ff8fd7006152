"""Collect a model's parameters, buffers, modules and training flags in one walk."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Named = list[tuple[str, torch.Tensor]]


@dataclass
class ModelState:
    """The state of a model at one moment.

    Attributes:
        all_parameters: names and parameters, in the order of ``named_parameters``; a tied parameter appears with each
            of its names.
        all_buffers: names and buffers, in the order of ``named_buffers``; a shared buffer appears with each of its
            names.
        training: the training flag of each module in ``modules``.
        modules: the modules, once for each of their names.
    """

    all_parameters: Named = field(default_factory=list)
    all_buffers: Named = field(default_factory=list)
    training: list[bool] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)

    @property
    def parameters(self) -> Named:
        """The parameters, each with its first name."""
        return _distinct(self.all_parameters)

    @property
    def buffers(self) -> Named:
        """The buffers, each with its first name."""
        return _distinct(self.all_buffers)


def model_state(model: torch.nn.Module) -> ModelState:
    """Collect the state of a model."""
    state = ModelState()
    _collect(model, "", state)
    return state


def _collect(module: torch.nn.Module, prefix: str, state: ModelState) -> None:
    state.training.append(module.training)
    state.modules.append(module)
    attributes = vars(module)
    state.all_parameters += [
        (prefix + name, tensor) for name, tensor in attributes["_parameters"].items() if tensor is not None
    ]
    state.all_buffers += [
        (prefix + name, tensor) for name, tensor in attributes["_buffers"].items() if tensor is not None
    ]
    for name, child in attributes["_modules"].items():
        if child is not None:
            _collect(child, f"{prefix}{name}.", state)


def _distinct(named: Named) -> Named:
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), (name, tensor))
    return list(first.values())
