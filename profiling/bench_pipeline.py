"""Measure pipelined steps on four processes: memory, times beside the simulation, overhead, and torch's pipelines.

Memory: bytes that torch's allocator gives during the first step, beyond those between steps; an activation of one layer
and a boundary tensor are 1 MiB. Predicted: ``step.memory(rank)``. Wire: real processes on the emulated wire with paced
computing, from the first slot to the end of the last, beside ``step.pipeline.simulate()``. Overhead: CPU time of the
thread that runs the slots of a tiny model, without that of the generated functions, and with it; gloo's own threads
are not counted. Torch: alternating pairs of whole steps: 8 blocks of a product and a GELU, 512 wide, with 256 rows in a
micro-batch; a Llama of 8 layers, 256 wide, with 4 × 64 tokens. Growth: capture, nodes and lines of generated code by
micro-batches.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench_step import interval, ratios, told
from pipeline_models import RIVALS, Blocks
from pipeline_ranks import MIB, MODELS, beside_torch, measured, on_wire, overhead, peaks, peaks_of_torch, uncaptured
from tables import printed

from autopar.pipeline import POLICIES
from autopar.runtime.lowering.lower import lower
from autopar.scheduling.programs.order import ORDERS

PROFILES_ITSELF = True  # in other processes
FEW, MANY = 8, 32  # micro-batches
COUNTS = (4, 16, 64, 128)
DEEP = 4  # layers of a stage
GROWS = ("gpipe", "looped-bfs")  # policies whose memory grows with the micro-batches
GROWTH = (4, 256)
FLAT, NEAR_BYTES, NEAR_SECONDS, LIGHT, SLOPE = 1.0, 0.10, 0.05, 0.3, 0.02


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="beside torch's")
    parser.add_argument("--rounds", type=int, default=24)


def chunks_of(policy: str) -> int:
    """Stages of a rank."""
    return POLICIES[policy].default


def mebibytes(values: Sequence[float]) -> str:
    return "  ".join(f"{value / MIB:.2f}" for value in values)


def outcome(text: str, worst: float, aim: float) -> str:
    return f"{text}: {worst:.3f}, aim {aim:g} {'met' if worst <= aim else 'missed'}\n"


# -- parts -------------------------------------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> str:
    """1F1B by micro-batches, beside torch's, and with sends of gradients kept to the end."""
    found = measured(peaks, "1f1b", COUNTS, 4 * DEEP)
    kept = measured(peaks, "1f1b", COUNTS, 4 * DEEP, True)
    torchs = measured(peaks_of_torch, COUNTS, 4 * DEEP)
    rows = [
        (str(count), mebibytes(row[0]), mebibytes(other[0]), mebibytes(theirs))
        for count, row, other, theirs in zip(COUNTS, found, kept, torchs, strict=True)
    ]
    columns = ("micro-batches", "autopar", "sends of gradients kept", "torch's Schedule1F1B")
    spread = max(max(ranks) - min(ranks) for ranks in zip(*(row[0] for row in found), strict=True)) / MIB
    slopes = [
        (last - first) / MIB / (COUNTS[-1] - COUNTS[1]) for first, last in zip(kept[1][0], kept[-1][0], strict=True)
    ]
    apart = max(abs(slope - (rank > 0)) for rank, slope in enumerate(slopes))
    return (
        printed("1F1B, MiB on each of four ranks", columns, rows)
        + outcome("most growth, boundary tensors", spread, FLAT)
        + f"kept sends, boundary tensors a micro-batch: {', '.join(f'{slope:.3f}' for slope in slopes)}\n"
        + outcome("apart from 0 on the first rank, 1 on others", apart, SLOPE)
    )


def promised(options: argparse.Namespace) -> str:
    """Each policy with few and many micro-batches, beside what is predicted; and ZB-H1 beside 1F1B."""
    rows, growth, apart = [], 0.0, 0.0
    by_policy: dict[str, Any] = {}
    for policy in options.policies:
        few, many = measured(peaks, policy, (FEW, MANY), 4 * chunks_of(policy) * DEEP)
        by_policy[policy] = many
        grown = max(b - a for a, b in zip(few[0], many[0], strict=True)) / MIB
        far = max(abs(a / b - 1) for row in (few, many) for a, b in zip(row[0], row[1], strict=True))
        if policy not in GROWS:
            growth = max(growth, grown)
        apart = max(apart, far)
        rows.append((policy, mebibytes(few[0]), mebibytes(many[0]), mebibytes(many[1]), f"{grown:.2f}", f"{far:.1%}"))
    columns = ("policy", f"m = {FEW}", f"m = {MANY}", "predicted", "growth", "apart")
    text = printed("Each policy, MiB on each of four ranks", columns, rows)
    text += outcome("most growth of policies that promise none, boundary tensors", growth, FLAT)
    text += outcome("apart from predicted", apart, NEAR_BYTES)
    if {"zb-h1", "1f1b"} <= set(by_policy):
        ours, plain = by_policy["zb-h1"], by_policy["1f1b"]
        more = [(a - b) / size for a, b, size in zip(ours[0], plain[0], ours[2], strict=True)]
        live = [a - b for a, b in zip(ours[3], plain[3], strict=True)]
        text += (
            f"ZB-H1 - 1F1B, in activations of a micro-batch: {', '.join(f'{value:.2f}' for value in more)}; "
            f"micro-batches kept: {', '.join(f'{value:g}' for value in live)}\n"
        )
    return text


def wire(options: argparse.Namespace) -> str:
    """The paced wire beside the simulation."""
    found = measured(on_wire, {policy: chunks_of(policy) for policy in options.policies}, (FEW, MANY))
    rows = [
        (policy, str(count), f"{seconds * 1e3:.1f}", f"{simulated * 1e3:.1f}", f"{seconds / simulated:.3f}",
         f"{late:.1%}")
        for policy, count, seconds, simulated, late in found
    ]  # fmt: skip
    text = printed("On the paced wire: median of 3 steps", ("policy", "m", "ms", "simulated", "/", "late"), rows)
    text += outcome("apart from simulated", max(abs(row[2] / row[3] - 1) for row in found), NEAR_SECONDS)
    swapped = [
        f"{a[0]} and {b[0]} at m = {a[1]} ({a[3] / b[3]:.3f} simulated, {a[2] / b[2]:.3f} measured)"
        for a in found for b in found
        if a[1] == b[1] and chunks_of(a[0]) == chunks_of(b[0]) and a[3] < b[3] and a[2] > b[2]
    ]  # fmt: skip
    return text + f"ranking of policies with as many stages: {'the same' if not swapped else '; '.join(swapped)}\n"


def slots(options: argparse.Namespace) -> str:
    """The CPU time of a slot."""
    rows, worst = [], 0.0
    for policy in ("1f1b", "zb-h1"):
        for rank, (count, own, whole) in enumerate(measured(overhead, policy, 64)):
            rows.append((policy, str(rank), str(count), f"{own:.3f}", f"{whole:.3f}"))
            worst = max(worst, own)
    columns = ("policy, m = 64", "rank", "slots", "CPU ms a slot", "with the functions")
    return printed("Overhead", columns, rows) + outcome("most CPU ms a slot", worst, LIGHT)


def beside(options: argparse.Namespace) -> str:
    """Whole steps beside torch's."""
    rows = []
    for name in options.models:
        for policy in RIVALS:
            ours, theirs, apart = measured(beside_torch, name, policy, 16, options.rounds)
            found = ratios(ours, theirs)
            low, high = interval(found)
            rows.append((
                name, policy, f"{statistics.median(ours) * 1e3:.0f}", f"{statistics.median(theirs) * 1e3:.0f}",
                f"{statistics.median(found):.3f}", f"{low:.3f} - {high:.3f}", *told(low, high, 1.0), f"{apart:.0e}",
            ))  # fmt: skip
    columns = ("model", "policy", "ms", "torch's", "ratio", "95 %", "aim", "", "losses apart")
    return printed(f"Steps of 16 micro-batches: {options.rounds} alternating pairs", columns, rows)


def growth(options: argparse.Namespace) -> str:
    """Capture and generated code by micro-batches; captures alternate, and orders are not cached."""
    seconds: dict[int, list[float]] = {count: [] for count in GROWTH}
    sizes: dict[int, tuple[int, int]] = {}
    for k in range(6):
        for count in GROWTH if k % 2 else GROWTH[::-1]:
            ORDERS.__dict__["_kept"].clear()
            given = Blocks.batch(8 * count, 8)
            step = uncaptured(Blocks(16, 8), count, "1f1b")  # it makes the schedule, which is data of m columns
            gc.collect()
            begun = time.perf_counter()
            step.capture(**given)
            if k:
                seconds[count].append(time.perf_counter() - begun)
            sizes[count] = generated(step)
    middle = {count: statistics.median(times) for count, times in seconds.items()}
    rows = [(str(count), f"{middle[count] * 1e3:.0f}", *map(str, sizes[count])) for count in GROWTH]
    few, many = GROWTH
    worst = max(middle[many] / middle[few], *(b / a for a, b in zip(sizes[few], sizes[many], strict=True)))
    text = printed("Capture and code", ("micro-batches", "capture, ms", "nodes", "lines of code"), rows)
    return text + outcome("m = 256 / m = 4", worst, 1 + NEAR_SECONDS)


def generated(step: Any) -> tuple[int, int]:
    """The nodes of all local programs of the stages, and the lines of code that are generated of them."""
    nodes = lines = 0
    for rank in range(4):
        for name, program in step.local(rank).programs.items():
            nodes += sum(1 for _ in program.nodes)
            if name.endswith("micro"):
                graphs = [function.graph for function in lower(program, {}).values()]
                lines += sum(len(graph.python_code("self").src.splitlines()) for graph in graphs)
    return nodes, lines


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {
    "memory": memory,
    "promised": promised,
    "wire": wire,
    "overhead": slots,
    "torch": beside,
    "growth": growth,
}


def run(options: argparse.Namespace) -> str:
    return "\n".join(PARTS[name](options) for name in options.only)
