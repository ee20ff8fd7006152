"""``kill -9`` of a rank in a job of torchrun: one message that names the rank and where it was, before torchrun ends
the others."""

from __future__ import annotations

import pytest
from killed_jobs import killed_run, told


@pytest.mark.parametrize(("killed", "moment"), [
    (0, 0.3), pytest.param(1, 0.0, marks=pytest.mark.sweep("test_launch kills rank 1")),
])  # fmt: skip
def test_a_killed_rank_is_named(killed: int, moment: float) -> None:
    """Rank 0 holds the store of torch.distributed's job."""
    text = killed_run(killed, moment, ranks=2)
    assert told(text, killed) == "named", text[-3000:]


def test_what_is_told_is_read() -> None:
    lost = "autopar: rank 1 was lost (killed or crashed); it was last seen in step(…)"
    assert told(lost, 1) == "named"
    assert told(lost, 0) == "another message"
    assert told("torch: a process ended by signal 9", 1) == "no message"
    assert told(f"{lost}\n{lost}", 1) == "named, and more than once"
