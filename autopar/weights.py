"""Loading weights: each rank reads its own pieces out of safetensors files, and nothing else of a split parameter."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from autopar.checkpoint_files import CheckpointFiles
from autopar.dtensor import attr_of
from autopar.initialize import agree, run_initialization
from autopar.layout import DistAttr
from autopar.materialize import Slot, device_for, materialized
from autopar.mesh import Mesh
from autopar.runtime.agreement import Agreement
from autopar.runtime.job import Job
from autopar.shards import is_dtensor, local_of

Run = tuple[int, int]  # start, size: what lies in one piece of a dim


class Match(NamedTuple):
    """How a model's names and a file's go together.

    Attributes:
        sources: by the names of one tensor, the name to read it from.
    """

    sources: dict[tuple[str, ...], str]
    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]


def load_weights(model: torch.nn.Module, path: str | os.PathLike[str], strict: bool, mesh: Mesh, job: Job | None, agreement: Agreement | None) -> Any:
    """Read what the model's ``state_dict`` names; what was on meta and is in no file gets the model's own initialisation.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` does.

    Raises:
        RuntimeError: keys are missing or unexpected, and ``strict``; a shape is another; a tensor has no values in the end.
    """
    agree(agreement, f"load_weights({os.fspath(path)!r}, strict={strict})")
    failure: Exception | None = None
    files = CheckpointFiles(path)
    try:
        files.__enter__()
    except (OSError, ValueError, ImportError) as error:
        failure = error
    _all_can_read(failure, job)
    with contextlib_closing(files):
        match = _match(model, files)
        _refuse(model, match, strict, path)
        device = device_for(model, job, None)
        with materialized(model, device, tied=True) as slots:
            by_name = {slot.name: slot for slot in slots}
            loaded: set[int] = set()
            for names, source in match.sources.items():
                tensor = by_name[names[0]].given
                _read(files, source, tensor, mesh, job)
                loaded.add(id(tensor))
            kept = [slot for slot in slots if id(slot.given) in loaded or not slot.was_on_meta]
            if len(kept) < len(slots):
                run_initialization(model, slots, None, device, job, agreement, kept)
    return torch.nn.modules.module._IncompatibleKeys(match.missing, match.unexpected)
