"""The forward is cut where the page says: by cost as well as all cuts allow, or by globs, whose mistakes are named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelined_programs import node_of, read

from autopar.costs.machine import machine_of
from autopar.errors import PlanError
from autopar.step.pipelined.cutting.assignment import computed_anywhere, ops_of_forward
from autopar.step.pipelined.cutting.cut import NEAR, best_cut, cut_by_cost, cut_by_globs
from autopar.step.pipelined.cutting.units import Unit, units_of

# -- by cost


def unit(seconds: float = 1.0, held: int = 0, activations: int = 0, crossing: int = 0, name: str = "") -> Unit:
    return Unit(name, (), seconds, held, activations, crossing)


@st.composite
def units(draw: st.DrawFn) -> list[Unit]:
    """Whole numbers, so that sums are exact. Some facts are the same for all, so that the next one decides."""
    numbers = st.integers(0, 12)
    time, memory = (draw(st.sampled_from((numbers, st.just(0)))) for _ in range(2))
    return [unit(float(draw(time)), draw(memory), draw(memory), draw(numbers)) for _ in range(draw(st.integers(1, 7)))]


@settings(deadline=None)
@given(data=st.data())
def test_no_cut_is_better(data: st.DataObject) -> None:
    """Of all cuts: the least time of the longest stage; within 5 % of that, the least memory of the largest; within
    5 % of that, the fewest bytes that are sent."""
    parts = data.draw(units())
    stages = data.draw(st.integers(1, len(parts)))
    live = [float(data.draw(st.integers(1, 4))) for _ in range(stages)]

    def facts(first: Sequence[int]) -> tuple[float, float, int]:
        own = [parts[begin:end] for begin, end in itertools.pairwise([*first, len(parts)])]
        time = max(sum(u.seconds for u in of) for of in own)
        memory = max(sum(u.held + live[k] * u.activations for u in of) for k, of in enumerate(own))
        return time, memory, sum(parts[begin].crossing for begin in first[1:])

    every = [facts((0, *more)) for more in itertools.combinations(range(1, len(parts)), stages - 1)]
    in_time = [(time, memory, sent) for time, memory, sent in every if time <= min(t for t, _, _ in every) * NEAR]
    least = min(memory for _, memory, _ in in_time)
    wanted = min(sent for _, memory, sent in in_time if memory <= least * NEAR)
    first = best_cut(parts, stages, live)
    assert len(first) == stages and first[0] == 0 and first == sorted(set(first))
    time, memory, sent = facts(first)
    assert (time, memory, sent) in in_time and memory <= least * NEAR and sent == wanted


def test_memory_counts_what_a_stage_keeps_alive() -> None:
    """The first stage of 1F1B keeps the activations of as many micro-batches as there are stages."""
    parts = [unit(seconds=0.0, activations=10) for _ in range(4)]
    assert best_cut(parts, 2, [1.0, 1.0]) == [0, 2]
    assert best_cut(parts, 2, [3.0, 1.0]) == [0, 1]


def test_too_few_parts() -> None:
    with pytest.raises(PlanError) as caught:
        cut_by_cost([unit(name="embed"), unit(), unit(name="embed")], 4, [1.0] * 4)
    assert str(caught.value) == (
        "the schedule has 4 stages, and the forward has 3 parts between which it can be cut: embed, the root; use "
        "fewer stages (a smaller pp, or fewer chunks), or a model with more layers"
    )


# -- a model by hand: an embedding, two blocks, a head

TEXT = """\
program traced
  embed : f32[4 4] = param('embed.w')
  first : f32[4 4] = param('layers.0.up.w')
  second : f32[4 4] = param('layers.1.up.w')
  head : f32[4 4] = param('head.w')
  x : f32[2 4] = input
  d : f32[2 4] = tangent(0)
forward:
  mm : f32[2 4] = mm(x, embed)  # call 0 embed
  mm_1 : f32[2 4] = mm(mm, first)  # call 1 layers.0.up
  relu : f32[2 4] = relu(mm_1)  # call 2 layers.0.act
  add : f32[2 4] = add.Tensor(relu, mm)  # call 3 layers.0
  mm_2 : f32[2 4] = mm(add, second)  # call 4 layers.1.up
  relu_1 : f32[2 4] = relu(mm_2)  # call 5 layers.1.act
  add_1 : f32[2 4] = add.Tensor(relu_1, mm)  # call 6 layers.1
  mm_3 : f32[2 4] = mm(add_1, head)  # call 7 head
  mean : f32[2 4] = mul.Tensor(mm_3, 0.5)  # call 8 
backward:
  d_mm : f32[2 4] = mul.Tensor(d, 0.5)  # call 8 
  t : f32[4 4] = t(head)  # call 7 head
  mm_4 : f32[2 4] = mm(d_mm, t)  # call 7 head
  t_1 : f32[4 2] = t(add_1)  # call 7 head
  mm_5 : f32[4 4] = mm(t_1, d_mm)  # call 7 head
  return mean
  grad head = mm_5
"""


def test_units_of_a_model() -> None:
    """A block is one part, with all its modules; the seconds of a call are those of its backward too; a parameter has
    its sum of gradients and two states beside it; what is read further on crosses each boundary before its last
    reader."""
    program = read(TEXT)
    found = units_of(program, ops_of_forward(program, computed_anywhere(program)), machine_of("cpu"))
    assert [(u.name, len(u.nodes)) for u in found] == [
        ("embed", 1), ("layers.0", 3), ("layers.1", 3), ("head", 1), ("", 1),
    ]  # fmt: skip
    bytes = 2 * 4 * 4
    assert [u.activations for u in found] == [bytes, 3 * bytes, 3 * bytes, bytes, bytes]
    assert [u.held for u in found] == [4 * 64, 4 * 64, 4 * 64, 4 * 64, 0]
    assert [u.crossing for u in found] == [0, bytes, 2 * bytes, bytes, bytes]
    times = {u.name: u.seconds for u in found}
    assert times["head"] > 2 * times["embed"] > 0, "three products, where the embedding has one"
    (tail,) = (u.seconds for u in found if not u.name)
    assert 0 < tail < times["head"]


def stages_by(*globs: object) -> dict[str, int | None]:
    """The stage of each op of the forward."""
    program = read(TEXT)
    ops = ops_of_forward(program, computed_anywhere(program))
    place = cut_by_globs(program, ops, globs, 2)  # type: ignore[arg-type]
    return {node.name: place(node) for node in ops}


def test_by_globs() -> None:
    """A glob matches a module, and all in it; one for a stage, or several. The root follows its operands."""
    found = stages_by(["embed", "layers.0"], ["*layers.1", "head"])
    assert found == {
        "mm": 0, "mm_1": 0, "relu": 0, "add": 0, "mm_2": 1, "relu_1": 1, "add_1": 1, "mm_3": 1, "mean": None,
    }  # fmt: skip
    assert stages_by(["embed", "layers.[0]"], "[lh]*[1d]")["add_1"] == 1
    within = stages_by(["embed", "layers.0", "layers.1.up"], ["layers.1.act", "head"])
    assert (within["mm_2"], within["relu_1"], within["add_1"]) == (0, 1, None), "around modules of two stages"


def test_a_glob_for_a_module_goes_before_one_for_a_module_around_it() -> None:
    found = stages_by(["embed", "layers.0", "layers.1.up"], ["layers.1", "head"])
    assert (found["mm_2"], found["relu_1"], found["add_1"]) == (0, 1, 1)


WRONG = {
    "too few": (
        ["*"],
        "stages=(['*'],) gives globs for 1 stages, and the schedule has 2: give one glob, or a list of them, for each",
    ),
    "too many": (
        ["embed", "layers.*", "head"],
        "stages=('embed', 'layers.*', 'head') gives globs for 3 stages, and the schedule has 2: give one glob, or a "
        "list of them, for each",
    ),
    "a number": (
        ["embed", 3],
        "stages= has 3 for stage 1: give globs over module paths",
    ),
    "no text": (
        ["embed", [3]],
        "stages= has 3 for stage 1: give globs over module paths",
    ),
    "no match": (
        [["embed", "layers.0"], ["layer.1", "head"]],
        "the glob 'layer.1' of stage 1 matches no module that runs an op; near it: layers.1, layers.0, layers.1.up",
    ),
    "overlap": (
        [["embed", "layers.*"], ["layers.1", "head"]],
        "the module layers.1 is on stage 0, and 'layers.1' puts it on stage 1, too: change one of the globs",
    ),
    "left out": (
        [["embed", "layers.0"], "layers.1"],
        "no stage has the module head\n    model.py:7   in module head\n  add a glob that matches it to one of stages=",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_globs(name: str) -> None:
    globs, words = WRONG[name]
    with pytest.raises(PlanError) as caught:
        stages_by(*globs)
    assert str(caught.value) == words.replace("(['*'],)", "('*',)")


def test_one_text_for_all_stages() -> None:
    program = read(TEXT)
    with pytest.raises(PlanError, match=r"^stages='layers\.\*' gives globs for 1 stages, and the schedule has 2: give"):
        cut_by_globs(program, [node_of(program, "mm")], "layers.*", 2)
