"""Check the options of a command that plans a model, and place the model on its mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.api import devices, parallelize
from autopar.cli.models.given import model_of
from autopar.cli.plan.options import MESH, PlannedOptions
from autopar.cli.stages import refuse_stages
from autopar.cli.train.check import mesh_of, one_of, plan_of
from autopar.cli.train.launched import launched
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.cli.train.refused import Refused
from autopar.costs.calibrate import knows_other_nodes
from autopar.costs.machine import Machine, machine_from, machine_of
from autopar.ir.mesh import MOST_RANKS, Mesh
from autopar.model.given_plan import check_mesh
from autopar.parallel import Parallel
from autopar.plan.plan import SEARCH, Plan
from autopar.search.devices.meshes import Devices
from autopar.search.solutions.solution import Solution
from autopar.step.train_step import TrainStep

Planned = Parallel | TrainStep


@dataclass(frozen=True)
class Planning:
    """What is planned: a call of a model, or its training step, on a mesh of machines.

    Attributes:
        model, example: as ``parallelize`` takes them.
        mesh: the mesh, or devices whose mesh is chosen with the plan.
        machine: the machine whose seconds are added up.
        memory: the most bytes that a rank may use in a searched plan; ``None``: the capacity of the machine.
        time_limit: seconds of a search.
        optimizer: of the training step; ``None``: a call, with its backward.
        step: further options of the training step, as ``train_step`` takes them.
        notes: what was decided for the user before, in sentences.
        cache: as ``parallelize`` takes it.
    """

    model: torch.nn.Module
    example: Any
    mesh: Mesh | Devices
    machine: Machine
    memory: float | None
    time_limit: float
    optimizer: str | None
    notes: tuple[str, ...] = ()
    step: Mapping[str, Any] = field(default_factory=dict)
    cache: str | bool | None = None

    @property
    def runs(self) -> str:
        """What is planned, in short."""
        return "a call" if self.optimizer is None else "a step"

    @property
    def limit(self) -> float | None:
        """The bytes that a rank may use, if there is a limit."""
        return self.memory if self.memory is not None else self.machine.capacity

    def on_mesh(self) -> Planning:
        """Return the same with a mesh; of devices it is the one whose plan of a call is the fastest."""
        if isinstance(self.mesh, Mesh):
            return self
        parallel = parallelize(self.model, self.mesh, example=self.example, **self.options)
        return replace(self, mesh=parallel.mesh)

    def placed(self, plan: Plan | Solution) -> Planned:
        """Place the model by a plan. Nothing is computed.

        Raises:
            AutoparError, ValueError: the plan cannot be placed.
        """
        if self.optimizer is None or isinstance(self.mesh, Devices):
            parallel = parallelize(self.model, self.mesh, plan, example=self.example, **self.options)
        else:
            parallel = parallelize(self.model, self.mesh, plan, **self.options)
        if self.optimizer is None:
            return parallel
        if isinstance(self.mesh, Devices):  # its plan is that of a call, and a step has another
            return replace(self, mesh=parallel.mesh).placed(plan)
        step = parallel.train_step(OPTIMIZERS[self.optimizer](parallel.parameters(), 1e-3, 0.0), **self.step)
        step.capture(self.example)
        return step

    @property
    def options(self) -> dict[str, Any]:
        """The options of the search, as ``parallelize`` takes them."""
        return {"machine": self.machine, "memory": self.memory, "time_limit": self.time_limit, "cache": self.cache}


def planning_of(
    options: PlannedOptions, command: str, *, values: bool = False, stages: bool = False
) -> tuple[Planning, Plan | Solution]:
    """Check the options, and return what is planned and the plan.

    Args:
        command: which errors name.
        values: whether the model's tensors have values, so that it can run.
        stages: whether the mesh may have the stages of a pipeline.

    Raises:
        Refused: an option is wrong; it names the option and the remedy.
    """
    plan = plan_of(options.plan)
    _check(options, command)
    machine = machine_for(options.machine, plan)
    mesh = _mesh(options, plan, machine, command, stages)
    given = model_of(options, values=values)
    notes = (*given.notes, *_about_nodes(mesh, machine))
    explains = bool(getattr(options, "explain", ()))  # a plan from the cache cannot be asked what others cost
    planning = Planning(
        given.model, given.example, mesh, machine, options.memory, options.time_limit, options.optimizer, notes,
        cache=False if explains else options.cache,
    )  # fmt: skip
    return planning, plan


def _check(options: PlannedOptions, command: str) -> None:
    if launched() is not None:
        raise Refused(f"{command} runs in one process, but RANK and WORLD_SIZE are set; start it without torchrun")
    if options.memory is not None and not options.memory > 0:
        raise Refused(f"--memory {options.memory:g} must be above 0, in bytes, such as 80e9")
    if not 0 < options.time_limit < math.inf:
        raise Refused(f"--time-limit {options.time_limit:g} must be above 0, in seconds")
    if options.optimizer is not None:
        one_of("optimizer", options.optimizer, OPTIMIZERS)


def _mesh(
    options: PlannedOptions, plan: Plan | Solution, machine: Machine, command: str, stages: bool
) -> Mesh | Devices:
    """Return the mesh, or the devices whose mesh is chosen."""
    if options.devices is not None and options.mesh is not None:
        raise Refused(f"--devices {options.devices} chooses the mesh, and --mesh {options.mesh} gives one; use one")
    if options.devices is not None:
        if plan != SEARCH:
            raise Refused(
                f"--devices {options.devices} chooses the axes of the mesh with the plan, and --plan {options.plan} "
                f"names axes; give a --mesh, as dp={options.devices}"
            )
        try:
            found: Mesh | Devices = devices(options.devices)
        except ValueError:
            raise Refused(f"--devices {options.devices}: give a number of devices from 1 to {MOST_RANKS:,}") from None
        size, given = options.devices, f"--devices {options.devices}"
    else:
        text = options.mesh or MESH
        found = mesh_of(text)
        if not stages:
            refuse_stages(found, command)
        if isinstance(plan, Solution):
            check_mesh(plan, found)
        size, given = found.size, f"--mesh {text}"
    if size > machine.ranks_per_node and not knows_other_nodes(machine):
        raise Refused(
            f"{given} has {size} ranks, and the machine {machine.name} has {machine.ranks_per_node}: between such "
            f"machines nothing was measured; use at most {machine.ranks_per_node} ranks, or name another --machine"
        )
    return found


def _about_nodes(mesh: Mesh | Devices, machine: Machine) -> tuple[str, ...]:
    """Say how many nodes a mesh has, if it has several."""
    size = mesh.count if isinstance(mesh, Devices) else mesh.size
    if size <= machine.ranks_per_node:
        return ()
    nodes = math.ceil(size / machine.ranks_per_node)
    return (f"{size} ranks are {nodes} nodes of {machine.ranks_per_node}, by the figures of {machine.name}",)


def machine_for(given: str | None, plan: Plan | Solution) -> Machine:
    """Return the machine of ``--machine``; by default that of a searched plan, or of this computer."""
    if given is None and isinstance(plan, Solution):
        return plan.machine
    if given is None:
        return machine_of(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        return machine_from(given)
    except ValueError as error:
        raise Refused(f"--machine {given}: {error}") from None
