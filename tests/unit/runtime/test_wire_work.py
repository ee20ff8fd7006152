"""What becomes of an operation on an emulated wire that some rank never issues, or whose table has no room."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from autopar.runtime.wire.carry import Carried
from autopar.runtime.wire.clock import now
from autopar.runtime.wire.link_table import SIZE, LinkTable, key_of
from autopar.runtime.wire.report import Counts
from autopar.runtime.wire.transfer import Medium, Transfer
from autopar.runtime.wire.work import CollectiveWork, InOrder, MessageWork


@dataclass
class File:
    """The ranks that live."""

    alive: tuple[int, ...]

    def is_alive(self, rank: int) -> bool:
        return rank in self.alive


class Done(torch.distributed.Work):
    """An operation of gloo that is over, or will be when ``end`` is called."""

    def __init__(self, over: bool = True) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        if over:
            self.end()

    def end(self) -> None:
        self.future.set_result([torch.ones(1)])

    def get_future(self) -> Any:
        return self.future

    def wait(self, *_: Any) -> bool:
        self.future.wait()
        return True


def transfer(alive: tuple[int, ...] = (0, 1), timeout: float = 30.0, name: str = "broadcast") -> Transfer:
    table = LinkTable(bytearray(SIZE), contextlib.nullcontext, now)
    medium: Any = Medium(table, File(alive), Counts())  # type: ignore[arg-type]
    return Transfer(key_of(1), (0, 1), (10, 20), "0", name, 8, 0.01, timeout, medium)


def collective(one: Transfer, inner: Done, order: InOrder | None = None) -> CollectiveWork:
    one.issue()
    return CollectiveWork(Carried([inner]), one, order or InOrder())


def waits(work: Any) -> None:
    work.wait()


def waits_for_future(work: Any) -> None:
    work.get_future().wait()


@pytest.mark.parametrize("wait", [waits, waits_for_future])
def test_a_collective_that_a_dead_rank_has_not_issued_is_an_error(wait: Callable[[Any], None]) -> None:
    work = collective(transfer(alive=(0,)), Done())
    with pytest.raises(RuntimeError, match=r"rank 1 has ended, and not all ranks have issued broadcast of group 0"):
        wait(work)


def test_a_message_that_a_dead_rank_has_not_issued_is_an_error() -> None:
    one = transfer(alive=(0,), name="send")
    one.issue()
    with pytest.raises(RuntimeError, match=r"rank 1 has ended, and not all ranks have issued send of group 0"):
        MessageWork(Done(), one).wait()


def test_a_rank_that_lives_and_does_not_come_is_an_error_after_the_time_out() -> None:
    one = transfer(timeout=0.1)
    with pytest.raises(RuntimeError, match=r"broadcast of group 0 has timed out after 0.1 s|have issued broadcast of"):
        collective(one, Done()).wait()
    one = transfer(timeout=0.1)
    with pytest.raises(RuntimeError, match=r"not all ranks have issued broadcast of group 0 within 0.1 s"):
        collective(one, Done()).get_future().wait()
    one = transfer(timeout=0.1, name="send")
    one.issue()
    with pytest.raises(RuntimeError, match=r"not all ranks have issued send of group 0 within 0.1 s"):
        MessageWork(Done(), one).wait()


def test_it_ends_when_the_last_rank_has_issued_it() -> None:
    one = transfer()
    work = collective(one, Done())
    assert not work.is_completed()
    one.issue()  # the other rank
    work.wait()
    assert work.is_completed()
    (record,) = one.medium.counts.records
    assert now() >= record.end == pytest.approx(record.begin + 0.01)
    assert [tensor.tolist() for tensor in work.result()] == [[1.0]]


def test_a_collective_ends_after_the_one_before_it() -> None:
    """Its own data and deadline do not suffice."""
    first, order, slow = transfer(), InOrder(), Done(over=False)
    second = replace(first, key=key_of(2))
    works = [collective(first, slow, order), collective(second, Done(), order)]
    first.issue()
    second.issue()
    done = list[int]()
    for k, work in enumerate(works):
        work.get_future().add_done_callback(lambda _, k=k: done.append(k))
    assert not works[1]._may_end.wait(0.05)
    assert not works[1].is_completed()
    slow.end()
    works[1].get_future().wait()
    assert works[0].is_completed()
    assert done[0] == 0


def test_a_full_table_is_an_error_after_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    one = transfer(timeout=0.0)
    monkeypatch.setattr(one.medium.table, "issue", lambda *_: False)
    with pytest.raises(RuntimeError, match=r"has had no room for broadcast for 0 s: too many transfers are started"):
        one.issue()
