"""Hold the keys and values of the tokens so far: this rank's pieces of them, or full tensors of simulated ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.model.generation.bound import Bound

TOKENS = 2  # the dim of the tokens: [batch, heads, tokens, size of a head]


@dataclass
class MeshCache:
    """The cache of one generation.

    Attributes:
        types: of the keys and the values of each layer, in turn: their global shapes, and their layouts.
        tensors: the pieces; full tensors where ranks are simulated.
        length: how many tokens are held.
    """

    types: list[TensorType]
    tensors: list[torch.Tensor]
    length: int = 0

    @classmethod
    def for_rows(cls, bound: Bound, rows: Sequence[torch.Tensor], mesh: Mesh, room: int) -> MeshCache:
        """Return an empty cache with room for so many tokens, in the layouts of the rows that a prefill returns.

        The dim of the tokens is whole in it. ``rows``: those that the prefill has returned behind its logits.
        """
        types, tensors = [], []
        for type, piece in zip(bound.types[1:], rows, strict=True):
            shape, attr = with_room(type.shape, room), type.attr
            attr = replace(attr, dims=(*attr.dims[:TOKENS], ((None, ()),), *attr.dims[TOKENS + 1 :]))
            attr = attr.normalize(shape, mesh)
            types.append(TensorType(shape, type.dtype, Layout(mesh, attr)))
            tensors.append(piece.new_zeros(with_room(piece.shape, room)))
        return cls(types, tensors)

    @property
    def attrs(self) -> list[DistAttr]:
        """The layouts of the tensors."""
        return [type.attr for type in self.types]

    @property
    def room(self) -> int:
        """How many tokens it can hold."""
        return self.types[0].shape[TOKENS]

    def bytes(self, rank: int) -> int:
        """Return the bytes of a rank's pieces."""
        at = self.types[0].mesh.coordinates(rank)
        shapes = [type.attr.local_shape(type.shape, type.mesh, at) for type in self.types]
        return sum(math.prod(shape) * type.dtype.itemsize for shape, type in zip(shapes, self.types, strict=True))

    def write(self, bound: Bound, rows: Sequence[torch.Tensor]) -> None:
        """Put rows that a program has returned behind its logits into the cache. All ranks call it."""
        count = bound.types[1].shape[TOKENS]
        for k, (tensor, attr, piece) in enumerate(zip(self.tensors, self.attrs, rows, strict=True)):
            tensor.narrow(TOKENS, self.length, count).copy_(bound.laid(piece, k + 1, attr))
        self.length += count

    def __str__(self) -> str:
        layouts = list(dict.fromkeys(print_type(type) for type in self.types))
        return f"keys and values of {len(self.types) // 2} layers, {' and '.join(layouts)}"


def with_room(shape: Sequence[int], room: int) -> tuple[int, ...]:
    """Return the shape of rows with room for so many tokens."""
    return *shape[:TOKENS], room, *shape[TOKENS + 1 :]
