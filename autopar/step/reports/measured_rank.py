"""Measure what one rank does in a step: run steps here, and read torch's allocator and the recorder of lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.capture.model_state import model_state
from autopar.ir.structure import flatten
from autopar.model.dtensor_parameters import local_of
from autopar.runtime.measuring.peak import peak_bytes
from autopar.runtime.processes.one_rank import alone
from autopar.step.reports.rank_report import RankReport, exchanged, storage_bytes, time_by_class


def measured_rank(step: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> RankReport:
    """Return the report of a training step on this rank; ``step.rank_report`` documents it."""
    calls = step._calls
    rank = calls.context(" and call parallelize in each, or use autopar.one_rank(mesh, rank)").rank
    step._recorded(args, kwargs, in_slots=True)  # it makes the functions and the optimizer's state
    made = peak_bytes(lambda: step(*args, **kwargs), calls.device)
    recorder, _ = step._recorded(args, kwargs, in_slots=True)
    memory, state = step.memory(rank), model_state(calls.module)
    parts = step._current().parts_of(rank)
    tensors = [tensor for _, tensor in (*state.parameters, *state.buffers)]
    tensors += [] if step.options.offload else step._state().values()
    held = storage_bytes(map(local_of, tensors)) + memory.kept["inputs"] + step._here.carrier.pooled
    if any(isinstance(leaf, torch.Tensor) and not leaf.is_contiguous() for leaf in flatten((args, kwargs))[0]):
        made -= memory.kept["inputs"]  # the step has copied its pieces, which are in ``held``
    programs = [part.program for part in parts.values()]
    classes, seconds = time_by_class(recorder.runs, programs, recorder.slots.get(rank, ()))
    return RankReport(
        rank, calls.mesh, memory.peak, held + made, held, seconds, classes, tuple(exchanged(parts)),
        step.communication.source, alone() is not None,
    )  # fmt: skip
