"""Run a training step as one rank of a large job, for ``autopar verify --rank``: the process is alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from autopar.api import parallelize, split_example
from autopar.cli.plan.options import VerifyOptions
from autopar.cli.plan.planning import Planning
from autopar.cli.stages import check_schedule, schedule_options
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.options import LIMITS, NONE, option
from autopar.cli.train.refused import Refused
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.structure import flatten, unflatten
from autopar.plan.plan import Plan
from autopar.runtime.processes.free_memory import free_memory
from autopar.runtime.processes.one_rank import one_rank
from autopar.search.certificate import bytes_text
from autopar.search.solutions.solution import Solution
from autopar.step.reports.rank_report import RankReport
from autopar.step.train_step import TrainStep

OPTIMIZER = "adamw"  # without --optimizer
NEAR = 0.10  # the most that the measured memory may differ from the predicted one,
LITTLE = 2**20  # unless it differs by fewer bytes: kernels have buffers of their own


def with_step(planning: Planning, options: VerifyOptions) -> Planning:
    """Return the same with a training step, where ``--rank``, ``--optimizer`` or an axis ``pp`` ask for one.

    Raises:
        Refused: an option is wrong; it names the option and the remedy.
    """
    chosen: dict[str, Any] = {"microbatches": options.microbatches, "zero": options.zero}
    for name, holds, words in LIMITS:
        if name in chosen and not holds(chosen[name]):
            raise Refused(f"{option(name)} {chosen[name]} must be {words}")
    chosen |= {} if options.recompute == NONE else {"recompute": options.recompute}
    staged = isinstance(planning.mesh, Mesh) and PIPELINE in planning.mesh.names
    if isinstance(planning.mesh, Mesh):
        check_schedule(options, planning.mesh)
        chosen |= schedule_options(options) if staged else {}
    if options.rank is not None:
        _check_rank(planning, options.rank)
    elif options.optimizer is None and not staged:
        if given := [name for name, value in chosen.items() if value != getattr(VerifyOptions(), name)]:
            raise Refused(f"{option(given[0])} {chosen[given[0]]} is of a training step; add --optimizer {OPTIMIZER}")
        return planning
    return replace(planning, optimizer=options.optimizer or OPTIMIZER, step=chosen)


def _check_rank(planning: Planning, rank: int) -> None:
    mesh = planning.mesh
    if not isinstance(mesh, Mesh):
        raise Refused(f"--rank {rank} is a rank of a mesh, and --devices chooses one; give --mesh dp={mesh.count}")
    if rank not in mesh:
        raise Refused(f"--rank {rank} is not on the mesh ({mesh}); give a rank from 0 to {mesh.size - 1}")
    if mesh.size == 1:
        raise Refused(f"--rank {rank} is for a mesh of several ranks, and ({mesh}) has one; give a larger --mesh")


def check_memory(step: TrainStep, rank: int) -> str:
    """Return how much memory the rank needs here, in words.

    Raises:
        Refused: more than is free.
    """
    needed, free = step.memory(rank).peak, free_memory(_device())
    if needed > free:
        raise Refused(
            f"--rank {rank} needs {bytes_text(needed)} at the peak of a step, and {bytes_text(free)} are free here: "
            f"make the model smaller, as with --set num_hidden_layers=2, or its pieces, as with --zero 3, or leave "
            f"--rank out"
        )
    return f"a step needs {bytes_text(needed)} at its peak, of {bytes_text(free)} that are free here"


def of_rank(planning: Planning, plan: Plan | Solution, rank: int) -> RankReport:
    """Run the step as one rank, and report what it does."""
    mesh, model = planning.mesh, planning.model
    assert isinstance(mesh, Mesh) and planning.optimizer is not None
    if not all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model = copy.deepcopy(model).to("meta")
    with one_rank(mesh, rank, ranks_per_host=planning.machine.ranks_per_node) as only:
        parallel = parallelize(model, mesh, plan, **planning.options)
        parallel.initialize(only.fill)
        optimizer = OPTIMIZERS[planning.optimizer](parallel.parameters(), 1e-3, 0.0)
        step = parallel.train_step(optimizer, **planning.step)
        args, kwargs = step_arguments(planning.example, _device())
        return step.rank_report(*args, **kwargs)


def is_near(report: RankReport) -> bool:
    """Return whether the measured memory is that predicted."""
    return abs(report.apart) <= NEAR or abs(report.measured - report.predicted) <= LITTLE


def _device() -> torch.device:
    """Return the device of the pieces of a model on meta."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def step_arguments(example: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step with values that take no memory: each is one number, which is expanded."""
    args, kwargs = split_example(example)
    leaves, structure = flatten((args, kwargs))
    made = [_expanded(leaf, device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    found: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(made, structure)
    return found


def _expanded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = 0.5 if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)
