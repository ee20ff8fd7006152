"""Any timetable that is right gives the numbers of programs that run one after the other, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import steps
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped_steps import made
from whole_programs import WholeProgram

from autopar import Mesh
from autopar.capture.model_state import model_state
from autopar.errors import VerifyError
from autopar.ir.value_names import batch_input_name, count_name
from autopar.runtime.running.functions import PlacedProgram
from autopar.runtime.running.programs import output_name
from autopar.runtime.simulation.pieces import cut, join
from autopar.step.running import StepRuns
from autopar.timetable import Entry, Position, Timetable
from autopar.timetable.rules import empty, hoist_counts, join_update, of_step

NAMES = ("llama", "mlp")
BATCHES = 3


def captured(name: str, sizes: dict[str, int], **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A step, and its batch."""
    make, batches, plan = steps.MODELS[name]
    batch = {key: torch.cat([value] * BATCHES) for key, value in batches(0).items()}
    step = made(make(), Mesh(sizes), plan if "tp" in sizes else "ddp", microbatches=BATCHES, **options)
    step.capture(**batch)
    return step, batch


def tables(step: Any, hoisted: bool, joined: bool, emptied: bool) -> Timetable:
    """A timetable of a step, by some of the rules."""
    micro, _ = step._current().pair
    lines = of_step(BATCHES, copy=micro.copy is not None, count=micro.count is not None)
    lines = hoist_counts(lines) if hoisted else lines
    lines = join_update(lines) if joined else lines
    lines = empty(lines) if emptied else lines
    return Timetable(BATCHES, (Position(tuple(step._calls.mesh.ranks), (), tuple(lines)),))


def runs_of(step: Any, table: Timetable) -> StepRuns:
    """What the step runs, with all programs that timetables name."""
    micro, update = step._current().pair
    runs = step._current().runs
    outputs = [output_name(k) for k in range(len(micro.outputs))]
    programs = {**runs.programs, ("micro", None): PlacedProgram(micro.program, micro.local, outputs)}
    programs["update", None] = PlacedProgram(update.program, update.local, update.returns, update.states)
    if micro.count is not None:
        counts = [count_name(k) for k in range(len(WholeProgram(*micro.count).interface.returned))]
        programs["count", None] = PlacedProgram(*micro.count, counts)
    return replace(runs, timetable=table, alone=table, programs=programs)


def one_after_the_other(step: Any, full: Mapping[str, torch.Tensor], inputs: list[dict[str, torch.Tensor]]) -> Any:
    """The loss, and what a step writes, by an interpreter that keeps everything and joins after each program."""
    micro, update = step._current().pair
    values = dict(full)

    def run(program: Any, local: Any, given: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        whole = WholeProgram(program, local)
        mesh, types = whole.interface.mesh, whole.interface.types
        pieces = {}
        for rank in mesh.ranks:
            own = pieces[rank] = dict[str, torch.Tensor]()
            for name, of in whole.named.items():
                at = mesh.coordinates(rank)
                if name in sums:
                    own[of] = sums[name][rank].clone()
                elif name in whole.sums:
                    own[of] = torch.zeros(types[of].attr.local_shape(types[of].shape, mesh, at), dtype=types[of].dtype)
                else:
                    own[of] = cut(given[name], types[of], at).clone()
        made = whole(pieces)
        returned = [
            join({rank: made[rank][0][k] for rank in made}, type, name)
            for k, (name, type) in enumerate(whole.interface.returned)
        ]
        nexts = {}
        for of in whole.interface.states:
            name, each = whole.names[of], {rank: made[rank][1][of] for rank in made}
            if name in whole.sums:
                sums[name] = each
            else:
                nexts[name] = join(each, types[of], name)
        return returned, nexts

    sums: dict[str, dict[int, torch.Tensor]] = {}
    copies: dict[str, torch.Tensor] = {}
    if micro.copy is not None:
        copies = {name.removesuffix(".copy"): value for name, value in run(*micro.copy, values)[1].items()}
    counts: dict[str, torch.Tensor] = {}
    if micro.count is not None:
        given = {batch_input_name(name, k): t for k, own in enumerate(inputs) for name, t in own.items()}
        counts = {count_name(k): value for k, value in enumerate(run(*micro.count, values | given)[0])}
    for own in inputs:
        values |= run(micro.program, micro.local, values | copies | own | counts)[1]
    returned, nexts = run(update.program, update.local, values)
    return dict(zip(update.returns, returned, strict=True)), {**values, **nexts}


@pytest.mark.long
@settings(deadline=None, max_examples=8)
@given(hoisted=st.booleans(), joined=st.booleans(), emptied=st.booleans(), name=st.sampled_from(NAMES),
       sizes=st.sampled_from([{"dp": 2}, {"dp": 2, "tp": 2}]), zero=st.integers(0, 3),
       clip_norm=st.sampled_from([None, 0.5]))  # fmt: skip
def test_rules_change_no_number(
    hoisted: bool, joined: bool, emptied: bool, name: str, sizes: dict[str, int], **options: Any
) -> None:
    step, batch = captured(name, sizes, **options)
    table = tables(step, hoisted, joined, emptied)
    table.verify()
    calls, module = step._calls, step.parallel.module
    before = {key: value.detach().clone() for key, value in (*module.named_parameters(), *module.named_buffers())}
    state = step._state()
    full = {**before, **copy.deepcopy(state)}
    inputs = step._inputs(calls.bound((), batch))
    plain = [dict(own.named) for own in inputs]
    wanted, written = one_after_the_other(step, full, plain)
    micro, _ = step._current().pair
    runs = runs_of(step, table)
    (returned, _), _ = step._simulated(inputs, model_state(module), micro, runs, state)
    assert all(torch.equal(returned[key], value) for key, value in wanted.items()), (returned, wanted)
    now = {**dict(module.named_parameters()), **dict(module.named_buffers()), **state}
    assert runs.written
    assert all(torch.equal(now[key], written[key]) for key in now)


def test_a_timetable_that_frees_too_early_is_refused() -> None:
    step, _ = captured("mlp", {"dp": 2})
    table = tables(step, True, True, True)
    early = [
        line.with_groups(empties={*line.empties, "inputs"}) if isinstance(line, Entry) else line
        for line in (*table.of(0)[:1], *table.of(0))
    ]
    with pytest.raises(VerifyError):
        replace(table, positions=(replace(table.positions[0], lines=tuple(early)),)).verify()
