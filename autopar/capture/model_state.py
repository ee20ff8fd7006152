"""Inventory: a model's parameters, buffers and training flags, in one walk instead of one for each question."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

Named = list[tuple[str, torch.Tensor]]


@dataclass
class Inventory:
    """What ``named_parameters`` and ``named_buffers`` list, in their order; ``all_…`` with every name of a tensor. And the modules, as often as
    they have a name, with their training flags."""

    all_parameters: Named = field(default_factory=list)
    all_buffers: Named = field(default_factory=list)
    training: list[bool] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)

    @property
    def parameters(self) -> Named:
        return _distinct(self.all_parameters)

    @property
    def buffers(self) -> Named:
        return _distinct(self.all_buffers)


def inventory(model: torch.nn.Module) -> Inventory:
    found = Inventory()
    _walk(model, "", found)
    return found


def _walk(module: torch.nn.Module, prefix: str, found: Inventory) -> None:
    found.training.append(module.training)
    found.modules.append(module)
    own = vars(module)
    found.all_parameters += [(prefix + name, tensor) for name, tensor in own["_parameters"].items() if tensor is not None]
    found.all_buffers += [(prefix + name, tensor) for name, tensor in own["_buffers"].items() if tensor is not None]
    for name, child in own["_modules"].items():
        if child is not None:
            _walk(child, f"{prefix}{name}.", found)


def _distinct(named: Named) -> Named:
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named:
        first.setdefault(id(tensor), (name, tensor))
    return list(first.values())
