"""Loading weights: each rank reads its own pieces out of safetensors files, and nothing else of a split parameter."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from autopar.ir.dtensor import attr_of
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.model.dtensor_parameters import is_dtensor, local_of
from autopar.model.initialize import agree, run_initialization
from autopar.model.initialize.storage import device_for, materialized
from autopar.model.weights.files import CheckpointFiles
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.job import Job
from autopar.torch_private import IncompatibleKeys


class Match(NamedTuple):
    """How a model's names and a file's go together.

    Attributes:
        sources: all names of each tensor, and the one to read it from.
    """

    sources: list[tuple[tuple[str, ...], str]]
    missing: list[str]
    unexpected: list[str]


def load_weights(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    strict: bool,
    mesh: Mesh,
    job: Job | None,
    agreement: Agreement | None,
) -> Any:
    """Read what the model's ``state_dict`` names; what was on meta and is in no file gets the model's own
    initialisation.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` does.

    Raises:
        RuntimeError: keys are missing or unexpected, and ``strict``; a shape is another; a tensor has no values in the
            end. The model is as before then.
    """
    agree(agreement, f"load_weights(strict={strict})")
    with CheckpointFiles(path) as files:
        match: Match | None = None
        with _on_all_ranks(job):
            files.open()
            match = _match(model, files, strict)
        assert match is not None
        device = device_for(model, job, None)
        with materialized(model, device, tied=True) as slots:
            given = {slot.name: slot.given for slot in slots}
            loaded = set()
            for names, source in match.sources:
                _read(files, source, given[names[0]], mesh, job)
                loaded.add(id(given[names[0]]))
            kept = [slot for slot in slots if id(slot.given) in loaded or not slot.was_on_meta]
            if len(kept) < len(slots):
                run_initialization(model, slots, None, device, job, kept)
    return IncompatibleKeys(match.missing, match.unexpected)


def _match(model: torch.nn.Module, files: CheckpointFiles, strict: bool) -> Match:
    """Match names and shapes.

    Raises:
        RuntimeError: they do not, in the words of ``load_state_dict``.
    """
    own = {
        name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    tied: dict[int, list[str]] = {}
    for name, tensor in own.items():
        tied.setdefault(id(tensor), []).append(name)
    sources, absent = [], set()
    for names in tied.values():
        there = [name for name in names if name in files.shapes]
        if there:
            sources.append((tuple(names), there[-1]))  # of several the last, as load_state_dict
        else:
            absent.update(names)
    missing = [name for name in own if name in absent]
    unexpected = [name for name in files.shapes if name not in own]
    said = []
    if strict and unexpected:
        said.append(f"Unexpected key(s) in state_dict: {_quoted(unexpected)}.")
    if strict and missing:
        said.append(f"Missing key(s) in state_dict: {_quoted(missing)}.")
    for name, tensor in own.items():
        if name in files.shapes and files.shapes[name] != tuple(tensor.shape):
            said.append(
                f"size mismatch for {name}: copying a param with shape {torch.Size(files.shapes[name])} from "
                f"checkpoint, the shape in current model is {tensor.shape}."
            )
    if said:
        lines = "".join(f"\n\t{line}" for line in said)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(model).__name__} from {files.path}:{lines}")
    return Match(sources, missing, unexpected)


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


@contextlib.contextmanager
def _on_all_ranks(job: Job | None) -> Iterator[None]:
    """What fails on one rank fails on all: a file that only one host lacks must not leave the others waiting."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if job is None:
            raise
        failure = error
    if job is None:
        return
    told: list[str | None] = [None] * job.control.size()
    distributed.all_gather_object(told, failure and f"{type(failure).__name__}: {failure}", job.control)
    if failure is not None:
        raise failure
    if failed := {rank: text for rank, text in enumerate(told) if text is not None}:
        rank, text = next(iter(failed.items()))
        raise RuntimeError(f"rank {rank} cannot load: {text}")


def _read(files: CheckpointFiles, name: str, tensor: torch.Tensor, mesh: Mesh, job: Job | None) -> None:
    """This rank's piece of a tensor, run by run: a merged dim, as of a fused qkv weight, has several."""
    attr = DistAttr.replicated(tensor.dim())
    at: dict[str, int] = {}
    if is_dtensor(tensor):
        assert job is not None
        attr, at = attr_of(tensor.placements, mesh, tensor.shape), mesh.coordinates(job.rank)
    local = local_of(tensor)
    for there, here in parts_of(attr, tensor.shape, mesh, at):
        local[here].copy_(files.read(name, there))


def parts_of(
    attr: DistAttr, shape: Sequence[int], mesh: Mesh, at: Mapping[str, int]
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Where the parts of the piece at ``at`` lie in the whole tensor, and where in the piece."""
    spans = iter(attr.local_parts(shape, mesh, at))
    dims = []
    for size, dim in zip(shape, attr.dims, strict=True):
        start, placed = 0, []
        for begin, count in _runs([(size if part is None else part, *next(spans)) for part, _ in dim]):
            placed.append((slice(begin, begin + count), slice(start, start + count)))
            start += count
        dims.append(placed)
    for chosen in itertools.product(*dims):
        yield tuple(there for there, _ in chosen), tuple(here for _, here in chosen)


def _runs(parts: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(start, count) in a dim, of what lies at (size, start, count) in each of its parts, major first; none is
    empty."""
    if not parts:
        return [(0, 1)]
    (_, start, count), *minor = parts
    stride = math.prod(size for size, _, _ in minor)
    inner = _runs(minor)
    if inner == [(0, stride)]:
        return [(start * stride, count * stride)] if count * stride else []
    return [((start + k) * stride + begin, length) for k in range(count) for begin, length in inner]
