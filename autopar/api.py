"""``parallelize``: an ordinary model and a mesh in, a model on the mesh out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.arguments import Signature, bind_arguments, signature_of
from autopar.capture import Captured, capture
from autopar.layout import DistAttr
from autopar.localize import localize, rank_classes
from autopar.mesh import Mesh
from autopar.passes import Place, Reshard, Share, collector_paused, run_passes
from autopar.plan import Plan, resolve
from autopar.program import Program, record_of
from autopar.report.passes import PassReport, Reports, bytes_per_axis
from autopar.runtime.step import SimulatedStep
from autopar.torch_private import pytree
from autopar.verify import verify


def parallelize(
    model: torch.nn.Module,
    mesh: Mesh,
    plan: Plan | None = None,
    *,
    example: Any = None,
) -> Parallel:
    """Put ``model`` on ``mesh``: capture its step once, give every value a Layout, insert the transfers.

    Args:
        model: any ``torch.nn.Module`` on one device; it is not changed.
        mesh: ``autopar.Mesh(dp=2, tp=2)``.
        plan: globs over names of parameters and inputs → an axis (or a tuple of axes, or ``None``) for each dim. What is
            not named is whole, but for the batch: the first axis that is not ``tp`` splits dim 0 of the inputs.
        example: the arguments of one call: a tuple, a dict of keywords, or both as a pair. With it, the step is captured
            now, and the program can be looked at; without it, at the first call.

    Raises:
        PlanError, CaptureError, RuleError: each names the offender and the remedy; nothing has been changed.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"parallelize takes a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"parallelize takes an autopar.Mesh, as in autopar.Mesh(dp=2, tp=2), not {type(mesh).__name__}")
    parallel = Parallel(model, mesh, plan)
    if example is not None:
        args, kwargs = _example(example)
        parallel.compile(*args, **kwargs)
    return parallel


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

    def __init__(self, model: torch.nn.Module, mesh: Mesh, plan: Plan | None) -> None:
        self.model = model
        self.mesh = mesh
        self._plan = plan
        self._compiled: dict[tuple[Signature, frozenset[int] | None], Compiled] = {}
        self._latest: Compiled | None = None
        resolve(plan, mesh, _shapes(model), None)

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
        compiled = self.compile(*args, **kwargs)
        captured = compiled.captured
        arguments = bind_arguments(self.model, args, kwargs)
        tensors = [*dict(self.model.named_parameters()).values(), *dict(self.model.named_buffers()).values()]
        outputs = iter(compiled.simulated([*tensors, *arguments.tensors]))
        count = captured.outputs + len(captured.leaves)
        leaves = [captured.leaves[k] if k in captured.leaves else next(outputs) for k in range(count)]
        return pytree.tree_unflatten(leaves, captured.spec)

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Capture a call of these shapes and place it, unless that was done before."""
        key = signature_of(self.model, bind_arguments(self.model, args, kwargs))
        if (key, None) not in self._compiled:
            self._compiled[key, None] = self._compile(key, args, kwargs, None)
        self._latest = self._compiled[key, None]
        return self._latest

    def _compile(
        self, key: Signature, args: Sequence[Any], kwargs: Mapping[str, Any], given: frozenset[int] | None
    ) -> Compiled:
        start = time.perf_counter()
        captured = capture(self.model, args, kwargs, given=given)
        captured_ms = (time.perf_counter() - start) * 1e3
        program = captured.program
        notes: list[str] = []
        constraints = self.constraints(captured, notes)
        reports = [PassReport("capture", captured_ms, notes=tuple(notes))]
        verify(program, "capture")
        reports += run_passes(program, (Place(self.mesh, constraints), Reshard(), Share()))
        start = time.perf_counter()
        local: dict[int, Program] = {}
        with collector_paused():
            for ranks in rank_classes(program):
                shared = localize(program, self.mesh.coordinates(ranks[0]))
                verify(shared, "localize")
                local.update(dict.fromkeys(ranks, shared))
        ms = (time.perf_counter() - start) * 1e3
        reports.append(PassReport("localize", ms, bytes=bytes_per_axis(program)))
        simulated = SimulatedStep(program, local, lambda given: self._specialized(key, captured, given))
        return Compiled(captured, program, local, Reports(reports), simulated)

    def _specialized(self, key: Signature, captured: Captured, given: frozenset[int]) -> SimulatedStep:
        """The step of a call whose backward gets gradients for only some of the outputs."""
        if (key, given) not in self._compiled:
            args, kwargs = captured.call
            with torch.enable_grad():
                now = signature_of(self.model, bind_arguments(self.model, args, kwargs))
                if now != key:
                    raise RuntimeError(
                        "the model was switched between train() and eval() after this forward, and its backward has to be "
                        "captured anew because not all outputs have a gradient; switch the model after backward()"
                    )
                self._compiled[key, given] = self._compile(key, args, kwargs, given)
        return self._compiled[key, given].simulated

    def constraints(self, captured: Captured, notes: list[str] | None = None) -> dict[str, DistAttr]:
        """The plan applied to a captured step: placeholder → DistAttr. What was decided for the user goes to ``notes``."""
        records = {node.name: record_of(node) for node in captured.program.placeholders}
        own = _shapes(self.model)
        users = {
            placeholder: placeholder if r.role == "input" and r.name in own else r.name or placeholder
            for placeholder, r in records.items()
            if r.role != "tangent"
        }
        inputs = {users[p]: r.type.shape for p, r in records.items() if r.role == "input"}  # type: ignore[union-attr]
        found = resolve(self._plan, self.mesh, own, inputs)
        if notes is not None:
            notes += found.notes
        return {placeholder: found.attrs[name] for placeholder, name in users.items() if name in found.attrs}


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tuple(tensor.shape) for name, tensor in named}
