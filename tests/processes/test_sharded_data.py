"""Loaders on real ranks: the losses of one device, with uneven last batches."""

from __future__ import annotations

import pytest
import sharded_data
from processes import ranks


@pytest.mark.parametrize("whole_step", (False, True))
@pytest.mark.parametrize("inputs", ("local", "global"))
def test_trains_as_one_device(inputs: str, whole_step: bool) -> None:
    ranks(4).run(sharded_data.trains_as_one_device, inputs, whole_step)


def test_refuses_ranks_that_differ() -> None:
    ranks(4).run(sharded_data.refuses_ranks_that_differ)


def test_refuses_streams_that_differ() -> None:
    ranks(4).run(sharded_data.refuses_streams_that_differ)


def test_takes_a_mesh_of_the_job() -> None:
    ranks(4).run(sharded_data.takes_a_mesh_of_the_job)
