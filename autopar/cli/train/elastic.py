"""Choose the mesh of ``autopar train --elastic`` by the ranks that are there, and check all meshes that are allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from autopar.cli.train.launched import Launched
from autopar.cli.train.options import TrainOptions
from autopar.cli.train.refused import Refused
from autopar.elastic.choice import mesh_of_ranks, microbatches_on
from autopar.elastic.pattern import Pattern, pattern_of
from autopar.elastic.torchrun import check_stores
from autopar.ir.mesh import EXPERTS, Mesh
from autopar.plan.batch import data_axes

WORDS = {  # of errors of ``choose`` → those of the command
    r"micro_batch=\d+, or ": "",
    r"global_batch=": "--batch ",
    r"leave this mesh out": "leave this mesh out of --meshes",
    r"\ballow a mesh of": "allow with --meshes a mesh of",
}
START = "torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400"


def elastic_options(options: TrainOptions, whole: Mesh, launched: Launched | None) -> TrainOptions:
    """Return the options on the mesh of the ranks that are there: they resume, and keep the batch.

    Args:
        whole: ``--mesh``, on which ``--microbatches`` are meant.

    Raises:
        Refused: no mesh fits the ranks, or the batch does not fit an allowed mesh; or something is missing.
    """
    if options.checkpoint is None:
        raise Refused("--elastic goes on from the newest checkpoint, but no folder is named; add --checkpoint FOLDER")
    if launched is None:
        raise Refused(
            f"--elastic needs a launcher that notices the loss of a host and starts the ranks again; start it with "
            f"{START} -m autopar train …"
        )
    rows = _rows(options, whole)
    try:
        patterns = patterns_of(options, whole)
        if not patterns:
            raise Refused(f"--meshes {options.meshes!r} names no mesh; write it as in --meshes 'dp=2,tp=2;tp=2'")
        for _ in allowed_options(options, whole):
            pass  # all are refused, or none is
        check_stores()
        mesh = mesh_of_ranks(patterns, launched.size)
        microbatches = microbatches_on(mesh, options.batch, rows, _splitting(mesh, options.plan))
    except ValueError as error:
        problem, _, remedy = _in_options(str(error)).partition("\n")
        raise Refused(f"--elastic: {problem}{'; ' * bool(remedy)}{remedy.strip()}") from None
    return _on(replace(options, resume=True), mesh, microbatches)


def allowed_options(options: TrainOptions, whole: Mesh) -> Iterator[TrainOptions]:
    """Yield the options on each allowed mesh whose size is known, so that all are refused or none is."""
    rows = _rows(options, whole)
    for pattern in patterns_of(options, whole):
        mesh = pattern.mesh(pattern.fixed)
        if not pattern.is_open and mesh is not None:
            yield _on(options, mesh, microbatches_on(mesh, options.batch, rows, _splitting(mesh, options.plan)))


def patterns_of(options: TrainOptions, whole: Mesh) -> list[Pattern]:
    """Return the allowed meshes: ``--meshes``, or ``--mesh`` with a data axis of any size."""
    if options.meshes is not None:
        return [pattern_of(text.strip()) for text in options.meshes.split(";") if text.strip()]
    opened = data_axes(whole)[:1]
    return [Pattern(tuple((axis, None if axis in opened else size) for axis, size in whole.axes))]


def _rows(options: TrainOptions, whole: Mesh) -> int:
    """Return the rows that a rank computes at a time on ``--mesh``."""
    pieces = math.prod(whole.sizes[axis] for axis in _splitting(whole, options.plan)) * options.microbatches
    if options.batch % pieces:
        raise Refused(
            f"--elastic keeps the rows that a rank computes at a time, and --batch {options.batch} is no multiple of "
            f"the {pieces} pieces of --mesh {options.mesh} and --microbatches {options.microbatches}; use --batch "
            f"{math.ceil(options.batch / pieces) * pieces}"
        )
    return options.batch // pieces


def _splitting(mesh: Mesh, plan: str | None) -> list[str]:
    """Return the axes over which the plan splits the batch."""
    count = 2 if plan == "hsdp" else 1
    return [*data_axes(mesh)[:count], *[axis for axis in mesh.names if axis == EXPERTS]]


def _in_options(text: str) -> str:
    """Return an error of ``autopar.elastic.choose`` in the words of the command."""
    for words, instead in WORDS.items():
        text = re.sub(words, instead, text)
    return text


def _on(options: TrainOptions, mesh: Mesh, microbatches: int) -> TrainOptions:
    text = ",".join(f"{axis}={size}" for axis, size in mesh.axes)
    return replace(options, mesh=text, microbatches=microbatches)
