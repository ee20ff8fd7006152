"""Say what is needed to repeat a measurement: the command, the machine, and the versions."""

from __future__ import annotations

import os
import platform
import shlex
import sys

import torch


def command() -> str:
    """The command that was started; of a path from the root, the last part."""
    words = [os.path.basename(word) if os.path.isabs(word) else word for word in sys.argv[1:]]
    return f"python {' '.join(map(shlex.quote, ['profiling/run.py', *words]))}"


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def versions() -> str:
    import autopar

    return f"Python {platform.python_version()}, torch {torch.__version__}, autopar {autopar.__version__}"


def heading() -> str:
    return f"{command()}\n{machine()}; {versions()}\n\n"
