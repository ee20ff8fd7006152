"""Measure the seconds from the command ``autopar plan MODEL --html FILE`` to the written page, from a cold start.

Each command runs in a process of its own, with one thread. ``CPU`` and ``memory`` are those of the process. ``opens``
is how long headless Chromium takes to open the page and to print its DOM, less an empty page; it is left out where
there is no Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tables import printed

PROFILES_ITSELF = True  # in other processes
MODELS = ("tiny", "llama-2-7b", "llama-3-8b")
MESH, MACHINE = "dp=4,tp=2", "NVIDIA H100 80GB HBM3"
COLUMNS = ("model", "s", "CPU, s", "memory, MB", "a step, ms", "gap, %", "page, MB", "opens, s")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EMPTY = "<!doctype html><title>empty</title>"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--mesh", default=MESH)
    parser.add_argument("--machine", default=MACHINE)


def run(options: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        rows = [measured(model, options.mesh, options.machine, Path(folder)) for model in options.models]
    return printed(f"From the command to the page, {options.mesh}, {options.machine}", COLUMNS, rows)


def measured(model: str, mesh: str, machine: str, folder: Path) -> tuple[str, ...]:
    page = folder / f"{model}.html"
    command = [sys.executable, "-m", "autopar", "plan", model, "--mesh", mesh, "--machine", machine]
    begun = time.monotonic()
    process = subprocess.Popen(
        [*command, "--html", str(page), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    found = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - begun
    assert status == 0, f"{' '.join(command)} has failed"
    return (
        model,
        f"{seconds:.1f}",
        f"{usage.ru_utime + usage.ru_stime:.1f}",
        f"{usage.ru_maxrss / 1024:.0f}",
        f"{found['seconds'] * 1e3:.3f}",
        f"{found['gap'] * 100:.2f}",
        f"{page.stat().st_size / 1e6:.2f}",
        opens(page, folder),
    )


def opens(page: Path, folder: Path, times: int = 5) -> str:
    """The median seconds that the browser needs beyond an empty page."""
    if BROWSER is None:
        return "–"
    empty = folder / "empty.html"
    empty.write_text(EMPTY)
    return f"{statistics.median(dumped(page) - dumped(empty) for _ in range(times)):.1f}"


def dumped(page: Path) -> float:
    begun = time.monotonic()
    subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()],
        check=True,
        capture_output=True,
    )
    return time.monotonic() - begun
