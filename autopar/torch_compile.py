"""Run what torch.compile compiles on a mesh: ``torch.compile(model, backend="autopar", options={"mesh": mesh})``.

Each graph of torch.compile becomes a program on the mesh. It takes the model's whole parameters in each call, so that
gradients arrive at them, and memory of parameters is not saved; ``parallelize`` saves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import distributed, fx

from autopar.api import parallelize
from autopar.capture.dynamo_graph import NamedGraph, named_graph
from autopar.capture.provenance import warn_user
from autopar.errors import shown
from autopar.ir.dtensor import is_device_mesh, mesh_of
from autopar.ir.mesh import Mesh
from autopar.parallel import Parallel

TAKEN = ("plan", "strict", "random", "machine", "time_limit", "memory", "overlap", "timeout")
USE = 'torch.compile(model, backend="autopar", options={"mesh": autopar.Mesh(dp=2)})'
OTHERS = ("tp", "cp", "ep", "pp")  # axes that no batch is split over, unless a plan says so


def compile_backend(
    graph: fx.GraphModule, arguments: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: Any = None
) -> Callable[..., Any]:
    """Return a function that runs a graph of torch.compile on a mesh, with the numbers of a single device.

    Each process passes the whole batch and has the whole parameters, and gets whole outputs and gradients.

    Args:
        graph: the graph that torch.compile has made. A graph break makes several; each runs on the mesh.
        arguments: those of the call that is compiled.
        options: ``"mesh"``: as for ``parallelize``. ``"plan"``: ``"search"``, or a dict of globs over names of
            parameters and inputs; without one the batch is split over the first data axis. ``"simulate": True``:
            all ranks run in this process. Others are those of ``parallelize``.
        mode: torch.compile's; it is refused.

    Raises:
        TypeError: there is no mesh, or an option is unknown.
        ValueError: the mesh has a pipeline.
        RuntimeError: this process is alone, and the mesh has several ranks.
    """
    given = dict(options or {})
    mesh, simulates = given.pop("mesh", None), given.pop("simulate", False)
    own = mesh_of(mesh) if is_device_mesh(mesh) else mesh
    if not isinstance(simulates, bool):
        raise TypeError(f'"simulate" is {shown(simulates)}, and not True or False: {USE}')
    if mode is not None or not isinstance(own, Mesh):
        raise TypeError(f"the backend autopar takes a mesh, and no mode: {USE}")
    if unknown := [name for name in given if name not in TAKEN]:
        raise TypeError(
            f"the backend autopar has no option {unknown[0]!r}; it takes mesh, simulate, {', '.join(TAKEN)}; "
            f"autopar.parallelize(model, mesh) takes the others"
        )
    if own.sizes.get("pp", 1) > 1:
        raise ValueError(
            "a graph of torch.compile is not cut into the stages of a pipeline; use a mesh without pp, or "
            "autopar.parallelize(model, mesh).train_step(optimizer, schedule=…)"
        )
    has_job = distributed.is_available() and (distributed.is_initialized() or distributed.is_torchelastic_launched())
    if own.size > 1 and not has_job and not simulates:
        raise RuntimeError(
            f"the mesh ({own}) needs {own.size} processes, and this one is alone; start them with "
            f'torchrun --nproc-per-node {own.size}, or add "simulate": True to the options, which runs all ranks in '
            f"this process"
        )
    return _OnMesh(named_graph(graph, arguments), mesh, own, given)


class _OnMesh:
    """A graph on a mesh, which is placed when it is first called: then the sizes are numbers."""

    def __init__(self, graph: NamedGraph, mesh: Any, own: Mesh, options: dict[str, Any]) -> None:
        self.graph, self.mesh, self.own, self.options = graph, mesh, own, options
        self.parallel: Parallel | None = None

    def __call__(self, *arguments: Any) -> Any:
        graph = self.graph
        taken = graph.arguments(arguments)
        if self.parallel is None:
            for position, name in graph.buffers.items():
                setattr(graph.module, name, arguments[position].detach().clone())
            plan = self._plan(dict(zip(graph.names, taken, strict=True)))
            self.parallel = parallelize(
                graph.module, self.mesh, plan, outputs="global", dynamic=False,
                **{key: value for key, value in self.options.items() if key != "plan"},
            )  # fmt: skip
        parallel = self.parallel
        own = dict(parallel.module.named_buffers())
        with torch.no_grad():
            for position, name in graph.buffers.items():
                own[name].copy_(arguments[position])
        outputs = parallel.simulate(*taken) if parallel.job is None and self.own.size > 1 else parallel(*taken)
        own = dict(parallel.module.named_buffers())
        with torch.no_grad():
            for position, name in graph.buffers.items():
                if not torch.equal(arguments[position], own[name]):
                    arguments[position].copy_(own[name])
        return outputs

    def _plan(self, arguments: Mapping[str, Any]) -> Any:
        """Return the plan over the arguments of the graph: the user's, by the model's names, after the batch's."""
        plan = self.options.get("plan")
        if plan == "search":
            return plan
        if plan is not None and not isinstance(plan, Mapping):
            raise TypeError(
                f"the backend autopar takes a plan of globs, or 'search', and not {shown(plan)}; "
                f"autopar.parallelize(model, mesh, plan) takes presets and saved plans"
            )
        names = self.graph.names
        chosen = self._batch(arguments)
        for glob, spec in (plan or {}).items():
            matched = {name: spec for name, path in names.items() if fnmatchcase(f".{path}", glob) or path == glob}
            if not matched:
                warn_user(
                    f"the plan's {glob!r} matches nothing in this graph of torch.compile, which takes "
                    f"{', '.join(names.values())}; after a graph break each graph has a part of the model"
                )
            chosen |= matched
        return chosen

    def _batch(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the layouts of the inputs whose dim 0 is as long as that of the first."""
        axis = next((name for name in self.own.names if name not in OTHERS), None)
        inputs = {
            name: value
            for name, value in arguments.items()
            if isinstance(value, torch.Tensor) and value.dim() and name not in self.graph.parameters
        }
        length = next((value.shape[0] for value in inputs.values()), 0)
        return {
            name: (axis if value.shape[0] == length else None, *[None] * (value.dim() - 1))
            for name, value in inputs.items()
        }
