"""Compare the numbers of a model on simulated ranks, or of a scaled-down copy of it, with those of a single device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import VerifyError
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.structure import flatten, unflatten

EXACT, ROUNDED = 1e-9, 1e-4  # relative differences: in float64 alone, and where the model computes in narrower dtypes
SMALL = 1e-6  # of all gradients: what is smaller is zero but for rounding

Pair = tuple[str, Any, torch.Tensor]  # a name, our value, and that of a single device


@dataclass(frozen=True)
class Numbers:
    """How far the numbers of all ranks are from those of a single device.

    Attributes:
        what: what was compared: outputs and gradients, or the loss and the parameters after a step.
        largest: the largest relative difference, by norms.
        of: the value that has it.
        count: the number of values.
        tolerance: the largest difference that rounding explains.
        first: the first number that differs, in words; empty if all are equal.
    """

    what: str
    largest: float
    of: str
    count: int
    tolerance: float
    first: str = ""

    @property
    def equal(self) -> bool:
        """Whether the numbers are the same, but for rounding; NaN is not."""
        return self.largest <= self.tolerance

    @staticmethod
    def of_pairs(what: str, pairs: Iterable[Pair], tolerance: float) -> Numbers:
        """Compare values, in the order in which errors name the first one."""
        rows = [(difference(ours, theirs), name, ours, theirs) for name, ours, theirs in pairs]
        largest, of = max(((far, name) for far, name, *_ in rows), default=(0.0, ""), key=_nan_last)
        wrong = ((name, ours, theirs) for far, name, ours, theirs in rows if not far <= tolerance)
        first = next((name + _where(ours, theirs) for name, ours, theirs in wrong), "")
        return Numbers(what, largest, of, len(rows), tolerance, first)


def _nan_last(row: tuple[float, str]) -> tuple[bool, float]:
    return row[0] != row[0], row[0]


def _where(ours: Any, theirs: torch.Tensor) -> str:
    """Say at which index two values differ, and what they are there."""
    if not isinstance(ours, torch.Tensor):
        return f" is {ours!r}, and a tensor on a single device"
    if ours.shape != theirs.shape:
        return f" has the shape {list(ours.shape)}, and {list(theirs.shape)} on a single device"
    apart = (ours.detach().double() - theirs.detach().double()).abs().nan_to_num(float("inf"))
    limit = ROUNDED * float(theirs.detach().double().abs().max()) if theirs.numel() else 0.0
    first = int((apart.flatten() > min(limit, float(apart.max()) / 2)).int().argmax()) if apart.numel() else 0
    at = [int(k) for k in torch.unravel_index(torch.tensor(first), ours.shape)]
    return f"{at} is {ours.flatten()[first].item():g}, and {theirs.flatten()[first].item():g} on a single device"


def pairs_of_call(eager: torch.nn.Module, simulated: Any, args: Any, kwargs: Any) -> list[Pair]:
    """Call a model on a single device and on all simulated ranks; returns the outputs and the gradients.

    Args:
        simulated: the same model on a mesh, in a process that is alone.
    """
    theirs, ours = flatten(eager(*args, **kwargs))[0], flatten(simulated.simulate(*args, **kwargs))[0]
    tensors = [
        (f"output {k}", a, b) for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if isinstance(b, torch.Tensor)
    ]
    for values in (ours, theirs):
        sums = [value.double().square().sum() for value in values if has_gradient(value)]
        if sums:
            torch.stack(sums).sum().backward()
    own = dict(simulated.named_parameters())
    pairs = [(name, own[name].grad, p.grad) for name, p in eager.named_parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for _, _, gradient in pairs]).norm() if pairs else torch.zeros(())
    floor = float(norm) * SMALL
    return [*tensors, *((f"the gradient of {name}", a, b) for name, a, b in pairs if float(b.norm()) > floor)]


def difference(ours: Any, theirs: torch.Tensor) -> float:
    """Return the norm of the difference, relative to that of a single device's value; infinite for other shapes."""
    if not isinstance(ours, torch.Tensor) or ours.shape != theirs.shape:
        return float("inf")
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30)) if not torch.equal(ours, theirs) else 0.0


def has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def tolerance_of(program: Program) -> float:
    """Return the largest difference that rounding explains: less if all floats of the program are in float64."""
    is_wide = all(not dtype.is_floating_point or dtype == torch.float64 for dtype in _dtypes(program))
    return EXACT if is_wide else ROUNDED


def _dtypes(program: Program) -> Iterator[torch.dtype]:
    for node in program.nodes:
        types = record_of(node).type
        for type in types if isinstance(types, tuple) else (types,):
            if isinstance(type, TensorType):
                yield type.dtype


# -- scaled-down copies ------------------------------------------------------------------------------------------------
#
# A few simulated ranks, a few rows. A mesh of thousands of ranks cannot be simulated. But a rule, a transfer or a pass
# that is wrong for 512 ranks along an axis is wrong for two, or, where pieces are uneven, for three. So each axis has
# two or three ranks in the copy, and the plan is the same. The copy computes in float64, in evaluation, on random
# numbers of the example's shapes.


MOST_PARAMETERS = 50_000_000  # of a model that is copied and simulated in float64
MOST_RANKS, EVEN, UNEVEN = 8, 2, 3  # of the copy; along an axis
ROWS = 4  # of the batch, for each rank along an axis
SEED = 0


def scaled_mesh(mesh: Mesh, program: Program) -> Mesh:
    """Return a mesh with the same axes and at most ``MOST_RANKS`` ranks: two along each, and three where it is uneven.

    Axes that are left have one rank; the first ones are kept.
    """
    uneven = uneven_axes(program)
    sizes = {axis: min(size, UNEVEN if axis in uneven else EVEN) for axis, size in mesh.axes}
    for few in (EVEN, 1):
        for axis in reversed(sizes):
            if math.prod(sizes.values()) > MOST_RANKS:
                sizes[axis] = min(sizes[axis], few)
    return Mesh(sizes)


def uneven_axes(program: Program) -> set[str]:
    """Return the axes that split a dim of an explicit program into pieces of different sizes."""
    found = set[str]()
    for node in program.nodes:
        types = record_of(node).type
        for type in types if isinstance(types, tuple) else (types,):
            if type is not None and type.layout is not None:
                for size, axes in type.attr.parts(type.shape):
                    if size % type.layout.mesh.count(axes):
                        found.update(axes)
    return found


def layouts_in(program: Program) -> dict[str, tuple[Any, ...]]:
    """Return the layouts of the parameters, buffers and inputs of an explicit program, as a plan.

    Merged dims are left out, because a plan has no words for them.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for node in program.placeholders:
        type, role = record_of(node).type, record_of(node).role
        if role in ("param", "buffer", "input", "state") and isinstance(type, TensorType) and type.layout is not None:
            dims = type.attr.dims
            if all(len(dim) == 1 for dim in dims):
                found[f".{name_of(node)}"] = tuple(axes or None for ((_, axes),) in dims)
    return found


def compare_scaled_copy(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    program: Program,
    parallelized: Callable[[torch.nn.Module, Mesh, Any], Any],
) -> str:
    """Run a copy of the model on a few simulated ranks and on a single device, and say in words what was compared.

    Args:
        args, kwargs: the example.
        program: the explicit program on the mesh, which tells the uneven axes.
        parallelized: puts a model on a mesh with an example, in this process, by the plan that is verified. A searched
            plan is given by its ``layouts_in``, because a small copy may be fastest on a single rank.

    Raises:
        VerifyError: a number differs.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MOST_PARAMETERS:
        return (
            f"numbers were not compared with a single device: the model has {count:,} parameters, more than "
            f"{MOST_PARAMETERS:,}; compare one with fewer layers and smaller sizes"
        )
    small = scaled_mesh(mesh, program)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(SEED)
        eager = copy.deepcopy(model).double().eval()
        example = _scaled(args, dict(kwargs), small)
        if failed := _failure(eager, example):
            return f"numbers were not compared with a single device, where a copy in float64 fails: {failed}"
        simulated = parallelized(eager, small, example)
        if any(tensor.is_meta for tensor in (*eager.parameters(), *eager.buffers())):
            simulated.initialize(device="cpu")
        alone = copy.deepcopy(simulated.module)
        pairs = pairs_of_call(alone, simulated, *example)
        if undefined := next((name for name, _, theirs in pairs if theirs.isnan().any()), ""):
            return f"numbers were not compared with a single device, where {undefined} of random numbers is NaN"
        numbers = Numbers.of_pairs("outputs and gradients", pairs, tolerance_of(simulated.program))
    if not numbers.equal:
        raise VerifyError(
            f"a scaled-down copy on ({small}) has other numbers than a single device: {numbers.first}; the largest "
            f"relative difference is {numbers.largest:.1e}, of {numbers.of}, more than {numbers.tolerance:g}\n"
            f"  the rule of an op may be wrong: look at those that you have registered, at functions of local_map, and "
            f"at the rules that parallel.reports names as found by running"
        )
    return (
        f"{numbers.count} outputs and gradients of a copy on ({small}), in float64 and in evaluation, are those of a "
        f"single device: the largest relative difference is {numbers.largest:.1e}"
    )


def _failure(eager: torch.nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    """Return the error of the model on a single device; empty if there is none. Casts to a fixed dtype may fail."""
    args, kwargs = example
    on_meta = any(tensor.is_meta for tensor in (*eager.parameters(), *eager.buffers()))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            if on_meta:
                leaves, structure = flatten((args, kwargs))
                args, kwargs = unflatten([_on_meta(leaf) for leaf in leaves], structure)
            copy.deepcopy(eager)(*args, **kwargs)
    except Exception as error:  # whatever a forward raises
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


def _on_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _scaled(args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example with a few rows, and with values: random ones, but integers that have values keep them."""
    leaves, structure = flatten((args, kwargs))
    rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
    few = min(rows, ROWS * mesh.size - (1 if rows % mesh.size else 0))
    made = [_leaf(leaf, rows, few) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    found: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(made, structure)
    return found


def _leaf(tensor: torch.Tensor, rows: int, few: int) -> torch.Tensor:
    shape = (few, *tensor.shape[1:]) if tensor.dim() and tensor.shape[0] == rows else tuple(tensor.shape)
    if tensor.is_floating_point():
        return torch.randn(shape, dtype=torch.float64)
    if tensor.is_complex():
        return torch.randn(shape, dtype=torch.complex128)
    if tensor.is_meta:
        return torch.zeros(shape, dtype=tensor.dtype)
    return tensor.detach()[tuple(slice(0, n) for n in shape)].cpu().clone()
