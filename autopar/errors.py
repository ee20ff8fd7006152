"""Define the errors that autopar raises. Each names what is wrong and the remedy, and leaves everything as it was."""

from __future__ import annotations

import math
import re

LONGEST = 200  # characters of a value that an error quotes


class AutoparError(Exception):
    """Any error of this package that is not a plain ``ValueError`` or ``TypeError``."""


class PlanError(AutoparError, ValueError):
    """A plan that names an unknown axis or value, splits what cannot be split, or contradicts itself."""


class MemoryLimitError(AutoparError, MemoryError):
    """No plan fits into the memory of a rank.

    Attributes:
        least: a lower bound of the nanoseconds of plans that fit, if there are any that were not found.
        bytes: of a rank, that the smallest plan takes which was found.
    """

    least: float = 0.0
    bytes: float = math.inf


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
    """A text that cannot be parsed as a program; the error names the line and what is wrong with it."""


class SimulationError(AutoparError, RuntimeError):
    """The simulated ranks disagree or wait for each other forever."""


class ChannelError(AutoparError, RuntimeError):
    """The ranks' collectives or messages do not fit together, or the ranks would wait for each other forever."""


class ScheduleError(AutoparError, ValueError):
    """A schedule, of a pipeline or of communication, that cannot be made, read or run.

    Tasks or lines are missing or doubled, messages do not fit, or tasks wait in a cycle.
    """


class ProfileError(AutoparError, ValueError):
    """A profile of measured times that cannot be read, or that belongs to another program."""


class CompileError(AutoparError, RuntimeError):
    """``compile=True`` needs a compiler that is not there, or Inductor cannot compile a region."""


class LaunchError(AutoparError, RuntimeError):
    """Processes could not be started, or one of them failed.

    ``rank`` is the rank that failed, ``None`` if none did; ``status`` is the exit status that a command passes on.
    """

    def __init__(self, text: str, *, rank: int | None = None, status: int = 1) -> None:
        super().__init__(text)
        self.rank, self.status = rank, status


class CheckpointError(AutoparError, RuntimeError):
    """A checkpoint cannot be written or read, does not fit or is damaged, or the ranks have different states."""


class PrecisionError(AutoparError, NotImplementedError):
    """Mixed precision would run an op in a dtype that it has no kernel for."""


class OverflowingError(AutoparError, ArithmeticError):
    """Gradients overflow in low precision, whatever the loss scale is."""


class AnomalyError(AutoparError, RuntimeError):
    """An op of a step made a NaN, or got one as input, while anomaly detection is on."""


class ProofError(AutoparError, AssertionError):
    """A sharding rule is wrong: running the op on pieces gives another result."""


def shown(value: object) -> str:
    """Return a value as an error quotes it: ``repr`` without the addresses of objects, which differ from run to run.

    A long one is cut.
    """
    try:
        text = re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(value))
    except Exception:  # repr of the value fails
        return class_of(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def class_of(value: object) -> str:
    """Return the name of a value's class with its article: ``an int``, ``a dict``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' or name == 'ndarray' else 'a'} {name}"


def at_line(source: str, module: str) -> str:
    """Return the user's line and the module that runs it, as errors and reports quote them."""
    return f"    {source or 'unknown line'}   in module {module or 'the root'}"


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error. Python 3.10 keeps it, and only pytest and the commands of autopar print it there."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), text]
