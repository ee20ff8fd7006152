"""Say why something is not kept for other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class NotCached(Exception):
    """It cannot be kept, or compared with what another process has."""


@contextlib.contextmanager
def failures_as_refused() -> Iterator[None]:
    """Raise ``NotCached`` for any error: what looks at the user's objects may fail, and must not end a run."""
    try:
        yield
    except NotCached:
        raise
    except Exception as error:
        raise NotCached(f"{type(error).__name__}: {error}") from error
