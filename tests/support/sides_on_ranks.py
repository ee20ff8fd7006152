"""On each rank of real processes: collectives that start from side streams, in the place of a GPU on gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from calls_of_orders import alike, step_in
from cuda_streams import Cuda
from random_orders import by_chance, decided
from streams_on_ranks import new_groups
from torch import distributed

from autopar.runtime.lowering import side_streams
from autopar.runtime.lowering.side_streams import SideStreams
from autopar.runtime.processes.groups import process_groups


@contextlib.contextmanager
def on_side_streams() -> Iterator[Cuda]:
    """Lower for a CPU as for CUDA; a collective that ends waits for nothing but gloo."""
    cuda = Cuda()
    sides = SideStreams(cuda)
    with (
        mock.patch.object(side_streams, "side_streams_of", lambda device: sides),
        mock.patch.object(side_streams, "SIDES", sides),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        yield cuda


def late_streams_are_alike(name: str, sizes: dict[str, int], options: Mapping[str, Any], seeds: range) -> list[str]:
    """Steps in random orders of which some collectives run on ``late``, beside ``today``. Return the groups' names."""
    expected = step_in("today", name, sizes, options)
    before = len(process_groups())
    for seed in seeds:
        with decided(by_chance(seed, late=0.5)), new_groups() as made:
            found = step_in("today", name, sizes, options)
        assert not (wrong := alike(found, expected, 0.0 if distributed.get_world_size() == 2 else 1e-12)), (seed, wrong)
        assert made and len(process_groups()) == before
    return [str(ranks) for ranks in made]


def steps_are_alike(name: str, sizes: dict[str, int], options: Mapping[str, Any], overlaps: list[Any]) -> int:
    """The numbers of steps, beside those of a CPU. Return how often a side stream waited for an event."""
    waited = 0
    for overlap in overlaps:
        with decided(by_chance(overlap)) if isinstance(overlap, int) else contextlib.nullcontext():
            policy = "today" if isinstance(overlap, int) else overlap
            expected = step_in(policy, name, sizes, options, count=3)
            with on_side_streams() as cuda:
                found = step_in(policy, name, sizes, options, count=3)
        assert not (wrong := alike(found, expected, 0.0)), (overlap, wrong)
        waited += sum(line.endswith("waits for an event") for line in cuda.log)
    return waited
