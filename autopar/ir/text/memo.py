"""Keep what texts were read as, because the programs of a pass after another have most of their lines in common."""

from __future__ import annotations

from typing import TypeVar

V = TypeVar("V")

LIMIT = 65536


class Memo(dict[str, V]):
    """A dict that begins anew when it is full."""

    def keep(self, text: str, value: V) -> V:
        if len(self) >= LIMIT:
            self.clear()
        self[text] = value
        return value
