"""Save the checkpoints that several files of tests load."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import saved
from processes import ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 1 and 2, which four ranks have written in pieces."""
    folder = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        ranks(4).run(saved, str(folder), step, "dp=2 tp=2")
    return folder
