"""Python values that forward reads, on processes: changed in either model, alike on all ranks or not."""

from __future__ import annotations

import calls_of_guards
import pytest
from processes import ranks


@pytest.mark.parametrize("name", ["changed_in_either_model", "annealed", "values_that_differ"])
def test_on_processes(name: str) -> None:
    ranks(2).run(getattr(calls_of_guards, name))
