"""Look a capture up by everything that decides it, and keep it if it is new: in a folder, for other processes.

The key has what is known before a capture. Beside it, an entry has the guards of the capture: the functions that ran
and the values that they read. An entry is used if they are the same here, as in one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from autopar.cache.codec import Check, Codec, Planned, Texts, made_digest, opened, texts_of
from autopar.cache.folder import Folder, Unusable
from autopar.cache.refused import NotCached, failures_as_refused
from autopar.cache.shared import planned_by_first
from autopar.cache.surroundings import surroundings
from autopar.gc_pause import gc_paused
from autopar.ir.digest import text_digest
from autopar.report.passes import PassReport
from autopar.runtime.processes.agreement import Agreement

T = TypeVar("T")
VARIANTS = 8  # entries of one key that are compared
REPORT = "cache"
LONG = 400  # letters; a fact with more is known by its digest


@dataclass(frozen=True)
class Found(Generic[T]):
    """What an entry has, with its texts."""

    made: T
    texts: Texts


@dataclass(eq=False)
class Cache:
    """The captures of one model that other processes have made, or may use.

    Attributes:
        folder: where they are kept.
        lines: what came of each look into it, as the reports say.
    """

    folder: Folder
    lines: list[str] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """How often something was found."""
        return sum(line.startswith("hit") for line in self.lines)

    def through(self, codec: Codec[T], ranks: Agreement | None = None) -> tuple[T, PassReport, str]:
        """Return what the codec makes: from an entry if there is one, and the report that says so.

        Args:
            ranks: those that have the same call; the first one plans, and the others read.
        """
        making = 0.0  # seconds, which the passes report

        def make(ranks: Agreement | None, check: Check | None) -> T:
            nonlocal making
            start = time.perf_counter()
            try:
                return codec.make(ranks, check)
            finally:
                making += time.perf_counter() - start

        timed, start = replace(codec, make=make), time.perf_counter()
        planned = (
            self.planned(timed, ranks)
            if ranks is None
            else planned_by_first(partial(self.planned, timed, None), timed, ranks)
        )
        self.lines.append(planned.line)
        report = PassReport(REPORT, (time.perf_counter() - start - making) * 1e3, notes=(planned.line,))
        return planned.made, report, "" if planned.texts is None else made_digest(planned.texts)

    def planned(self, codec: Codec[T], ranks: Agreement | None, check: Check | None = None) -> Planned[T]:
        """Return what this process finds or makes.

        Args:
            ranks: those with which it agrees on a plan.
            check: is called once a call is captured; what it raises ends the search for a plan.
        """
        try:
            with failures_as_refused():
                key = Key.of(codec)
        except NotCached as refused:
            if check is not None:
                raise
            return Planned(codec.make(ranks, None), f"not used: {refused}", None)
        found, why = self.found(key, codec)
        if found is not None:
            return Planned(found.made, f"hit: {key.text[:12]} in {self.folder.path}", found.texts)
        made = codec.make(ranks, check)
        try:
            with failures_as_refused():
                texts = texts_of(codec, made)
        except NotCached as refused:
            return Planned(made, f"miss: {why}; not kept: {refused}", None)
        failed = self.folder.write(key.text, key.facts, texts)
        kept = f"not kept: {failed}" if failed else f"kept as {key.text[:12]} in {self.folder.path}"
        return Planned(made, f"miss: {why}; {kept}", texts)

    @gc_paused()
    def found(self, key: Key, codec: Codec[T]) -> tuple[Found[T] | None, str]:
        """Return what an entry has, or why there is none."""
        if why := self.folder.why_untrusted():
            return None, why
        reasons = []
        for path in self.folder.variants(key.text)[:VARIANTS]:
            try:
                entry = self.folder.read(path)
                found = opened(entry.texts, codec)
            except Unusable as error:
                reasons.append(str(error))
                self.folder.remove(path)
                continue
            if not isinstance(found, str):
                return Found(found, entry.texts), ""
            reasons.append(found)
        return None, reasons[0] if reasons else self._nearest(key)

    def _nearest(self, key: Key) -> str:
        """Say which facts differ from those of the entry that is most like it, of those used last."""
        nearest: list[str] | None = None
        for path in self.folder.entries()[:VARIANTS]:
            try:
                about = self.folder.read(path, touch=False).about
            except Unusable:
                continue
            if about.get("kind") == key.facts["kind"]:
                different = [name for name, value in key.facts.items() if about.get(name) != value]
                if nearest is None or len(different) < len(nearest):
                    nearest = different
        return "nothing was kept before" if nearest is None else f"other {', '.join(nearest)} than in what is kept"


def on_all_ranks(cache: Cache | None, ranks: Agreement | None) -> tuple[Cache | None, str]:
    """Return the cache if all ranks have one, else ``None``, and why. All ranks call it.

    A rank that only looks into a cache would wait for ranks that do not.
    """
    if ranks is None:
        return cache, ""
    has = ranks.gathered(cache is not None)
    if all(has) or not any(has):
        return cache, ""
    return None, f"off on rank {has.index(False)}, and so on all ranks"


@dataclass(frozen=True)
class Key:
    """Everything that decides a capture and is known before it.

    Attributes:
        text: the digest.
        facts: name → what it is; long ones as digests.
    """

    text: str
    facts: Mapping[str, Any]

    @staticmethod
    def of(codec: Codec[Any]) -> Key:
        """Return the key of what a codec makes. ``NotCached`` if something that decides it has no text."""
        facts = {"kind": codec.kind, **_short({**surroundings(), **codec.facts()}.items())}
        return Key(text_digest(json.dumps(facts, sort_keys=True)), facts)


def _short(facts: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    short = {}
    for name, fact in facts:
        text = json.dumps(fact, sort_keys=True)
        short[name] = json.loads(text) if len(text) <= LONG else f"digest {text_digest(text)}"
    return short
