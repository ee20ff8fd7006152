"""Run an initialization that was written for whole tensors on this rank's pieces, and note what it wrote.

An op on DTensors runs on whole plain tensors, and this rank's piece is cut out of the result. So every rank draws the
same random numbers as a single device does, and no rule of DTensor's is needed. A whole tensor lives during one op, or
as long as a view of it lives. Ranks may drop a view at different times (a thread of the process group may keep the
storage a moment longer), so whether an op communicates never depends on views.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar.model.dtensor_parameters import local_of
from autopar.runtime.dtensors import full_tensor, is_dtensor, piece_of_whole
from autopar.runtime.processes.dtensor_ops import OVERWRITES
from autopar.torch_private import (
    OpOverload,
    StorageReference,
    TorchDispatchMode,
    aten,
    packets,
    pytree,
    storage_of,
    written_arguments,
)

# elementwise ops, with the same bits on a piece as on the whole tensor
EXACT = packets("fill_ zero_ mul_ add_ sub_ div_ neg_ clamp_ clamp_min_ clamp_max_ erfinv_")
SAME_TENSOR = frozenset({aten.detach.default, aten.alias.default})


class Writes(TorchDispatchMode):
    """Context in which ops on DTensors run on whole tensors; it notes which tensors were written, and when.

    Args:
        waiting: tensors without values, by name.
        kept: tensors that keep their values: ops that write to them do nothing.
    """

    def __init__(self, waiting: Iterable[tuple[str, torch.Tensor]], kept: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._names = {_identity(tensor): name for name, tensor in waiting}
        self._kept = {_identity(tensor) for tensor in kept}
        self._count = 0
        self._times: dict[int, int] = {}  # storage → number of the latest write to it
        # storage of a piece → storage of the whole tensor that views look at, and the DTensor
        self._views: dict[int, tuple[StorageReference, Any]] = {}

    def time_of(self, tensor: torch.Tensor) -> int | None:
        """Return when a tensor was last written, as a growing number; ``None`` if never."""
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
        wholes: dict[int, torch.Tensor] = {}  # id of an argument → the whole tensor
        dtensors: dict[int, Any] = {}  # id of a whole tensor → its DTensor

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in wholes and is_dtensor(leaf):
                wholes[id(leaf)] = self._whole(leaf, values=id(leaf) not in overwritten)
                dtensors[id(wholes[id(leaf)])] = leaf
            if any(leaf is tensor for tensor in kept):
                wholes[id(leaf)] = wholes.get(id(leaf), leaf).clone()
            return wholes.get(id(leaf), leaf)

        args, kwargs = pytree.tree_map(whole, (args, dict(kwargs)))
        result = func(*args, **kwargs)
        for tensor in written:
            if not any(tensor is kept_tensor for kept_tensor in kept):
                self._cut(self._base(tensor), wholes.get(id(tensor), tensor))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in dtensors:
                for key, value in dtensors.items():
                    self._watch(value, next(w for w in wholes.values() if id(w) == key), leaf)
        return pytree.tree_map(lambda leaf: dtensors.get(id(leaf), leaf), result)

    def _whole(self, tensor: Any, values: bool) -> torch.Tensor:
        """Return a plain whole tensor: the piece if it is whole, the one that live views look at, or a new one."""
        local = local_of(tensor)
        if all(placement.is_replicate() for placement in tensor.placements):
            return local
        viewed = self._viewed(tensor)
        gathered = full_tensor(tensor.detach()) if values else None  # a collective, also on ranks that have the view
        if viewed is not None:
            return viewed
        if gathered is not None:
            return gathered.contiguous()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)

    def _viewed(self, tensor: Any) -> torch.Tensor | None:
        """Return the whole tensor that live views of this DTensor look at, if there is one."""
        key = _identity(tensor)
        storage = self._views[key][0].storage() if key in self._views else None
        if storage is None:
            self._views.pop(key, None)
            return None
        return _of_storage(storage, tensor)

    def _watch(self, tensor: Any, whole: torch.Tensor, result: torch.Tensor) -> None:
        """Note a returned view of a whole tensor: a later write to it must reach the piece."""
        if storage_of(result) == storage_of(whole) != _identity(tensor) and _identity(tensor) not in self._views:
            self._views[_identity(tensor)] = StorageReference(whole.untyped_storage()), tensor

    def _base(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the DTensor whose whole tensor a plain tensor views, or else the tensor itself."""
        if not is_dtensor(tensor):
            for reference, base in self._views.values():
                if reference.refers_to(tensor.untyped_storage()):
                    return base
        return tensor

    def _cut(self, target: Any, written: torch.Tensor) -> None:
        """Copy this rank's piece out of the written whole tensor; ``written`` may be a view of it."""
        if not is_dtensor(target) or storage_of(written) == _identity(target):
            return
        stride = torch.empty(target.shape, device="meta").stride()
        piece = piece_of_whole(target, written.as_strided(target.shape, stride, 0))
        if piece is not None:
            local_of(target).copy_(piece)

    def _note(self, func: Any, target: torch.Tensor) -> None:
        key = _identity(target)
        if (
            key in self._names
            and key not in self._times
            and torch.Tag.pointwise in func.tags
            and func.overloadpacket.__name__.endswith("_")
        ):
            raise RuntimeError(
                f"{self._names[key]} has no values yet, and the initialisation changes them with "
                f"{func.overloadpacket.__name__}; write it first, as with torch.nn.init.normal_"
            )
        self._count += 1
        self._times[key] = self._count


def _identity(tensor: torch.Tensor) -> int:
    """Return a key that a tensor, its ``.data`` and ``detach()`` share: its storage, or that of its piece."""
    return storage_of(local_of(tensor))


def _of_storage(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    stride = torch.empty(like.shape, device="meta").stride()
    return torch.empty(0, dtype=like.dtype, device=local_of(like).device).set_(storage, 0, like.shape, stride)
