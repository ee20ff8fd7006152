"""Write Megatron's tensor parallelism by hand, for a Llama of Hugging Face.

Two all-reduces a layer forward and two backward, each over all of a block (Shoeybi et al., "Megatron-LM", 2019). With
the vocabulary cut, as Megatron cuts it, the embedding, the head and the loss have five more, and each rank computes a
part of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn

BY_COLUMNS, BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
IGNORED = -100  # the label of a token without a loss


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


class CrossEntropy(torch.autograd.Function):
    """The loss of each token, from this rank's columns of the logits: ``[tokens vocabulary/tp], [tokens] → [tokens]``.

    ``first``: the first index that this rank has.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
        largest = logits.amax(-1)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        logits = logits - largest.unsqueeze(-1)
        own = (labels >= first) & (labels < first + logits.shape[-1])
        places = (labels - first).where(own, 0).unsqueeze(-1)
        predicted = logits.gather(-1, places).squeeze(-1).masked_fill_(~own, 0)
        distributed.all_reduce(predicted)
        softmax = logits.exp_()
        total = softmax.sum(-1)
        distributed.all_reduce(total)
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, places, own)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, places, own = ctx.saved_tensors
        softmax = softmax.scatter_add(-1, places, -own.to(softmax.dtype).unsqueeze(-1))
        return softmax.mul_(gradient.unsqueeze(-1)), None, None


def by_hand(model: nn.Module, cut: dict[str, int], *, vocabulary: bool = False) -> nn.Module:
    """Cut a model in place, and return it.

    Args:
        cut: gets for each parameter that is cut the dim of which it has a piece.
        vocabulary: whether the vocabulary is cut, too.
    """
    for name, linear in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in BY_COLUMNS + BY_ROWS:
            _keep_own(linear, f"{name}.weight", int(kind in BY_ROWS), cut)
        if kind in BY_ROWS:
            linear.register_forward_hook(lambda _, args, out: ReduceFromGroup.apply(out))
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: (CopyToGroup.apply(args[0]),))
        layer.self_attn.register_forward_pre_hook(_copied_states, with_kwargs=True)
    if vocabulary:
        _cut_vocabulary(model, cut)
    return model


def _keep_own(module: Any, name: str, dim: int, cut: dict[str, int]) -> None:
    cut[name] = dim
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    module.weight = nn.Parameter(module.weight.detach().chunk(ranks, dim)[rank].clone())


def _copied_states(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"hidden_states": CopyToGroup.apply(kwargs["hidden_states"])}


def _cut_vocabulary(model: Any, cut: dict[str, int]) -> None:
    embedding, head = model.model.embed_tokens, model.lm_head
    _keep_own(embedding, "model.embed_tokens.weight", 0, cut)
    _keep_own(head, "lm_head.weight", 0, cut)
    held = len(head.weight)
    first = held * distributed.get_rank()

    def looked_up(ids: torch.Tensor) -> torch.Tensor:
        own = (ids >= first) & (ids < first + held)
        found = nn.functional.embedding((ids - first).where(own, 0), embedding.weight)
        return ReduceFromGroup.apply(found.masked_fill(~own.unsqueeze(-1), 0))

    def loss_of(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1)
        counted = labels != IGNORED
        losses = CrossEntropy.apply(logits.view(-1, held), labels, first)
        return losses.masked_fill(~counted, 0).sum() / counted.sum()

    embedding.forward = looked_up
    head.register_forward_pre_hook(lambda _, args: (CopyToGroup.apply(args[0]),))
    model.loss_function = loss_of
