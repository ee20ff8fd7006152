"""Fit state dicts to a model whose parameters are DTensors, and make state dicts that torch's checkpoints can have."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar.capture.provenance import warn_user
from autopar.model.dtensor_parameters import is_on_a_stage, placed_on
from autopar.runtime.dtensors import full_tensor, is_dtensor, redistribute
from autopar.runtime.processes.job import Job
from autopar.torch_private import FullStateDicts, full_state_dicts, is_strided_shard


def with_public_placements(state: Any) -> Any:
    """Return a state whose DTensors have public placements, which ``torch.distributed.checkpoint`` reads and writes.

    A merged dim becomes a dim that is split as a whole, with pieces of the same size: ``[(3 8/tp) 6]`` → ``[24/tp 6]``.
    ``fitted_to``, and the optimizer's state of a step, go the other way. All ranks call it.

    Args:
        state: tensors and other values, in dicts, lists and tuples. They stay as they are; where nothing is laid out
            anew, the same tensors are returned.
    """
    from torch.distributed.tensor import Shard

    if isinstance(state, dict):
        # ranks may have loaded the entries in other orders
        laid_out = {key: with_public_placements(state[key]) for key in sorted(state, key=str)}
        return {key: laid_out[key] for key in state}
    if type(state) in (list, tuple):
        return type(state)(map(with_public_placements, state))
    if is_dtensor(state) and any(map(is_strided_shard, state.placements)):
        public = [Shard(p.dim) if is_strided_shard(p) else p for p in state.placements]
        return redistribute(state.detach(), public)
    return state


PIECES = (
    "this writes the pieces that this rank has of the parameters, and a file of one rank has no others; "
    "torch.save(parallel.full_state_dict(), path) on the first rank writes whole tensors, which a model on one device "
    "loads, and autopar.checkpoint.save(folder, state) writes the pieces of all ranks, which any mesh loads"
)


class StateOfPieces(collections.OrderedDict[str, Any]):
    """A state dict of this rank's pieces. Where it is pickled, as by ``torch.save``, it warns that it is not whole."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        warn_user(PIECES)
        return self.copy().__reduce_ex__(protocol)

    def copy(self) -> Any:
        """Return a plain dict of the same, with the versions of the modules."""
        plain = collections.OrderedDict(self)
        vars(plain).update(vars(self))
        return plain

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.copy(), memo)


def of_pieces(state: Any) -> Any:
    """Return a state dict that warns where it is pickled, if it has pieces of tensors."""
    if type(state) is not collections.OrderedDict or not any(map(_is_piece, state.values())):
        return state
    pieces = StateOfPieces(state)
    vars(pieces).update(vars(state))
    return pieces


def _is_piece(value: Any) -> bool:
    return is_dtensor(value) and any(not p.is_replicate() for p in value.placements)


def full_state_dict(model: torch.nn.Module, job: Job | None) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a model in host memory, on the first rank; nothing on the others. All ranks call it.

    The other ranks hold one gathered tensor at a time.
    """
    keeps = job is None or job.rank == 0
    return gathered(model.state_dict(keep_vars=True), keeps)


def gathered(state: Mapping[str, Any], keeps: bool) -> dict[str, Any]:
    """Return the full tensors of a state dict, and of tied weights one; nothing unless this rank keeps them."""
    full: dict[int, Any] = {}
    for tensor in state.values():
        if id(tensor) not in full and isinstance(tensor, torch.Tensor):
            whole = full_tensor(tensor) if is_dtensor(tensor) else tensor
            full[id(tensor)] = whole.detach().cpu() if keeps else None
    return {name: full.get(id(value), value) for name, value in state.items()} if keeps else {}


def give_public_state_dicts(model: torch.nn.Module) -> None:
    """Let the state dicts of a model, and those of its submodules, have public placements."""
    for module in model.modules():
        module.register_state_dict_post_hook(_lay_out_own)


def _lay_out_own(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Lay out what a module itself has in a state dict; its submodules have done so for theirs."""
    tensors = (
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    )
    own = [prefix + name for name, _ in tensors if prefix + name in state]
    state.update(with_public_placements({name: state[name] for name in own}))


def give_public_optimizer_states(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer.state_dict()`` have public placements, so that torch's checkpoints can have it."""
    optimizer.register_state_dict_post_hook(lambda _, state: with_public_placements(state))


def fitted_to(state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], job: Job | None) -> dict[str, Any]:
    """Return a state dict whose values have the placements of the model's tensors. All ranks call it.

    Each rank gets its piece of the first rank's full tensor, as in ``sharded``; a DTensor is redistributed, from
    whatever mesh or stage it is on. A value that does not fit stays as it is, so that ``load_state_dict`` reports it.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor

    fitted = dict(state)
    for name, target in tensors.items():  # in the order of the model, which all ranks share
        value = state.get(name)
        if job is None or not isinstance(value, torch.Tensor) or value.shape != target.shape:
            continue
        device_mesh = target.device_mesh if is_dtensor(target) else job.device_mesh
        placements = target.placements if is_dtensor(target) else [Replicate()] * device_mesh.ndim
        if is_dtensor(value) and value.device_mesh == device_mesh:
            value = redistribute(value.detach().to(job.device), placements)
        elif is_on_a_stage(target, job) or is_on_a_stage(value, job):
            value = placed_on(value.detach(), device_mesh, placements, job)
        else:
            value = full_tensor(value) if is_dtensor(value) else value  # on another mesh
            value = distribute_tensor(value.detach().to(target.device), job.device_mesh, placements)
        fitted[name] = value if is_dtensor(target) else value.to_local()
    return fitted


# -- torch's full state dicts ------------------------------------------------------------------------------------------
#
# Refuse them where they would wait forever, or be wrong without an error.
#
# Torch handles each DTensor on the ranks of its own mesh. It gathers nothing of a parameter on a stage for the ranks of
# the other stages, and its broadcast fails on them while the ranks of the stage wait. Its broadcast also cuts a merged
# dim, such as ``(3 4096/tp)``, as if it were split as a whole.


LEAVE = "call parallel.leave_stages() on all ranks before"
ON_EACH_RANK = "give each rank the whole state dict, and leave broadcast_from_rank0 out"


def refuse_full_state_dicts(model: torch.nn.Module, job: Job | None) -> None:
    """Raise ``RuntimeError`` if one of torch's functions is about to read or load a full state dict that goes wrong."""
    asked = None if job is None else full_state_dicts()
    if asked is None:
        return
    assert job is not None
    if asked.optimizers:
        states = (state for optimizer in asked.optimizers for state in optimizer.state.values())
        values = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        kept = "save step.state_dict(), with autopar.checkpoint or torch.distributed.checkpoint"
        _refuse_stages("the state of the optimizer", values, asked, job, kept if asked.reads else ON_EACH_RANK)
    if not asked.model:
        return
    named = dict(model.named_parameters())
    _refuse_stages("the parameters", named.values(), asked, job, LEAVE)
    merged = [name for name, p in named.items() if is_dtensor(p) and any(map(is_strided_shard, p.placements))]
    if asked.broadcasts and not asked.reads and merged:
        raise RuntimeError(
            f"{merged[0]} has a dim whose parts are split one by one, and broadcast_from_rank0=True would cut it as if "
            f"the dim were split as a whole: {ON_EACH_RANK}"
        )


def _refuse_stages(what: str, values: Iterable[torch.Tensor], asked: FullStateDicts, job: Job, remedy: str) -> None:
    """Refuse values on the stages of a pipeline."""
    if not any(is_on_a_stage(value, job) for value in values):
        return
    if asked.reads:
        raise RuntimeError(
            f"{what} are on the stages of a pipeline, and full_state_dict=True would give each rank empty tensors for "
            f"the other stages: {remedy}"
        )
    if asked.broadcasts:
        raise RuntimeError(
            f"{what} are on the stages of a pipeline, and with broadcast_from_rank0=True ranks would wait for those of "
            f"other stages forever: {remedy}"
        )
