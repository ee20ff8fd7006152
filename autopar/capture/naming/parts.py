"""Find the parts of which a layer's weight is made: they are split as the weight is.

===========================  ===================================================================================
``q_proj.lora_B.*.weight``   ``[out r]`` beside the ``[out in]`` of ``q_proj.base_layer.weight``: dim 0 follows ``out``
``up.parametrizations.*``    what a parametrization computes is ``up.weight``; its originals of the same size follow it
===========================  ===================================================================================

What is ``in`` and ``out`` is asked of the layer: ``transformers``' ``Conv1D`` and embeddings have ``[in out]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.parametrize import is_parametrized

from autopar.capture.naming.wrapped import class_names
from autopar.ir.layout import WHOLE, DistAttr

Shape = tuple[int, ...]

ADAPTERS: dict[str, tuple[str, ...]] = {  # PEFT's name of a part → for each of its dims, which of the base's it follows
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
NEEDS_ALL = {"_Orthogonal"}  # parametrizations of which each element depends on all of the original
IN_OUT = {"Conv1D", "Embedding", "_ConvTransposeNd"}  # layers with a weight [in out]; others have [out in]


@dataclass(frozen=True)
class Part:
    """A tensor that is split as another is.

    Attributes:
        name: the tensor, or with ``()`` the module that returns it.
        kind: ``lora_A``, ``original0``, …
        base: the other.
        dims: for each dim that of the base, or ``None`` for one that stays whole.
    """

    name: str
    kind: str
    base: str
    dims: tuple[int | None, ...]

    def attr(self, base: DistAttr) -> DistAttr:
        return DistAttr(tuple(WHOLE if d is None else base.dims[d] for d in self.dims))


def computed(modules: Mapping[str, torch.nn.Module]) -> dict[str, Shape]:
    """The tensors that parametrizations compute, ``up.weight``, with their shapes, as far as these follow from the originals'."""
    return {f"{path}.{name}".lstrip("."): shape for path, name, shape, _ in _parametrized(modules) if shape is not None}


def parts(modules: Mapping[str, torch.nn.Module], shapes: Mapping[str, Sequence[int]]) -> list[Part]:
    """All parts; a base that is a part itself comes first. ``shapes`` are those of all tensors, computed ones too."""
    found = [part for path, module in modules.items() for part in _adapted(path, module, shapes)]
    for path, name, shape, originals in _parametrized(modules):
        if shape is not None:
            needs_all = any(NEEDS_ALL & class_names(step) for step in modules[path].parametrizations[name])  # type: ignore[union-attr,index]
            base, inside = f"{path}.{name}".lstrip("."), f"{path}.parametrizations.{name}".lstrip(".")
            found.append(Part(f"{inside}()", "computed", base, tuple(range(len(shape)))))
            found += [Part(f"{inside}.{original}", original, base, (None,) * len(own) if needs_all else _alike(own, shape)) for original, own in originals.items()]
    return found


def _adapted(path: str, module: torch.nn.Module, shapes: Mapping[str, Sequence[int]]) -> Iterator[Part]:
    """The parts of an adapter, a module with a ``base_layer``."""
    layer = getattr(module, "base_layer", None)
    if not isinstance(layer, torch.nn.Module):
        return
    base = f"{path}.base_layer.weight".lstrip(".")
    while base not in shapes and isinstance(getattr(layer, "base_layer", None), torch.nn.Module):
        layer, base = layer.base_layer, base.removesuffix("weight") + "base_layer.weight"
    if len(shapes.get(base, ())) < 2:
        return
    swapped = bool(IN_OUT & class_names(layer)) or getattr(module, "fan_in_fan_out", False) is True
    roles = {"in": 0, "out": 1} if swapped else {"out": 0, "in": 1}
    for kind, child in module.named_children():
        for name, tensor in child.named_parameters() if kind in ADAPTERS else ():
            dims = [roles.get(role) for role in ADAPTERS[kind]]
            dims += [None] * (tensor.dim() - len(dims))
            fits = (d if d is not None and size == shapes[base][d] else None for d, size in zip(dims, tensor.shape, strict=False))
            yield Part(f"{path}.{kind}.{name}".lstrip("."), kind, base, tuple(fits))


def _parametrized(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, str, Shape | None, dict[str, Shape]]]:
    """The path, the tensor's name and shape, and the originals' shapes, of each tensor that is computed."""
    for path, module in modules.items():
        if is_parametrized(module):
            for name, chain in module.parametrizations.items():  # type: ignore[union-attr,operator]
                originals = {key: tuple(tensor.shape) for key, tensor in (*chain.named_parameters(recurse=False), *chain.named_buffers(recurse=False))}
                yield path, name, _broadcast(list(originals.values())), originals


def _broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """The shape of a direction times its length; ``None`` where the originals are otherwise."""
    try:
        return tuple(torch.broadcast_shapes(*shapes)) if shapes else None
    except RuntimeError:
        return None


def _alike(own: Shape, shape: Shape) -> tuple[int | None, ...]:
    return tuple(d if len(own) == len(shape) and size == shape[d] else None for d, size in enumerate(own))
