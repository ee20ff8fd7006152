"""Architectures of transformers and of plain torch on meshes: the same numbers, ops without a rule, transfers of a
layer.

Random weights, float64, training mode, small sizes; casts to float32 inside the models become float64. "ok": outputs,
gradients and buffers of the simulated ranks are eager's to 1e-10. "whole": ops that every rank computes on whole
operands, for want of a sharding rule. Transfers over tp are those of two layers less those of one, on dp=2 tp=2,
forward + backward; an expert's are all-reduces alone. cp splits the sequence of the inputs, where there is one.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import torch
from architectures_alike import MESHES, check_equal, over_tp
from casts import PromotedCasts
from zoo_architectures import ARCHITECTURES

from autopar import AutoparError
from autopar.capture import capture


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", nargs="+", help="architectures; all without")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=list(MESHES))
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one architecture")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--jobs", type=int, default=2)


def measure(name: str, meshes: list[str], dropout: float) -> dict[str, str]:
    """What one row says."""
    architecture = ARCHITECTURES[name]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    row = dict.fromkeys(meshes, "failed")
    whole: set[str] = set()
    for mesh in meshes:
        if mesh == "2x2x2" and not architecture.sequence:
            row[mesh] = "–"
            continue
        try:
            with PromotedCasts():
                parallel = check_equal(name, MESHES[mesh], dropout)
            row[mesh] = "ok"
            whole |= {
                note.split(" ")[0]
                for report in parallel.reports
                for note in report.notes
                if "computes all of it" in note
            }
        except AutoparError as error:
            row[mesh] = "refused"
            row["why"] = " · ".join(line.strip() for line in refusal(architecture, error).splitlines()[:3])
        except AssertionError as error:
            row[mesh] = "WRONG"
            row["why"] = str(error).partition("\n")[0]
        except TimeoutError:
            raise
        except Exception as error:
            row["why"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    row["whole"] = ", ".join(sorted(whole)) or ("0" if "ok" in row.values() else "")
    if "ok" in row.values():
        try:
            with PromotedCasts():
                one, two = over_tp(name, 1), over_tp(name, 2)
        except TimeoutError:
            raise
        except Exception as error:  # a configuration that lists its layers
            row["transfers"] = f"not counted: {error}".partition("\n")[0]
            return row
        more = {
            t: [b - a for a, b in zip(one.get(t, [0, 0]), two[t], strict=True)] for t in two if two[t] != one.get(t)
        }
        row["transfers"] = ", ".join(f"{t} {f:g}+{b:g}" for t, (f, b) in sorted(more.items())) or "none"
        row["expert"] = "{}+{}".format(*architecture.block) if architecture.block else ""
    return row


def refusal(architecture: Any, error: Exception) -> str:
    """With the line of the model: without the mode that promotes casts, and is somebody's line too."""
    try:
        capture(architecture.make(), (), architecture.batch())
    except Exception as own:
        return str(own)
    finally:
        torch.set_default_dtype(torch.float64)
    return str(error)


def run(options: argparse.Namespace) -> str:
    names = options.names or list(ARCHITECTURES)
    command = [
        sys.executable,
        __file__,
        "--meshes",
        *options.meshes,
        "--timeout",
        str(options.timeout),
        "--dropout",
        str(options.dropout),
    ]
    jobs = [
        subprocess.Popen([*command, "--names", *names[k :: options.jobs]], stdout=subprocess.PIPE, text=True)
        for k in range(options.jobs)
    ]
    printed = "".join(job.communicate()[0] for job in jobs)
    rows = dict(json.loads(line) for line in printed.splitlines() if line.startswith('["'))
    return table({name: rows.get(name, dict.fromkeys(options.meshes, "failed")) for name in names}, options.meshes)


def table(rows: dict[str, dict[str, str]], meshes: list[str]) -> str:
    header = ["architecture", *meshes, "whole", "transfers of a layer over tp", "an expert's"]
    cells = [header]
    cells += [
        [name, *(row[mesh] for mesh in meshes), *(row.get(key, "") for key in ("whole", "transfers", "expert"))]
        for name, row in rows.items()
    ]
    widths = [max(len(line[k]) for line in cells) for k in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    seen = Counter(row[mesh] for row in rows.values() for mesh in meshes if row[mesh] != "–")
    counts = ", ".join(f"{state} {count}" for state, count in seen.most_common())
    reasons = [f"{name}: {row['why']}" for name, row in rows.items() if "why" in row]
    return "\n".join([*lines, "", f"{len(rows)} architectures, {len(meshes)} meshes: {counts}", "", *reasons]) + "\n"


def work(options: argparse.Namespace) -> None:
    """Prints a line for each of the names."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {options.timeout:g} s")

    signal.signal(signal.SIGALRM, stop)
    for name in options.names:
        signal.alarm(int(options.timeout))
        try:
            row = measure(name, options.meshes, options.dropout)
        except Exception as error:
            row = dict.fromkeys(options.meshes, "failed") | {
                "why": f"{type(error).__name__}: {error}".partition("\n")[0]
            }
        signal.alarm(0)
        print(json.dumps([name, row]), flush=True)


if __name__ == "__main__":  # one of the processes that share the names
    parser = argparse.ArgumentParser()
    arguments(parser)
    work(parser.parse_args())
