"""An exported program on processes."""

from __future__ import annotations

import exported_models
from processes import ranks


def test_an_exported_program_on_processes() -> None:
    ranks(2).run(exported_models.trains_on_processes)
