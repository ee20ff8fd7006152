"""Run a command, and turn what it raises into a line and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from autopar.cli.models.raised import is_of_the_model, raised
from autopar.errors import AutoparError

DONE, CUT_OFF, REFUSED, INTERRUPTED = 0, 1, 2, 130  # exit statuses
FAILED = 1  # of a command that checks something: it is wrong

SAID = (AutoparError, OSError, ValueError, ImportError)  # errors that say what is wrong, and the remedy


def status_of(follow: Callable[[], int], model: str = "") -> int:
    """Return the exit status of a command. An error is printed as one line, without a traceback.

    Args:
        follow: runs the command.
        model: what the user called the model, for errors that the model raises; "" if the command captures none.
    """
    try:
        status = follow()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if model and not isinstance(error, (AutoparError, OSError)) and is_of_the_model(error):
            said = f"{model}: the call of its model raises {raised(error)}; correct the model, or pass other inputs"
        elif isinstance(error, SAID):
            said = str(error)
        else:
            raise
        print(said if said.startswith("autopar:") else f"autopar: {said}", file=sys.stderr)
    return REFUSED
