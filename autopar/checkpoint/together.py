"""What all ranks do together: a failure of one is an error on all, and none waits for it."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import distributed

from autopar.errors import CheckpointError

T = TypeVar("T")
Group = distributed.ProcessGroup | None  # None: that of all processes, and none where there is one process alone

SHOWN = 5  # differences that an error lists


def alone() -> bool:
    """Whether this process has no others."""
    return not (distributed.is_available() and distributed.is_initialized())


def rank_in(group: Group) -> int:
    """The number of this process among those of the group."""
    return 0 if alone() else distributed.get_rank(group)


def ranks_of(group: Group) -> list[int]:
    """The ranks of the group, in its order."""
    return [0] if alone() else distributed.get_process_group_ranks(group)


def everywhere(group: Group, function: Callable[[], T]) -> list[T]:
    """What a function returns on each rank of the group. All of them call this.

    Raises:
        Exception: what it raised on this rank.
        CheckpointError: it raised on another, or a rank was lost.
    """
    value, failure = _tried(function)
    told: list[tuple[T | None, str]] = [(value, _text(failure))] * len(ranks_of(group))
    if not alone():
        with _lost():
            distributed.all_gather_object(told, told[0], group)
    if failure is not None:
        raise failure
    for rank, (_, text) in zip(ranks_of(group), told, strict=True):
        if text:
            raise CheckpointError(f"rank {rank} failed, so no rank goes on: {text}")
    return [value for value, _ in told]  # type: ignore[misc]


def from_first(group: Group, function: Callable[[], T]) -> T:
    """What a function returns on the first rank of the group; the others do not call it. All of them call this.

    Raises:
        Exception: what it raised; where nothing was found, all ranks say so.
        CheckpointError: it raised something else on another rank, or a rank was lost.
    """
    value, failure = _tried(function) if rank_in(group) == 0 else (None, None)
    told: list[Any] = [value, _text(failure), isinstance(failure, FileNotFoundError)]
    if not alone():
        with _lost():
            distributed.broadcast_object_list(told, group=group, group_src=0)
    value, text, nothing = told
    if failure is not None:
        raise failure
    if text:
        raise FileNotFoundError(text) if nothing else CheckpointError(text)
    return value  # type: ignore[return-value]


def _tried(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _text(failure: Exception | None) -> str:
    if failure is None:
        return ""
    return str(failure) if isinstance(failure, (CheckpointError, FileNotFoundError)) else f"{type(failure).__name__}: {failure}"


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost(error) from error


def lost(error: Exception, what: str = "no checkpoint was written or loaded") -> CheckpointError:
    """The error of a collective that failed: a rank has died, or left."""
    return CheckpointError(f"{what}: a rank was lost, or does not answer: {error}")


@contextmanager
def torch_failures(what: str, group: Group) -> Iterator[None]:
    """What fails inside of ``torch.distributed.checkpoint`` is an error of ours: its own is none that ``except Exception`` sees.

    Raises:
        CheckpointError: names the first rank that failed.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a process may be alone
            yield
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
        if isinstance(failure.failures.get(rank_in(group), (None,))[0], KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise CheckpointError(f"{what}: rank {ranks_of(group)[rank]}: {error}") from error
    except RuntimeError as error:
        raise lost(error, what) from error


def agree(group: Group, outline: Callable[[], Mapping[str, str]]) -> None:
    """Make sure that all ranks bring the same, before they meet in anything else.

    Args:
        outline: of what this rank brings, name → what it is, in words.

    Raises:
        CheckpointError: they do not; tells names and ranks. Or ``outline`` raised on another rank.
    """
    own: dict[str, str] = {}

    def digest() -> str:
        own.update(outline())
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()

    if len(set(everywhere(group, digest))) == 1:
        return
    every = everywhere(group, lambda: own)
    raise CheckpointError(_differences(dict(zip(ranks_of(group), every, strict=True))))


def _differences(outlines: Mapping[int, Mapping[str, str]]) -> str:
    names = list(dict.fromkeys(name for outline in outlines.values() for name in outline))
    differing = [name for name in names if len({outline.get(name) for outline in outlines.values()}) > 1]
    lines = []
    for name in differing[:SHOWN]:
        ranks: dict[str | None, list[int]] = {}
        for rank, outline in outlines.items():
            ranks.setdefault(outline.get(name), []).append(rank)
        said = (f"{_ranks(some)}: {'nothing of that name' if what is None else _short(what)}" for what, some in ranks.items())
        lines.append(f"\n    {name}   {'   '.join(said)}")
    more = f"\n    and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    return (
        f"the ranks bring different states{''.join(lines)}{more}\n  let all ranks pass the same folder and the same keys; what differs from rank to rank "
        f"goes in as a DTensor that is split over them, or in a list that all ranks have"
    )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:30]}…{text[-49:]}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))}"
