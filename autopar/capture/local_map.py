"""Let a model's forward run a function on the pieces of each rank: ``autopar.local_map``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autopar.capture.constrained import running_capture
from autopar.capture.provenance import user_line
from autopar.errors import CaptureError, RuleError, class_of, shown
from autopar.ir.dtensor import attr_of, with_an_axis
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.ops import local_map as ops
from autopar.ir.record import TensorType
from autopar.rules.registry import RULES, Rule, op_name
from autopar.torch_private import FakeTensorMode, TorchDispatchMode, draws_random, without_modes

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# for each axis of the mesh, in order, or by its name: axes that are left out replicate
Placements = Sequence["Placement"] | Mapping[str, "Placement"]
EXAMPLE = 'autopar.local_map(f, ({"tp": Partial()},), ({"tp": Shard(1)}, {"tp": Shard(0)}))'


@dataclass(frozen=True)
class Region:
    """A function on pieces, as one call of it is captured.

    Attributes:
        name: of the function, which errors quote.
        results, operands, gradients: the placements of each; ``gradients`` is ``None`` if they follow.
        source: the user's line.
    """

    name: str
    results: tuple[Placements, ...]
    operands: tuple[Placements, ...]
    gradients: tuple[Placements | None, ...] | None
    source: str


REGIONS: dict[str, Region] = {}  # name in programs → the region
_NAMES: dict[Any, str] = {}  # what makes a region → its name


def local_map(
    func: Callable[..., Any],
    out_placements: Placements | tuple[Placements, ...],
    in_placements: tuple[Placements | None, ...],
    in_grad_placements: tuple[Placements | None, ...] | None = None,
    *,
    whole: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a function that runs ``func`` on each rank's pieces, where autopar captures a step; else on all tensors.

    That the pieces together are what ``func`` makes of the whole is your promise, as with torch's ``local_map``. What
    can be checked is: the shapes of the pieces; and autopar derives the gradients, so a gradient that ranks make parts
    of is summed.

    Args:
        func: takes tensors, one by one, and other values; returns a tensor or a tuple of them. It draws no random
            numbers, communicates nothing, and uses no tensors from outside.
        out_placements: the placements of its result: one for each axis of the mesh, in order, or a dict of axes, of
            which those left out replicate. For several results a tuple of these.
        in_placements: those of each positional argument; ``None`` for one that is no tensor. autopar brings them there.
        in_grad_placements: those of the gradients of arguments. They follow from the others, and are compared.
        whole: what runs in the place of ``func`` outside of a capture, where ``func`` on all tensors is another
            function, such as one that divides by a number of rows.

    Raises:
        TypeError: placements are missing, or an argument is of another kind than its placements say.
        CaptureError: later, in a capture: ``func`` does what it may not.
        RuleError: later, on a mesh: the placements do not fit it, or ``func`` makes pieces of another shape.
    """
    if not callable(func):
        raise TypeError(f"local_map takes a function, not {class_of(func)}")
    if in_placements is None or out_placements is None:
        raise TypeError(f"local_map takes the placements of the results and of each argument: {EXAMPLE}")
    several = isinstance(out_placements, tuple) and all(_is_placements(each) for each in out_placements)
    results: tuple[Any, ...] = out_placements if several else (out_placements,)  # type: ignore[assignment]
    for each in (*results, *(p for p in in_placements if p is not None)):
        if not _is_placements(each):
            raise TypeError(f"{shown(each)} are no placements; write a dict of axes or one for each axis: {EXAMPLE}")

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if running_capture() is None:
            return (whole or func)(*args, **kwargs)
        return _captured(func, results, tuple(in_placements), in_grad_placements, whole, args, kwargs)

    return mapped


def _is_placements(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(axis, str) and hasattr(each, "is_shard") for axis, each in value.items())
    return isinstance(value, Sequence) and len(value) > 0 and all(hasattr(each, "is_shard") for each in value)


def _captured(
    func: Callable[..., Any], results: tuple[Any, ...], operands: tuple[Any, ...], gradients: Any,
    whole: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Run a call in a capture as one op."""
    name = getattr(func, "__qualname__", type(func).__name__)
    if len(args) != len(operands):
        raise TypeError(f"{name} is called with {len(args)} arguments, and in_placements has {len(operands)} entries")
    for k, (value, placed) in enumerate(zip(args, operands, strict=True)):
        if isinstance(value, torch.Tensor) != (placed is not None):
            raise TypeError(
                f"argument {k} of {name} is {class_of(value)}, and its placements are {shown(placed)}; a tensor has "
                f"placements, and another value has None"
            )
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        raise TypeError(f"{name} takes a tensor by a keyword, which has no placements; pass it by position")
    places = [k for k, placed in enumerate(operands) if placed is not None]
    constants = tuple(None if k in places else value for k, value in enumerate(args))

    def of_tensors(run: Callable[..., Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(constants)
        for k, tensor in zip(places, tensors, strict=True):
            values[k] = tensor
        made = run(*values, **kwargs)
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    tensors = [args[k] for k in places]
    function = functools.partial(of_tensors, func)
    made = _tried(name, function, tensors)
    if len(made) != len(results):
        raise CaptureError(f"{name} returns {len(made)} results, and out_placements has {len(results)}")
    if whole is not None:
        of_whole = _tried(name, functools.partial(of_tensors, whole), tensors)
        if [(y.shape, y.dtype) for y in of_whole] != [(y.shape, y.dtype) for y in made]:
            raise CaptureError(f"whole= of {name} returns other shapes or dtypes than {name} on all of the tensors")
    placed = tuple(operands[k] for k in places)
    given = None if gradients is None else tuple(gradients[k] for k in places)
    region = Region(name, results, placed, given, user_line())
    key = (func, repr(region), repr(constants), repr(sorted(kwargs.items())))
    if key not in _NAMES:
        count = sum(known.name == name for known in REGIONS.values())
        _NAMES[key] = f"{name}_{count}" if count else name
        REGIONS[_NAMES[key]], ops.FUNCTIONS[_NAMES[key]] = region, function
    outputs = ops.LocalMap.apply(_NAMES[key], *tensors)
    return outputs if len(results) > 1 else outputs[0]


class _Refusing(TorchDispatchMode):
    """Refuses what ranks would do differently, or in vain."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_random(func, args, kwargs):
            raise CaptureError(
                f"{self.name} draws random numbers with {func.__name__}, and its backward would draw others\n  draw "
                f"them outside of local_map, and pass them in"
            )
        if "c10d" in func.namespace:
            raise CaptureError(
                f"{self.name} communicates with {func.__name__}, which autopar would not see\n  return the partial "
                f"result with Partial(), and autopar reduces it; or let another placement bring the operands together"
            )
        return func(*args, **(kwargs or {}))


def _tried(name: str, function: ops.Function, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the results of a function on tensors without values, and refuse what it may not do."""
    with without_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        fakes = [torch.empty([int(n) for n in t.shape], dtype=t.dtype, device=t.device) for t in tensors]
        try:
            with _Refusing(name):
                results = function(*fakes)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{name} fails on tensors of {', '.join(str(list(t.shape)) for t in fakes)}: {type(error).__name__}: "
                f"{error}\n  it may use what it is given alone: pass tensors of the model as arguments"
            ) from error
    for result in results:
        if not isinstance(result, torch.Tensor):
            raise CaptureError(f"{name} returns {class_of(result)}; a function of local_map returns tensors alone")
        if result.requires_grad:
            raise CaptureError(
                f"{name} uses a tensor from outside that requires a gradient, which would be lost\n  pass it as an "
                f"argument, with its placements"
            )
    return results


# -- the layouts of a region on a mesh ---------------------------------------------------------------------------------

Layouts = tuple[tuple[DistAttr, ...], tuple[DistAttr | None, ...]]
Types = Sequence[TensorType]


def _forward(args: Sequence[Any], results: Types, mesh: Mesh) -> Layouts:
    """Return the layouts that the region takes and gives."""
    operands, name = args
    region = REGIONS[name]
    needs = tuple(_attr(region, p, x, mesh) for p, x in zip(region.operands, operands, strict=True))
    gives = tuple(_attr(region, p, y, mesh) for p, y in zip(region.results, results, strict=True))
    for axis in mesh.names:
        if any(axis in dict(attr.pending) for attr in needs) and not all(axis in dict(a.pending) for a in gives):
            raise RuleError(
                f"{region.name} takes a Partial operand over {axis}, and not all of its results are Partial\n"
                f"    {region.source}\n  let a function that is not additive take Replicate() or Shard()"
            )
    _check_pieces(name, operands, results, needs, gives, mesh)
    return needs, gives


def _backward(args: Sequence[Any], results: Types, mesh: Mesh) -> Layouts:
    """Return the layouts that the gradients of a region take and have.

    Along an axis on which ranks compute different parts, the gradient of a replicated operand is a partial sum of what
    the ranks find; that of a partial sum is the same on each rank; and that of a replicated result counts once.
    """
    operands, gradients, name, wanted = args
    region = REGIONS[name]
    needs = [_attr(region, p, x, mesh) for p, x in zip(region.operands, operands, strict=True)]
    # only results with numbers have gradients; which they are follows from their number unless some have none
    floating = _floating(name, operands)
    places = [p for p, floats in zip(region.results, floating, strict=True) if floats]
    of_results = [_attr(region, p, y, mesh) for p, y in zip(places, gradients, strict=True)]
    parted = [axis for axis in mesh.names if any(_lies(attr, axis) for attr in (*needs, *of_results))]
    taken = tuple(_transposed(attr, parted) for attr in of_results)
    given = tuple(_transposed(attr, parted) for attr in needs)
    for k, placements in enumerate(region.gradients or ()):
        if placements is not None and wanted[k] and _attr(region, placements, operands[k], mesh) != given[k]:
            raise RuleError(
                f"in_grad_placements of {region.name} says {shown(placements)} of argument {k}, and its gradient is "
                f"{given[k]} on ({mesh})\n    {region.source}\n  leave in_grad_placements out: it follows from the others"
            )
    return (*needs, *taken), tuple(attr for attr, want in zip(given, wanted, strict=True) if want)


def _lies(attr: DistAttr, axis: str) -> bool:
    return axis in attr.axes or axis in dict(attr.pending)


def _transposed(attr: DistAttr, parted: Sequence[str]) -> DistAttr:
    """Return the layout of a gradient: splits stay, replicated is pending, and pending is replicated."""
    pending = tuple((axis, "sum") for axis in sorted(parted) if not _lies(attr, axis))
    return DistAttr(attr.dims, pending)


def _floating(name: str, operands: Types) -> list[bool]:
    made = _tried(name, ops.FUNCTIONS[name], [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in operands])
    return [y.is_floating_point() or y.is_complex() for y in made]


def _attr(region: Region, placements: Placements, type: TensorType, mesh: Mesh) -> DistAttr:
    """Return placements of a value as a layout on the mesh."""
    from torch.distributed.tensor import Replicate

    if isinstance(placements, Mapping):
        if missing := [axis for axis in placements if axis not in mesh.sizes]:
            raise RuleError(
                f"{region.name} has a placement for the axis {missing[0]}, and the mesh ({mesh}) has none of that name\n"
                f"    {region.source}"
            )
        placements = [placements.get(axis, Replicate()) for axis in with_an_axis(mesh).names]
    try:
        attr = attr_of(placements, mesh, type.shape)
    except ValueError as error:
        raise RuleError(f"{region.name}: {error}\n    {region.source}") from None
    if any(kind != "sum" for _, kind in attr.pending):
        raise RuleError(f"{region.name}: {shown(placements)}: a partial result of local_map is a sum\n    {region.source}")
    pending = tuple((axis, kind) for axis, kind in attr.pending if mesh.sizes[axis] > 1)
    return DistAttr(attr.dims, pending)


def _check_pieces(
    name: str, operands: Types, results: Types, needs: Sequence[DistAttr], gives: Sequence[DistAttr], mesh: Mesh
) -> None:
    """Check the shapes of the pieces that the function makes on each rank."""
    region, seen = REGIONS[name], set()
    for at in mesh.points():
        shapes = [attr.local_shape(x.shape, mesh, at) for attr, x in zip(needs, operands, strict=True)]
        wanted = [attr.local_shape(y.shape, mesh, at) for attr, y in zip(gives, results, strict=True)]
        if (row := (*map(tuple, shapes), *map(tuple, wanted))) in seen:
            continue
        seen.add(row)
        pieces = [torch.empty(s, dtype=x.dtype, device="meta") for s, x in zip(shapes, operands, strict=True)]
        made = [tuple(y.shape) for y in _tried(region.name, ops.FUNCTIONS[name], pieces)]
        if made != [tuple(shape) for shape in wanted]:
            raise RuleError(
                f"{region.name} makes pieces of {', '.join(map(str, map(list, made)))} on the rank at {dict(at)}, and "
                f"its out_placements say {', '.join(map(str, map(list, wanted)))}\n    {region.source}\n  correct the "
                f"placements, or the function"
            )


for _op, _layouts in ((ops.local_map, _forward), (ops.local_map_backward, _backward)):
    RULES[_op] = Rule(op_name(_op), lambda *args, **kwargs: None, layouts=_layouts)
