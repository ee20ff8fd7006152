"""On the processes of a job the first rank plans, and the others read what it has found or made.

They wait at the store of the job, so planning may take longer than any time-out. Those that see the same folder read
the entry there; if one does not, the text goes over the control group. Each rank compares the guards with its own
values. Where they differ, or nothing can be kept, each rank captures by itself, as without a cache.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from torch import distributed

from autopar import errors
from autopar.cache.codec import Check, Codec, Make, Planned, guards_to_json, opened
from autopar.cache.folder import NotCached, Unusable, failures_as_refused
from autopar.capture import Captured
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.launch import store_of_job

T = TypeVar("T")
WAITS = 0.5  # the most seconds between two looks at the store
EACH = "each rank captures by itself"
_CALLS = itertools.count()


@cache
def _store() -> distributed.Store:
    """Return the store of the job."""
    return store_of_job()


def planned_by_first(
    plan: Callable[[Check], Planned[T]], make: Make[T], codec: Codec[T], ranks: Agreement
) -> Planned[T]:
    """Return what the first rank has found or made; all ranks call it.

    Args:
        plan: finds or makes it, on the first rank.
        make: makes it on each rank, where it cannot be kept.

    Raises:
        Exception: what the first rank has raised, with its text.
    """
    number = next(_CALLS)
    planned, error, why = None, None, ""
    if ranks.rank == 0:
        try:
            planned = plan(_check_of(codec))
        except NotCached as refused:
            why = str(refused)
        except Exception as raised:  # whatever planning raises is raised on all ranks
            error = raised
        _store().set(f"autopar/planned/{number}", "1")
    else:
        wait_until(lambda: _store().check([f"autopar/planned/{number}"]))
    said = ranks.text_of_first(_said(planned, error, why))
    content = json.loads(said)
    if error is not None:
        raise error
    if content["error"] is not None:
        raise _raised(content["error"])
    line = content["line"]
    if content["texts"] is None:
        return Planned(make(ranks, None), f"{line}; {EACH}", None)
    failed = ""
    if planned is None:
        failed, planned = _opened(codec, content)
    differing = {rank: text for rank, text in enumerate(ranks.gathered(failed)) if text}
    if differing:
        rank, text = next(iter(differing.items()))
        return Planned(make(ranks, None), f"{line}; on rank {rank} {text}, so {EACH}", None)
    assert planned is not None
    return planned


def _check_of(codec: Codec[Any]) -> Callable[[Captured], None]:
    """Return what looks at a capture before its plan is searched: whether its guards can be kept."""

    def check(captured: Captured) -> None:
        if codec.model is not None:
            with failures_as_refused():
                guards_to_json(captured.guards, codec.model)

    return check


def _said(planned: Any, error: Exception | None, why: str) -> str:
    """Return what the first rank tells the others."""
    figures = {name: getattr(error, name) for name in ("least", "bytes") if hasattr(error, name)}
    told = None if error is None else [type(error).__name__, str(error), figures]
    line = planned.line if planned is not None else f"not used: {why}"
    texts = None if planned is None else planned.texts
    return json.dumps({"error": told, "line": line, "texts": texts})


def _raised(told: list[Any]) -> Exception:
    """Return the error that the first rank has raised."""
    name, text, figures = told
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.AutoparError):
        error: Exception = kind(text)
        vars(error).update(figures)
        return error
    builtin = {each.__name__: each for each in (ValueError, TypeError, RuntimeError, KeyError, NotImplementedError)}
    return builtin.get(name, RuntimeError)(text if name in builtin else f"{name} on rank 0: {text}")


def _opened(codec: Codec[T], content: Any) -> tuple[str, Planned[T] | None]:
    """Return what the first rank has sent; or, in words, what differs on this rank."""
    try:
        found = opened(content["texts"], codec)
    except Unusable as error:
        return str(error), None
    if isinstance(found, str):
        return found, None
    return "", Planned(found, f"read from rank 0; there: {content['line']}", content["texts"])


def wait_until(there: Callable[[], bool]) -> None:
    """Wait until something is there; the looks become rarer."""
    pause = 0.005
    while not there():
        time.sleep(pause)
        pause = min(WAITS, pause * 1.3)
