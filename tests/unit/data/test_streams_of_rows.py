"""Streams without numbers of rows: each rank reads all of it, and takes its rows of each batch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from datasets import StatefulStream, Stream

from autopar import Mesh, checkpoint
from autopar.data import ShardedLoader, sharded

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
