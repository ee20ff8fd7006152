"""Bind the calls of a model: their arguments, the layouts of inputs and parameters, and the key of their captures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from autopar.capture.arguments import Arguments, bind_arguments, signature_of
from autopar.capture.guards import Original
from autopar.capture.model_state import ModelState, model_state
from autopar.capture.provenance import user_line
from autopar.errors import PlanError
from autopar.ir.layout import DistAttr
from autopar.model.inputs import CallInputs, CallKey, Inputs, Shapes, call_inputs
from autopar.model.uneven_batches import with_like_pieces
from autopar.plan.boundary import OPEN
from autopar.plan.constraints import layouts_without_search
from autopar.plan.plan import Plan, of_the_batch
from autopar.torch_private import transforms

if TYPE_CHECKING:
    from autopar.model.calls import CallRanks

TRANSFORMED = (
    "torch.func transforms a call of a model on a mesh, whose captured program has gradients through backward() alone\n"
    "    {line}\n  use the transform inside of forward, where it is captured with the model, or loss.backward() and "
    "torch.autograd.grad outside"
)


class CallBinding:
    """What is known of the calls of a model before they are captured.

    Attributes:
        module: the model, with parameters that are DTensors on processes.
        plan: the plan of its layouts.
        passed: the option ``inputs`` of ``parallelize``.
        layouts: parameter → its layout between calls, on the whole mesh.

    Args:
        ranks: those that bring the pieces of inputs.
        original: the model of which ``module`` is a copy.
    """

    def __init__(self, module: torch.nn.Module, plan: Plan | None, ranks: CallRanks, passed: Inputs,
                 layouts: Mapping[str, DistAttr], original: Original | None = None) -> None:  # fmt: skip
        self.module, self.plan, self.passed, self.layouts = module, plan, passed, dict(layouts)
        self._ranks, self._original = ranks, original
        self._of_inputs: dict[Any, Mapping[str, DistAttr]] = {}  # by names and shapes of inputs
        self._of_the_batch: dict[Any, Mapping[str, bool]] = {}  # by names and numbers of dims of inputs

    def of_host(self, module: torch.nn.Module, ranks: CallRanks) -> CallBinding:
        """Return the binding of the model under another forward, with full tensors. Both share layouts."""
        binding = CallBinding(module, self.plan, ranks, "global", {}, self._original)
        binding.layouts = self.layouts
        return binding

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Bind the arguments of a call to the parameters of forward, and flatten them; this is done once for each call.

        If the ranks bring pieces of different sizes, the result has the whole batch. All ranks call it.

        Raises:
            RuntimeError: the model is closed.
            ValueError: torch.func transforms the call.
        """
        self._ranks.membership.check()
        if transforms():
            raise ValueError(TRANSFORMED.format(line=user_line()))
        arguments, others = bind_arguments(self.module, args, kwargs), self._ranks.agreement.ranks
        if self.passed == "global" or others is None:
            return arguments
        return with_like_pieces(arguments, self._ranks.mesh, others, self._layouts_of)

    def inputs(self, arguments: Arguments) -> CallInputs:
        """Return the inputs of a call: bound arguments with their layouts."""
        return call_inputs(arguments, "global" if arguments.whole else self.passed, self._ranks.mesh, self._layouts_of)

    def key(self, inputs: CallInputs, state: ModelState) -> CallKey:
        """Return the key of a call's capture, without the values that forward reads."""
        if self._original is not None:
            self._original.take_over()
        return signature_of(state, inputs.arguments), inputs.facts

    def row_axes(self) -> tuple[str, ...] | None:
        """Return the axes over which the plan splits dim 0 of inputs; ``None`` if it may name inputs by themselves."""
        parts = self.plan if isinstance(self.plan, (list, tuple)) else () if self.plan is None else (self.plan,)
        if any(isinstance(part, Mapping) for part in parts):
            return None
        attrs = self._layouts_of({"rows": (self._ranks.mesh.size,)})
        dims = attrs["rows"].dims if "rows" in attrs else ()
        return tuple(axis for dim in dims for _, axes in dim for axis in axes)

    def of_the_batch(self, inputs: Mapping[str, int]) -> Mapping[str, bool]:
        """Return for each named input whether its dim 0 is the batch. ``inputs``: name → number of dims."""
        key = tuple(inputs.items())
        if key not in self._of_the_batch:
            state = model_state(self.module)
            # a glob of the plan means these tensors if an input has the same name
            others = {name for name, _ in (*state.parameters, *state.buffers)}
            own = {name: dims for name, dims in inputs.items() if name not in others}
            self._of_the_batch[key] = of_the_batch(self.plan, self._ranks.mesh, own)
        return self._of_the_batch[key]

    def refuse_to_simulate(self) -> None:
        """Raise ``RuntimeError`` on processes, each of which has only its pieces of parameters.

        Also where each rank brings its piece of the batch, of which a process that is alone has only one.
        """
        if self._ranks.job is not None:
            raise RuntimeError(
                "the parameters of this model are sharded over processes; to simulate, call parallelize in a process "
                "that is alone"
            )
        if self.passed == "local" and self._ranks.mesh.size > 1:
            raise RuntimeError(
                'with inputs="local" each process brings its piece of the batch, and a simulation takes the whole; to '
                'simulate, call parallelize with inputs="global"'
            )

    def _layouts_of(self, shapes: Shapes) -> Mapping[str, DistAttr]:
        """Return the plan's layouts for inputs of the given shapes, which ranks bring in pieces.

        They are not searched: inputs that the plan does not name have the defaults.

        Raises:
            PlanError: the plan leaves a dim of an input open.
        """
        key = tuple(shapes.items())
        if key not in self._of_inputs:
            attrs = layouts_without_search(self.plan, self.module, self._ranks.mesh, shapes)
            for name, attr in attrs.items():
                if OPEN in attr.dims:
                    raise PlanError(
                        f"the plan leaves a dim of the input {name} open ('?'), and with inputs=\"local\" each rank "
                        f"brings its piece of it, so its layout is known before the search; give an axis or None for "
                        f'each dim, or use inputs="global"'
                    )
            self._of_inputs[key] = attrs
        return self._of_inputs[key]
