"""Writes: how an initialisation that was written for whole tensors runs on pieces, and what it has written.

An op on DTensors runs on whole plain tensors, and what it wrote is cut; so every rank draws the same random numbers as
a single device does, and no rule of DTensor's is needed. A whole tensor is there for one op, or as long as a view of it
is. When a view dies differs between ranks (a thread of the process group may hold the storage a moment longer), so
whether an op communicates never depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar.model.dtensor_parameters import is_dtensor, local_of
from autopar.runtime.dtensors import full_tensor
from autopar.torch_private import OpOverload, StorageReference, TorchDispatchMode, pytree, storage_of, written_arguments

aten = torch.ops.aten

OVERWRITES = frozenset({  # they do not read what they write to
    aten.fill_, aten.zero_, aten.copy_, aten.normal_, aten.uniform_, aten.random_, aten.bernoulli_, aten.exponential_,
    aten.cauchy_, aten.log_normal_, aten.geometric_,
})  # fmt: skip
EXACT = frozenset({  # element by element, with the same bits on a piece as on the whole
    aten.fill_, aten.zero_, aten.mul_, aten.add_, aten.sub_, aten.div_, aten.neg_, aten.clamp_, aten.clamp_min_,
    aten.clamp_max_, aten.erfinv_,
})  # fmt: skip
SAME_TENSOR = frozenset({aten.detach.default, aten.alias.default})


class Writes(TorchDispatchMode):
    """While it is active, ops on DTensors run on whole tensors; notes which tensors were written, and when.

    Args:
        waiting: tensors without values, by name.
        kept: tensors that keep their values: what would write to them does nothing.
    """

    def __init__(self, waiting: Iterable[tuple[str, torch.Tensor]], kept: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._names = {_identity(tensor): name for name, tensor in waiting}
        self._kept = {_identity(tensor) for tensor in kept}
        self._count = 0
        self._times: dict[int, int] = {}  # of the latest write, by storage
        self._views: dict[
            int, tuple[StorageReference, Any]
        ] = {}  # by storage of the piece: the whole that views look at

    def time_of(self, tensor: torch.Tensor) -> int | None:
        """When a tensor was last written, as a number that grows; ``None``: never."""
        return self._times.get(_identity(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._views = {key: view for key, view in self._views.items() if not view[0].expired()}
        written = written_arguments(func, args, kwargs)
        targets = [self._base(tensor) for tensor in written]
        kept = [tensor for tensor, target in zip(written, targets, strict=True) if _identity(target) in self._kept]
        if kept and len(written) == 1:
            return written[0]
        for target in targets:
            self._note(func, target)
        if func in SAME_TENSOR:
            return func(*args, **kwargs)
        dtensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_dtensor(leaf)]
        if len(dtensors) == 1 and dtensors[0] is args[0] and self._runs_on_pieces(func, args, kwargs):
            func(local_of(args[0]), *args[1:], **kwargs)
            if (viewed := self._viewed(args[0])) is not None:
                func(viewed, *args[1:], **kwargs)
            return args[0]
        return self._run_on_wholes(func, args, kwargs, written, kept)

    def _runs_on_pieces(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        others = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, torch.Tensor)]
        return func.overloadpacket in EXACT and not others

    def _run_on_wholes(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        written: list[torch.Tensor],
        kept: list[torch.Tensor],
    ) -> Any:
        overwritten = (
            {id(tensor) for tensor in written} if getattr(func, "overloadpacket", None) in OVERWRITES else set()
        )
        instead: dict[int, torch.Tensor] = {}  # by id of the argument
        origin: dict[int, Any] = {}  # by id of the whole: the DTensor

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in instead and is_dtensor(leaf):
                instead[id(leaf)] = self._whole(leaf, values=id(leaf) not in overwritten)
                origin[id(instead[id(leaf)])] = leaf
            if any(leaf is tensor for tensor in kept):
                instead[id(leaf)] = instead.get(id(leaf), leaf).clone()
            return instead.get(id(leaf), leaf)

        args, kwargs = pytree.tree_map(whole, (args, dict(kwargs)))
        result = func(*args, **kwargs)
        for tensor in written:
            if not any(tensor is one for one in kept):
                self._cut(self._base(tensor), instead.get(id(tensor), tensor))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in origin:
                for key, value in origin.items():
                    self._watch(value, next(w for w in instead.values() if id(w) == key), leaf)
        return pytree.tree_map(lambda leaf: origin.get(id(leaf), leaf), result)

    def _whole(self, tensor: Any, values: bool) -> torch.Tensor:
        """A plain tensor of the whole: the piece, where that is it; the one that views look at; else a new one."""
        local = local_of(tensor)
        if all(placement.is_replicate() for placement in tensor.placements):
            return local
        viewed = self._viewed(tensor)
        gathered = full_tensor(tensor.detach()) if values else None  # on every rank, whether it has the view or not
        if viewed is not None:
            return viewed
        if gathered is not None:
            return gathered.contiguous()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)

    def _viewed(self, tensor: Any) -> torch.Tensor | None:
        """The whole that views of this DTensor look at, if any is left."""
        key = _identity(tensor)
        storage = self._views[key][0].storage() if key in self._views else None
        if storage is None:
            self._views.pop(key, None)
            return None
        return _of_storage(storage, tensor)

    def _watch(self, tensor: Any, whole: torch.Tensor, result: torch.Tensor) -> None:
        """A view of a whole tensor leaves: what is written to it later belongs to the piece."""
        if storage_of(result) == storage_of(whole) != _identity(tensor) and _identity(tensor) not in self._views:
            self._views[_identity(tensor)] = StorageReference(whole.untyped_storage()), tensor

    def _base(self, tensor: torch.Tensor) -> torch.Tensor:
        """The DTensor that a plain tensor is a view of the whole of; else the tensor."""
        if not is_dtensor(tensor):
            for reference, base in self._views.values():
                if reference.refers_to(tensor.untyped_storage()):
                    return base
        return tensor

    def _cut(self, target: Any, written: torch.Tensor) -> None:
        """This rank's piece of what was written; ``written`` may be a view of the whole."""
        if not is_dtensor(target) or storage_of(written) == _identity(target):
            return
        from torch.distributed.tensor import distribute_tensor

        stride = torch.empty(target.shape, device="meta").stride()
        whole = written.as_strided(target.shape, stride, 0)
        local_of(target).copy_(
            local_of(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))
        )

    def _note(self, func: Any, target: torch.Tensor) -> None:
        key = _identity(target)
        if (
            key in self._names
            and key not in self._times
            and torch.Tag.pointwise in func.tags
            and torch.Tag.inplace in func.tags
        ):
            raise RuntimeError(
                f"{self._names[key]} has no values yet, and the initialisation changes them with "
                f"{func.overloadpacket.__name__}; write it first, as with torch.nn.init.normal_"
            )
        self._count += 1
        self._times[key] = self._count


def _identity(tensor: torch.Tensor) -> int:
    """The same for a tensor, its ``.data`` and ``detach()``: the storage, of a DTensor that of its piece."""
    return storage_of(local_of(tensor))


def _of_storage(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    stride = torch.empty(like.shape, device="meta").stride()
    return torch.empty(0, dtype=like.dtype, device=local_of(like).device).set_(storage, 0, like.shape, stride)
