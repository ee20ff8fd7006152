"""Measure reshard on Llama-2-7B cut to some layers: with one commit, one a reshard and one an operation.

The setting of PaddlePaddle #60022, as far as it exists here: 12 layers, dims full, sequence 2048, forward and backward;
on dp=2 tp=2, Megatron over tp, parameters and gradients split over dp as well. The pass alone is timed, with what it
asks for (the transitions), and not the capture. Seconds are those of the CPU, on which the pass is one thread, so that
other processes do not count; of several runs the fastest. With ``--step`` those of a training step, too: ``micro``,
forward and backward of one micro-batch, ``update``, and the low-precision ``copy`` of parameters; and what all passes
take.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from plot_reshard import plot
from profilers import calls_of, lines_of, positive
from stacks import below, sample, speedscope

import autopar
from autopar.examples.workloads import (
    LLAMA_PLAN,
    LLAMA_TRANSFERS,
    MESH,
    STEP,
    STEP_PLAN,
    STEP_TRANSFERS,
    PlacedStep,
    llama,
    placed_llama,
    placed_step,
)
from autopar.gc_pause import gc_paused
from autopar.ir import transfers
from autopar.ir.commit import Changes
from autopar.ir.edit import Edit
from autopar.ir.program import Program
from autopar.ir.program_data import Counts
from autopar.passes import Reshard
from autopar.passes.reshard import MODES, disagreements

PROFILES_ITSELF = True  # the pass, and not the capture before it
LINES = [Reshard.run, disagreements, Edit.insert, Changes.insert, Changes.settle]
HEAD = f"{MESH}, Megatron over tp, parameters and gradients split over dp\n\n"
REPEAT = 25
Key = TypeVar("Key")
ENOUGH = 4.0  # seconds, after which a run is not repeated
COMPILED = 3  # times that a step is


@dataclass
class Run:
    """One mode on one program."""

    seconds: float
    counts: Counts
    text: str


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=positive, nargs="+", default=[12])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--step", action="store_true", help="the programs of a training step, too")
    parser.add_argument(
        "--outside", action="store_true", help="the same edits, metadata kept by Inductor's FakeTensorUpdater"
    )
    parser.add_argument("--whole", action="store_true", help="reshard's share of a call of parallelize")


def once(placed: Program, mode: str, printed: bool = True) -> Run:
    program = placed.copy()
    before = replace(program.counts)
    with gc_paused():  # as the passes run
        start = time.process_time()
        Reshard(mode).run(program)
        seconds = time.process_time() - start
    assert before == Counts()
    program.level = Reshard.gives
    return Run(seconds, program.counts, str(program) if printed else "")


def measure(programs: Mapping[Key, Program], mode: str) -> dict[Key, Run]:
    """All programs in turn, so that a slow minute of the machine is one of all of them."""
    runs = {key: [once(placed, mode)] for key, placed in programs.items()}
    for _ in range(REPEAT - 1):
        for key, placed in programs.items():
            if sum(run.seconds for run in runs[key]) < ENOUGH:
                runs[key].append(once(placed, mode, printed=False))
    return {key: replace(min(each, key=lambda run: run.seconds), text=each[0].text) for key, each in runs.items()}


def inserted(placed: Program) -> Counter[str]:
    """The transfers that reshard inserts, by kind."""
    program = placed.copy()
    Reshard().run(program)
    return Counter(node.target.__name__ for node in program.nodes if node.target in transfers.BY_FUNCTION)


def check(expected: Mapping[str, tuple[int, int]], layers: int, kinds: Counter[str], runs: dict[str, Run]) -> None:
    """As many transfers as there should be, and the same bytes from every mode."""
    assert kinds == {kind: whole + each * layers for kind, (whole, each) in expected.items() if whole + each}, kinds
    assert len({run.text for run in runs.values()}) == 1, "the modes print different programs"
    for mode, run in runs.items():
        assert run.counts.inserted == kinds.total()
        assert run.counts.commits == 1 or mode != "batched"


def table(title: str, placed: Program, kinds: Counter[str], runs: dict[str, Run]) -> str:
    def row(what: str, values: list[float], form: str) -> str:
        return f"{what:24}" + "".join(f"{value:14{form}}" for value in values)

    every = list(runs.values())
    fastest = min(run.seconds for run in every)
    return "\n".join([
        f"{title}: {len(placed.graph.nodes)} nodes, {kinds.total()} inserted "
        f"({', '.join(f'{n} {kind}' for kind, n in kinds.most_common())})",
        f"{'':24}" + "".join(f"{mode:>14}" for mode in runs),
        row("milliseconds", [run.seconds * 1e3 for run in every], ".1f"),
        row("times the fastest", [run.seconds / fastest for run in every], ".1f"),
        row("commits", [run.counts.commits for run in every], "d"),
        row("records updated", [run.counts.record_updates for run in every], "d"),
        row("nodes visited", [run.counts.node_visits for run in every], "d"),
        row("µs per inserted op", [run.seconds * 1e6 / run.counts.inserted for run in every], ".1f"),
        row("µs per node visited", [run.seconds * 1e6 / run.counts.node_visits for run in every], ".2f"),
    ]) + "\n"  # fmt: skip


def exponents(rows: dict[int, dict[str, Run]]) -> str:
    """That of seconds over inserted ops; 1 is linear."""
    said = []
    for mode in next(iter(rows.values())):
        runs = [row[mode] for row in rows.values()]
        slope = np.polyfit(np.log([run.counts.inserted for run in runs]), np.log([run.seconds for run in runs]), 1)[0]
        said.append(f"{mode} {slope:.2f}")
    return f"exponent of seconds over inserted ops, {', '.join(map(str, rows))} layers: {', '.join(said)}\n"


def tables(tool: str, placed: Program, modes: list[str]) -> str:
    """The profiler's tables of the pass alone."""
    said = []
    for mode in modes:
        program = placed.copy()
        with gc_paused():
            if tool == "cprofile":
                printed = calls_of(lambda mode=mode, program=program: Reshard(mode).run(program))[2]
            else:
                printed = lines_of(lambda mode=mode, program=program: Reshard(mode).run(program), LINES)[1]
        said.append(f"{mode}, under {tool}\n{printed}")
    return "\n".join(said)


def flames(placed: Program, runs: dict[str, Run]) -> str:
    """A speedscope file: where each mode spends its time."""
    profiles = {}
    for mode, run in runs.items():
        stacks: Counter[Any] = Counter()
        for program in [placed.copy() for _ in range(max(1, min(100, int(2 / run.seconds))))]:
            with gc_paused():
                stacks += sample(lambda mode=mode, program=program: Reshard(mode).run(program))
        profiles[mode] = below(stacks, Reshard.run.__code__), run.seconds * 1e3
    return speedscope(profiles)


def whole(layers: int) -> str:
    """The share of reshard in a call of ``parallelize``: by the clock, and under cProfile."""
    model, given = llama(layers)

    def call() -> Any:
        return autopar.parallelize(model, MESH, LLAMA_PLAN, example=given)

    call()
    start = time.perf_counter()
    parallel = call()
    seconds = time.perf_counter() - start
    ms = parallel.reports[Reshard.name].ms
    _, stats, _ = calls_of(call)
    spent = {(Path(file).name, name): row[3] for (file, _, name), row in stats.stats.items()}
    part = spent["reshard.py", "run"]
    return (
        f"parallelize with an example, {layers} layers: {seconds:.2f} s, of which reshard {ms:.1f} ms, "
        f"{ms / seconds / 10:.2f} %\n"
        f"  under cProfile {stats.total_tt:.2f} s, of which reshard {part * 1e3:.0f} ms, "
        f"{part / stats.total_tt * 100:.2f} %\n"
    )


def step(layers: int, options: argparse.Namespace) -> str:
    """The programs of a training step: reshard in each mode, and then all passes."""
    said = [
        f"a training step on {MESH}, {STEP_PLAN}; AdamW, "
        f"{', '.join(f'{name}={value!r}' for name, value in STEP.items())}\n"
    ]
    steps = [placed_step(layers) for _ in range(COMPILED)]
    programs = steps[0].programs
    measured = {mode: measure(programs, mode) for mode in options.mode}
    for name, placed in programs.items():
        runs = {mode: by_name[name] for mode, by_name in measured.items()}
        kinds = inserted(placed)
        check(STEP_TRANSFERS[name], layers, kinds, runs)
        said.append(table(f"{name}, {layers} layers", placed, kinds, runs))
        if options.tool != "time":
            said.append(tables(options.tool, placed, options.mode))
    return "\n".join([*said, all_passes(steps)])


def all_passes(steps: list[PlacedStep]) -> str:
    """Each pass of each program: by the clock, of several compilations the fastest."""
    said = [f"{'all passes':24}{'milliseconds':>14}{'inserted':>14}{'removed':>14}{'commits':>14}"]
    for name in steps[0].reports:
        for same in zip(*(step.reports[name] for step in steps), strict=True):
            ms, first = min(report.ms for report in same), same[0]
            said.append(
                f"{f'{name}: {first.name}':24}{ms:14.1f}{first.inserted:14d}{first.removed:14d}{first.commits:14d}"
            )
    return "\n".join(said) + "\n"


def run(options: argparse.Namespace) -> str:
    recorded = options.record is not None
    folder = Path(__file__).parent / "results" if recorded else Path(tempfile.gettempdir()) / "autopar"
    try:  # before minutes of measuring
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise SystemExit(f"no place for the plot and the stacks: {error}") from None
    shown = folder.name if recorded else folder
    said = []
    least, *_ = options.layers
    programs = {least: placed_llama(least)}
    first = programs[least]
    cold = once(first, options.mode[0])
    programs |= {layers: placed_llama(layers) for layers in options.layers if layers != least}
    measured = {mode: measure(programs, mode) for mode in options.mode}
    rows = {layers: {mode: runs[layers] for mode, runs in measured.items()} for layers in programs}
    for layers, placed in programs.items():
        kinds = inserted(placed)
        check(LLAMA_TRANSFERS, layers, kinds, rows[layers])
        said.append(table(f"{layers} layers", placed, kinds, rows[layers]))
        if layers == least:
            said.append(f"the first run of the process, {options.mode[0]}: {cold.seconds * 1e3:.1f} ms\n")
    if len(rows) > 1:
        said.append(exponents(rows))
    if options.outside:
        from fake_updates import compare

        said.append(compare(first, least))
    if options.whole:
        said.append(whole(least))
    if options.step:
        said.append(step(least, options))
    if options.tool != "time":  # the pictures are those of the runs that are timed
        said.append(tables(options.tool, first, options.mode))
        return HEAD + "\n".join(said)
    (folder / "reshard.speedscope.json").write_text(flames(first, rows[least]))
    points = {mode: [(row[mode].counts.inserted, row[mode].seconds) for row in rows.values()] for mode in options.mode}
    plot(points, list(rows), folder / "reshard.png")
    said.append(f"{shown}/reshard.png: seconds over inserted ops\n")
    said.append(
        f"{shown}/reshard.speedscope.json: where the time goes, sampled, {least} layers; drop it on speedscope.app\n"
    )
    return HEAD + "\n".join(said)
