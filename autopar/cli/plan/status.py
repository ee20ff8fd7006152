"""Run a command that captures a user's model, and turn what it raises into a line and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from autopar.cli.plan.raised import is_of_the_model, raised
from autopar.errors import AutoparError

DONE, CUT_OFF, REFUSED = 0, 1, 2  # exit statuses


def status_of(follow: Callable[[], int], model: str) -> int:
    """Return the exit status of a command. An error is printed as one line, without a traceback.

    Args:
        follow: runs the command.
        model: what the user called the model, for errors that the model raises.
    """
    try:
        status = follow()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF
    except (AutoparError, OSError) as error:
        print(f"autopar: {error}", file=sys.stderr)
    except Exception as error:
        if is_of_the_model(error):
            print(f"autopar: {model}: the call of its model raises {raised(error)}", file=sys.stderr)
        elif isinstance(error, ValueError):
            print(f"autopar: {error}", file=sys.stderr)
        else:
            raise
    return REFUSED
