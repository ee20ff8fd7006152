"""Features on CUDA and NCCL, each in processes of its own, beside eager on the device.

One rank, and two or four ranks of NCCL, which may share a GPU. "equal": what the column "compared" names is eager's, in
most cases the losses of a few steps and the final parameters, up to the tolerance of their dtype; and all ranks have
sent their collectives in one order. "ran": nothing crashed, and the ranks agree on the order. So it is where a case
compares nothing, and everywhere without a GPU: ``--stand-in PATH`` is preloaded, a library that answers in the place of
CUDA and computes nothing (tests/README.md says what it must answer).

The name of this file ends with an underscore because torch imports a package ``cuda``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from cuda_cases import CASES

SUPPORT = Path(__file__).parents[1] / "support"
RIGHT = ("equal", "ran")  # verdicts: with values, and without
TOGETHER = 8  # ranks at once of cases of several: ranks that share a GPU wait for the turns of all the others
PATIENCE = 10.0  # seconds for the other ranks, after one has failed
OWN_MACHINE = {  # ranks that share a GPU are hosts of their own, else NCCL refuses the second one
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    "NCCL_MAX_NCHANNELS": "2", "NCCL_MIN_NCHANNELS": "1", "NCCL_BUFFSIZE": "1048576", "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0",
}  # fmt: skip
EVERYWHERE = {
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "AUTOPAR_CACHE": "",
    "PYTHONUNBUFFERED": "1", "CUDA_MODULE_LOADING": "LAZY", "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_FR_BUFFER_SIZE": "20000",
}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", nargs="+", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--part", metavar="K/N", help="the K-th of N parts of the cases")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one case")
    parser.add_argument("--stand-in", type=Path, metavar="PATH", help="a library that answers in the place of CUDA")
    parser.add_argument("--cpu", action="store_true", help="the same cases on CPUs and gloo, which tries the cases")
    parser.add_argument(
        "--rows", type=Path, help="rows are appended to this file, and the table has all that are in it"
    )
    parser.add_argument("--table", action="store_true", help="run nothing: print the table of --rows")
    parser.add_argument(
        "--logs", type=Path, help="what the ranks of a failed case have printed is appended to this file"
    )
    parser.add_argument("--commit", help="for the heading, where there is no git")


@dataclass
class Row:
    """What became of a case. ``apart``: the largest difference from eager, in parts of a tensor's largest number."""

    case: str
    verdict: str
    seconds: float
    apart: float | None = None
    error: str = ""


@dataclass
class Running:
    """A case on its processes."""

    name: str
    device: str
    folder: Path
    environment: Mapping[str, str]
    begun: float = field(default_factory=time.monotonic)
    failed: float = 0.0  # when the first rank has failed
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        size = CASES[self.name].ranks
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shares = self.device != "cpu" and gpus(self.device) < size
        for rank in range(size):
            more = OWN_MACHINE | {"NCCL_HOSTID": f"host{rank}"} if shares and size > 1 else {}
            if size > 1:
                more |= {
                    "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0" if shares else str(rank),
                    "LOCAL_WORLD_SIZE": "1" if shares else str(size), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }  # fmt: skip
            with open(self.folder / f"{self.name}.{rank}.txt", "w") as log:
                command = [
                    sys.executable,
                    str(SUPPORT / "cuda_case_run.py"),
                    self.name,
                    self.device,
                    str(self.file(rank)),
                ]
                self.ranks.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True,
                        env={**os.environ, **EVERYWHERE, **self.environment, **more}, start_new_session=True,
                    )
                )  # fmt: skip

    def file(self, rank: int) -> Path:
        return self.folder / f"{self.name}.{rank}.json"

    def found(self) -> list[dict[str, Any] | None]:
        """The results of the ranks; ``None`` of one that has none yet."""
        files = map(self.file, range(len(self.ranks)))
        return [json.loads(file.read_text()) if file.exists() else None for file in files]

    def ended(self, limit: float) -> Row | None:
        """The row, once there is one; then no process is left."""
        found, now = self.found(), time.monotonic()
        dead = [r for r, rank in enumerate(self.ranks) if rank.poll() is not None and not self.file(r).exists()]
        late = now - self.begun > limit
        if dead or any(row and "error" in row for row in found):
            self.failed = self.failed or now
            waited = now - self.failed > PATIENCE
        else:
            waited = False
        if None in found and not late and not waited:
            return None
        self.end()
        row = Row(self.name, "", round(now - self.begun, 1))
        rows = [row for row in found if row]
        errors = [row["error"] for row in rows if "error" in row]
        if errors or dead:
            text = errors[0] if errors else f"rank {dead[0]} ended: {self.last_words(dead[0])}"
            row.verdict, row.error = ("WRONG" if "apart from eager" in text else "failed"), text
        elif None in found:
            rank = found.index(None)
            row.verdict, row.error = "time-out", f"rank {rank} after {limit:g} s: {self.last_words(rank)}"
        elif order := unequal([row.get("collectives", {}) for row in rows]):
            row.verdict, row.error = "ORDER", order
        else:
            row.verdict = "equal" if self.device != "stand-in" and CASES[self.name].compared else "ran"
        if self.device != "stand-in" and all(row.get("apart") is not None for row in rows) and rows:
            row.apart = max(row["apart"] for row in rows)
        return row

    def printed(self, rank: int, characters: int) -> str:
        return (self.folder / f"{self.name}.{rank}.txt").read_text(errors="replace")[-characters:]

    def last_words(self, rank: int) -> str:
        return " ".join(self.printed(rank, 600).split())

    def log(self) -> str:
        return "".join(f"== {self.name}, rank {r}\n{self.printed(r, 8000)}\n" for r in range(len(self.ranks)))

    def end(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
            assert rank.stdin is not None
            rank.stdin.close()


def unequal(ranks: list[Mapping[str, list[str]]]) -> str:
    """Where the orders of collectives of a group differ between its ranks, or a message has no counterpart; else ""."""
    for group in sorted({group for rank in ranks for group in rank}):
        lists = {r: rank[group] for r, rank in enumerate(ranks) if group in rank}
        if group.endswith("messages"):
            if words := unmatched(group, lists.values()):
                return words
            continue
        (first, wanted), *others = lists.items()
        for rank, found in others:
            for k in range(max(len(wanted), len(found))):
                pair = [" ".join(one[k : k + 1]) or "nothing" for one in (wanted, found)]
                if pair[0] != pair[1]:
                    return f"group {group}, collective {k}: rank {first} sends {pair[0]}, rank {rank} {pair[1]}"
    return ""


def unmatched(group: str, lists: Iterable[list[str]]) -> str:
    """The first pair of ranks of which one sends what the other does not receive, in order."""
    sent: dict[str, list[str]] = {}
    received: dict[str, list[str]] = {}
    for kind, ends, *dtypes in (text.split(" ") for one in lists for text in one):
        if kind == "send":
            sent.setdefault(ends, []).append(" ".join(dtypes))
        elif kind == "recv":
            here, _, there = ends.partition("<-")
            received.setdefault(f"{there}->{here}", []).append(" ".join(dtypes))
    for ends in sorted(sent.keys() | received.keys()):
        if sent.get(ends, []) != received.get(ends, []):
            counts = len(sent.get(ends, [])), len(received.get(ends, []))
            return f"group {group} {ends}: {counts[0]} sent, {counts[1]} received, or of other dtypes"
    return ""


def gpus(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 1


def chosen(options: argparse.Namespace) -> list[str]:
    """The names of the cases, the long ones first: those that compile, and those of more processes."""
    names = [] if options.table else options.names or list(CASES)
    if options.part:
        part, _, parts = options.part.partition("/")
        if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
            sys.exit(f"--part {options.part} is not K/N, as in 1/3")
        names = names[int(part) - 1 :: int(parts)]
    return sorted(names, key=lambda name: ("compile" not in name, -CASES[name].ranks))


def rows_of(names: list[str], device: str, environment: Mapping[str, str], options: Any) -> Iterator[Row]:
    """Run cases, as many as there are processes for, and yield the row of each when it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        running: list[Running] = []
        try:
            while names or running:
                for name in list(names):
                    if has_room(CASES[name].ranks, [CASES[each.name].ranks for each in running], options.jobs):
                        names.remove(name)
                        running.append(Running(name, device, Path(folder), environment))
                        running[-1].start()
                time.sleep(0.1)
                for each in list(running):
                    if row := each.ended(options.limit):
                        running.remove(each)
                        if options.logs and row.verdict not in RIGHT:
                            with open(options.logs, "a") as logs:
                                logs.write(each.log())
                        yield row
        finally:
            for each in running:
                each.end()


def has_room(ranks: int, running: list[int], jobs: int) -> bool:
    """Whether a case of so many ranks can start beside those that run."""
    several = sum(each for each in running if each > 1)
    return not running or (sum(running) + ranks <= jobs and (ranks == 1 or several + ranks <= TOGETHER))


def run(options: argparse.Namespace) -> str:
    device = "cpu" if options.cpu else "stand-in" if options.stand_in else "cuda"
    environment: dict[str, str] = {}
    if options.stand_in:
        path = options.stand_in.resolve(strict=True)
        folders = filter(None, [str(path.parent), os.environ.get("LD_LIBRARY_PATH")])
        environment = {"LD_PRELOAD": str(path), "LD_LIBRARY_PATH": os.pathsep.join(folders)}
    elif device == "cuda" and not options.table and not torch.cuda.is_available():
        sys.exit(
            "torch sees no GPU here; --stand-in PATH preloads a library that answers in the place of CUDA, and --cpu "
            "tries the cases on CPUs (tests/README.md)"
        )
    if options.rows is None:
        file, options.rows = tempfile.mkstemp(suffix=".jsonl", prefix="cuda_")
        os.close(file)
        print(f"rows: {options.rows}", file=sys.stderr)
    begun = time.monotonic()
    for row in rows_of(chosen(options), device, environment, options):
        with open(options.rows, "a") as rows:
            rows.write(json.dumps(asdict(row)) + "\n")
        print(f"{time.monotonic() - begun:5.0f} s  {line(row)}", file=sys.stderr, flush=True)
    read = [Row(**json.loads(text)) for text in Path(options.rows).read_text().splitlines()]
    return heading(device, options.commit) + table({row.case: row for row in read})


def heading(device: str, commit: str | None) -> str:
    """The card, its driver, the versions and the commit."""
    git = ["git", "-C", str(SUPPORT), "rev-parse", "--short=8", "HEAD"]
    commit = commit or output(git) or "unknown"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, commit {commit}"
    if device == "cpu":
        return f"CPUs and gloo; {versions}\n\n"
    if torch.version.cuda:
        versions = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {versions}"
    if device == "stand-in":
        return (
            f"No GPU computed this: a library that computes nothing answered in the place of CUDA. It shows crashes\n"
            f"and the order of collectives, and no values. {versions}\n\n"
        )
    card = output(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    return f"{card or 'no nvidia-smi'}; {versions}\n\n"


def output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def line(row: Row) -> str:
    case = CASES[row.case]
    apart = "" if row.apart is None else f"{row.apart:.1e}"
    cells = (
        f"{row.case:18}", f"{case.feature:48}", f"{case.ranks:5}", f"{case.compared:27}", f"{case.precision:>9}",
        f"{row.verdict:>9}", f"{apart:>8}", f"{case.tolerance:9.0e}" if case.compared else " " * 9,
        f"{row.seconds:8.1f}",
    )  # fmt: skip
    return " ".join(cells) + (f"  {row.error[:300]}" if row.error else "")


def table(rows: Mapping[str, Row]) -> str:
    """The rows in the order of the cases, and below it the errors."""
    found = [rows[name] for name in CASES if name in rows]
    title = (
        f"{'case':18} {'feature':48} {'ranks':>5} {'compared':27} {'dtype':>9} {'verdict':>9} {'apart':>8} "
        f"{'tolerance':>9} {'seconds':>8}"
    )
    lines = [line(Row(**asdict(row) | {"error": ""})) for row in found]
    counts = Counter(row.verdict for row in found)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    errors = [f"{row.case}: {row.error}" for row in found if row.error]
    total = (
        f"{len(found)} of {len(CASES)} cases: {verdicts}; {sum(row.seconds for row in found):.0f} s one after another"
    )
    return "\n".join([title, *lines, "", total, *(["", *errors] if errors else [])]) + "\n"
