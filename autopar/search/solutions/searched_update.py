"""Tell the update of one step from that of another: a plan's bound holds for the step that it was searched for."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any

from autopar.errors import shown
from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import ValueType
from autopar.ir.text.printer import print_type, target_name


@dataclass(frozen=True)
class SearchedUpdate:
    """The update that a plan was searched with.

    Attributes:
        words: the optimizer and the options of the step, such as ``AdamW, clip_norm=1.0``.
        digest: of the ops and their types. Numbers such as learning rates do not count, for they cost nothing.
    """

    words: str
    digest: str

    def to_json(self) -> dict[str, str]:
        """Return the update as JSON."""
        return asdict(self)

    def differs_from(self, other: SearchedUpdate) -> str:
        """Say what another update has instead."""
        return f"{other.words}; here it is {self.words}" if self.words != other.words else "with other ops"


def searched_update(words: str, update: Program) -> SearchedUpdate:
    """Return what tells an explicit update from others: its ops, without the layouts and transfers of a plan."""
    digest = hashlib.blake2b(digest_size=16)
    for node in update.nodes:
        if node.op != "output" and node.target not in transfers.BY_FUNCTION:
            name = node.name if node.op == "placeholder" else target_name(node.target)
            types = [print_type(_whole(record_of(value).type)) for value in (*operands(node), node)]
            digest.update(f"{name}: {', '.join(types)}\n".encode())
    return SearchedUpdate(words, digest.hexdigest())


def _whole(type: ValueType) -> ValueType:
    """Return a type without its layout."""
    parts = tuple(
        None if part is None else replace(part, layout=None) for part in (type if isinstance(type, tuple) else (type,))
    )
    return parts if isinstance(type, tuple) else parts[0]


def update_from(content: Any) -> SearchedUpdate:
    """Read an update from JSON. ``ValueError`` if it is none."""
    right = isinstance(content, dict) and content.keys() == {"words", "digest"}
    if not right or not all(isinstance(value, str) for value in content.values()):
        raise ValueError(f"update: {shown(content)} is no update of a step: words and a digest are wanted")
    return SearchedUpdate(**content)
