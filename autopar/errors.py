"""The errors autopar raises. Each names the offender and the remedy, and leaves everything as it was."""

from __future__ import annotations

import re


class AutoparError(Exception):
    """Any error of this package that is not a plain ``ValueError`` or ``TypeError``."""


class PlanError(AutoparError, ValueError):
    """A plan that names an unknown axis or value, splits what cannot be split, or contradicts itself."""


class CaptureError(AutoparError, RuntimeError):
    """The model's step cannot be captured as one static graph."""


class RuleError(AutoparError, NotImplementedError):
    """An op has no sharding rule, or its rule does not fit the arguments."""


class TransitionError(AutoparError, ValueError):
    """No sequence of transfers leads from one Layout to another."""


class VerifyError(AutoparError, AssertionError):
    """A program breaks a promise of its level: a defect in the pass that made it."""


class EditError(AutoparError, ValueError):
    """An edit that would break the program; nothing of it was applied."""


class TextError(AutoparError, ValueError):
    """A dump that cannot be read back, with the line and what is wrong with it."""


class SimulationError(AutoparError, RuntimeError):
    """The simulated ranks disagree or wait for each other for ever."""


class ChannelError(AutoparError, RuntimeError):
    """The ranks' collectives or messages do not fit together, or the ranks would wait for each other for ever."""


class ScheduleError(AutoparError, ValueError):
    """A pipeline schedule that cannot be made, read or run: tasks missing or doubled, messages that do not fit, a cycle."""


class LaunchError(AutoparError, RuntimeError):
    """Processes could not be started, or one of them failed.

    ``rank`` is the one to blame, ``None`` where it is none; ``status`` is the exit status for a command that passes it on.
    """

    def __init__(self, text: str, *, rank: int | None = None, status: int = 1) -> None:
        super().__init__(text)
        self.rank, self.status = rank, status


class CheckpointError(AutoparError, RuntimeError):
    """A checkpoint that cannot be written or read, does not fit, or is not as it was written. Ranks that bring different states."""


class PrecisionError(AutoparError, NotImplementedError):
    """Mixed precision would run an op in a dtype that it has no kernel for."""


class OverflowingError(AutoparError, ArithmeticError):
    """Gradients overflow in low precision, whatever the loss is multiplied by."""


class AnomalyError(AutoparError, RuntimeError):
    """An op of a step made a NaN, or one came in, while anomalies are looked for."""


class ProofError(AutoparError, AssertionError):
    """A sharding rule claims what its op does not do: running it on pieces gives something else."""


def shown(value: object) -> str:
    """A value as an error quotes it: ``repr`` without the addresses of objects, which say nothing and differ from run to run."""
    try:
        return re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(value))
    except Exception:  # of the value's own
        return f"a {type(value).__qualname__}"


def at_line(source: str, module: str) -> str:
    """The user's line and the module that runs it, as errors and reports quote them."""
    return f"    {source or 'unknown line'}   in module {module or 'the root'}"
