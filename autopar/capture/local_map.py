"""Let a model's forward run a function on the pieces of each rank: ``autopar.local_map``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import autopar.capture.local_map_layouts  # noqa: F401  # it registers the layouts of the ops
from autopar.capture.constrained import running_capture
from autopar.capture.provenance import user_line
from autopar.capture.regions import REGIONS, Placements, Region, tried
from autopar.errors import CaptureError, class_of, shown
from autopar.ir.ops import local_map as ops

EXAMPLE = 'autopar.local_map(f, ({"tp": Partial()},), ({"tp": Shard(1)}, {"tp": Shard(0)}))'
_NAMES: dict[Any, str] = {}  # what makes a region → its name


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placements | tuple[Placements, ...] | None = None,
    in_placements: tuple[Placements | None, ...] | None = None,
    in_grad_placements: tuple[Placements | None, ...] | None = None,
    device_mesh: None = None,
    *,
    redistribute_inputs: bool = True,
    whole: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a function that runs ``func`` on each rank's pieces, where autopar captures a step; else on all tensors.

    That the pieces together are what ``func`` makes of the whole is your promise, as with torch's ``local_map``. What
    can be checked is: the shapes of the pieces; and autopar derives the gradients, so a gradient that ranks make parts
    of is summed.

    Args:
        func: a function of tensors, one by one, and other values, that returns a tensor or a tuple of them. It draws no
            random numbers, communicates nothing, and uses no tensors from outside. ``None``: return a decorator.
        out_placements: the placements of its result: one for each axis of the mesh, in order, or a dict of axes, of
            which those left out replicate. For several results a tuple of these.
        in_placements: those of each positional argument; ``None`` for one that is no tensor. autopar brings them there.
        in_grad_placements: those of the gradients of arguments. They follow from the others, and are compared.
        device_mesh, redistribute_inputs: of torch's ``local_map``. The mesh is that of ``parallelize``, and arguments
            are always brought to their placements, so nothing else is taken.
        whole: what runs in the place of ``func`` outside of a capture, where ``func`` on all tensors is another
            function, such as one that divides by a number of rows.

    Raises:
        TypeError: placements are missing, or an argument is of another kind than its placements say.
        CaptureError: later, in a capture: ``func`` does what it may not.
        RuleError: later, on a mesh: the placements do not fit it, or ``func`` makes pieces of another shape.
    """
    if device_mesh is not None or redistribute_inputs is not True:
        raise TypeError(
            "local_map takes neither a device_mesh nor redistribute_inputs=False: the mesh is that of parallelize, and "
            "arguments are brought to their placements"
        )
    if func is None:
        return functools.partial(
            local_map, out_placements=out_placements, in_placements=in_placements,
            in_grad_placements=in_grad_placements, whole=whole,
        )  # fmt: skip
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
    name = getattr(func, "__name__", type(func).__name__)
    if len(args) != len(operands):
        raise TypeError(f"{name} is called with {len(args)} arguments, and in_placements has {len(operands)} entries")
    for k, (value, placed) in enumerate(zip(args, operands, strict=True)):
        if isinstance(value, torch.Tensor) != (placed is not None):
            raise TypeError(
                f"argument {k} of {name} is {'a tensor' if placed is None else class_of(value)}, and its placements "
                f"are {shown(placed)}; a tensor has placements, and another value has None"
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
    made = tried(name, function, tensors)
    if len(made) != len(results):
        raise CaptureError(f"{name} returns {len(made)} results, and out_placements has {len(results)}")
    if whole is not None:
        of_whole = tried(name, functools.partial(of_tensors, whole), tensors)
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
