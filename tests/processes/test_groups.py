"""Process groups: one for each set of ranks and purpose, shared by all meshes, closed by the last model that uses
it."""

from __future__ import annotations

from pathlib import Path

import closing
import pytest
import torch
from processes import ranks

import autopar
from autopar import Mesh

CASES = ["shared", "last_one_closes", "again_after_close", "many_times", "one_closes_another_calls",
         "meshes_in_different_orders", "closed_while_an_exception_is_handled", "groups_of_the_user"]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_on_processes(name: str) -> None:
    ranks(4, closing.of_their_own).run(getattr(closing, name))


def test_everything_is_refused_after_close(tmp_path: Path) -> None:
    ranks(4, closing.of_their_own).run(closing.everything_is_refused_after_close, str(tmp_path))


def test_saves_in_a_thread_have_their_own_group(tmp_path: Path) -> None:
    ranks(4, closing.of_their_own).run(closing.saved_in_a_thread, str(tmp_path))


def test_close_in_a_process_that_is_alone() -> None:
    parallel = autopar.parallelize(closing.model(), Mesh(tp=4), closing.PLAN)
    parallel.simulate(closing.X)
    parallel.close()
    parallel.close()
    with pytest.raises(RuntimeError, match="this model is closed"):
        parallel.simulate(torch.zeros(4, 8))
