"""Run a captured call again and again, for other inputs of the same shapes, on this rank or on all simulated ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.capture.arguments import Arguments
from autopar.capture.model_state import ModelState
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.model.calls import Calls
from autopar.model.dtensor_parameters import local_of
from autopar.model.inputs import CallInputs, refuse_without_values
from autopar.runtime.redistribute import Redistribution, RedistributionOnRank
from autopar.runtime.simulation.pieces import cut


class Bound:
    """A captured call without gradients. The model's tensors are looked up once, and its inputs may be pieces.

    Attributes:
        types: the global type of each returned tensor.

    Args:
        arguments: the inputs of the call.
        held: how many of them, the last ones, are pieces on processes.
        attrs, shapes: the layouts and global shapes of these.
        simulates: whether all ranks are simulated; then all inputs are full tensors.
    """

    def __init__(
        self, calls: Calls, arguments: Arguments, state: ModelState, simulates: bool,
        attrs: Sequence[DistAttr] = (), shapes: Sequence[tuple[int, ...]] = (),
    ) -> None:  # fmt: skip
        self._calls, self._simulates, self._held = calls, simulates, len(attrs)
        names = arguments.names[len(arguments.names) - len(attrs) :]
        pieces = {} if simulates else dict(zip(names, shapes, strict=True))
        inputs = CallInputs(arguments, dict(zip(names, attrs, strict=True)), pieces)
        self._compiled = calls.captures.compiled(inputs, calls.call(inputs, state))
        named = [*state.parameters, *state.buffers]
        refuse_without_values(named)
        self._fixed = [tensor if simulates else local_of(tensor).detach() for _, tensor in named]
        self._step = self._compiled.simulated if simulates else self._compiled.here
        interface = self._step.interface
        self._types = [interface.types[name] for name in interface.arguments[len(named) :]]
        self.types: list[TensorType] = [type for _, type in interface.returned]
        self._moves: dict[tuple[int, DistAttr], RedistributionOnRank] = {}

    @property
    def program(self) -> Program:
        """The explicit program."""
        return self._compiled.program

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the pieces of the returned tensors; all full tensors where ranks are simulated.

        ``tensors``: in the order of the arguments.
        """
        calls = self._calls
        computed = calls.computed(self._compiled.captured)[0].values()
        if self._simulates:
            return self._compiled.simulated([*self._fixed, *tensors, *computed])
        at = calls.mesh.coordinates(calls.context().rank)
        plain = len(tensors) - self._held
        pieces = [cut(tensor, type, at) for tensor, type in zip(tensors[:plain], self._types, strict=False)]
        return self._compiled.here([*self._fixed, *pieces, *tensors[plain:], *computed], {}, _no_gradient)

    def full(self, piece: torch.Tensor, k: int) -> torch.Tensor:
        """Return returned tensor ``k`` whole, on each rank. All ranks call it."""
        return self.laid(piece, k, DistAttr.replicated(len(self.types[k].shape)))

    def laid(self, piece: torch.Tensor, k: int, attr: DistAttr) -> torch.Tensor:
        """Return the piece of returned tensor ``k`` in another layout. All ranks call it."""
        type = self.types[k]
        if self._simulates or type.attr == attr:
            return piece
        if (k, attr) not in self._moves:
            move = Redistribution(type, replace(type, layout=Layout(type.mesh, attr)))
            context = self._calls.context()
            groups = context.groups_for(move.local)
            self._moves[k, attr] = move.on(context.rank, groups, self._calls.device)
        moved = self._moves[k, attr](piece)
        assert moved is not None
        return moved


def _no_gradient(name: str, piece: torch.Tensor) -> Any:
    raise AssertionError(f"{name} has a gradient in a call without gradients")
