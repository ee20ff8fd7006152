"""Define how a result is written to files of JSON, and read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from autopar.cache.folder import Unusable, digest_of
from autopar.cache.kept_guards import guards_of, guards_to_json
from autopar.capture import Captured
from autopar.capture.guards import Guards
from autopar.runtime.processes.agreement import Agreement

T = TypeVar("T")
U = TypeVar("U")
GUARDS, MADE = "guards.json", "made.json"
Texts = Mapping[str, str]  # name of a file → its JSON
Check = Callable[[Captured], None]  # raises ``NotCached`` for a capture that cannot be kept
Make = Callable[[Agreement | None, Check | None], T]  # for ranks that agree, or for one; ``Check`` looks at the capture


@dataclass(frozen=True)
class Codec(Generic[T]):
    """How something is kept that was made of a capture.

    Attributes:
        kind: what it is, in one word.
        model: the model that was captured; ``None`` where no forward decides it.
        facts: returns what decides it, besides what surrounds it, by name.
        guards: returns its guards.
        write: returns it as JSON.
        read: makes it of JSON and guards.
    """

    kind: str
    model: torch.nn.Module | None
    facts: Callable[[], Mapping[str, Any]]
    guards: Callable[[T], Guards | None]
    write: Callable[[T], Any]
    read: Callable[[Any, Guards], T]

    def around(self, apart: Callable[[U], T], together: Callable[[T], U]) -> Codec[U]:
        """Return how another thing is kept: ``apart`` returns what is kept of it, ``together`` makes it of that."""
        return Codec(
            self.kind, self.model, self.facts, lambda made: self.guards(apart(made)),
            lambda made: self.write(apart(made)), lambda content, guards: together(self.read(content, guards)),
        )  # fmt: skip


@dataclass(frozen=True)
class Planned(Generic[T]):
    """What one process has found or made, with the texts by which others have the same.

    Attributes:
        line: what came of the look into the folder.
        texts: ``None`` where it cannot be kept.
    """

    made: T
    line: str
    texts: Texts | None


def texts_of(codec: Codec[T], made: T) -> Texts:
    """Return the files of an entry.

    Raises:
        NotCached: a part of it has no form that another process could read.
    """
    guards = codec.guards(made)
    kept = None if guards is None or codec.model is None else guards_to_json(guards, codec.model)
    return {GUARDS: _text(kept), MADE: _text(codec.write(made))}


def opened(texts: Texts, codec: Codec[T]) -> T | str:
    """Return what the files of an entry have; or, in words, what differs in this process.

    Raises:
        Unusable: the files are malformed.
    """
    try:
        guards: Guards | str = Guards((), ())
        if codec.model is not None:
            guards = guards_of(json.loads(texts[GUARDS]), codec.model)
        return guards if isinstance(guards, str) else codec.read(json.loads(texts[MADE]), guards)
    except Exception as error:  # whatever reading malformed JSON raises; it is no error of the user's
        raise Unusable(f"the entry is malformed: {type(error).__name__}: {error}") from error


def made_digest(texts: Texts) -> str:
    """Return the digest of what was made."""
    return digest_of(texts[MADE].encode())


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))
