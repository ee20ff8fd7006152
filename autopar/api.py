"""``parallelize``: an ordinary model and a mesh in, a model on the mesh out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autopar.arguments import Signature, bind_arguments, signature_of
from autopar.borrow import ONE_AT_A_TIME
from autopar.capture import Captured, capture
from autopar.collector import collector_paused
from autopar.constraints import check_plan, constraints
from autopar.dtensor import is_device_mesh, mesh_of
from autopar.layout import DistAttr
from autopar.localize import localize, rank_classes
from autopar.mesh import Mesh
from autopar.passes import PIPELINE, Pass, Place, run_passes
from autopar.plan import Plan
from autopar.program import Program
from autopar.report.passes import PassReport, Reports
from autopar.report.transfers import Transfers, bytes_per_axis, transfers_of
from autopar.runtime.step import SimulatedStep
from autopar.specialize import specialize
from autopar.structure import part_at, take_over, unflatten
from autopar.torch_private import is_transformed
from autopar.verify import verify

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(
    model: torch.nn.Module,
    mesh: Mesh | DeviceMesh,
    plan: Plan | None = None,
    *,
    example: Any = None,
    strict: bool = False,
) -> Parallel:
    """Put ``model`` on ``mesh``: capture its step once, give every value a Layout, insert the transfers.

    Args:
        model: any ``torch.nn.Module`` on one device; it is not changed.
        mesh: ``autopar.Mesh(dp=2, tp=2)``, or a ``DeviceMesh`` whose dims have names.
        plan: globs over names of parameters and inputs → an axis (or a tuple of axes, or ``None``) for each dim, or
            DTensor's placements; ``"*.module()"`` for what a module returns. Or the name of a preset (``"ddp"``,
            ``"megatron"``, ``"megatron+sp"``), or a list of such plans, the last of which has the last word. What is
            not named is whole, but for the batch: the first axis that is not ``tp`` splits dim 0 of the inputs. Without
            a plan an axis ``tp`` gets the preset ``megatron``, as far as the model has its names.
        example: the arguments of one call: a tuple, a dict of keywords, or both as a pair. With it, the step is captured
            now, and the program can be looked at; without it, at the first call.
        strict: refuse ops that have no sharding rule. Else each rank computes all of such an op, and the report says so.

    Raises:
        PlanError, CaptureError, RuleError: each names the offender and the remedy; nothing has been changed.
    """
    _check_model(model)
    if is_device_mesh(mesh):
        mesh = mesh_of(mesh)  # type: ignore[arg-type]
    if not isinstance(mesh, Mesh):
        raise TypeError(f"parallelize takes an autopar.Mesh, as in autopar.Mesh(dp=2, tp=2), not {type(mesh).__name__}")
    if mesh.name is not None:
        raise ValueError(f"parallelize takes the whole mesh; this one is the stage {mesh.name!r}")
    parallel = Parallel(model, mesh, plan, strict=strict)
    if example is not None:
        args, kwargs = _example(example)
        parallel.compile(*args, **kwargs)
    return parallel


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"parallelize takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        raise TypeError(f"parallelize takes the model itself, not {type(model).__name__}; pass model.module")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("parallelize takes an eager model, not one of torch.jit; pass what was scripted or traced")
    if hasattr(model, "_orig_mod"):
        raise TypeError("parallelize takes the model before torch.compile; pass model._orig_mod")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.UninitializedParameter):
            raise TypeError(f"the parameter {name} has no shape yet; run the model once before parallelize")


def _example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        if len(example) == 2 and isinstance(example[0], (tuple, list)) and isinstance(example[1], Mapping):
            return tuple(example[0]), dict(example[1])
        return tuple(example), {}
    raise TypeError(
        f"example is the arguments of one call: a tuple (x,), a dict of keywords, or both ((x,), {{'labels': y}}), "
        f"not a {type(example).__name__}"
    )


@dataclass(frozen=True)
class Compiled:
    """One captured step on the mesh."""

    captured: Captured
    program: Program
    local: dict[int, Program]
    reports: Reports
    simulated: SimulatedStep


class Parallel:
    """A model on a mesh. Made by ``parallelize``.

    Attributes:
        model: the model as it was given; its parameters receive the gradients.
        mesh: the mesh.
    """

    def __init__(self, model: torch.nn.Module, mesh: Mesh, plan: Plan | None, *, strict: bool = False) -> None:
        self.model = model
        self.mesh = mesh
        self._plan = plan
        self._strict = strict
        self._compiled: dict[Signature, Compiled] = {}
        self._latest: Compiled | None = None
        check_plan(plan, model, mesh)

    def __repr__(self) -> str:
        return f"Parallel({type(self.model).__name__} on {self.mesh})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "this model runs on one process per rank, and no processes have been started; "
            "call .simulate(...) with the same arguments to run all ranks in this process"
        )

    @property
    def program(self) -> Program:
        """The explicit program: every transfer is an op. ``RuntimeError`` before a capture."""
        return self._current().program

    @property
    def reports(self) -> Reports:
        """What each pass did; prints as a table. ``RuntimeError`` before a capture."""
        return self._current().reports

    @property
    def transfers(self) -> Transfers:
        """What was inserted where, and the bytes it moves; prints as a table. ``RuntimeError`` before a capture."""
        return transfers_of(self.program)

    def local(self, rank: int) -> Program:
        """The program of one rank, in the shapes of its pieces. Ranks with pieces of equal sizes share one graph."""
        at = self.mesh.coordinates(rank)
        return self._current().local[rank].at(at)

    def _current(self) -> Compiled:
        if self._latest is None:
            raise RuntimeError(
                "nothing has been captured yet; give parallelize an example=(x,), or call .simulate(x) once"
            )
        return self._latest

    def simulate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with all ranks in this process: its own signature, its own output structure, full tensors.

        The outputs are attached to autograd: ``backward()`` fills full-size ``.grad`` of the model's parameters.
        """
        with ONE_AT_A_TIME:  # while a thread captures, the model's tensors are lent
            compiled = self.compile(*args, **kwargs)
            state = [*self.model.named_parameters(), *self.model.named_buffers()]
        captured = compiled.captured
        arguments = bind_arguments(self.model, args, kwargs)
        named = [*state, *zip(arguments.names, arguments.tensors, strict=True)]
        for name, tensor in named:
            if is_transformed(tensor):
                raise ValueError(
                    f"{name} is inside a torch.func transform or carries a forward-mode tangent; "
                    f"a captured step has gradients through backward() alone"
                )
            if tensor.is_meta:
                raise ValueError(f"{name} is on the meta device and has no values to simulate with; to_empty() and init it")
        outputs = iter(compiled.simulated([tensor for _, tensor in named]))
        count = captured.outputs + len(captured.leaves)
        leaves = [captured.leaves[k] if k in captured.leaves else next(outputs) for k in range(count)]
        returned = unflatten(leaves, captured.spec)
        for position, way in captured.extended:
            take_over((*args, *kwargs.values())[position], part_at(returned, way))
        return returned

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Capture a call of these shapes and place it, unless that was done before."""
        key = signature_of(self.model, bind_arguments(self.model, args, kwargs))
        if key not in self._compiled:
            self._compiled[key] = self._compile(args, kwargs)
        self._latest = self._compiled[key]
        return self._latest

    def _compile(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compiled:
        start = time.perf_counter()
        captured = capture(self.model, args, kwargs)
        captured_ms = (time.perf_counter() - start) * 1e3
        attrs, notes = constraints(self._plan, self.model, self.mesh, captured)
        verify(captured.program, "capture")
        first = PassReport("capture", captured_ms, notes=(*captured.notes, *notes))
        return self._placed(captured, captured.program, attrs, [first])

    def _placed(
        self, captured: Captured, program: Program, attrs: Mapping[str, DistAttr], reports: list[PassReport]
    ) -> Compiled:
        """Everything after capture."""
        traced = program.copy() if len(captured.differentiable) > 1 else program
        options: dict[type[Pass], Any] = {Place: (self.mesh, attrs, self._strict)}
        reports += run_passes(program, [step(*options.get(step, ())) for step in PIPELINE])
        start = time.perf_counter()
        local: dict[int, Program] = {}
        with collector_paused():
            for ranks in rank_classes(program):
                shared = localize(program, self.mesh.coordinates(ranks[0]))
                verify(shared, "localize")
                local.update(dict.fromkeys(ranks, shared))
        ms = (time.perf_counter() - start) * 1e3
        reports.append(PassReport("localize", ms, bytes=bytes_per_axis(program)))
        special: dict[frozenset[int], SimulatedStep] = {}

        def specialized(given: frozenset[int]) -> SimulatedStep:
            if given not in special:
                part = specialize(traced, given, captured.device)
                verify(part, "specialize")
                special[given] = self._placed(captured, part, attrs, []).simulated
            return special[given]

        return Compiled(captured, program, local, Reports(reports), SimulatedStep(program, local, specialized))
