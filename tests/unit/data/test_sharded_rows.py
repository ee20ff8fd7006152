"""The rows of each rank: together they are those of one device, in one order, on any mesh."""

from __future__ import annotations

import json
import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Augmented, Numbered
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from autopar import Mesh, checkpoint
from autopar.data import ShardedLoader, sharded
from autopar.data.place import Place

pytestmark = pytest.mark.simulated

MESHES = (Mesh(dp=1), Mesh(dp=2), Mesh(dp=3, tp=2), Mesh(tp=2, dp=4), Mesh(dp=2, ep=2), Mesh(tp=2))


def rows(batches: Any) -> list[list[int]]:
    return [batch["k"].tolist() for batch in batches]


def alone(count: int, size: int, **options: Any) -> ShardedLoader:
    return sharded(Numbered(count), Mesh(dp=1), size, rank=0, **options)


def on_all(mesh: Mesh, count: int, size: int, state: Any = None, **options: Any) -> list[list[int]]:
    """The rows of each global batch: those of the ranks, one after the other; replicas must have the same."""
    by_place: dict[tuple[int, ...], list[list[int]]] = {}
    for rank in mesh.ranks:
        loader = sharded(Numbered(count), mesh, size, rank=rank, **options)
        if state is not None:
            loader.load_state_dict(state)
        at = mesh.coordinates(rank)
        own = rows(loader)
        assert by_place.setdefault((at.get("dp", 0), at.get("ep", 0)), own) == own
    return [[*chain(*pieces)] for pieces in zip(*[by_place[place] for place in sorted(by_place)], strict=True)]


@given(st.sampled_from(MESHES), st.integers(0, 20), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 3))
@settings(max_examples=60)
def test_ranks_together_have_the_rows_of_one_device(
    mesh: Mesh, count: int, size: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed}
    whole = rows(alone(count, size, **options))
    assert on_all(mesh, count, size, **options) == whole
    assert len(alone(count, size, **options)) == len(whole)
    taken = [*chain(*whole)]
    kept = count - count % size if drop_last else count
    assert len(taken) == len(set(taken)) == kept and all(len(batch) == size for batch in whole[:-1])


@given(st.sampled_from(MESHES), st.sampled_from(MESHES), st.integers(1, 20), st.integers(1, 6), st.integers(0, 25))
@settings(max_examples=60)
def test_another_mesh_goes_on_with_the_next_row(before: Mesh, after: Mesh, count: int, size: int, stop: int) -> None:
    whole = alone(count, size, shuffle=True)
    all_epochs = [rows(whole) for _ in range(4)]
    loader, taken = sharded(Numbered(count), before, size, True, rank=before.ranks[-1]), 0
    while loader.epoch < 3 and taken != stop:
        for _ in loader:
            taken += 1
            if taken == stop:
                break
    state = json.loads(json.dumps(loader.state_dict()))
    epoch, batches = state["epoch"], -(-state["row"] // size)
    assert on_all(after, count, size, state, shuffle=True) == all_epochs[epoch][batches:]
    if taken == stop and stop:
        assert epoch * len(whole) + batches == stop


def test_a_position_is_part_of_a_checkpoint(tmp_path: Any) -> None:
    loader = alone(10, 4, shuffle=True)
    next(iter(loader))
    checkpoint.save(tmp_path, {"data": loader.state_dict()})
    other = alone(10, 4, shuffle=True)
    other.load_state_dict(checkpoint.load(tmp_path, {"data": other.state_dict()})["data"])
    assert rows(other) == rows(alone(10, 4, shuffle=True))[1:]


def test_another_batch_size_goes_on_with_the_next_row() -> None:
    loader = alone(10, 4)
    next(iter(loader))
    other = alone(10, 3)
    other.load_state_dict(loader.state_dict())
    assert rows(other) == [[4, 5, 6], [7, 8, 9]] and rows(other)[0] == [0, 1, 2]


def test_each_loop_takes_the_next_epoch() -> None:
    loader = alone(6, 2, shuffle=True)
    first, second = rows(loader), rows(loader)
    assert first != second and loader.epoch == 2
    next(iter(loader))
    assert loader.epoch == 2 and rows(loader) != first and loader.epoch == 4
    loader.set_epoch(1)
    assert rows(loader) == second


def test_the_end_of_an_epoch_is_a_position() -> None:
    loader = alone(4, 2)
    *_, last = (loader.state_dict() for _ in loader)
    assert (last["epoch"], last["row"]) == (0, 4)
    done = loader.state_dict()
    assert (done["epoch"], done["row"]) == (1, 0)
    other = alone(4, 2)
    other.load_state_dict(last)  # nothing is left of this epoch
    assert rows(other) == [] and other.epoch == 1
    other.load_state_dict(done)
    assert rows(other) == [[0, 1], [2, 3]]


def test_the_order_is_that_of_a_distributed_sampler() -> None:
    sampler = DistributedSampler(Numbered(12), 1, 0, shuffle=True, seed=5)
    sampler.set_epoch(3)
    loader = alone(12, 12, shuffle=True, seed=5)
    loader.set_epoch(3)
    assert rows(loader) == [list(sampler)]


def test_a_piece_without_rows_has_the_shapes_of_others() -> None:
    loader = sharded(Numbered(5), Mesh(dp=4), 4, rank=3)
    *_, last = loader
    assert last["x"].shape == (0, 3) and last["x"].dtype == torch.float64
    assert last["k"].tolist() == [] and last["text"] == []
    first, *_ = loader
    assert first["x"].tolist() == [[3.0] * 3] and first["text"] == ["row 3"]


def test_pieces_differ_by_one_row_at_most() -> None:
    for count in range(1, 6):
        for n in range(12):
            ends = [Place(k, count).of(n) for k in range(count)]
            assert [end for _, end in ends[:-1]] == [start for start, _ in ends[1:]]
            assert ends[0][0] == 0 and ends[-1][1] == n
            lengths = [end - start for start, end in ends]
            assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("workers", (0, 2))
def test_what_a_row_draws_depends_on_the_row_alone(workers: int) -> None:
    def drawn(mesh: Mesh, rank: int, workers: int, start: int = 0) -> dict[int, list[float]]:
        loader = sharded(Augmented(8), mesh, 4, True, rank=rank, num_workers=workers)
        if start:
            loader.load_state_dict({**loader.state_dict(), "row": start})
        return {
            int(k): values for batch in loader for k, values in zip(batch["k"], batch["drawn"].tolist(), strict=True)
        }

    whole = drawn(Mesh(dp=1), 0, 0)
    assert len({value for values in whole.values() for value in values}) == 24
    halves = {**drawn(Mesh(dp=2), 0, workers), **drawn(Mesh(dp=2), 1, workers)}
    assert halves == whole
    assert drawn(Mesh(dp=1), 0, workers, start=4).items() <= whole.items()


def test_epochs_draw_differently() -> None:
    loader = sharded(Augmented(2), Mesh(dp=1), 2, rank=0)
    (first,), (second,) = loader, loader
    assert not torch.equal(first["drawn"], second["drawn"])


def test_the_training_draws_as_without_a_loader() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    def seeded() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seeded()
    wanted = draw()
    seeded()
    assert len([*sharded(Augmented(4), Mesh(dp=1), 2, rank=0)]) == 2
    assert draw() == wanted


def test_batches_are_fetched_at_once_where_rows_draw_nothing() -> None:
    class Fetched(Numbered):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            return [{"k": k, "together": len(numbers)} for k in numbers]

    (batch,) = sharded(Fetched(3), Mesh(dp=1), 3, rank=0, seed_rows=False)
    assert batch["together"].tolist() == [3, 3, 3]
    (one,) = sharded(TensorDataset(torch.arange(3)), Mesh(dp=1), 3, rank=0)
    assert one[0].tolist() == [0, 1, 2]


def test_a_process_that_is_alone_has_whole_batches() -> None:
    assert rows(sharded(Numbered(5), Mesh(dp=2, tp=2), 4)) == [[0, 1, 2, 3], [4]]


def test_axes_split_the_batch_major_first() -> None:
    mesh = Mesh(replicate=2, shard=2)
    assert [rows(sharded(Numbered(4), mesh, 4, rank=rank, axes=("shard", "replicate"))) for rank in mesh.ranks] == [
        [[0]], [[2]], [[1]], [[3]],
    ]  # fmt: skip


def hybrid() -> autopar.Parallel:
    return autopar.parallelize(torch.nn.Linear(3, 1), Mesh(dp=2, fsdp=2), "hsdp", inputs="local")


def test_axes_are_those_of_the_plan() -> None:
    """Axes of one rank may be named or left out."""
    for axes in (None, ("dp", "fsdp")):
        rows = [next(iter(sharded(Numbered(8), hybrid(), 8, rank=rank, axes=axes)))["k"].tolist() for rank in range(4)]
        assert rows == [[0, 1], [2, 3], [4, 5], [6, 7]]
    parallel = autopar.parallelize(torch.nn.Linear(3, 1), Mesh(dp=1, tp=2), "ddp", inputs="local")
    for axes in (None, ("dp",)):
        assert len(next(iter(sharded(Numbered(8), parallel, 8, rank=1, axes=axes)))["k"]) == 8


@pytest.mark.parametrize("seed", (-1, 2**64 - 1, 2**70))
def test_seeds_of_any_size(seed: int) -> None:
    loader = sharded(Numbered(8), Mesh(dp=1), 8, True, seed=seed, rank=0)
    assert all(sorted(batch["k"].tolist()) == [*range(8)] for _ in range(2) for batch in loader)


def test_one_axis_may_be_its_name_and_a_size_a_number_of_numpy() -> None:
    assert rows(sharded(Numbered(4), Mesh(a=2, b=2), np.int64(4), rank=3, axes="b")) == [[2, 3]]


def test_inputs_global_gives_whole_batches_on_each_rank() -> None:
    assert rows(sharded(Numbered(4), Mesh(dp=2), 4, rank=1, inputs="global")) == [[0, 1, 2, 3]]


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: sharded(Numbered(4), Mesh(dp=2), 0), ValueError,
     "batch_size=0 is not an integer ≥ 1; it counts the rows of a global batch"),
    (lambda: sharded(Numbered(4), Mesh(dp=2), 2, inputs="whole"), ValueError,
     "inputs='whole' is unknown; there are 'global' and 'local'"),
    (lambda: sharded(Numbered(4), Mesh(dp=2), 2, sampler=[0]), TypeError,
     "sharded decides sampler of DataLoader; use shuffle= and seed=, or give the dataset in another order "
     "(torch.utils.data.Subset)"),
    (lambda: sharded(Numbered(4), Mesh(dp=2), 2, in_order=False), TypeError,
     "sharded decides in_order of DataLoader; use num_workers= alone: batches come in the order of the rows, for all "
     "ranks take pieces of one batch"),
    (lambda: sharded(Numbered(4), Mesh(dp=2), 2, rank=True), ValueError,
     "rank=True is not an integer; it is a rank of the mesh"),
    (lambda: sharded(Numbered(4), Mesh(pp=2, dp=2), 2, rank=0, axes=("pp",)), ValueError,
     "axes=('pp',) names pp, and all stages take the same rows; leave it out"),
    (lambda: sharded(Numbered(4), hybrid(), 2, rank=0, axes=("dp",)), ValueError,
     "axes=('dp',), and the plan splits the batch over ('dp', 'fsdp'): rows would count several times, or not at all; "
     "leave axes= out, which takes those of the plan"),
    (lambda: sharded(Numbered(4), hybrid(), 2, rank=0, axes="fsdb"), ValueError,
     "the mesh (dp=2 fsdp=2) has no axis 'fsdb'; its axes are dp, fsdp; did you mean 'fsdp'?"),
    (lambda: alone(4, 2).load_state_dict(None), TypeError,  # type: ignore[arg-type]
     "a position is what state_dict of a sharded loader returned, not a NoneType"),
    (lambda: sharded(7, Mesh(dp=2), 2), TypeError,  # type: ignore[arg-type]
     "the dataset is an int; it needs __len__ and __getitem__, or be an IterableDataset"),
    (lambda: sharded(DataLoader(Numbered(4)), Mesh(dp=2), 2), TypeError,  # type: ignore[arg-type]
     "the dataset is a DataLoader; it needs __len__ and __getitem__, or be an IterableDataset; pass its .dataset"),
    (lambda: sharded(Numbered(4), Mesh(dp=2), 2, True, seed=None), ValueError,  # type: ignore[arg-type]
     "seed=None is not an integer; all ranks give the same one"),
    (lambda: sharded(Numbered(4), 2, 2), TypeError,
     "sharded takes an autopar.Mesh, a DeviceMesh or what parallelize returned, not an int"),
    (lambda: sharded(Numbered(4), Mesh(dp=2), 2, rank=2), ValueError,
     "rank 2 is not on the mesh (dp=2), whose ranks are 0 1"),
    (lambda: sharded(Numbered(4), Mesh(dp=2), 2, rank=0, axes=("pd",)), ValueError,
     "the mesh (dp=2) has no axis 'pd'; its axes are dp; did you mean 'dp'?"),
    (lambda: sharded(Numbered(4), Mesh(dp=2), 2, rank=0, axes=("dp", "dp")), ValueError,
     "axes=('dp', 'dp') names an axis twice; name each axis that splits the batch once"),
    (lambda: sharded(Numbered(4), Mesh(a=2, b=2), 2, rank=0), ValueError,
     "the mesh (a=2 b=2) has several data axes, a and b; name those over which the plan splits the batch: "
     "axes=('a', 'b') with the preset hsdp, axes=('a',) without it"),
    (lambda: sharded(Numbered(4), Mesh(dp=2, cp=2), 2, rank=0), ValueError,
     "on the mesh (dp=2 cp=2) each rank has a part of the sequence, and a loader cuts rows only; use "
     'inputs="global" here and in parallelize, so that each rank keeps its part of the whole batch'),
    (lambda: alone(4, 2).set_epoch(-1), ValueError, "epoch -1 is not an integer ≥ 0"),
    (lambda: alone(4, 2).load_state_dict({}), ValueError,
     "this is no position of a sharded loader: it has no rows, shuffle, seed, epoch"),
    (lambda: alone(4, 2, shuffle=True).load_state_dict(alone(5, 2, seed=1).state_dict()), ValueError,
     "the position belongs to other data: rows is 4, and it was 5; shuffle is True, and it was False; seed is 0, and "
     "it was 1; make the loader as it was, or begin anew without the position"),
    (lambda: alone(4, 2).load_state_dict({**alone(4, 2).state_dict(), "row": 9}), ValueError,
     "row 9 of the position is not between 0 and 4"),
]  # fmt: skip


@pytest.mark.parametrize("call, kind, text", ERRORS)
def test_errors(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == text
