"""Find the tensors that a layer's weight is computed from: they are split as the weight is.

===========================  ===================================================================================
``q_proj.lora_B.*.weight``   ``[out r]`` beside the ``[out in]`` of ``q_proj.base_layer.weight``: dim 0 follows ``out``
``up.parametrizations.*``    what a parametrization computes is ``up.weight``; its originals of the same size follow it
===========================  ===================================================================================

The class of the layer decides which dim is ``in`` and which is ``out``: ``transformers``' ``Conv1D`` and embeddings
have ``[in out]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.utils.parametrize import is_parametrized

from autopar.capture.naming.wrapped import class_names
from autopar.ir.layout import WHOLE, DistAttr

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
