"""Say in a few lines what the user's own function or model has raised: the error and the user's line."""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path

import autopar

OURS = Path(autopar.__file__).resolve().parent
INSTALLED = tuple(
    str(Path(path).resolve())
    for path in (*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
)
CAPTURING = "while autopar captured"  # what the note of an error begins with that the model has raised


def raised(error: Exception) -> str:
    """Return an error with its class, and the user's innermost line below it, if there is one."""
    kind, message = type(error).__name__, str(error).strip()
    line = user_line(error)
    return f"{kind}{f': {message}' if message else ''}" + (f"\n  {line}" if line else "")


def user_line(error: BaseException) -> str:
    """Return the user's innermost line, ``model.py:3  raise KeyError("x")``; "" if no frame is the user's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}  {frame.line}"
    return ""


def is_of_the_model(error: Exception) -> bool:
    """Return whether the user's model has raised an error when it was captured."""
    notes = getattr(error, "__notes__", ())
    return bool(user_line(error)) or any(note.startswith(CAPTURING) for note in notes)


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    return not path.is_relative_to(OURS) and not str(path).startswith(INSTALLED)
