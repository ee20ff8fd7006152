"""Refuse torch's full state dicts where they would wait forever, or be wrong without an error.

Torch handles each DTensor on the ranks of its own mesh. It gathers nothing of a parameter on a stage for the ranks of
the other stages, and its broadcast fails on them while the ranks of the stage wait. Its broadcast also cuts a merged
dim, such as ``(3 4096/tp)``, as if it were split as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.model.stage_parameters import is_on_a_stage
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.processes.job import Job
from autopar.torch_private import FullStateDicts, full_state_dicts, is_strided_shard

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
