"""Bind the calls of a model: their arguments, the layouts of inputs and parameters, and the key of their captures.

Pieces of a batch that ranks bring with ``inputs="local"`` are joined where their sizes differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autopar.capture.arguments import Arguments, bind_arguments, signature_of
from autopar.capture.guards import Original
from autopar.capture.model_state import ModelState, model_state
from autopar.capture.provenance import user_line
from autopar.errors import PlanError
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.model.inputs import CallInputs, CallKey, Inputs, Shapes, axes_of, call_inputs
from autopar.plan.boundary import OPEN
from autopar.plan.constraints import layouts_without_search
from autopar.plan.plan import Plan, of_the_batch
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.processes.agreement import Agreement, other_values
from autopar.torch_private import transforms

if TYPE_CHECKING:
    from autopar.model.call_ranks import CallRanks


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


# -- uneven batches ----------------------------------------------------------------------------------------------------
#
# Before a call the ranks compare the shapes of their pieces. If they are equal, nothing else happens. Else all ranks
# gather the pieces and join them in the order of the mesh, and the call takes the whole batch.


Split = list[tuple[int, tuple[str, ...]]]  # (dim, the axes that shard it), of each sharded dim
Layouts = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, DistAttr]]


class _Facts(NamedTuple):
    """The facts of its piece that a rank sends to the others."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}" + " with gradients" * self.requires_grad

    @property
    def alike(self) -> tuple[torch.dtype, int, bool]:
        """The facts that must be equal on all ranks: dtype, number of dims, whether it requires a gradient."""
        return self.dtype, len(self.shape), self.requires_grad


def with_like_pieces(arguments: Arguments, mesh: Mesh, agreement: Agreement, layouts: Layouts) -> Arguments:
    """Return the arguments of a call; those of the whole batch if the ranks' pieces differ in size.

    All ranks call it. The gradient of the whole batch goes back to each rank's own piece.

    Args:
        layouts: returns the plan's layouts of inputs of such shapes.

    Raises:
        RuntimeError: the ranks make different calls; their pieces do not fit together; ranks that have the same piece
            bring different values.
    """
    plain = {
        name: tensor for name, tensor in zip(arguments.names, arguments.tensors, strict=True) if not is_dtensor(tensor)
    }
    if not plain:
        return arguments
    shapes = {name: tuple(tensor.shape) for name, tensor in plain.items()}
    if not agreement.differ(f"a call with pieces of {', '.join(plain)}", repr(shapes)):
        return arguments
    facts: list[dict[str, _Facts]] = agreement.gathered(
        {name: _Facts(tensor.dtype, shapes[name], tensor.requires_grad) for name, tensor in plain.items()}
    )
    splits = _splits(facts, layouts)
    for name, split in splits.items():
        _refuse_misfits(name, [of_rank[name] for of_rank in facts], split, mesh)
    # a view would be sent with its whole storage
    pieces = agreement.gathered({name: plain[name].detach().cpu().clone() for name, split in splits.items() if split})
    whole = {}
    for name, split in splits.items():
        if split:
            whole[name] = _joined(
                name,
                [of_rank[name].to(plain[name].device) for of_rank in pieces],
                split,
                mesh,
                agreement.rank,
                plain[name],
            )
    names = iter(arguments.names)
    flat = [whole.get(next(names), value) if isinstance(value, torch.Tensor) else value for value in arguments.flat]
    return replace(arguments.with_leaves(flat), whole=True)


def _splits(facts: Sequence[Mapping[str, _Facts]], layouts: Layouts) -> dict[str, Split]:
    """Return for each input the dims that the plan shards on all ranks.

    On one rank alone a dim may by chance be as long as the batch; it does not count.
    """
    of_ranks = {
        tuple(of_rank.items()): layouts({name: fact.shape for name, fact in of_rank.items()}) for of_rank in facts
    }
    return {
        name: [
            (d, axes)
            for d in range(len(fact.shape))
            for axes in [_axes(next(iter(of_ranks.values())), name, d)]
            if axes and all(_axes(attrs, name, d) == axes for attrs in of_ranks.values())
        ]
        for name, fact in facts[0].items()
    }


def _axes(attrs: Mapping[str, DistAttr], name: str, dim: int) -> tuple[str, ...]:
    """Return the axes that shard a dim."""
    if name not in attrs or dim >= len(attrs[name].dims):
        return ()
    return axes_of(attrs[name], name, dim)


def _refuse_misfits(name: str, facts: Sequence[_Facts], split: Split, mesh: Mesh) -> None:
    """Raise ``RuntimeError`` unless the pieces have one dtype and number of dims, and fit together.

    They fit if their lengths are equal, except along the axes that shard a dim.
    """
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    over = dict(split)
    for rank, fact in enumerate(facts):
        at = mesh.coordinates(rank)
        if fact.alike != facts[0].alike:
            raise RuntimeError(_misfit(name, 0, rank, facts, over))
        for d, length in enumerate(fact.shape):
            other = first.setdefault((d, tuple(at[axis] for axis in over.get(d, ()))), rank)
            if facts[other].shape[d] != length:
                raise RuntimeError(_misfit(name, other, rank, facts, over))


def _misfit(name: str, a: int, b: int, facts: Sequence[_Facts], over: Mapping[int, tuple[str, ...]]) -> str:
    free = ", and ".join(f"dim {d}, along {' and '.join(axes)}" for d, axes in over.items())
    remedy = (
        f"they may differ in the length of {free}"
        if free
        else "it must be the same on all ranks, because the plan does not split it"
    )
    return f"the pieces of {name} do not fit together: {facts[a]} on rank {a}, {facts[b]} on rank {b}\n  {remedy}"


def _joined(
    name: str, pieces: Sequence[torch.Tensor], split: Split, mesh: Mesh, rank: int, own: torch.Tensor
) -> torch.Tensor:
    """Return the full tensor of the pieces of all ranks. ``own`` is this rank's piece, and receives its gradient."""
    axes = tuple(axis for _, dim_axes in split for axis in dim_axes)
    places = [tuple(mesh.coordinates(other)[axis] for axis in axes) for other in range(len(pieces))]
    first: dict[tuple[int, ...], int] = {}
    for other, (place, piece) in enumerate(zip(places, pieces, strict=True)):
        if not _same(piece, pieces[first.setdefault(place, other)]):
            raise RuntimeError(other_values([name], axes, first[place], other, mesh))
    return _concatenated({place: pieces[k] for place, k in first.items()} | {places[rank]: own}, (), split, mesh)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, equal_nan=True) if a.is_floating_point() or a.is_complex() else torch.equal(a, b)


def _concatenated(
    pieces: Mapping[tuple[int, ...], torch.Tensor], at: tuple[int, ...], split: Split, mesh: Mesh
) -> torch.Tensor:
    """Concatenate the pieces whose coordinates begin with ``at``."""
    if not split:
        return pieces[at]
    (dim, axes), *other_dims = split
    return torch.cat(
        [
            _concatenated(pieces, (*at, *index), other_dims, mesh)
            for index in itertools.product(*(range(mesh.sizes[axis]) for axis in axes))
        ],
        dim,
    )
