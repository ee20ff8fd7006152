"""Models of the benchmark ``pipeline``, and the same models on the stages of torch.distributed.pipelining."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, schedules

Batch = dict[str, torch.Tensor]
RATE = 1e-2
VOCABULARY, SEQUENCE, LAYERS = 512, 64, 8  # of the Llama
# policy → torch's schedule, and whether the stages of a rank lie in a V
RIVALS: dict[str, tuple[Any, bool]] = {
    "1f1b": (schedules.Schedule1F1B, False),
    "interleaved-1f1b": (schedules.ScheduleInterleaved1F1B, False),
    "zb-v": (schedules.ScheduleZBVZeroBubble, True),
}


class Blocks(nn.Module):
    """A product and a GELU, several times."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)

    @staticmethod
    def batch(rows: int, hidden: int) -> Batch:
        draw = torch.Generator().manual_seed(1)
        return {name: torch.randn(rows, hidden, generator=draw) for name in ("x", "y")}

    def parts(self, stages: int) -> list[nn.Module]:
        """The stages of torch's pipeline, each with as many layers."""
        per = len(self.layers) // stages
        return [nn.Sequential(*copy.deepcopy(list(self.layers[k * per : (k + 1) * per]))) for k in range(stages)]

    loss = staticmethod(nn.functional.mse_loss)


class LlamaPart(nn.Module):
    """Some layers of a Llama, with the embedding before them and the head behind, where they stand."""

    def __init__(self, model: Any, first: int, end: int) -> None:
        super().__init__()
        inner = copy.deepcopy(model.model)
        self.embed = inner.embed_tokens if first == 0 else None
        self.layers, self.rotary = inner.layers[first:end], inner.rotary_emb
        is_last = end == len(inner.layers)
        self.norm, self.head = (inner.norm, copy.deepcopy(model.lm_head)) if is_last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1])[None]
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Llama(nn.Module):
    """A small Llama that returns its loss; or a given one of Hugging Face."""

    def __init__(self, model: nn.Module | None = None) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.model: Any = model or LlamaForCausalLM(LlamaConfig(
            hidden_size=256, intermediate_size=688, num_hidden_layers=LAYERS, num_attention_heads=4,
            vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, use_cache=False,
        ))  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=x, labels=y).loss
        return loss

    @staticmethod
    def batch(rows: int) -> Batch:
        ids = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=torch.Generator().manual_seed(1))
        return {"x": ids, "y": ids}

    def parts(self, stages: int) -> list[nn.Module]:
        per = len(self.model.model.layers) // stages
        return [LlamaPart(self.model, k * per, (k + 1) * per) for k in range(stages)]

    @staticmethod
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def rival(
    model: Any,
    policy: str,
    given: Batch,
    microbatches: int,
    optimized: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    prepared: Callable[[nn.Module], nn.Module] = lambda part: part,
) -> Callable[[], torch.Tensor]:
    """A training step of torch.distributed.pipelining on this rank.

    Args:
        optimized: makes the optimizer of the rank's parameters.
        prepared: what becomes of each stage's module.
    """
    schedule_class, in_a_v = RIVALS[policy]
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    own = stages_of(rank, ranks, 1 if policy == "1f1b" else 2, in_a_v)
    count = ranks * len(own)
    parts = [prepared(part) for k, part in enumerate(model.parts(count)) if k in own]
    stages = [PipelineStage(part, k, count, torch.device("cpu")) for k, part in zip(own, parts, strict=True)]
    schedule = schedule_class(stages[0] if len(stages) == 1 else stages, microbatches, loss_fn=model.loss)
    optimizer = optimized([p for part in parts for p in part.parameters()])
    is_last = count - 1 in own
    inputs = (given["x"],) if 0 in own else ()

    def step() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        more = {"target": given["y"], "losses": losses} if is_last else {}
        schedule.step(*inputs, **more)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if is_last else torch.zeros(())
        distributed.broadcast(loss, 0 if in_a_v else ranks - 1)
        return loss

    return step


def stages_of(rank: int, ranks: int, chunks: int, in_a_v: bool) -> Sequence[int]:
    return [rank, 2 * ranks - 1 - rank] if in_a_v else [rank + ranks * k for k in range(chunks)]
