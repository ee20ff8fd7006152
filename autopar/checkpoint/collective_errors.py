"""Make the failure of one rank an error on all ranks, so that no rank waits for it."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from torch import distributed

from autopar.errors import CheckpointError

T = TypeVar("T")
Group = distributed.ProcessGroup | None  # None: the group of all processes, or no group if there is only one process

SHOWN = 5  # differences that an error lists


def is_single_process() -> bool:
    """Return whether this is the only process."""
    return not (distributed.is_available() and distributed.is_initialized())


def rank_in(group: Group) -> int:
    """Return the rank of this process in the group."""
    return 0 if is_single_process() else distributed.get_rank(group)


def ranks_of(group: Group) -> list[int]:
    """Return the global ranks of the group, in its order."""
    return [0] if is_single_process() else distributed.get_process_group_ranks(group)


def on_all_ranks(group: Group, function: Callable[[], T]) -> list[T]:
    """Call a function on each rank of the group, and return the results of all ranks. All of them call this.

    Raises:
        Exception: the function raised it on this rank.
        CheckpointError: the function raised on another rank, or a rank was lost.
    """
    value, failure = _tried(function)
    outcomes: list[tuple[T | None, str]] = [(value, _text(failure))] * len(ranks_of(group))
    if not is_single_process():
        with _lost():
            distributed.all_gather_object(outcomes, outcomes[0], group)
    if failure is not None:
        raise failure
    for rank, (_, text) in zip(ranks_of(group), outcomes, strict=True):
        if text:
            raise CheckpointError(f"rank {rank} failed, so no rank goes on: {text}")
    return [cast(T, value) for value, _ in outcomes]  # None only where a rank failed


def on_first_rank(group: Group, function: Callable[[], T]) -> T:
    """Call a function on the first rank of the group, and return its result on all ranks. All of them call this.

    Raises:
        Exception: the function raised it on this rank; a ``FileNotFoundError`` is raised on all ranks.
        CheckpointError: the function raised another error on the first rank, or a rank was lost.
    """
    value, failure = _tried(function) if rank_in(group) == 0 else (None, None)
    outcome: list[Any] = [value, _text(failure), isinstance(failure, FileNotFoundError)]
    if not is_single_process():
        with _lost():
            distributed.broadcast_object_list(outcome, group=group, group_src=0)
    value, text, is_not_found = outcome
    if failure is not None:
        raise failure
    if text:
        raise FileNotFoundError(text) if is_not_found else CheckpointError(text)
    return value


def _tried(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _text(failure: Exception | None) -> str:
    if failure is None:
        return ""
    return (
        str(failure)
        if isinstance(failure, (CheckpointError, FileNotFoundError))
        else f"{type(failure).__name__}: {failure}"
    )


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost(error) from error


def lost(error: Exception, outcome: str = "no checkpoint was written or loaded") -> CheckpointError:
    """Return the error of a collective that failed: a rank has died, or left."""
    return CheckpointError(f"{outcome}: a rank was lost, or does not answer: {error}")


@contextmanager
def torch_failures(outcome: str, group: Group) -> Iterator[None]:
    """Turn failures inside of ``torch.distributed.checkpoint`` into errors of autopar.

    ``except Exception`` does not catch torch's own.

    Raises:
        CheckpointError: names the first rank that failed.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # there may be only one process
            yield
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
        if isinstance(failure.failures.get(rank_in(group), (None,))[0], KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise CheckpointError(f"{outcome}: rank {ranks_of(group)[rank]}: {error}") from error
    except RuntimeError as error:
        raise lost(error, outcome) from error


def agree(group: Group, outline: Callable[[], Mapping[str, str]]) -> None:
    """Make sure that all ranks pass the same arguments, before their first other collective.

    Args:
        outline: returns the arguments of this rank, name → description.

    Raises:
        CheckpointError: they differ; lists names and ranks. Or ``outline`` raised on another rank.
    """
    outlined: dict[str, str] = {}

    def digest() -> str:
        outlined.update(outline())
        return hashlib.sha256(json.dumps(outlined, sort_keys=True).encode()).hexdigest()

    if len(set(on_all_ranks(group, digest))) == 1:
        return
    every = on_all_ranks(group, lambda: outlined)
    raise CheckpointError(_differences(dict(zip(ranks_of(group), every, strict=True))))


def _differences(outlines: Mapping[int, Mapping[str, str]]) -> str:
    names = list(dict.fromkeys(name for outline in outlines.values() for name in outline))
    differing = [name for name in names if len({outline.get(name) for outline in outlines.values()}) > 1]
    lines = []
    for name in differing[:SHOWN]:
        ranks: dict[str | None, list[int]] = {}
        for rank, outline in outlines.items():
            ranks.setdefault(outline.get(name), []).append(rank)
        values = (
            f"{_ranks(having)}: {'nothing of that name' if value is None else _short(value)}"
            for value, having in ranks.items()
        )
        lines.append(f"\n    {name}   {'   '.join(values)}")
    more = f"\n    and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    return (
        f"the ranks bring different states{''.join(lines)}{more}\n  let all ranks pass the same folder and the same "
        f"keys; what differs from rank to rank goes in as a DTensor that is split over them, or in a list that all "
        f"ranks have"
    )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:30]}…{text[-49:]}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))}"
