"""Compare autopar with DDP, FSDP2, DTensor, torch.distributed.pipelining and autoparallel, and write a page of it.

All systems but the planners train one small Llama by SGD with momentum on gloo processes of one thread. Their losses
must be those of the plain model, or nothing is compared. ``plan``: from the model to the first step, on the slowest
rank; of systems that plan nothing it is their wrapping. Caches are empty for the first of ours only. ``grows``: what
the process grows by at most meanwhile. ``ms``: a step on the slowest rank, in interleaved rounds; ratios are taken
within rounds. ``peak``: what tensors hold between steps and at most in a step, on the worst rank. On the emulated wire
products are paced, those of attention too, and each step also runs with transfers that take no time: the difference is
what is exposed at least, and with the time that data really took there, at most. ``moved``: what leaves a rank in a
step, the mean over ranks. Where this machine was late the wire's figures are void.
Planners choose layouts by themselves for Llama 3 8B, 32 layers, on 8 × 8 devices.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import compare_planners
import headings
from bench_step import interval, ratios
from compare_planners import AUTOPARALLEL, Planned
from compare_ranks import Plain, Wired, on_wire, plainly
from compare_systems import SYSTEMS
from overlap_wire import machine
from profilers import positive
from ranks import on_ranks
from tables import printed

PROFILES_ITSELF = True  # in other processes
PAGE = Path(__file__).parent / "results" / "compare.md"
BANDWIDTH = 8e6 / 3  # bytes a second of the wire: the gradients of the Llama take some 1.5 seconds
SLOW = {2: 3.0, 4: 6.0}  # ranks → how slow the paced machine is: four ranks share two cores
OP_SECONDS = 0.0  # of all systems the products are paced, and nothing else
MEBI = 2**20

SYSTEM = ("system", "ranks")
PLAIN = ("plan, s", "grows, MiB", "ms", "ours / it", "95 %", "peak, MiB", "losses apart")
WIRED = ("ms on the wire", "exposed, ms", "moved, MiB", "late")
PLANNERS = ("planner", "trace, s", "problem, s", "solve, s", "plan, s", "apply, s", "peak, MiB")
SOURCE = ("machine", "versions", "command")
Row = tuple[str, ...]


def arguments(parser: argparse.ArgumentParser) -> None:
    names = [system.name for system in SYSTEMS]
    parser.add_argument("--ranks", type=int, nargs="+", choices=list(SLOW), default=list(SLOW))
    parser.add_argument("--systems", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--rounds", type=positive, default=8, help="without the wire")
    parser.add_argument("--steps", type=positive, default=2, help="timed, of each system in each round")
    parser.add_argument("--wire-rounds", type=positive, default=3)
    parser.add_argument("--layers", type=int, default=compare_planners.LAYERS, help="of the planners; 0: without them")


def run(options: argparse.Namespace) -> str:
    systems = [row for ranks in options.ranks for row in compared(ranks, options)]
    planners, sources = planned(options.layers) if options.layers else ([], [])
    here = source()
    if options.record is not None:
        PAGE.write_text(page([(*row, *here) for row in systems],
                             [(*row, *one) for row, one in zip(planners, sources, strict=True)]))  # fmt: skip
    cut = len(SYSTEM) + len(PLAIN)
    text = printed("Training one small Llama", (*SYSTEM, *PLAIN), [row[:cut] for row in systems])
    text += printed("On the emulated wire", (*SYSTEM, *WIRED), [(*row[: len(SYSTEM)], *row[cut:]) for row in systems])
    text += f"each row: {'; '.join(here)}\n\n"
    if planners:
        text += printed("Llama 3 8B on 8 × 8", PLANNERS, planners)
        text += "".join(f"{row[0]}: {'; '.join(one)}\n" for row, one in zip(planners, sources, strict=True))
    return text


def source() -> Row:
    """Where the rows of this run are from."""
    import transformers

    return headings.machine(), f"{headings.versions()}, transformers {transformers.__version__}", headings.command()


# -- rows --------------------------------------------------------------------------------------------------------------


def compared(ranks: int, options: argparse.Namespace) -> list[Row]:
    """A row for each system on so many ranks."""
    on = machine(BANDWIDTH, SLOW[ranks], OP_SECONDS)
    plain = on_ranks(ranks, plainly, options.systems, options.rounds, options.steps)
    wired = on_ranks(ranks, on_wire, options.systems, on, options.wire_rounds, wire=on)
    beside = {system.name: plain.get(system.beside) for system in SYSTEMS}
    return [row(name, ranks, plain[name], wired[name], beside[name]) for name in plain]


def row(name: str, ranks: int, plain: Plain, wired: Wired, ours: Plain | None) -> Row:
    ratio = spread = ""
    if ours is not None:
        found = ratios(ours.seconds, plain.seconds)
        low, high = interval(found)
        ratio, spread = f"{statistics.median(found):.3f}", f"{low:.3f} - {high:.3f}" if math.isfinite(low) else ""
    taken, on_it = (statistics.median(one.seconds) * 1e3 for one in (plain, wired))
    return (
        name, str(ranks), f"{plain.plan:.2f}", f"{plain.rise / MEBI:.0f}", f"{taken:.1f}", ratio, spread,
        f"{plain.peak / MEBI:.1f}", f"{plain.apart:.0e}", f"{on_it:.0f}",
        " - ".join(f"{seconds * 1e3:.0f}" for seconds in wired.exposed),
        f"{wired.moved / MEBI:.2f}", f"{statistics.median(wired.late):.1%}{' void' if wired.is_void else ''}",
    )  # fmt: skip


def planned(layers: int) -> tuple[list[Row], list[Row]]:
    """A row for each planner, and where it is from."""
    rows, sources = [planner(compare_planners.our_planner(layers))], [source()]
    if compare_planners.has_autoparallel():
        rows.append(planner(compare_planners.autoparallel()))
        sources.append(source())
    else:
        rows.append(planner(AUTOPARALLEL.planned))
        sources.append((AUTOPARALLEL.machine, AUTOPARALLEL.versions, AUTOPARALLEL.command))
    return rows, sources


def planner(found: Planned) -> Row:
    seconds = (found.trace, found.problem, found.solve, found.seconds, found.apply)
    return (found.name, *("" if one is None else f"{one:.1f}" for one in seconds), f"{found.memory / MEBI:.0f}")


# -- the page ----------------------------------------------------------------------------------------------------------


def page(systems: Iterable[Row], planners: Sequence[Row]) -> str:
    """The result as Markdown, with machine, versions and command in each row."""
    title, *more = (__doc__ or "").splitlines()
    text = f"# {title}\n{chr(10).join(more)}\n\n{markdown((*SYSTEM, *PLAIN, *WIRED, *SOURCE), systems)}"
    return f"{text}\n{markdown((*PLANNERS, *SOURCE), planners)}" if planners else text


def markdown(columns: Row, rows: Iterable[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
