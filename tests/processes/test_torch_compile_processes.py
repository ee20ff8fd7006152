"""The backend of torch.compile on processes."""

from __future__ import annotations

import compiled_by_backend
from processes import ranks


def test_the_backend_on_processes() -> None:
    ranks(2).run(compiled_by_backend.compiles_on_processes)
