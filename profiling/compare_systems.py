"""Define the systems that ``compare`` sets beside each other: ours, and how people train with torch alone.

All train one small Llama on one batch by SGD with momentum, so that losses show the size of gradients too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from overlap_wire import batch, llama, paced
from pipeline_models import Llama, rival
from step_rivals import Step, alike, dtensor, fsdp2, loop, own_rows
from torch import distributed, nn

import autopar
from autopar.costs.machine import Machine

MICROBATCHES = 4  # of pipelines
RATE, MOMENTUM = 5e-2, 0.9
SEARCH_MESHES = {2: {"dp": 2}, 4: {"dp": 2, "tp": 2}}
DDP, SHARDED, MEGATRON, PIPELINE, SEARCH = (
    f"autopar, {way}" for way in ("ddp", "zero=3", "megatron", "1f1b", "search")
)


@dataclass(frozen=True)
class Setting:
    """Where a system is built.

    Attributes:
        machine: the paced machine of the emulated wire; ``None`` where nothing is emulated.
    """

    machine: Machine | None = None

    @property
    def ranks(self) -> int:
        return distributed.get_world_size()

    def paced(self, model: nn.Module) -> nn.Module:
        """The model of another system, with paced products where the wire is emulated. Programs of ours pace alone."""
        if self.machine is None:
            return model
        return paced(model, autopar.runtime.wire.emulate.present().pacer, self.machine)


@dataclass(frozen=True)
class System:
    """A way to train.

    Attributes:
        build: makes the step; its first call is what planning costs.
        beside: the name of which of ours it is compared with; empty for ours.
        local: the step gives this rank's loss, of which the global one is the mean over the ranks.
    """

    name: str
    build: Callable[[Setting], Step] = field(repr=False)
    beside: str = ""
    local: bool = False

    def loss(self, step: Step) -> float:
        """The global loss of a step."""
        loss = step().detach().clone()
        if self.local:
            distributed.all_reduce(loss)
            loss /= distributed.get_world_size()
        return float(loss)


def optimizer_of(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


def alone(steps: int) -> list[float]:
    """The losses of the plain model on the whole batch."""
    model = llama()
    step = loop(model, optimizer_of(model.parameters()), batch(), 1, unchanged)
    return [float(step()) for _ in range(steps)]


def unchanged(model: Any, last: bool) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


# -- ways to train -----------------------------------------------------------------------------------------------------


def ours(axis: str, plan: Any, setting: Setting, inputs: str = "global", **options: Any) -> Step:
    given = own_rows(batch()) if inputs == "local" else batch()
    mesh = autopar.Mesh({axis: setting.ranks})
    parallel = autopar.parallelize(llama(), mesh, plan, inputs=inputs, machine=setting.machine)
    return captured(parallel, given, **options)


def searched(setting: Setting) -> Step:
    mesh = autopar.Mesh(SEARCH_MESHES[setting.ranks])
    parallel = autopar.parallelize(llama(), mesh, "search", example=batch(), machine=setting.machine or "cpu")
    return captured(parallel, batch())


def captured(parallel: Any, given: dict[str, torch.Tensor], **options: Any) -> Step:
    step = parallel.train_step(optimizer_of(parallel.parameters()), **options)
    step.capture(**given)
    return lambda: step(**given)


def theirs(wrapped: Callable[[nn.Module, int], nn.Module], whole: bool, setting: Setting) -> Step:
    """The loop that people write.

    Args:
        whole: whether each rank takes the whole batch, and not its own rows.
    """
    model = wrapped(llama(), setting.ranks)
    if setting.machine is not None:
        setting.paced(model)
    return loop(model, optimizer_of(alike(model)), batch() if whole else own_rows(batch()), 1, unchanged)


def distributed_data_parallel(model: nn.Module, ranks: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def torch_pipeline(setting: Setting) -> Step:
    given = dict(zip(("x", "y"), batch().values(), strict=True))
    return rival(Llama(llama()), "1f1b", given, MICROBATCHES, optimizer_of, setting.paced)


SYSTEMS = (
    System(DDP, partial(ours, "dp", "ddp", inputs="local")),
    System("DDP", partial(theirs, distributed_data_parallel, False), DDP, local=True),
    System(SHARDED, partial(ours, "dp", "ddp", inputs="local", zero=3)),
    System("FSDP2", partial(theirs, fsdp2, False), SHARDED, local=True),
    System(MEGATRON, partial(ours, "tp", "megatron")),
    System("DTensor, tensor parallel", partial(theirs, dtensor, True), MEGATRON),
    System(PIPELINE, partial(ours, "pp", {}, microbatches=MICROBATCHES, schedule="1f1b")),
    System("torch pipelining, 1F1B", torch_pipeline, PIPELINE),
    System(SEARCH, searched),
)  # fmt: skip
