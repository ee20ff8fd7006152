"""Streams without numbers of rows: each rank reads all of it, and takes its rows of each batch."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from datasets import Shuffled, StatefulStream, Stream

from autopar import Mesh, checkpoint
from autopar.data import ShardedLoader, sharded
from autopar.data.place import WHOLE
from autopar.data.rows import Collate
from autopar.data.seeded_stream import digest_of
from autopar.data.stream import StreamLoader

pytestmark = pytest.mark.simulated

pytest.importorskip("torchdata", reason="streams need torchdata")


def on(mesh: Mesh, rank: int, dataset: Any, **options: Any) -> ShardedLoader:
    return sharded(dataset, mesh, 4, rank=rank, **options)


def rows(loader: ShardedLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", (Stream, StatefulStream))
def test_ranks_together_have_the_rows_of_the_stream(kind: Any) -> None:
    first, second = (rows(on(Mesh(dp=2), rank, kind(9))) for rank in range(2))
    assert first == [[0, 1], [4, 5], [8]] and second == [[2, 3], [6, 7], []]


@pytest.mark.parametrize("kind, workers", ((Stream, 0), (Stream, 2), (StatefulStream, 0)))
def test_another_mesh_goes_on_with_the_next_row(kind: Any, workers: int, tmp_path: Any) -> None:
    whole = rows(on(Mesh(dp=1), 0, kind(12), num_workers=workers))
    assert len(whole) == 3 or workers
    loader = on(Mesh(dp=2), 1, kind(12), num_workers=workers)
    next(iter(loader))
    checkpoint.save(tmp_path, {"data": loader.state_dict()})
    other = on(Mesh(dp=1), 0, kind(12), num_workers=workers)
    other.load_state_dict(checkpoint.load(tmp_path, {})["data"])
    assert other.state_dict()["batches"] == 1
    assert rows(other) == whole[1:]


def test_a_stream_is_told_its_epoch() -> None:
    loader = on(Mesh(dp=1), 0, StatefulStream(4))
    assert rows(loader) == [[0, 1, 2, 3]] and rows(loader) == [[1000, 1001, 1002, 1003]]


def drawn_rows(loader: ShardedLoader) -> list[tuple[int, float]]:
    return [row for batch in loader for row in zip(batch["k"].tolist(), batch["drawn"].tolist(), strict=True)]


@pytest.mark.parametrize("workers", (0, 2))
def test_a_stream_that_shuffles_itself_has_one_order_on_all_ranks(workers: int) -> None:
    """Whatever the state of a rank's generators; and these are left alone."""
    whole = drawn_rows(on(Mesh(dp=1), 0, Shuffled(14), num_workers=workers))
    assert sorted(k for k, _ in whole) == [*range(14)] and [k for k, _ in whole] != [*range(14)]
    parts = []
    for rank in range(2):
        random.seed(rank)
        torch.manual_seed(rank)
        before = random.getstate(), torch.get_rng_state().tolist()
        loader = on(Mesh(dp=2), rank, Shuffled(14), num_workers=workers)
        parts.append(drawn_rows(loader))
        assert workers or (random.getstate(), torch.get_rng_state().tolist()) == before
        second = drawn_rows(loader)
        assert [k for k, _ in second] != [k for k, _ in parts[-1]]
    assert sorted(parts[0] + parts[1]) == sorted(whole)


def test_a_stream_that_shuffles_itself_goes_on_where_it_was() -> None:
    whole = drawn_rows(on(Mesh(dp=1), 0, Shuffled(12)))
    loader = on(Mesh(dp=2), 1, Shuffled(12))
    next(iter(loader))
    other = on(Mesh(dp=1), 0, Shuffled(12))
    other.load_state_dict(loader.state_dict())
    assert drawn_rows(other) == whole[4:]


def test_seeds_and_none() -> None:
    first, second = (drawn_rows(on(Mesh(dp=1), 0, Shuffled(12), seed=seed)) for seed in (0, 1))
    assert first != second
    unseeded = []
    for _ in range(2):
        random.seed(5)
        torch.manual_seed(5)
        unseeded.append(torch.rand(()).item())
        drawn_rows(on(Mesh(dp=1), 0, Shuffled(12), seed_rows=False))
        unseeded.append(torch.rand(()).item())
    assert unseeded[0] == unseeded[2] and unseeded[1] == unseeded[3]


def test_ranks_compare_the_rows_of_some_batches() -> None:
    """Of the batches 1, 2, 4, 8, …"""
    said: list[str] = []
    options = {"batch_size": 2, "drop_last": False}
    loader = StreamLoader(Stream(18), 0, Collate(torch.tensor, WHOLE), options, said.append)
    assert len([*loader]) == 9
    of_batches = [text for text in said if text.startswith("take batch")]
    assert [text.split()[2] for text in of_batches] == ["1", "2", "4", "8"]
    assert f"whose rows have the digest {digest_of([2, 3])}: each rank reads the whole stream" in of_batches[1]


def test_digests_differ_where_rows_do() -> None:
    rows = [
        1,
        2.0,
        "a",
        b"a",
        None,
        [1],
        [[1]],
        {"a": 1},
        {"b": 1},
        torch.zeros(2),
        torch.zeros(3),
        torch.ones(2),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(3).numpy(),
        [1, 2],
        [[1, 2]],
        ["12"],
        ["1", "2"],
    ]
    assert len({digest_of(row) for row in rows}) == len(rows)
    assert digest_of([torch.ones(2), {"a": 1}]) == digest_of([torch.ones(2), {"a": 1}])


def test_a_stream_of_other_workers_is_refused() -> None:
    loader = on(Mesh(dp=1), 0, Stream(4))
    with pytest.raises(ValueError) as raised:
        loader.load_state_dict({**loader.state_dict(), "num_workers": 2})
    assert str(raised.value).startswith("the position belongs to other data: num_workers is 0, and it was 2; ")


def test_a_stream_shuffles_itself() -> None:
    with pytest.raises(ValueError, match="shuffle=True needs rows with numbers; an IterableDataset shuffles its own"):
        on(Mesh(dp=1), 0, Stream(4), shuffle=True)


def test_torchdata_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(ImportError, match=r"needs torchdata, .*: pip install 'autopar\[data\]'"):
        on(Mesh(dp=1), 0, Stream(4))
