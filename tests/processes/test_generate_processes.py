"""Generation on four processes: the tokens of a single device on each rank, and pieces of the cache."""

from __future__ import annotations

from typing import Any

import generated
import pytest
import torch
from generated import alone, prompts
from processes import ranks

from autopar import Mesh

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "top_k": 12}


@pytest.mark.parametrize(
    ("name", "mesh", "plan", "pieces"),
    [("llama", Mesh(dp=2, tp=2), "megatron", 4), ("gpt2", Mesh(tp=4), "megatron", 4),
     ("llama", Mesh(replica=2, shard=2), "hsdp", 4), ("llama", Mesh(dp=2, cp=2), "ddp", 2)],
)  # fmt: skip
def test_each_rank_has_the_tokens_of_a_single_device(name: str, mesh: Mesh, plan: str, pieces: int) -> None:
    """Greedy, then sampled with the first rank's seed. Each rank keeps its pieces of the keys and values (``cp`` splits
    the prompt alone), and two programs are captured however many tokens there are."""
    every = ranks(4).run(generated.on_ranks, name, mesh, plan, [GREEDY, SAMPLED])
    expected = [alone(name, prompts(), **options) for options in (GREEDY, SAMPLED)]
    heads = 2 if name == "llama" else 4
    whole = 2 * 2 * 4 * heads * (6 + 8) * 4 * 8  # keys and values of two layers, in float64
    for found in every:
        assert all(torch.equal(one, other) for one, other in zip(found["tokens"], expected, strict=True))
        assert found["bytes"] == [whole // pieces] * 2 and found["captures"] == [2, 2]
    assert len({found["next"] for found in every}) == 1


def test_ranks_with_different_prompts_all_raise_and_can_go_on() -> None:
    assert set(ranks(4).run(generated.other_prompts)) == {
        (
            "RuntimeError",
            "ranks 0 and 3 bring different values of input_ids, attention_mask, position_ids, which must be equal on "
            "these ranks\n  pass the whole batch on each rank, as autopar.data.sharded gives it (a DistributedSampler "
            'gives each rank other rows), or let each pass its own rows: parallelize(…, inputs="local")',
        )
    }


def test_pieces_of_the_batch_are_refused() -> None:
    assert set(ranks(4).run(generated.local_inputs)) == {
        (
            "ValueError",
            'each rank generates the same tokens, so generate needs inputs="global", the default of parallelize, and '
            'not "local"',
        )
    }
