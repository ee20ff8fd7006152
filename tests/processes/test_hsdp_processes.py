"""HSDP on four processes, two replicas of two pieces, beside a single device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hsdp_on_ranks import eager, trained
from processes import ranks


@pytest.mark.parametrize("options", [{"loop": True}, {"microbatches": 2}, {"zero": 3}], ids=str)
def test_losses_parameters_and_placements(options: dict[str, Any]) -> None:
    """State dicts say ``[Replicate(), Shard(0)]``, and the moments of AdamW lie as the parameters do."""
    losses, parameters = eager()
    for found in ranks(4).run(trained, options):
        torch.testing.assert_close(found["losses"], losses)
        torch.testing.assert_close(found["parameters"], parameters)
        first, last = "(Replicate(), Shard(dim=0))", "(Replicate(), Shard(dim=1))"
        assert found["placements"] == {
            "up.weight": first, "down.weight": first, "odd.weight": last, "odd.bias": first,
        }  # fmt: skip
        assert [placements for placements, _ in found["moments"]] == [first, first, last, first]
        assert [shape for _, shape in found["moments"]][:3] == [(6, 8), (4, 12), (5, 4)]
