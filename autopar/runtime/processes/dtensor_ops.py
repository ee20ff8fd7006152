"""Make the user's own ops on DTensors of a job act as on one device: reads, random numbers, writes by an index, copies.

DTensor reads a number from this rank's piece, even of a partial sum, and on CPU draws the random numbers of each piece
by itself; writes by an index it refuses, and ``.data = value`` it loses. Here they run on whole tensors. They
communicate, so the ranks first agree that all of them make the call. What cannot be right is refused.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.capture.provenance import user_line
from autopar.runtime.dtensors import distributed, full_tensor, is_dtensor, piece_of_whole, redistribute
from autopar.runtime.processes.job import Job, job_with
from autopar.runtime.processes.replicas import note_memory_given
from autopar.runtime.seeds import first_ranks_generator
from autopar.torch_private import (
    BEFORE_2_13,
    OpOverload,
    add_dtensor_methods,
    aten,
    draws_random,
    dtensor_handlers,
    give_memory,
    packets,
    pytree,
    random_ops,
    written_arguments,
)

# ops that do not read the old values of the tensor that they write
OVERWRITES = packets(
    "fill_ zero_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_ eye"
)
# DTensor gives the ``out`` of the first the shape of a piece, and has no rule for the others
ON_WHOLES = (aten.eye.m_out, aten.tril_.default, aten.triu_.default, aten.index_fill_.int_Scalar,
             aten.index_fill_.int_Tensor, aten.index_copy_.default, aten.index_add_.default)  # fmt: skip
READ = "read a number of a tensor that is split or pending over ranks"
ON_ALL = "{line}\n  it takes the values of all ranks; call it on all of them, and use the result where you want"

SAME = (
    "{line}\n  copy the same whole tensor on all ranks; what is for this rank's piece alone is copied into "
    "weight.to_local()"
)
TRANSPOSED = (
    "t_() turns a tensor on the mesh around in place, as torch.nn.init.orthogonal_ does for more columns than rows\n"
    "    {line}\n  write parameters with parallel.initialize(init), a function of a module as for apply, or before "
    "parallelize"
)
PART = (
    "{name} writes to a part of a tensor that is split over ranks, but DTensor has gathered this part: the tensor "
    "would not change\n    {line}\n  write by an index on all ranks, as in weight[0] = 2 * weight[0]"
)
DATA = "a tensor on the mesh is given .data of another {what}: {value}, and it has {tensor}\n    {line}\n  {remedy}"
OF_OTHER = (
    "write values of the same shape with torch.no_grad(): p.copy_(value); another shape, dtype or device is given to "
    "the model before parallelize"
)
OF_OTHER_MESH = "give it value.full_tensor()"
VIEWS = ("__getitem__", "select", "narrow", "view", "view_as", "reshape", "flatten", "unflatten", "unbind", "chunk",
         "split", "tensor_split", "diagonal", "squeeze", "unsqueeze", "movedim", "permute", "expand", "unfold", "t",
         "transpose", "swapaxes", "swapdims", "ravel", "detach")  # fmt: skip
VIEWS_AS_ATTRIBUTES = ("T", "mT", "data")
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")


def take_dtensor_ops() -> None:
    """Let DTensor ask here first, for tensors on the meshes of jobs; those on other meshes are torch's own."""
    handlers = dtensor_handlers()
    handlers[aten._local_scalar_dense.default] = _read
    for op in (*random_ops(), *ON_WHOLES):
        handlers[op] = _on_wholes
    handlers[aten.t_.default] = _transposed
    handlers[aten.copy_.default] = _copied
    views: dict[str, Any] = {name: _viewing(name) for name in VIEWS}
    for name in VIEWS_AS_ATTRIBUTES:
        views[name] = property(_viewing(name), _set_data if name == "data" else None)
    writes: dict[str, Callable[..., Any]] = {"__setitem__": _set_item, "fill_diagonal_": _fill_diagonal}
    add_dtensor_methods({"tolist": _tolist, "numpy": _numpy, "__format__": _format, **writes, **views})


def _tolist(tensor: Any) -> Any:
    return torch.Tensor.tolist(tensor if job_with(tensor.device_mesh) is None else _values(tensor))


def _numpy(tensor: Any, **options: Any) -> Any:
    return torch.Tensor.numpy(tensor if job_with(tensor.device_mesh) is None else _values(tensor), **options)


def _format(tensor: Any, form: str) -> str:
    return object.__format__(tensor, form) if tensor.dim() else format(tensor.item(), form)


def _set_item(tensor: Any, index: Any, value: Any) -> None:
    if not _write_whole(tensor, lambda whole, index, value: whole.__setitem__(index, value), index, value):
        torch.Tensor.__setitem__(tensor, index, value)


def _fill_diagonal(tensor: Any, fill_value: float, wrap: bool = False) -> Any:
    if _write_whole(tensor, lambda whole: whole.fill_diagonal_(fill_value, wrap)):
        return tensor
    return torch.Tensor.fill_diagonal_(tensor, fill_value, wrap)


def _write_whole(tensor: Any, write: Callable[..., Any], *args: Any) -> bool:
    """Write to elements of the whole tensor, of which each rank keeps its piece. Return whether it is on a job's mesh.

    Args:
        write: gets the whole tensor and ``args``, whole too.
    """
    job, is_tracked = job_with(tensor.device_mesh), tensor.requires_grad and torch.is_grad_enabled()
    if job is not None and is_tracked and tensor.is_leaf:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")  # torch's own
    if job is None or is_tracked:
        return False
    _agree(job, "a write to elements of a tensor on the mesh")
    with torch.no_grad():
        whole = _whole(tensor, True)
        write(whole, *pytree.tree_map(lambda leaf: _whole(leaf, True) if is_dtensor(leaf) else leaf, args))
        if (piece := piece_of_whole(tensor, whole)) is not None:
            tensor.to_local().copy_(piece)
    return True


def _viewing(name: str) -> Callable[..., Any]:
    """Return a method of a view. What is gathered for it is no view, and refuses to be written to."""

    def view(tensor: Any, *args: Any, **options: Any) -> Any:
        of_tensors = getattr(torch.Tensor, name)
        method = of_tensors if callable(of_tensors) else of_tensors.__get__
        try:
            results = method(tensor, *args, **options)
        except RuntimeError:
            if not BEFORE_2_13 or job_with(tensor.device_mesh) is None:
                raise
            # there DTensor flattens no dim that is split; all ranks come here, because all have the same placements
            results = method(_replicated(tensor), *args, **options)
        copies = name == "__getitem__" and any(map(_chooses, args[0] if isinstance(args[0], tuple) else args))
        if copies or job_with(tensor.device_mesh) is None:
            return results
        part = gathered_part()
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if not is_dtensor(result):  # under a mode that runs ops on whole values
                continue
            pairs = zip(tensor.placements, result.placements, strict=True)
            gathers = any(not before.is_replicate() and after.is_replicate() for before, after in pairs)
            if (gathers or type(tensor) is part) and type(result) is part.__base__:
                result.__class__ = part  # type: ignore[assignment]
        return results

    return view


def _replicated(tensor: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _chooses(index: object) -> bool:
    """Return whether an index makes a copy on one device, too: a list, a mask or a tensor of numbers."""
    return isinstance(index, (list, torch.Tensor)) and not (isinstance(index, torch.Tensor) and index.dim() == 0)


@functools.cache
def gathered_part() -> type[torch.Tensor]:
    """Return the class of DTensors that refuse to be written to. Late, because DTensor is slow to import."""
    from torch.distributed.tensor import DTensor

    def refusing(name: str) -> Any:
        def refuse(tensor: Any, *args: Any, **options: Any) -> Any:
            raise NotImplementedError(PART.format(name=name, line=user_line()))

        return refuse

    kept = ("requires_grad_", "detach_", "share_memory_", "rename_", "retain_grad_")
    names = [n for n in dir(torch.Tensor) if n.endswith("_") and not n.startswith("_") and n not in kept]
    operators = [f"__i{n}__" for n in OPERATORS]
    writes = {name: refusing(name) for name in [*names, *operators, "__setitem__"]}
    return type("GatheredPart", (DTensor,), {"__slots__": (), **writes})


def _read(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return op(_values(args[0]))


def _values(tensor: Any) -> torch.Tensor:
    """Return the whole tensor. All ranks call it, unless each rank has it."""
    job = job_with(tensor.device_mesh)
    if job is None:
        return tensor.to_local()
    everywhere = tensor.device_mesh.size() == job.device_mesh.size()
    if everywhere and all(placement.is_replicate() for placement in tensor.placements):
        return tensor.to_local()
    _agree(job, READ)
    if everywhere:
        return full_tensor(tensor)
    # ranks of other stages have nothing of it
    here = tensor.device_mesh.get_coordinate() is not None
    value = full_tensor(tensor.detach()).cpu() if here else None
    assert job.surface is not None
    values = job.surface.gathered(value)
    return next(value for value in values if value is not None).to(job.device)


def _on_wholes(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on whole tensors, with the first rank's generator, and give this rank its pieces of the results."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_dtensor(leaf)]
    job = next((job for leaf in leaves if (job := job_with(leaf.device_mesh)) is not None), None)
    random = op not in ON_WHOLES
    if job is None or (random and not draws_random(op, args, kwargs)):
        return _by_dtensor(op, args, kwargs)
    _agree(job, f"{op.overloadpacket.__name__} of a tensor on the mesh")
    written: list[Any] = list(written_arguments(op, args, dict(kwargs)))
    unread = {id(tensor) for tensor in written} if op.overloadpacket in OVERWRITES else set()
    wholes = {id(leaf): _whole(leaf, id(leaf) not in unread) for leaf in leaves}

    def replaced(leaf: Any) -> Any:
        return wholes.get(id(leaf), leaf)

    generator = kwargs.get("generator")
    with first_ranks_generator(job, job.device, [generator] if generator is not None else None):
        result = op(*pytree.tree_map(replaced, args), **pytree.tree_map(replaced, dict(kwargs)))
    for tensor in written:
        if id(tensor) in wholes and (piece := piece_of_whole(tensor, wholes[id(tensor)])) is not None:
            tensor.to_local().copy_(piece)
    given = {id(whole): leaf for leaf in leaves for whole in [wholes[id(leaf)]]}
    return pytree.tree_map(lambda leaf: given.get(id(leaf)) if id(leaf) in given else _like(leaf, leaves), result)


def _transposed(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if job_with(args[0].device_mesh) is None:
        return _by_dtensor(op, args, kwargs)
    # from torch 2.14 on DTensor has it for whole tensors alone
    raise NotImplementedError(TRANSPOSED.format(line=user_line()))


def _copied(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Copy a whole plain tensor, which all ranks have: each rank takes its piece."""
    tensor, source = args[:2]
    job = job_with(tensor.device_mesh, alone=True) if is_dtensor(tensor) and not is_dtensor(source) else None
    if job is None:
        return _by_dtensor(op, args, kwargs)
    if (piece := _piece(job, tensor, source)) is not None:
        tensor.to_local().copy_(piece)
    return tensor


def _piece(job: Job, tensor: Any, whole: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's piece of a plain tensor, after the ranks have agreed that all have the same."""
    content = whole.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data
    digest = hashlib.sha256(content).hexdigest()[:16]
    _agree(job, f"copy a whole tensor with the digest {digest} to a tensor on the mesh", SAME)
    return piece_of_whole(tensor, whole.expand(tensor.shape))


def _set_data(tensor: Any, value: Any) -> None:
    """Give a tensor new memory. DTensor gives it to the wrapper alone, which has no values.

    What shares the old memory keeps its values, as on one device: averages keep ``p.data``, and restore it.
    """
    job, own = job_with(tensor.device_mesh, alone=True), torch.Tensor.data
    is_captured = isinstance(own, property)  # then it refuses
    if job is None or is_captured or not isinstance(value, torch.Tensor):
        own.__set__(tensor, value)  # type: ignore[attr-defined]
        return
    _check_alike(tensor, value)
    with torch.no_grad():
        piece: Any
        if is_dtensor(value) and value.placements == tensor.placements:
            piece = value.to_local()
        elif is_dtensor(value):
            _agree(job, "move values to .data of a tensor on the mesh")
            piece = redistribute(value.detach(), tensor.placements).to_local()
        else:
            cut = _piece(job, tensor, value)
            piece = None if cut is None else cut.clone()
        note_memory_given(tensor)
        if piece is None:
            return
        stride = tensor.to_local().stride()
        if piece.stride() != stride:  # optimizers read a parameter and its states in memory order
            piece = torch.empty_strided(piece.shape, stride, dtype=piece.dtype, device=piece.device).copy_(piece)
        give_memory(tensor, piece)


def _check_alike(tensor: Any, value: torch.Tensor) -> None:
    pairs = {
        "shape": (list(value.shape), list(tensor.shape)),
        "dtype": (value.dtype, tensor.dtype),
        "device": (value.device.type, tensor.device.type),
        "mesh": (value.device_mesh if is_dtensor(value) else tensor.device_mesh, tensor.device_mesh),
    }
    for what, (new, old) in pairs.items():
        if new != old:
            remedy = OF_OTHER_MESH if what == "mesh" else OF_OTHER
            raise NotImplementedError(DATA.format(what=what, value=new, tensor=old, line=user_line(), remedy=remedy))


def _agree(job: Job, call: str, remedy: str = ON_ALL) -> None:
    """Check that all ranks make this call; ``RuntimeError`` names the line otherwise."""
    if (ranks := job.surface) is not None:
        ranks.agree(call, remedy.format(line=user_line()))


def _by_dtensor(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    handlers = dtensor_handlers()
    ours = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours


def _whole(tensor: Any, values: bool) -> torch.Tensor:
    if values and tensor.device_mesh.get_coordinate() is not None:
        return full_tensor(tensor.detach()).contiguous()
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)


def _like(value: Any, leaves: Sequence[Any]) -> Any:
    """Return a whole result as a DTensor: split as the first operand of its shape is, or else whole on each rank."""
    if not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import Replicate

    like = next((leaf for leaf in leaves if leaf.shape == value.shape), leaves[0])
    placements = [
        placement if like.shape == value.shape and not placement.is_partial() else Replicate()
        for placement in like.placements
    ]
    return distributed(value, like, placements)
