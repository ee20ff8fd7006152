"""Say what is needed to repeat a measurement: the command, the machine, and the versions."""

from __future__ import annotations

import os
import platform
import shlex
import sys

import torch


def command() -> str:
    return f"python {' '.join(map(shlex.quote, ['profiling/run.py', *sys.argv[1:]]))}"


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def versions() -> str:
    import autopar

    return f"Python {platform.python_version()}, torch {torch.__version__}, autopar {autopar.__version__}"


def heading() -> str:
    return f"{command()}\n{machine()}; {versions()}\n\n"
