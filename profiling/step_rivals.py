"""The systems that ``bench_step`` compares: one Llama of Hugging Face, put on processes in the ways people do it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed, nn

import autopar

Batch = dict[str, torch.Tensor]

ROWS, LENGTH, VOCABULARY = 2, 128, 1000
BY_COLUMNS, BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def llama() -> nn.Module:
    """The same weights in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(ranks: int = 1) -> Batch:
    """``ROWS`` sequences for each of the ranks that share a batch."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (ROWS * ranks, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def own_rows(whole: Batch) -> Batch:
    """This rank's, contiguous as from a loader."""
    rank = distributed.get_rank()
    return {name: value[ROWS * rank : ROWS * (rank + 1)].clone() for name, value in whole.items()}


@dataclass(frozen=True)
class System:
    """A model that is trained in one way, and the batch that a rank gives it.

    Attributes:
        mean: the global loss and gradients are the mean over the ranks of what a rank has; ``loss`` alone where the
            gradients are the global ones already.
        cut: parameter → the dim of which each rank has a plain piece.
        aim: of the time of ours over this one's.
    """

    name: str
    model: nn.Module
    batch: Batch
    aim: float | None = None
    mean: str = ""
    cut: Mapping[str, int] = field(default_factory=dict)

    def step(self) -> torch.Tensor:
        """Forward and backward."""
        loss = self.model(**self.batch).loss
        loss.backward()
        return loss

    def clear(self) -> None:
        self.model.zero_grad()

    def numbers(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The global loss and the whole gradients of one step."""
        loss = self.step().detach().clone()
        found = {n.removeprefix("module."): whole(p.grad) for n, p in self.model.named_parameters()}
        self.clear()
        for name, dim in self.cut.items():
            pieces = [torch.empty_like(found[name]) for _ in range(distributed.get_world_size())]
            distributed.all_gather(pieces, found[name].contiguous())
            found[name] = torch.cat(pieces, dim)
        for tensor in (*([loss] if self.mean else []), *(found.values() if self.mean == "all" else [])):
            distributed.all_reduce(tensor)
            tensor /= distributed.get_world_size()
        return loss, found


def whole(tensor: Any) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.clone()


def one_process(model: nn.Module) -> list[System]:
    mesh = autopar.Mesh(dp=1)
    return [
        System("autopar", autopar.parallelize(copy.deepcopy(model), mesh, "ddp"), batch()),
        System("eager", copy.deepcopy(model), batch(), aim=1.05),
    ]


def data_parallel(model: nn.Module) -> list[System]:
    ranks = distributed.get_world_size()
    own = own_rows(batch(ranks))
    ours = autopar.parallelize(model, autopar.Mesh(dp=ranks), "ddp", inputs="local")
    ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    return [
        System("autopar", ours, own),
        System("DistributedDataParallel", ddp, own, aim=0.95, mean="loss"),
        System("FSDP2", fsdp2(copy.deepcopy(model), ranks), own, aim=0.6, mean="loss"),
        System("eager, nothing sent", copy.deepcopy(model), own, mean="all"),
    ]


def fsdp2(model: nn.Module, ranks: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module) -> list[System]:
    ranks = distributed.get_world_size()
    own = batch()
    ours = autopar.parallelize(model, autopar.Mesh(tp=ranks), "megatron")
    hand, cut = written_by_hand(copy.deepcopy(model))
    return [
        System("autopar", ours, own),
        System("DTensor", dtensor(copy.deepcopy(model), ranks), own, aim=0.6 if ranks == 4 else None),
        System("written by hand", hand, own, aim=1.1, cut=cut),
    ]


FAMILIES: dict[str, Callable[[nn.Module], list[System]]] = {"data": data_parallel, "tensor": tensor_parallel}


def dtensor(model: nn.Module, ranks: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for name, _ in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in BY_COLUMNS + BY_ROWS:
            plan[name] = ColwiseParallel() if kind in BY_COLUMNS else RowwiseParallel()
    return parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)


class CopyToGroup(torch.autograd.Function):
    """Megatron's f: the identity forward; the sum over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient)
        return gradient


class ReduceFromGroup(torch.autograd.Function):
    """Megatron's g: the sum over the ranks forward; the identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def written_by_hand(model: nn.Module) -> tuple[nn.Module, dict[str, int]]:
    """Tensor parallelism as in Megatron: two all-reduces a layer forward and two backward, each over all of a block.

    Returns:
        The model, and of which dim each parameter is a piece.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    cut: dict[str, int] = {}
    for name, linear in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in BY_COLUMNS + BY_ROWS:
            dim = cut[f"{name}.weight"] = int(kind in BY_ROWS)
            linear.weight = nn.Parameter(linear.weight.detach().chunk(ranks, dim)[rank].clone())
        if kind in BY_ROWS:
            linear.register_forward_hook(lambda _, args, out: ReduceFromGroup.apply(out))
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: (CopyToGroup.apply(args[0]),))
        layer.self_attn.register_forward_pre_hook(_copied_states, with_kwargs=True)
    return model, cut


def _copied_states(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"hidden_states": CopyToGroup.apply(kwargs["hidden_states"])}
