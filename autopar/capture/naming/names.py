"""List all names of a model's parameters and buffers that a plan may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.nn.utils.parametrize import is_parametrized

from autopar.capture.model_state import model_state
from autopar.ir.layout import WHOLE, DistAttr

# -- wrapped -----------------------------------------------------------------------------------------------------------
#
# Leave the modules that wrap a layer out of a tensor's name.
#
#     model.layers.0.q_proj.base_layer.weight          model.layers.0.q_proj.weight        an adapter of PEFT
#     layers.0._orig_mod.up.weight                     layers.0.up.weight                  torch.compile
#     lm_head.modules_to_save.default.weight           lm_head.weight                      a copy that PEFT trains
#
# A path is a list of steps from the root, each with its module. Steps into wrappers are left out; the step before takes
# the wrapped module in the place of the wrapper.


# children with such names
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "token_adapter")
# children whose result the wrapper returns unchanged
CALLED_ALIKE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

WRAPPING = {  # class → the child that it wraps; in other classes this name may be an ordinary child
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "AveragedModel": "module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "AuxiliaryTrainingWrapper": "original_module",
}
# a class, and its child whose children are each a copy of the wrapped module
COPIES = ("AuxiliaryTrainingWrapper", "modules_to_save")

Step = tuple[str, torch.nn.Module | None]  # a name, and the module that is called so; ``None`` for a tensor


def class_names(module: torch.nn.Module | None) -> set[str]:
    """Return the names of a module's class and of those it derives from."""
    return {base.__name__ for base in type(module).__mro__}


def class_name(module: torch.nn.Module) -> str:
    """Return the name of a module's class.

    A parametrized module has a generated class, so the class that it derives from is named.
    """
    kind = type(module)
    return (kind.__bases__[0] if is_parametrized(module) else kind).__name__


def steps_to(name: str, modules: Mapping[str, torch.nn.Module]) -> list[Step]:
    """Return the steps of a name; ``modules`` has all modules by their paths."""
    parts = name.split(".")
    return [(part, modules.get(".".join(parts[: k + 1]))) for k, part in enumerate(parts)]


def through(root: torch.nn.Module, steps: Sequence[Step], *, calls: bool = False) -> list[Step]:
    """Return the steps without those into wrappers.

    With ``calls``, only wrappers that return their child's result are left out.
    """
    without_wrappers: list[Step] = []
    parent: torch.nn.Module | None = root
    copies = False  # whether the last step was into the dict of a layer's copies
    for name, module in steps:
        kinds = class_names(parent)
        into_copies = not calls and name == COPIES[1] and COPIES[0] in kinds
        if copies or into_copies or _is_wrapped(name, module, kinds, CALLED_ALIKE if calls else WRAPPERS):
            if without_wrappers and not into_copies:
                without_wrappers[-1] = without_wrappers[-1][0], module
        else:
            without_wrappers.append((name, module))
        copies, parent = into_copies, module
    return without_wrappers


def _is_wrapped(name: str, module: torch.nn.Module | None, parents: set[str], children: Sequence[str]) -> bool:
    return module is not None and (name in children or any(WRAPPING.get(kind) == name for kind in parents))


def joined(steps: Sequence[Step], spelled: Callable[[str, torch.nn.Module], str] = lambda name, module: name) -> str:
    return ".".join(name if module is None else spelled(name, module) for name, module in steps)


def with_class(name: str, module: torch.nn.Module) -> str:
    """``c_fc:Conv1D``."""
    return f"{name}:{class_name(module)}"


# -- parts -------------------------------------------------------------------------------------------------------------
#
# Find the tensors that a layer's weight is computed from: they are split as the weight is.
#
# ===========================  ===================================================================================
# ``q_proj.lora_B.*.weight``   ``[out r]`` beside the ``[out in]`` of ``q_proj.base_layer.weight``: dim 0 follows
# ``out`` ``up.parametrizations.*``    what a parametrization computes is ``up.weight``; its originals of the same size
# follow it ===========================
# ===================================================================================
#
# The class of the layer decides which dim is ``in`` and which is ``out``: ``transformers``' ``Conv1D`` and embeddings
# have ``[in out]``.


Shape = tuple[int, ...]

# PEFT's name of a part → for each of its dims, the dim of the base weight that it follows
ADAPTERS: dict[str, tuple[str, ...]] = {
    "lora_A": ("", "in"),
    "lora_B": ("out", ""),
    "lora_embedding_A": ("", "in"),
    "lora_embedding_B": ("out", ""),
    "lora_magnitude_vector": ("out",),
    "ia3_l": ("out", "in"),
    "vera_lambda_b": ("out",),
    "hada_w1_a": ("out", ""),
    "hada_w2_a": ("out", ""),
    "hada_w1_b": ("", "in"),
    "hada_w2_b": ("", "in"),
}
NEEDS_ALL = {"_Orthogonal"}  # parametrizations in which each element depends on the whole original
IN_OUT = {"Conv1D", "Embedding", "_ConvTransposeNd"}  # layers with a weight [in out]; others have [out in]


@dataclass(frozen=True)
class Part:
    """A tensor that is split as another tensor, its base, is.

    Attributes:
        name: the tensor, or with ``()`` the module that returns it.
        kind: ``lora_A``, ``original0``, …
        base: the name of the base.
        dims: for each dim the dim of the base that it follows, or ``None`` for a dim that stays whole.
    """

    name: str
    kind: str
    base: str
    dims: tuple[int | None, ...]

    def attr(self, base: DistAttr) -> DistAttr:
        return DistAttr(tuple(WHOLE if d is None else base.dims[d] for d in self.dims))


def computed(modules: Mapping[str, torch.nn.Module]) -> dict[str, Shape]:
    """Return the tensors that parametrizations compute, such as ``up.weight``, with their shapes.

    Tensors whose shapes do not follow from those of the originals are left out.
    """
    return {f"{path}.{name}".lstrip("."): shape for path, name, shape, _ in _parametrized(modules) if shape is not None}


def parts(modules: Mapping[str, torch.nn.Module], shapes: Mapping[str, Sequence[int]]) -> list[Part]:
    """Return all parts; a base that is a part itself comes before its parts.

    ``shapes`` holds all tensors, computed ones too.
    """
    result = [part for path, module in modules.items() for part in _adapted(path, module, shapes)]
    for path, name, shape, originals in _parametrized(modules):
        if shape is not None:
            needs_all = any(NEEDS_ALL & class_names(step) for step in _chains(modules[path])[name])
            base, inside = f"{path}.{name}".lstrip("."), f"{path}.parametrizations.{name}".lstrip(".")
            result.append(Part(f"{inside}()", "computed", base, tuple(range(len(shape)))))
            result += [
                Part(
                    f"{inside}.{original}",
                    original,
                    base,
                    (None,) * len(size) if needs_all else _dims_of_equal_size(size, shape),
                )
                for original, size in originals.items()
            ]
    return result


def _adapted(path: str, module: torch.nn.Module, shapes: Mapping[str, Sequence[int]]) -> Iterator[Part]:
    """Yield the parts of an adapter, which is a module with a ``base_layer``."""
    layer = getattr(module, "base_layer", None)
    if not isinstance(layer, torch.nn.Module):
        return
    base = f"{path}.base_layer.weight".lstrip(".")
    while base not in shapes and isinstance(inner := getattr(layer, "base_layer", None), torch.nn.Module):
        layer, base = inner, base.removesuffix("weight") + "base_layer.weight"
    if len(shapes.get(base, ())) < 2:
        return
    swapped = bool(IN_OUT & class_names(layer)) or getattr(module, "fan_in_fan_out", False) is True
    roles = {"in": 0, "out": 1} if swapped else {"out": 0, "in": 1}
    for kind, child in module.named_children():
        for name, tensor in child.named_parameters() if kind in ADAPTERS else ():
            dims = [roles.get(role) for role in ADAPTERS[kind]]
            dims += [None] * (tensor.dim() - len(dims))
            fits = (
                d if d is not None and size == shapes[base][d] else None
                for d, size in zip(dims, tensor.shape, strict=False)
            )
            yield Part(f"{path}.{kind}.{name}".lstrip("."), kind, base, tuple(fits))


def _parametrized(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, str, Shape | None, dict[str, Shape]]]:
    """Yield each tensor that a parametrization computes: its module's path, its name and shape.

    With it come the shapes of the originals.
    """
    for path, module in modules.items():
        if is_parametrized(module):
            for name, chain in _chains(module).items():
                originals = {
                    key: tuple(tensor.shape)
                    for key, tensor in (*chain.named_parameters(recurse=False), *chain.named_buffers(recurse=False))
                }
                yield path, name, _broadcast(list(originals.values())), originals


def _chains(module: torch.nn.Module) -> Mapping[str, torch.nn.ModuleList]:
    """Return the steps of each tensor that a module computes by parametrizations."""
    return cast(Any, module.parametrizations)


def _broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """Return the shape of the originals' product; ``None`` if they do not broadcast.

    Such a product is a direction times its length.
    """
    try:
        return tuple(torch.broadcast_shapes(*shapes)) if shapes else None
    except RuntimeError:
        return None


def _dims_of_equal_size(original: Shape, shape: Shape) -> tuple[int | None, ...]:
    return tuple(d if len(original) == len(shape) and size == shape[d] else None for d, size in enumerate(original))


# -- names -------------------------------------------------------------------------------------------------------------


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
