"""Tune ByteScheduler's partition and credit: by a grid, or by Bayesian optimisation, as its authors do.

Each trial is a simulation; nothing runs. Sizes are powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import ScheduleError
from autopar.scheduling.decide import schedule
from autopar.scheduling.op import Op
from autopar.scheduling.policies import ByteScheduler
from autopar.scheduling.simulation import Issue, Schedule

PARTITIONS = tuple(2**k for k in range(16, 27))  # bytes: 64 KiB to 64 MiB
CREDITS = tuple(2**k for k in range(6))  # partitions
SEED = 0


@dataclass(frozen=True)
class Tuned:
    """The best sizes, their schedule, and the number of trials."""

    policy: ByteScheduler
    schedule: Schedule
    trials: int


def grid(ops: Sequence[Op], issue: Issue = "enqueue", *, startup: float = 0.0, fused: bool = True) -> Tuned:
    """Return the best of all pairs of ``PARTITIONS`` and ``CREDITS``; among equal ones the first."""
    policies = [ByteScheduler(p, p * c, fused) for p in PARTITIONS for c in CREDITS]
    made = [schedule(ops, policy, issue, startup=startup) for policy in policies]
    best = min(range(len(made)), key=lambda k: made[k].makespan)
    return Tuned(policies[best], made[best], len(made))


def bayesian(
    ops: Sequence[Op], issue: Issue = "enqueue", *, startup: float = 0.0, fused: bool = True, trials: int = 15
) -> Tuned:
    """Return the best of some trials that optuna's tree of Parzen estimators proposes, the same for the same input.

    Raises:
        ScheduleError: there is less than one trial.
        ModuleNotFoundError: optuna is missing.
    """
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ScheduleError(f"trials={trials!r}; give at least 1")
    optuna = _optuna()
    found: dict[ByteScheduler, Schedule] = {}

    def seconds(trial: Any) -> float:
        partition = 2 ** trial.suggest_int("partition", 16, 26)
        policy = ByteScheduler(partition, partition * 2 ** trial.suggest_int("credit", 0, 5), fused)
        if policy not in found:
            found[policy] = schedule(ops, policy, issue, startup=startup)
        return found[policy].makespan

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED, n_startup_trials=5))
    study.optimize(seconds, n_trials=trials)
    best = min(found, key=lambda policy: found[policy].makespan)
    return Tuned(best, found[best], trials)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Bayesian tuning needs optuna: install autopar[tune], or tune by grid", name="optuna"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
