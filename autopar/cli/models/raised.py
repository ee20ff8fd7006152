"""Say in a line what the user's own function or model has raised: the error and the user's line."""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path

import autopar
from autopar.errors import LONGEST

OURS = Path(autopar.__file__).resolve().parent
INSTALLED = tuple(
    str(Path(path).resolve())
    for path in (*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
)
CAPTURING = "while autopar captured"  # what the note of an error begins with that the model has raised


def raised(error: BaseException) -> str:
    """Return an error in one line: its class, what it says, shortened, and the user's innermost line."""
    kind, message = type(error).__name__, " ".join(str(error).split())
    message = message if len(message) <= LONGEST else f"{message[:LONGEST]}…"
    line = user_line(error)
    return f"{kind}{f': {message}' if message else ''}" + (f", at {line}" if line else "")


def user_line(error: BaseException) -> str:
    """Return the user's innermost line, ``model.py:3  raise KeyError("x")``; "" if no frame is the user's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}  {frame.line}"
    return ""


def is_of_the_model(error: BaseException) -> bool:
    """Return whether the user's model has raised an error when it was captured."""
    notes = getattr(error, "__notes__", ())
    return bool(user_line(error)) or any(note.startswith(CAPTURING) for note in notes)


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    return not path.is_relative_to(OURS) and not str(path).startswith(INSTALLED)
