"""The suite on several versions of torch, each in an environment of its own that is removed after its run.

    python tests/campaigns/run.py torch 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
    python tests/campaigns/run.py torch newest --python python3.10

Each version runs ``fast``, the blocks of the pages, and a sample of ``simulated`` and of ``processes``. ``newest`` is
what pip chooses. From PyPI these are CUDA builds of some 5 GB each. pip gets the user's configuration without its
constraints, which may refuse a version.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from dataclasses import dataclass, field
from pathlib import Path

try:
    import tomllib
except ImportError:  # before Python 3.11
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).parents[2]
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
SIMULATED = "amp backward conv_net equality exported generate layers random recurrent step step_amp train_step"
PROCESSES = "groups messages processes step_processes pipelined weights wire"
PARTS: dict[str, list[str]] = {
    "fast": ["-m", "fast"],
    "pages": ["-m", "", "tests/structure/test_pages.py"],
    "simulated": ["-m", "simulated", *(f"tests/simulated/test_{name}.py" for name in SIMULATED.split())],
    "processes": ["-m", "processes", *(f"tests/processes/test_{name}.py" for name in PROCESSES.split())],
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("versions", nargs="*", help=f"of torch; else {' '.join(VERSIONS)}, if no --there is given")
    parser.add_argument("--there", nargs="*", default=[], metavar="PYTHON", help="environments that exist, and stay")
    parser.add_argument("--python", default=sys.executable, help="which makes the environments")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where they are made")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--jobs", default="auto", help="of pytest at a time")


def run(options: argparse.Namespace) -> str:
    rows = [_tried(Path(python), options) for python in options.there]
    for version in options.versions or ([] if options.there else VERSIONS):
        options.folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"torch-{version}-", dir=options.folder))
        try:
            python, lacking = _environment(folder, version, options.python)
            rows.append(_tried(python, options, lacking))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return _table(rows, options.parts)


@dataclass
class Tried:
    """A version: what ran, passed and failed.

    Attributes:
        counts: part → passed, failed and skipped tests.
        failed: the names of those that failed.
        lacking: packages of the tests that have no wheel for this Python.
    """

    name: str
    lacking: list[str]
    counts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


def _own_pip() -> dict[str, str]:
    """Return the environment of a pip that has the user's configuration, without its constraints."""
    own = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"} | {
        "PIP_CONFIG_FILE": os.devnull,  # which is to read no file
        "PIP_NO_CACHE_DIR": "1",
    }
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in ("global", "install") and name != "constraint":
            (text,) = shlex.split(value)
            own.setdefault(f"PIP_{name.upper().replace('-', '_')}", text.replace("\\n", " "))
    return own


def _environment(folder: Path, version: str, python: str) -> tuple[Path, list[str]]:
    """Make an environment with a torch and what tests need; return its Python, and the packages without a wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    subprocess.run([python, "-m", "venv", folder], check=True)
    inside = folder / "bin" / "python"
    torch = next(need for need in project["dependencies"] if need.startswith("torch"))
    torch = torch if version == "newest" else f"torch=={version}"

    def install(*what: str) -> bool:
        command = [inside, "-m", "pip", "install", "--quiet", "--prefer-binary", *what]
        return not subprocess.run(command, env=_own_pip()).returncode

    if not install(torch) or not install(torch, *project["dependencies"]):
        raise SystemExit(f"pip cannot install {torch}")
    needs = sorted({need for name in ("llm", "test", "profile") for need in extras[name]})
    lacking = [] if install(torch, *needs) else [need for need in needs if not install(torch, need)]
    return inside, lacking


def _tried(python: Path, options: argparse.Namespace, lacking: list[str] | None = None) -> Tried:
    ask = "import platform, torch; print(platform.python_version(), torch.__version__)"
    versions = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    row = Tried("Python {}, torch {}".format(*versions), lacking or [])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CI": "1"}
    for part in options.parts:
        with tempfile.NamedTemporaryFile(suffix=".xml") as report:
            how = [f"--junitxml={report.name}", "-p", "no:cacheprovider", "-n", options.jobs]
            subprocess.run(
                [python, "-m", "pytest", *how, *PARTS[part]], cwd=ROOT, env=environment, stdout=sys.stderr.fileno()
            )
            _count(row, part, Path(report.name))
        print(f"{row.name}: {part}: {row.counts[part]}", file=sys.stderr, flush=True)
    return row


def _count(row: Tried, part: str, report: Path) -> None:
    """Read what pytest has written: passed, failed and skipped. Nothing written, or no test, is a failure."""
    cases = list(xml.parse(report).getroot().iter("testcase")) if report.stat().st_size else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    row.failed += [f"{case.get('classname')}::{case.get('name')}" for case in failed] or (
        [] if cases else [f"{part}: no test ran"]
    )
    row.counts[part] = len(cases) - len(failed) - skipped, len(failed), skipped


def _table(rows: list[Tried], parts: list[str]) -> str:
    """Return the table: passed and failed tests of each version, by part."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'passed / failed':{width}}" + "".join(f"{part:>14}" for part in parts)]
    lines += [
        f"{row.name:{width}}" + "".join(f"{'{} / {}'.format(*row.counts[part]):>14}" for part in parts) for row in rows
    ]
    for row in rows:
        lines += [f"{row.name}: without {', '.join(row.lacking)}"] * bool(row.lacking)
        lines += [f"{row.name}: failed {name}" for name in row.failed]
    lines += ["", f"simulated: {SIMULATED}", f"processes: {PROCESSES}"]
    return "\n".join(lines) + "\n"
