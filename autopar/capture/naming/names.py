"""List all names of a model's parameters and buffers that a plan may use."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from autopar.capture.model_state import model_state
from autopar.capture.naming.parts import Part, Shape, computed, parts
from autopar.capture.naming.wrapped import joined, steps_to, through, with_class


@dataclass
class Names:
    """The tensors of a model, with all their names.

    Attributes:
        shapes: name → shape, for parameters, buffers, and tensors that parametrizations compute (``up.weight``).
        parameters: those of them that are parameters.
        aliases: other name → the name in ``shapes``: further names of tied tensors, and names that contain the classes
            of modules.
        through: pairs of a name without wrappers and a name in ``shapes`` that it may mean.
        parts: tensors that are split as another tensor is, unless a plan names them.
        paths: module path → its path without wrappers, if these differ; for the values that modules return.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    through: list[tuple[str, str]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)


def names_of(model: torch.nn.Module) -> Names:
    """Return the tensors of a model, with all names that a plan may use for them."""
    state, modules = model_state(model), dict(model.named_modules(remove_duplicate=False))
    names = Names({name: tuple(tensor.shape) for name, tensor in (*state.parameters, *state.buffers)})
    names.parameters = frozenset(name for name, _ in state.parameters)
    named_tensors = [*state.all_parameters, *state.all_buffers]
    first_names: dict[int, str] = {}
    for name, tensor in named_tensors:
        first_names.setdefault(id(tensor), name)
    names.shapes |= (parametrized := computed(modules))
    listed = {name: first_names[id(tensor)] for name, tensor in named_tensors} | {name: name for name in parametrized}
    names.aliases = {name: target for name, target in listed.items() if name != target}
    for name, target in listed.items():
        steps = steps_to(name, modules)
        steps[-1] = steps[-1][0], None
        without_wrappers = through(model, steps)
        if len(steps) > 1:
            names.aliases[joined(steps, with_class)] = target
        if len(without_wrappers) < len(steps):
            names.through += [
                (spelled, target)
                for spelled in dict.fromkeys((joined(without_wrappers), joined(without_wrappers, with_class)))
            ]
    sizes = {name: names.shapes[target] for name, target in listed.items()}
    names.parts = [
        replace(part, name=listed.get(part.name, part.name), base=listed[part.base]) for part in parts(modules, sizes)
    ]
    for path in modules:
        steps = steps_to(path, modules) if path else []
        without_wrappers = through(model, steps, calls=True)
        if len(without_wrappers) < len(steps):
            names.paths[path] = joined(without_wrappers)
    return names
