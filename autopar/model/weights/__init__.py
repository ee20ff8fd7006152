"""Load weights and save them.

Each rank reads its own pieces from safetensors files, and nothing else of a sharded parameter. A model is written as
its own ``save_pretrained`` does: the first rank gathers, and writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import distributed

from autopar.errors import class_of
from autopar.ir.boxes import box_of, slices_of
from autopar.ir.dtensor import layout_of_dtensor
from autopar.model.dtensor_parameters import local_of
from autopar.model.initialize import device_for, materialized, run_initialization
from autopar.model.state_dicts import gathered
from autopar.model.weights.files import CheckpointFiles
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.processes.job import Job
from autopar.torch_private import IncompatibleKeys


class Match(NamedTuple):
    """The model's names and the file's names, matched.

    Attributes:
        sources: all names of each tensor, and the name in the files to read it from.
        missing: names that the files do not have.
        unexpected: names that the model does not have.
    """

    sources: list[tuple[tuple[str, ...], str]]
    missing: list[str]
    unexpected: list[str]


def load_weights(model: torch.nn.Module, path: str | os.PathLike[str], strict: bool, job: Job | None) -> Any:
    """Read the tensors that the model's ``state_dict`` names. The model initializes those on meta that no file has.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` does.

    Raises:
        RuntimeError: with ``strict``, keys are missing or unexpected; a shape differs; a tensor has no values in the
            end. The model is then as it was before.
    """
    with CheckpointFiles(path) as files:
        match: Match | None = None
        with on_all_ranks(job, "load"):
            files.open()
            match = _match(model, files, strict)
        assert match is not None
        device = device_for(model, job, None)
        with materialized(model, device, tied=True) as slots:
            tensors = {slot.name: slot.replacement for slot in slots}
            loaded = set()
            for names, source in match.sources:
                _read(files, source, tensors[names[0]], 0 if job is None else job.rank)
                loaded.add(id(tensors[names[0]]))
            with_values = [slot for slot in slots if id(slot.replacement) in loaded or not slot.was_on_meta]
            if len(with_values) < len(slots):
                run_initialization(model, slots, None, device, job, with_values)
    return IncompatibleKeys(match.missing, match.unexpected)


def _match(model: torch.nn.Module, files: CheckpointFiles, strict: bool) -> Match:
    """Match the names and shapes of the model and of the files.

    Raises:
        RuntimeError: they do not match. The error has the words of ``load_state_dict``.
    """
    tensors = {
        name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    sources, absent_names = [], set()
    for names in tied.values():
        present = [name for name in names if name in files.shapes]
        if present:
            sources.append((tuple(names), present[-1]))  # like load_state_dict, take the last of several
        else:
            absent_names.update(names)
    missing = [name for name in tensors if name in absent_names]
    unexpected = [name for name in files.shapes if name not in tensors]
    problems = []
    if strict and unexpected:
        problems.append(f"Unexpected key(s) in state_dict: {_quoted(unexpected)}.")
    if strict and missing:
        problems.append(f"Missing key(s) in state_dict: {_quoted(missing)}.")
    for name, tensor in tensors.items():
        if name in files.shapes and files.shapes[name] != tuple(tensor.shape):
            problems.append(
                f"size mismatch for {name}: copying a param with shape {torch.Size(files.shapes[name])} from "
                f"checkpoint, the shape in current model is {tensor.shape}."
            )
    if problems:
        lines = "".join(f"\n\t{line}" for line in problems)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__} from {files.path}:{lines}")
    return Match(sources, missing, unexpected)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _read(files: CheckpointFiles, name: str, tensor: torch.Tensor, rank: int) -> None:
    """Read this rank's piece of a tensor, run by run: a merged dim, as of a fused qkv weight, has several runs."""
    local = local_of(tensor)
    if not is_dtensor(tensor):
        local.copy_(files.read(name, ()))
        return
    home = layout_of_dtensor(tensor)  # on the whole mesh, or on a stage
    if rank in home.mesh:
        for in_whole, in_piece in slices_of(box_of(home, tensor.shape, rank)):
            local[in_piece].copy_(files.read(name, in_whole))


@contextmanager
def on_all_ranks(job: Job | None, verb: str) -> Iterator[None]:
    """Raise an error of one rank on all ranks: the others must not wait for a rank that lacks a file."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if job is None:
            raise
        failure = error
    if job is None:
        return
    failures: list[str | None] = [None] * job.control.size()
    distributed.all_gather_object(failures, failure and f"{type(failure).__name__}: {failure}", job.control)
    if failure is not None:
        raise failure
    if failed := {rank: text for rank, text in enumerate(failures) if text is not None}:
        rank, text = next(iter(failed.items()))
        raise RuntimeError(f"rank {rank} cannot {verb}: {text}")


def save_pretrained(model: Any, path: str | os.PathLike[str], job: Job | None, options: dict[str, Any]) -> Any:
    """Write the folder that a single device writes. All ranks call it, and return when the folder is complete.

    The rank that writes holds all weights meanwhile, in host memory; the others hold one gathered weight at a time.

    Args:
        options: those of the model's ``save_pretrained``. ``is_main_process`` is by default true on the first rank, and
            a ``state_dict`` is gathered.

    Raises:
        TypeError: the model has no ``save_pretrained``.
        RuntimeError: another rank cannot write.
    """
    if not hasattr(model, "save_pretrained"):
        raise TypeError(
            f"{class_of(model)} has no save_pretrained, which models of transformers and PEFT have; save the weights "
            f"with autopar.checkpoint.save(folder, parallel.state_dict())"
        )
    options = {"is_main_process": job is None or job.rank == 0} | options
    state = options.pop("state_dict", None)
    state = model.state_dict(keep_vars=True) if state is None else state
    weights = gathered(state, options["is_main_process"])
    if hasattr(model, "peft_config") and not weights:
        # PEFT picks its tensors by their names before it asks whether to write
        weights = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    with on_all_ranks(job, "save"):
        # on the other ranks too, because it writes to the model's config
        return model.save_pretrained(path, state_dict=weights, **options)
