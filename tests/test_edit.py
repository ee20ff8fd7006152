"""Edits: one commit each, nothing left of those that fail, and the same program however often is committed."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import transfers
from autopar.capture import capture
from autopar.edit import Edit, Staged
from autopar.errors import EditError
from autopar.layout import DistAttr, Layout
from autopar.mesh import Mesh
from autopar.passes import Place, Reshard, Share, run_passes
from autopar.passes.reshard import MODES
from autopar.program import Program, operands, record_of, set_record
from autopar.record import Requirement, TensorType

aten = torch.ops.aten

TEXT = """\
program explicit on dp=2 tp=2
stage s1 on dp=2 tp=2 ranks 4 5 6 7
  x : f32[8/dp 4] = input
  w : f32[4 4/tp] = param
  g : f32[8 4] +tp = input
forward:
  relu : f32[8/dp 4] = relu(x)
  x_dp : f32[8 4] = all_gather(x, 0, dp)
  x_dp_tp : f32[8 4/tp] = slice(x_dp, 1, tp)
  add : f32[8/dp 4] = add.Tensor(relu, relu)
  ln : (f32[8/dp 4], f32[8/dp 1], f32[8/dp 1]) = native_layer_norm(add, [4], None, None, 1e-05)
  y : f32[8/dp 4] = ln[0]
backward:
  g_tp : f32[8 4] = all_reduce(g, tp)
  mul : f32[8 4] = mul.Tensor(g_tp, x_dp)
  mm : f32[8/dp 4/tp] = mm(y, w)
  neg : f32[8/dp 4/tp] = neg(mm)
  return (neg, mul, x_dp_tp)
"""


def base() -> Program:
    """The program, with source lines that tell where each line came from."""
    program = Program.parse(TEXT)
    for number, node in enumerate(program.nodes):
        if node.op == "call_function":
            set_record(node, replace(record_of(node), module="block", source=f"model.py:{number}  {node.name}"))
    return program


def layout(program: Program, *dims: str | None, pending: tuple[str, ...] = ()) -> Layout:
    assert program.mesh is not None
    return Layout(program.mesh, DistAttr.split(*dims, pending=pending))


def lines(program: Program) -> dict[str, str]:
    """name → what stands behind it."""
    return dict(line.strip().split(" : ") for line in str(program).splitlines() if " : " in line)


# -- commits and counts ------------------------------------------------------------------------------------------


def test_a_batch_of_edits_is_committed_once() -> None:
    program = base()
    node = program.node
    with program.edit() as edit:
        for user in ("mul", "neg"):
            whole = edit.all_gather(node("x"), 0, "dp", before=node(user))
            split = edit.slice(whole, 1, "tp", before=node(user))
            edit.insert(aten.relu.default, (split,), before=node(user), type=split.type)
        edit.annotate(node("neg"), phase="update")
        assert len(program.graph.nodes) == 14  # nothing has been touched
        assert str(program) == TEXT
    counts = program.counts
    assert (counts.commits, counts.inserted, counts.removed, counts.record_updates, counts.node_visits) == (1, 6, 0, 1, 20)


@pytest.mark.parametrize(("sync", "explicit", "commits"), [(False, False, 1), (False, True, 3), (True, False, 3)])
def test_commits_and_visits_of_each_mode(sync: bool, explicit: bool, commits: int) -> None:
    program = base()
    with program.edit(sync=sync) as edit:
        for count in range(3):
            edit.slice(program.node("g_tp"), 0, "dp", before=program.node("mul"))
            if explicit:
                edit.commit()
            assert len(program.graph.nodes) == 14 + (count + 1) * (commits > 1)
    assert program.counts.commits == commits
    assert program.counts.inserted == 3
    assert program.counts.node_visits == (17 if commits == 1 else 15 + 16 + 17)  # each node once a commit


def test_an_edit_without_operations_commits_nothing() -> None:
    program = base()
    for sync in (False, True):
        with program.edit(sync=sync) as edit:
            edit.commit()
            edit.annotate(program.node("neg"), phase="backward", type=record_of(program.node("neg")).type)
    assert program.counts.commits == program.counts.node_visits == program.counts.record_updates == 0


def test_erased_nodes_are_counted_and_gone() -> None:
    program = base()
    neg, mm, ln = map(program.node, ("neg", "mm", "ln"))
    with program.edit() as edit:
        edit.erase(mm)
        edit.erase(neg)
        edit.erase(neg)
        edit.replace_all_uses(neg, ln.args[0])
        edit.erase(edit.pend(ln.args[0], "tp", before=mm))
        assert "neg" in str(program)
    assert program.counts.removed == 3 and program.counts.inserted == 1 and program.counts.commits == 1
    assert "neg" not in str(program) and "mm" not in str(program) and "pend" not in str(program)
    assert "return (add as [8/dp 4/tp], mul, x_dp_tp)" in str(program)
    assert Program.parse(str(program)) == program


def place() -> Place:
    return Place(Mesh(dp=2, tp=2), {"x": DistAttr.split("dp", None), "up_weight": DistAttr.split("tp", None), "down_weight": DistAttr.split(None, "tp")})


def test_each_pass_commits_once_if_it_edits() -> None:
    program = capture(models.Block(), (torch.randn(6, 8),), {}).program
    for step in (place(), Reshard()):
        before = program.counts.commits, program.counts.node_visits
        step.run(program)
        program.level = step.gives
        assert program.counts.commits - before[0] == 1, step.name
        assert program.counts.node_visits - before[1] == len(program.graph.nodes), step.name
    twice = program.copy()
    user = next(node for node in twice.nodes if node.target is aten.gelu.default)
    with twice.edit() as edit:
        for _ in range(2):
            edit.pend(twice.node("down_bias"), "tp", before=user)
    Share().run(twice)
    assert twice.counts.commits == 2
    Share().run(twice)
    assert twice.counts.commits == 2  # nothing left to share


@pytest.mark.parametrize("step", [Place(Mesh(dp=2)), Reshard(), Share()], ids=lambda step: step.name)
def test_a_pass_with_nothing_to_do_commits_nothing(step: Any) -> None:
    """Reshard where all uses agree, Share without twins, Place where there is nothing to place."""
    agreeing = "  x : f32[4/dp] = input\nforward:\n  y : f32[4/dp] = relu(x)\n  return y\n"
    program = Program.parse(f"program {step.takes} on dp=2\n{'' if step.takes == 'traced' else agreeing}")
    run_passes(program, [step])
    assert program.counts.commits == 0


@pytest.mark.parametrize("name", ["block", "residual", "language"])
def test_the_modes_of_reshard_give_the_same_program(name: str) -> None:
    model, args = {
        "block": lambda: (models.Block(), (torch.randn(6, 8),)),
        "residual": lambda: (models.Residual(7, 9), (torch.randn(5, 3, 7),)),
        "language": lambda: (models.Language(), (torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, 3, dtype=torch.long))),
    }[name]()
    placed = capture(model, args, {}).program
    split = {}
    for p in placed.placeholders:
        ndim, user = len(record_of(p).type.shape), record_of(p).name
        if record_of(p).role == "input" or user.endswith("up.weight"):
            split[p.name] = DistAttr.split("tp" if user.endswith("up.weight") else "dp", *[None] * (ndim - 1))
    run_passes(placed, [Place(Mesh(dp=2, tp=2), split)])
    made = {}
    for mode in MODES:
        program = placed.copy()
        (report,) = run_passes(program, [Reshard(mode)])
        made[mode] = program.text(comments=True)
        assert (report.commits == 1) == (mode == "batched")
        assert report.inserted > 3
        assert program.counts.node_visits >= report.commits * len(placed.graph.nodes)
    assert made["batched"] == made["per-reshard"] == made["sync"]


# -- what a commit does ------------------------------------------------------------------------------------------


def test_names_are_given_in_graph_order() -> None:
    program = base()
    node = program.node
    with program.edit() as edit:
        last = edit.all_gather(node("x"), 0, "dp", before=program.output)
        first = edit.all_gather(node("x"), 0, "dp", before=node("relu"))
        middle = edit.all_gather(node("x"), 0, "dp", before=node("mm"))
        chained = edit.slice(middle, 0, "tp", before=node("mm"))
        assert repr(last) == "<staged all_gather>"
    assert (first.node.name, middle.node.name, last.node.name) == ("x_dp_1", "x_dp_2", "x_dp_3")  # x_dp is there
    assert repr(chained) == chained.node.name == "x_dp_2_tp"


def test_a_name_for_every_op_parses_back() -> None:
    """FX renames builtins; axes and hints may be anything that is a name."""
    program = Program.parse("program explicit on dp=2 é=2\n  x : f32[8/dp/é] = input\nforward:\n  y : f32[8/dp/é] = neg(x)\n  return y\n")
    x, y = map(program.node, "xy")
    with program.edit() as edit:
        edit.insert(aten.sum.default, (x,), before=y, type=TensorType((), torch.float32, layout(program, pending=("dp", "é"))),
                    uses=[Requirement(record_of(x).type.layout, torch.float32)])  # fmt: skip
        edit.insert(aten.relu.default, (x,), before=y, type=record_of(x).type, name="mine", uses=record_of(y).uses)
        edit.insert(aten.relu.default, (x,), before=y, type=record_of(x).type, name="mine", uses=record_of(y).uses)
        edit.all_gather(x, 0, "é", before=y)
        edit.cast(x, torch.bfloat16, before=y)
    assert [node.name for node in program.nodes] == ["x", "sum_1", "mine", "mine_1", "x__", "x_bfloat16", "y", "output"]
    program.verify()
    assert Program.parse(str(program)) == program
    assert program.graph.create_node("call_function", aten.relu.default, (x,), name="mine").name not in ("mine", "mine_1")


@pytest.mark.parametrize("name", ["sum", "lambda", "f32", "state", "a.b", "", "ü"])
def test_names_that_cannot_be_are_refused(name: str) -> None:
    program = base()
    with pytest.raises(EditError, match="cannot name a value: Python, FX or the program's text has a meaning for it"), program.edit() as edit:
        edit.insert(aten.relu.default, (program.node("x"),), before=program.node("add"), type=record_of(program.node("x")).type, name=name)


def test_inserted_nodes_know_where_they_come_from() -> None:
    """Phase of what they stand before, module and source of what they serve, unless told otherwise."""
    program = base()
    with program.edit() as edit:
        plain = edit.slice(program.node("add"), 1, "tp", before=program.node("mul"))
        told = edit.slice(program.node("add"), 1, "tp", before=program.node("mul"), phase="update")
    for staged, phase in ((plain, "backward"), (told, "update")):
        record = record_of(staged.node)
        assert (record.phase, record.module) == (phase, "block")
        assert record.source == record_of(program.node("add")).source != ""
        assert record.type == TensorType((8, 4), torch.float32, layout(program, "dp", "tp"))
        assert record.uses == ()


def test_concat_joins_and_tells_its_requirements() -> None:
    program = base()
    mul = program.node("mul")
    with program.edit() as edit:
        joined = edit.concat([program.node("x_dp"), program.node("g_tp")], 1, before=mul)
        edit.slice(joined, 1, "tp", before=mul)
    assert lines(program)["cat"] == "f32[8 8] = cat([x_dp, g_tp], 1)"
    assert lines(program)["cat_tp"] == "f32[8 8/tp] = slice(cat, 1, tp)"
    program.verify()


def test_one_occurrence_or_all_of_them() -> None:
    program = base()
    add, relu, x, x_dp = map(program.node, ("add", "relu", "x", "x_dp"))
    with program.edit() as edit:
        edit.replace_use(add, relu, x, index=1)
    assert lines(program)["add"] == "f32[8/dp 4] = add.Tensor(relu, x)"
    with program.edit() as edit:
        edit.replace_use(add, relu, x)
        copy = edit.slice(x_dp, 0, "dp", before=add)
        edit.replace_use(add, x, copy, index=0)
    assert lines(program)["add"] == "f32[8/dp 4] = add.Tensor(x_dp_dp, x)"
    with program.edit() as edit:
        again = edit.insert(aten.neg.default, (x,), before=x.next.next.next, type=record_of(x).type, uses=record_of(relu).uses)
        edit.replace_all_uses(x, again)  # but in what replaces it
    assert lines(program)["neg_1"] == "f32[8/dp 4] = neg(x)"
    assert all(node.args[0] is not x for node in program.nodes if node.op == "call_function" and node is not again.node)
    program.verify()


def test_changed_types_are_carried_to_the_transfers_that_read_them() -> None:
    program = base()
    x, neg = program.node("x"), program.node("neg")
    with program.edit() as edit:
        late = edit.slice(program.node("x_dp"), 0, "tp", before=neg)
        edit.annotate(x, type=TensorType((16, 4), torch.bfloat16, layout(program, "dp", None)))
    assert lines(program)["x_dp"] == "bf16[16 4] = all_gather(x, 0, dp)"
    assert lines(program)["x_dp_tp"] == "bf16[16 4/tp] = slice(x_dp, 1, tp)"
    assert lines(program)[late.node.name] == "bf16[16/tp 4] = slice(x_dp, 0, tp)"
    assert lines(program)["relu"] == "f32[8/dp 4] = relu(x as f32[16/dp 4])"  # an op keeps its own
    assert program.counts.record_updates == 4 and program.counts.commits == 1
    with program.edit() as edit:
        edit.annotate(program.node("ln"), type=(record_of(x).type, None, None))
    assert lines(program)["y"] == "bf16[16/dp 4] = ln[0]"


@pytest.mark.parametrize("sync", [False, True])
def test_a_transfer_that_reads_something_else_has_another_type(sync: bool) -> None:
    program = base()
    with program.edit(sync=sync) as edit:
        edit.replace_use(program.node("x_dp_tp"), program.node("x_dp"), program.node("relu"))
    assert lines(program)["x_dp_tp"] == "f32[8/dp 4/tp] = slice(relu, 1, tp)"


def test_a_transfer_may_apply_only_after_what_is_staged_before_it() -> None:
    """What is staged counts, also where a type follows from it."""
    made = []
    for sync in (False, True):
        program = base()
        with program.edit(sync=sync) as edit:
            edit.replace_use(program.node("x_dp_tp"), program.node("x_dp"), program.node("relu"))
            edit.annotate(program.node("x"), type=TensorType((8, 4), torch.float32, layout(program, "dp", None, pending=("tp",))))
            edit.all_reduce(program.node("x"), "tp", before=program.node("relu"))
            again = edit.reduce_scatter(program.node("x_dp"), 1, "tp", before=program.node("mul"))
            edit.all_gather(again, 1, "tp", before=program.node("mul"))
        made.append(str(program))
    assert made[0] == made[1]
    assert "  x_dp_tp_1 : f32[8 4/tp] = reduce_scatter(x_dp, 1, tp)\n  x_dp_tp_1_tp : f32[8 4] = all_gather(x_dp_tp_1, 1, tp)\n" in made[0]


def test_a_transfer_that_does_not_apply_is_refused_when_other_types_change_too() -> None:
    program = base()
    x, w = program.node("x"), program.node("w")
    with pytest.raises(EditError, match=r"all_gather\(w, 0, dp\): dim 0 is not split over dp last; w is f32\[4 4/tp\]"), program.edit() as edit:
        edit.annotate(x, type=replace(record_of(x).type, dtype=torch.bfloat16))
        edit.all_gather(w, 0, "dp", before=program.node("mm"))
    assert str(program) == TEXT


def test_types_are_carried_through_a_transfer_of_which_something_else_is_said() -> None:
    for sync in (False, True):
        program = base()
        x = program.node("x")
        with program.edit(sync=sync) as edit:
            edit.annotate(program.node("x_dp"), phase="backward")
            edit.annotate(x, type=replace(record_of(x).type, dtype=torch.bfloat16))
        assert lines(program)["x_dp_tp"] == "bf16[8 4/tp] = slice(x_dp, 1, tp)"


def test_what_is_said_of_a_transfer_does_not_change_its_type() -> None:
    program = base()
    x_dp = program.node("x_dp")
    with program.edit() as edit:
        edit.annotate(x_dp, type=record_of(program.node("x")).type, phase="backward")
    assert (record_of(x_dp).type, record_of(x_dp).phase) == (TensorType((8, 4), torch.float32, layout(program, None, None)), "backward")


# -- the same program, however often is committed ----------------------------------------------------------------

Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # operands are ("value", number)


class Script:
    """Operations drawn at random while they are carried out one by one; can be carried out again in another mode."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def play(self, program: Program, edit: Edit, after: Callable[[], None] = lambda: None) -> None:
        values: list[Any] = list(program.nodes)
        for call in self.calls:
            self.one(edit, values, call)
            after()

    @staticmethod
    def one(edit: Edit, values: list[Any], call: Call) -> None:
        def load(value: Any) -> Any:
            if isinstance(value, tuple) and value[:1] == ("value",):
                return values[value[1]]
            return [load(v) for v in value] if isinstance(value, list) else value

        name, args, kwargs = call
        result = getattr(edit, name)(*map(load, args), **{key: load(v) for key, v in kwargs.items()})
        if isinstance(result, Staged):
            values.append(result)


def draw_script(data: st.DataObject, count: int) -> tuple[Script, bool]:
    """A script, and whether all of it went well when each operation was committed at once."""
    program, script = base(), Script()
    edit = Edit(program, sync=True)
    values: list[Any] = list(program.nodes)
    size = len(values)
    places = [float(k) for k in range(size)]

    def draw(options: Any) -> Any:
        return data.draw(st.sampled_from(list(options)))

    def type_of(number: int) -> Any:
        value = values[number]
        return record_of(value.node if isinstance(value, Staged) else value).type

    def a_transfer() -> Call:
        x = draw(k for k in range(len(values)) if isinstance(type_of(k), TensorType))
        type = type_of(x)
        axis, dim = draw(["dp", "tp"]), draw(range(2))
        options: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("slice", (dim, axis), {}), ("all_gather", (dim, axis), {}), ("all_reduce", (axis,), {}), ("pend", (axis,), {}),
            ("reduce_scatter", (dim, axis), {}), ("all_to_all", (dim, 1 - dim, axis), {}), ("send", ("s1",), {}), ("cast", (torch.bfloat16,), {}),
        ]  # fmt: skip
        fits = []
        for name, args, kwargs in options:
            row = transfers.TRANSFERS[name]
            try:
                row.infer(type, transfers.arguments(row.function, (None, *args), kwargs), program.stages)
                fits.append((name, args, kwargs))
            except ValueError:
                pass
        name, args, kwargs = draw(fits)
        return name, (("value", x), *args), {**kwargs, "before": ("value", place(x)), "phase": draw([None, "update"])}

    where: list[float] = []  # between which nodes the newest value stands

    def place(number: int) -> int:
        """What to insert before: something behind the operand, staged or not."""
        spot = draw(k for k in range(3, len(values)) if places[k] > places[number])
        where.append(spot - 0.5 if spot < size else places[spot])
        return spot

    def an_op() -> Call:
        x = draw(k for k in range(len(values)) if isinstance(type_of(k), TensorType))
        about = {"type": type_of(x), "uses": [Requirement(type_of(x).layout, type_of(x).dtype)], "name": draw([None, "mine", "mine_1"])}
        return "insert", (draw([aten.relu.default, aten.sum.default]), [("value", x)]), {"before": ("value", place(x)), **about}

    def a_concat() -> Call:
        x = draw([0, 2, 3, 6])  # no transfer: what is known of those at once may change with the commit
        return "concat", ([("value", x), ("value", x)], 1), {"before": ("value", place(x))}

    def a_use() -> Call:
        user = draw(k for k in range(3, size) if operands(values[k]))
        index = draw(range(len(operands(values[user]))))
        old = operands(values[user])[index]
        number = next((k for k, v in enumerate(values) if v is old or (isinstance(v, Staged) and v.node is old)), None)
        new = draw(k for k in range(len(values)) if places[k] < user and isinstance(type_of(k), TensorType))
        return "replace_use", (("value", user), ("value", number), ("value", new)), {"index": draw([index, index, None])}

    def all_uses() -> Call:
        old = draw(range(len(values)))
        new = draw(k for k in range(len(values) - 1) if k != size - 1 and isinstance(type_of(k), TensorType))
        return "replace_all_uses", (("value", old), ("value", new)), {}

    def a_note() -> Call:
        number = draw(range(size - 1))
        type = draw([record_of(values[k]).type for k in (0, 1, 2, 5)])
        changes = draw([{"phase": "update"}, {"phase": "forward"}, {"source": "another.py:1"}, {"type": type}, {"type": type}])
        return "annotate", (("value", number),), changes

    def an_erasure() -> Call:
        unused = [k for k, v in enumerate(values[:-1]) if k != size - 1 and not (v.node if isinstance(v, Staged) else v).users]
        return ("erase", (("value", draw(unused)),), {}) if unused else a_note()

    try:
        for _ in range(count):
            call = draw([a_transfer, a_transfer, a_transfer, an_op, a_concat, a_use, a_use, all_uses, a_note, an_erasure])()
            script.calls.append(call)
            Script.one(edit, values, call)
            places += where[-1:] if len(values) > len(places) else []
        edit.__exit__(None, None, None)
    except EditError:
        return script, False
    return script, True


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_all_modes_give_the_same_program(data: st.DataObject) -> None:
    script, fine = draw_script(data, data.draw(st.integers(1, 8)))
    if not fine:
        script.calls.pop()
    made: dict[str, str] = {}
    counts: dict[str, tuple[int, int]] = {}
    for mode in ("sync", "explicit", "batched"):
        program = base()
        try:
            with program.edit(sync=mode == "sync") as edit:
                script.play(program, edit, edit.commit if mode == "explicit" else lambda: None)
        except EditError:
            assert not fine  # an erasure that the operation left out would have made possible
            return
        made[mode] = program.text(comments=True)
        counts[mode] = (program.counts.inserted, program.counts.removed)
        assert Program.parse(made[mode]) == program
        assert len({node.name for node in program.nodes}) == len(program.graph.nodes)
        assert program.counts.commits <= 1 or mode != "batched"
        program.graph.lint()
    assert made["sync"] == made["explicit"] == made["batched"]
    assert counts["sync"] == counts["explicit"] == counts["batched"]


def snapshot(program: Program) -> list[Any]:
    """Every node object with what it reads, who reads it, what is known of it; the counts."""
    found: list[Any] = [replace(program.counts), program.text(comments=True)]
    for node in program.nodes:
        found.append((id(node), node.name, repr(node.args), repr(node.kwargs), [id(o) for o in operands(node)], set(map(id, node.users)),
                      id(record_of(node)), id(node.prev), id(node.next)))  # fmt: skip
    return found


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["sync", "explicit", "batched"]))
def test_nothing_is_left_of_an_edit_that_fails(data: st.DataObject, mode: str) -> None:
    """An exception of the user's, or an operation that is refused, after any number of operations."""
    script, _ = draw_script(data, data.draw(st.integers(0, 8)))
    program = base()
    with program.edit() as edit:  # something that has been done before
        edit.pend(program.node("x"), "tp", before=program.node("relu"))
    before = snapshot(program)
    keep = list(program.nodes)
    stop = data.draw(st.integers(0, len(script.calls)))
    with pytest.raises((EditError, ZeroDivisionError)), program.edit(sync=mode == "sync") as edit:
        values: list[Any] = [node for node in keep if node.name != "x_tp"]
        for call in script.calls[:stop]:
            Script.one(edit, values, call)
            if mode == "explicit":
                edit.commit()
        refuse(edit, program, data.draw(st.sampled_from(["exception", "order", "erase", "mismatch", "use"])))
    assert snapshot(program) == before
    assert list(program.nodes) == keep
    program.graph.lint()


def refuse(edit: Edit, program: Program, how: str) -> None:
    """Something that cannot be done, at once or when it is committed."""
    node = {node.name: node for node in program.nodes}
    if how == "exception":
        raise ZeroDivisionError
    if how == "order":
        edit.replace_use(node["relu"], operands(node["relu"])[0], node["neg"])
    elif how == "erase":
        edit.erase(node["w"])
        edit.replace_use(program.output, operands(program.output)[0], node["w"])
    elif how == "mismatch":
        edit.all_gather(node["w"], 0, "dp", before=node["mm"])
        raise ZeroDivisionError  # a staged change may have made it fit
    else:
        edit.replace_use(node["relu"], node["neg"], node["x"])


def test_an_edit_after_one_that_failed_starts_afresh() -> None:
    program = base()
    for sync in (True, False):
        with pytest.raises(ZeroDivisionError), program.edit(sync=sync) as edit:
            edit.slice(program.node("g_tp"), 0, "dp", before=program.node("mul"))
            raise ZeroDivisionError
    assert str(program) == TEXT and program.counts.commits == 0
    with program.edit() as edit:
        staged = edit.slice(program.node("g_tp"), 0, "dp", before=program.node("mul"))
    assert staged.node.name == "g_tp_dp"


def test_with_sync_an_error_points_at_its_operation() -> None:
    for sync in (True, False):
        program = base()
        with pytest.raises(EditError) as caught, program.edit(sync=sync) as edit:
            edit.replace_use(program.node("relu"), program.node("x"), program.node("neg"))  # here
            edit.pend(program.node("x"), "tp", before=program.node("add"))
        frames = [frame.line or "" for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert any(line.endswith("# here") for line in frames) == sync


# -- errors ------------------------------------------------------------------------------------------------------

Operation = Callable[[Edit, Callable[[str], Any]], Any]
REFUSED: dict[str, tuple[Operation, str]] = {
    "order": (
        lambda e, n: e.replace_use(n("relu"), n("x"), n("neg")),
        "relu would read neg before it is made; insert it earlier",
    ),
    "order of an insertion": (
        lambda e, n: e.all_gather(n("neg"), 1, "tp", before=n("mm")),
        "all_gather would read neg before it is made; insert it earlier",
    ),
    "replacement by something that reads it": (
        lambda e, n: e.replace_all_uses(n("x"), n("x_dp_tp")),
        "relu would read x_dp_tp before it is made; insert it earlier",
    ),
    "no such use": (
        lambda e, n: e.replace_use(n("add"), n("x"), n("relu")),
        "add does not read x; it reads relu, relu",
    ),
    "no such operand": (
        lambda e, n: e.replace_use(n("add"), n("relu"), n("x"), index=2),
        "add does not read relu as operand 2; it reads relu, relu",
    ),
    "still read": (
        lambda e, n: e.erase(n("relu")),
        "cannot erase relu: add still read it; replace those uses first",
    ),
    "the output": (lambda e, n: e.erase(n("output")), "the output cannot be erased"),
    "a gather of a whole dim": (
        lambda e, n: e.all_gather(n("x"), 1, "dp", before=n("add")),
        "all_gather(x, 1, dp): dim 1 is not split over dp last; x is f32[8/dp 4]",
    ),
    "a used axis": (
        lambda e, n: e.slice(n("x"), 1, "dp", before=n("add")),
        "slice(x, 1, dp): the value already uses the axis dp; x is f32[8/dp 4]",
    ),
    "nothing pending": (
        lambda e, n: e.all_reduce(n("x"), "tp", before=n("add")),
        "all_reduce(x, tp): the value is not pending sum over tp; x is f32[8/dp 4]",
    ),
    "another kind": (
        lambda e, n: e.all_reduce(n("g"), "tp", op="max", before=n("add")),
        "all_reduce(g, tp, max): the value is not pending max over tp; g is f32[8 4] +tp",
    ),
    "no such axis": (
        lambda e, n: e.slice(n("x"), 0, "pp", before=n("add")),
        "slice(x, 0, pp): the mesh (dp=2 tp=2) has no axis 'pp'; its axes are dp, tp; did you mean 'tp'?; x is f32[8/dp 4]",
    ),
    "no such dim": (
        lambda e, n: e.slice(n("x"), 2, "tp", before=n("add")),
        "slice(x, 2, tp): there is no dim 2 in a value of 2; x is f32[8/dp 4]",
    ),
    "no such stage": (
        lambda e, n: e.recv(n("x"), "s2", before=n("add")),
        "recv(x, s2): there is no stage 's2'; stages are s1; x is f32[8/dp 4]",
    ),
    "a missing argument": (
        lambda e, n: e.insert(transfers.slice, (n("x"), 0), before=n("add")),
        "slice(x, 0): the argument 'axis' is missing",
    ),
    "several tensors": (
        lambda e, n: e.slice(n("ln"), 0, "tp", before=n("mm")),
        "slice(ln, 0, tp): ln is several tensors; transfer its elements",
    ),
    "an op without type": (
        lambda e, n: e.insert(aten.relu.default, (n("x"),), before=n("add")),
        "insert(relu.default) needs type=…: only transfers know their own type",
    ),
    "a carried type that does not fit": (
        lambda e, n: e.annotate(n("x"), type=record_of(n("g_tp")).type),
        "all_gather(x, 0, dp): dim 0 is not split over dp last; x is f32[8 4]",
    ),
    "an element that is not there": (
        lambda e, n: e.annotate(n("ln"), type=record_of(n("x")).type),
        "y reads element 0 of ln, which has no such element",
    ),
    "pieces that do not fit": (
        lambda e, n: e.concat([n("x_dp"), n("w")], 1, before=n("mul")),
        "concat needs pieces that differ only in dim 1, got f32[8 4], f32[4 4/tp]",
    ),
    "a split dim": (
        lambda e, n: e.concat([n("x"), n("x")], 0, before=n("add")),
        "concat joins along dim 0, which is split; gather it first",
    ),
    "no pieces": (lambda e, n: e.concat([], 0, before=n("add")), "concat needs pieces, each one tensor"),
    "no such dim to join": (lambda e, n: e.concat([n("x"), n("x")], -1, before=n("add")), "concat along dim -1 of a value of 2"),
    "a staged value": (
        lambda e, n: e.annotate(e.slice(n("x"), 1, "tp", before=n("add")), phase="update"),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("sync", [False, True])
def test_what_is_refused_says_why(what: str, sync: bool) -> None:
    program = base()
    before = snapshot(program)
    operation, message = REFUSED[what]
    with pytest.raises(EditError) as caught, program.edit(sync=sync) as edit:
        operation(edit, program.node)
    if message is None:
        assert str(caught.value).startswith("annotate takes a node of the program; insert was told all that is known of ")
    else:
        assert str(caught.value) == message
    assert snapshot(program) == before


def test_nodes_of_other_programs_are_refused() -> None:
    program, other = base(), base()
    for operation in (
        lambda edit: edit.slice(other.node("x"), 1, "tp", before=program.node("add")),
        lambda edit: edit.slice(program.node("x"), 1, "tp", before=other.node("add")),
        lambda edit: edit.insert(aten.cat.default, ([program.node("x"), other.node("x")],), before=program.node("add"), type=record_of(other.node("x")).type),
        lambda edit: edit.replace_use(program.node("relu"), program.node("x"), other.node("x")),
        lambda edit: edit.replace_all_uses(other.node("x"), program.node("x")),
        lambda edit: edit.annotate(other.node("x"), phase="update"),
        lambda edit: edit.erase(other.node("x")),
    ):
        with pytest.raises(EditError) as caught, program.edit() as edit:
            operation(edit)
        assert re.fullmatch(r"(x|add) belongs to another program; take the node from this one, as in program.node\('(x|add)'\)", str(caught.value))
    assert str(program) == str(other) == TEXT


def test_erased_nodes_and_values_of_other_edits_are_refused() -> None:
    program = base()
    neg = program.node("neg")
    with program.edit() as edit:
        edit.replace_all_uses(neg, program.node("mm"))
        edit.erase(neg)
    with pytest.raises(EditError, match="neg has been erased from the program"), program.edit() as edit:
        edit.slice(program.node("x"), 1, "tp", before=neg)
    kept: list[Staged] = []
    with pytest.raises(ZeroDivisionError), program.edit(sync=True) as edit:
        kept.append(edit.slice(program.node("x"), 1, "tp", before=program.node("add")))
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), program.edit() as edit:
        kept.append(edit.slice(program.node("x"), 1, "tp", before=program.node("add")))
        raise ZeroDivisionError
    for staged, why in zip(kept, ("has been erased from the program", "is not part of this edit"), strict=True):
        with pytest.raises(EditError, match=why), program.edit() as edit:
            edit.replace_use(program.node("add"), program.node("relu"), staged)
    with program.edit() as edit:
        done = edit.slice(program.node("x"), 1, "tp", before=program.node("relu"))
    with program.edit() as edit:  # a value that is there may be used
        edit.replace_use(program.node("add"), program.node("relu"), done)
    assert lines(program)["add"].endswith("add.Tensor(x_tp, x_tp)") or "as" in lines(program)["add"]


def test_an_edit_that_is_over_is_over() -> None:
    """Nothing can be staged that no commit would ever carry out."""
    program = base()
    with program.edit() as edit:
        pass
    with pytest.raises(EditError, match=r"this edit is over; begin another one with program.edit\(\)"):
        edit.erase(program.node("neg"))
    with program.edit(sync=True) as edit:
        with pytest.raises(EditError, match="before it is made"):
            edit.replace_use(program.node("relu"), program.node("x"), program.node("neg"))
        with pytest.raises(EditError, match="this edit is over"):
            edit.annotate(program.node("neg"), phase="update")
    assert str(program) == TEXT


def test_a_refused_operation_may_be_caught_and_the_edit_goes_on() -> None:
    program = base()
    with program.edit() as edit:
        edit.pend(program.node("x"), "tp", before=program.node("relu"))
        with pytest.raises(EditError, match="not split over dp last"):
            edit.all_gather(program.node("x"), 1, "dp", before=program.node("relu"))
    assert program.counts.inserted == program.counts.commits == 1
