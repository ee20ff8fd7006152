"""Define the systems that ``bench_step`` compares, in the ways people train on processes.

All train one Llama of Hugging Face by AdamW.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron_by_hand import BY_COLUMNS, BY_ROWS, by_hand
from torch import distributed, nn

import autopar

OURS, ZERO, LAYERS, TODAY = "autopar", "autopar, zero=3", "autopar, layers", "today"
Batch = dict[str, torch.Tensor]
Step = Callable[[], torch.Tensor]  # a whole training step; the loss
# what a micro-batch runs in, which is the last one or not
Last = Callable[[Any, bool], contextlib.AbstractContextManager[Any]]

ROWS, LENGTH, VOCABULARY = 2, 128, 1000  # rows of a micro-batch of a rank
MICROBATCHES = 4  # where there are several
RATE = 1e-4
NO_SLOWER = 1 / 0.98  # than the order of ``today``, where nothing is gained by another one
# Megatron's cuts of the layers, without the vocabulary
ONLY_LAYERS: list[Any] = ["megatron", {"*.embed_tokens.weight": (), "lm_head.weight": ()}]
KERNELS: dict[str, dict[str, bool]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {}}  # of AdamW


def llama() -> nn.Module:
    """The same weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(pieces: int = 1) -> Batch:
    """``ROWS`` sequences for each micro-batch of each rank that shares it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (ROWS * pieces, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def own_rows(whole: Batch) -> Batch:
    """This rank's, contiguous as from a loader."""
    return {
        name: value.chunk(distributed.get_world_size())[distributed.get_rank()].clone() for name, value in whole.items()
    }


@dataclass(frozen=True)
class Numbers:
    """The results of a first step: the global loss, and by name the parameters and mean gradients.

    All are whole. AdamW's first change of parameters, a sign, does not show the size of the gradients.
    """

    loss: torch.Tensor
    parameters: dict[str, torch.Tensor]
    means: dict[str, torch.Tensor]


@dataclass(frozen=True)
class System:
    """A model that is trained in one way.

    Attributes:
        name: of the way.
        kernel: of AdamW; of those of one name the fastest is compared.
        beside: the name of which of ours this one is compared with; empty if it is ours itself.
        aim: the time of ours over this one's must not be more.
        local: ``step`` gives this rank's loss, of which the global one is the mean over the ranks.
        alone: part of a step, or one that sends nothing: how fast a step could be, and not a training.
        cut: parameter → the dim of which each rank has a plain piece.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    kernel: str = ""
    beside: str = OURS
    aim: float | None = None
    local: bool = False
    alone: bool = False
    cut: Mapping[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.kernel}" if self.kernel else self.name

    def numbers(self) -> Numbers:
        """Of one step, the first."""
        loss = self.step().detach().clone()
        if self.local:
            distributed.all_reduce(loss)
            loss /= distributed.get_world_size()
        named = {n.removeprefix("module."): p for n, p in self.model.named_parameters()}
        parameters = {n: self._whole(n, p.detach()) for n, p in named.items()}
        return Numbers(
            loss, parameters, {n: self._whole(n, self.optimizer.state[p]["exp_avg"]) for n, p in named.items()}
        )

    def _whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        found = whole(piece)
        if name not in self.cut:
            return found
        pieces = [torch.empty_like(found) for _ in range(distributed.get_world_size())]
        distributed.all_gather(pieces, found.contiguous())
        return torch.cat(pieces, self.cut[name])


def whole(tensor: Any) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.clone()


# -- ways to train -----------------------------------------------------------------------------------------------------


def ours(
    model: nn.Module,
    given: Batch,
    mesh: autopar.Mesh,
    plan: Any,
    name: str = OURS,
    inputs: str = "global",
    beside: str = "",
    aim: float | None = None,
    **options: Any,
) -> System:
    parallel = autopar.parallelize(copy.deepcopy(model), mesh, plan, inputs=inputs)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=RATE)
    step = parallel.train_step(optimizer, **options)
    return System(name, parallel, optimizer, lambda: step(given), beside=beside, aim=aim)


def today(model: nn.Module, given: Batch, mesh: autopar.Mesh, plan: str, beside: str = OURS, **options: Any) -> System:
    """Ours, with communication in the order of ``today``."""
    return ours(model, given, mesh, plan, f"{beside}, {TODAY}", beside=beside, aim=NO_SLOWER, overlap=TODAY, **options)


def loops(name: str, make: Callable[[], nn.Module], given: Batch, microbatches: int = 1, *,
          last: Last = lambda model, last: contextlib.nullcontext(), **facts: Any) -> list[System]:  # fmt: skip
    """The loop that people write, with each kernel of AdamW."""
    found = []
    for kernel, chosen in KERNELS.items():
        model = make()
        optimizer = torch.optim.AdamW(alike(model), lr=RATE, **chosen)
        found.append(System(name, model, optimizer, loop(model, optimizer, given, microbatches, last), kernel, **facts))
    return found


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, given: Batch, microbatches: int, last: Last) -> Step:
    pieces = [
        dict(zip(given, tensors, strict=True))
        for tensors in zip(*(tensor.chunk(microbatches) for tensor in given.values()), strict=True)
    ]

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for k, piece in enumerate(pieces):
            with last(model, k == len(pieces) - 1):
                loss = model(**piece).loss / microbatches
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def alike(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups; a kernel takes plain tensors, or DTensors."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return [{"params": some} for some in kinds.values()]


def one_process(model: nn.Module) -> list[System]:
    return [
        ours(model, batch(), autopar.Mesh(dp=1), "ddp"),
        *loops("eager", lambda: copy.deepcopy(model), batch(), aim=1.02),
    ]


def data_parallel(model: nn.Module, microbatches: int = 1) -> list[System]:
    ranks = distributed.get_world_size()
    own = own_rows(batch(ranks * microbatches))
    mesh, options = autopar.Mesh(dp=ranks), {"inputs": "local", "microbatches": microbatches}
    return [
        ours(model, own, mesh, "ddp", **options),
        ours(model, own, mesh, "ddp", ZERO, zero=3, **options),
        today(model, own, mesh, "ddp", **options),
        today(model, own, mesh, "ddp", ZERO, zero=3, **options),
        *loops("DistributedDataParallel", lambda: nn.parallel.DistributedDataParallel(copy.deepcopy(model)), own,
               microbatches, last=lambda model, last: contextlib.nullcontext() if last else model.no_sync(),
               aim=0.97 if microbatches == 1 else None, local=True),
        *loops("FSDP2", lambda: fsdp2(copy.deepcopy(model), ranks), own, microbatches,
               last=_synchronized, beside=ZERO, aim=0.75, local=True),
        *loops("floor: nothing sent", lambda: copy.deepcopy(model), own, microbatches, local=True, alone=True),
        System("floor: all-reduce alone", model, torch.optim.AdamW(model.parameters()), all_reduce_of(model),
               alone=True),
    ]  # fmt: skip


def all_reduce_of(model: nn.Module) -> Step:
    """All gradients in one all-reduce."""
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))

    def step() -> torch.Tensor:
        distributed.all_reduce(gradients)
        return gradients

    return step


@contextlib.contextmanager
def _synchronized(model: Any, last: bool) -> Any:
    model.set_requires_gradient_sync(last)
    yield


def fsdp2(model: nn.Module, ranks: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module) -> list[System]:
    ranks = distributed.get_world_size()
    mesh, layers, all_of_it = autopar.Mesh(tp=ranks), dict[str, int](), dict[str, int]()
    return [
        ours(model, batch(), mesh, "megatron"),
        ours(model, batch(), mesh, ONLY_LAYERS, LAYERS),
        today(model, batch(), mesh, "megatron"),
        *loops("DTensor", lambda: dtensor(copy.deepcopy(model), ranks), batch(), aim=0.6 if ranks == 4 else None),
        *loops("by hand, layers", lambda: by_hand(copy.deepcopy(model), layers), batch(), beside=LAYERS, aim=1.05,
               cut=layers),
        *loops("by hand, vocabulary too", lambda: by_hand(copy.deepcopy(model), all_of_it, vocabulary=True), batch(),
               aim=1.05, cut=all_of_it),
    ]  # fmt: skip


FAMILIES: dict[str, tuple[str, Callable[[nn.Module], list[System]]]] = {
    "data": ("data parallel", data_parallel),
    "microbatches": (f"{MICROBATCHES} micro-batches", lambda model: data_parallel(model, MICROBATCHES)),
    "tensor": ("tensor parallel", tensor_parallel),
}


def dtensor(model: nn.Module, ranks: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for name, _ in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in BY_COLUMNS + BY_ROWS:
            plan[name] = ColwiseParallel() if kind in BY_COLUMNS else RowwiseParallel()
    return parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
