"""Schedules as tables, documents and CSVs: what is written is read back the same, by torch too; what is wrong is
refused."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.errors import ScheduleError
from autopar.pipeline import POLICIES, PipelineSchedule, Slot, Task, build
from autopar.pipeline.formats import to_csv, to_json
from autopar.pipeline.formats.document import FIELDS
from autopar.pipeline.lowering import with_frees

Action = torch_schedules._Action
from_csv, from_json, table = PipelineSchedule.from_csv, PipelineSchedule.from_json, PipelineSchedule.table


@st.composite
def schedules(draw: st.DrawFn, *, most: int = 9) -> PipelineSchedule:
    policy = draw(st.sampled_from(sorted(POLICIES)))
    chunks = draw(st.integers(1, 3)) if POLICIES[policy].chunks is None else None
    made = build(
        policy,
        draw(st.integers(1, 4)),
        draw(st.integers(1, most)),
        chunks,
        messages=draw(st.booleans()),
        recompute=draw(st.booleans()),
    )
    return with_frees(made) if made.has_messages and draw(st.booleans()) else made


# -- table -------------------------------------------------------------------------------------------------------------

ONNX_RUNTIME = """\
FW00    FW01    FW02                    BW00    FW03    BW01            BW02            BW03    .
        FW00    FW01    FW02    BW00            BW01    FW03    BW02            BW03            .
                FW00    BW00    FW01    BW01    FW02    BW02    FW03    BW03                    ."""
WITH_MESSAGES = """\
FW00    FS00    FW01    FS01                    BR00    BW00    BR01    BW01    .
        FR00    FW00    FR01    FW01    BW00    BS00    BW01    BS01            ."""
WITH_EVENTS = """\
FW00     -1,-1>0,1                                       BW00     0,1>2,3  .
                   FW00     -1,-1>0,1 BW00     0,1>2,3                     ."""
WIDE = """\
time  rank 0             rank 1
   0  FW00.0       -1>0
   1  FS00.0       0>1   FR00.0       -1>0
   2                     FW00.0       0>1
   3  FR00.1       1>2   FS00.0       1>2"""


def test_table_texts() -> None:
    assert table(build("onnxruntime", 3, 4), messages=False) == ONNX_RUNTIME.replace(".", "")
    assert table(build("gpipe", 2, 2)) == WITH_MESSAGES.replace(".", "")
    assert table(build("looped-bfs", 2, 1), events=True, down=True).startswith(WIDE)
    assert table(build("gpipe", 2, 1), messages=False, events=True) == WITH_EVENTS.replace(".", "")
    assert table(PipelineSchedule((), 1, (0, 1)), messages=False) == "\n"


def cut(text: str, each: int) -> list[str]:
    return [text[at : at + each] for at in range(0, len(text), each)]


@pytest.mark.simulated
@settings(deadline=None)
@given(made=schedules(), messages=st.booleans())
def test_table_is_read_by_cutting_it(made: PipelineSchedule, messages: bool) -> None:
    """Each line is a rank; its equal pieces are the slots, their equal pieces the tasks."""
    slots = made.compute_comm_table if messages else made.compute_table
    narrow = made.chunks == 1 and all(len(slot.tasks) <= 2 for row in slots for slot in row)
    lines = table(made, messages=messages).split("\n")
    assert len(lines) == made.ranks
    each = 4 if narrow else 4 + 2 * (made.chunks > 1)
    gap = 0 if narrow else 1
    for rank, line in enumerate(lines):
        pieces = cut(line + " " * gap, (len(line) + gap) // len(slots))
        assert len(pieces) == len(slots) and (not narrow or len(pieces[0]) == 8)
        for piece, row in zip(pieces, slots, strict=True):
            texts = [
                f"{t.kind}{t.batch:02d}" + (f".{made.chunk_of(t.stage)}" if made.chunks > 1 else "")
                for t in row[rank].tasks
            ]
            assert [word for word in cut(piece.rstrip(), each) if word] == texts


def test_large_numbers_make_all_tasks_wider() -> None:
    lines = table(build("1f1b", 2, 101), messages=False).split("\n")
    assert lines[0].startswith("FW000      FW001      ") and "BW100" in lines[1]
    assert len({len(line) for line in lines}) == 1
    assert table(build("1f1b", 2, 100), messages=False).startswith("FW00    FW01    ")


# -- document ----------------------------------------------------------------------------------------------------------

TWO = """\
{
  "format": "autopar pipeline schedule",
  "version": 1,
  "name": "1f1b",
  "batches": 1,
  "rank_of": [0, 1],
  "recompute": false,
  "rows": [
    [["FW0@0"], []],
    [["FS0@0>1"], ["FR0@1<0"]],
    [[], ["FW0@1"]],
    [[], ["BW0@1", "REDUCE_GRAD@1"]],
    [["BR0@0<1"], ["BS0@1>0"]],
    [["free FS0@0>1", "BW0@0", "REDUCE_GRAD@0"], []]
  ]
}
"""


def test_document_text() -> None:
    assert to_json(with_frees(build("1f1b", 2, 1))) == TWO
    assert from_json(TWO) == with_frees(build("1f1b", 2, 1))


@pytest.mark.simulated
@settings(deadline=None)
@given(made=schedules(), name=st.text().filter(str.isprintable), indent=st.sampled_from([None, 0, 3]))
@example(made=PipelineSchedule((), 3, (0,)), name="", indent=None)
@example(made=PipelineSchedule(((Slot(parameters=(("UNSHARD", 0),)),), (Slot(),)), 3, (0,)), name="", indent=None)
def test_document_is_read_back(made: PipelineSchedule, name: str, indent: int | None) -> None:
    made = replace(made, name=name)
    text = to_json(made)
    assert from_json(text) == made
    assert from_json(json.dumps(json.loads(text), indent=indent)) == made
    assert text.count("\n") == len(made.slots) + (11 if made.slots else 10) - 1


def test_events_are_derived() -> None:
    made = build("1f1b", 2, 3)
    assert from_json(to_json(replace(made, slots=made.compute_comm_table))) == made


WORDS = (
    "there is no such word; there are FW0@1, BW0@1 or WW0@1, FS0@1>2 or BS0@1>0, FR0@1<0 or BR0@1<2, free "
    "FS0@1>2, REDUCE_GRAD@1, UNSHARD@1 or RESHARD@1"
)
DOCUMENT_ERRORS = {
    ('"FW0@0"', '"FW0@7"'): 'line 9, column 7: "FW0@7": there is no stage 7, only 0 to 1',
    ('"FW0@0"', '"FW1@0"'): 'line 9, column 7: "FW1@0": there is no micro-batch 1, only 0 to 0',
    ('"FW0@0"', '"FW0@1"'): 'line 9, column 7: "FW0@1": stage 1 is on rank 1, but this is slot 0 of the row',
    ('"REDUCE_GRAD@1"', '"REDUCE_GRAD@0"'): 'line 12, column 20: "REDUCE_GRAD@0": stage 0 is on rank 0, but this is '
                                            'slot 1 of the row',
    ('"FR0@1<0"', '"FR0@1<1"'): 'line 10, column 20: "FR0@1<1": there is no other stage 1; stages are 0 to 1',
    ('"FR0@1<0"', '"FR0@1<2"'): 'line 10, column 20: "FR0@1<2": there is no other stage 2; stages are 0 to 1',
    ('"FR0@1<0"', '"FR0@1>0"'): f'line 10, column 20: "FR0@1>0": {WORDS}',
    ('"FW0@1"', '"FW00@1"'): f'line 11, column 11: "FW00@1": {WORDS}',
    ('"FW0@1"', '"FW-1@1"'): f'line 11, column 11: "FW-1@1": {WORDS}',
    ('"FW0@1"', "7"): f"line 11, column 11: 7: {WORDS}",
    ('"free FS', '"free BR'): f'line 14, column 7: "free BR0@0>1": {WORDS}',
    ('[["FW0@0"], []]', '[["FW0@0"]]'): 'line 9, column 5: [["FW0@0"]]: row 0 is a list of 2 slots, one for each rank',
    ('["FW0@0"]', '"FW0@0"'): f'line 9, column 6: "FW0@0": a slot is a list of '
                              f'{WORDS.replace("there is no such word; there are", "words:")}',
    ("], [\"FW0@1\"]", "] [\"FW0@1\"]"): "line 11, column 9: this is not JSON: Expecting ',' delimiter",
    ('"batches": 1', '"batches": NaN'): "line 5, column 14: NaN: batches is a whole number from 1 to 999999999",
    ('"batches": 1', '"batches": 0'): "line 5, column 14: 0: batches is a whole number from 1 to 999999999",
    ('"batches": 1', '"batches": true'): "line 5, column 14: true: batches is a whole number from 1 to 999999999",
    ('"batches": 1', '"batches": ' + "9" * 5000): f"line 5, column 14: {'9' * 37}...: batches is a whole number from "
                                                  f"1 to 999999999",
    ("[0, 1]", "[0, 2]"): "line 6, column 14: [0, 2]: rank_of is a list, the rank of each stage, with ranks from 0 "
                          "without gaps",
    ("[0, 1]", "[]"): "line 6, column 14: []: rank_of is a list, the rank of each stage, with ranks from 0 without "
                      "gaps",
    ("[0, 1]", "[0, 999999999]"): "line 6, column 14: [0, 999999999]: rank_of is a list, the rank of each stage, with "
                                  "ranks from 0 without gaps",
    ("false", "0"): "line 7, column 16: 0: recompute is true or false",
    ('"1f1b"', "null"): "line 4, column 11: null: name is a string that can be printed, the name of the policy",
    ('"batches"', '"version"'): 'line 5, column 3: "version": the field is given twice; leave one out',
    ('"batches"', '"microbatches"'): f'line 5, column 3: "microbatches": there is no such field; the fields are '
                                     f'{", ".join(FIELDS)}',
    ('"version": 1', '"version": 2, "more": 3'): "line 3, column 14: 2: a document of version 2; this autopar reads "
                                                 "version 1",
    ('"version": 1', '"version": true'): "line 3, column 14: true: version is 1",
    ("autopar pipeline", "another"): 'line 2, column 13: "another schedule": format is "autopar pipeline schedule"',
    ('  "name": "1f1b",\n', ""): "line 1, column 1: {   \"format\": \"autopar pipeline sched...: the field name is "
                                 "missing; it is a string that can be printed, the name of the policy",
    (TWO, "[1]"): f"line 1, column 1: [1]: a schedule is an object with the fields {', '.join(FIELDS)}",
    (TWO, "\n "): "line 2, column 2: this is not JSON: Expecting value",
    (TWO, '{"a": "[[[[[[", "b": ' + "[" * 100000): "line 1, column 25: lists nest deeper than rows, row, slot",
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), DOCUMENT_ERRORS.items(), ids=lambda one: str(one)[:40])
def test_document_errors(change: tuple[str, str], message: str) -> None:
    old, new = change
    assert TWO.count(old) == 1
    with pytest.raises(ScheduleError) as caught:
        from_json(TWO.replace(old, new))
    assert str(caught.value) == message


def test_errors_are_found_wherever_lines_end() -> None:
    text = json.dumps(json.loads(TWO.replace("BW0@0", "BW3@0")), indent=1)
    line, column = next(
        (number, line.index('"BW3') + 1) for number, line in enumerate(text.split("\n"), 1) if "BW3" in line
    )
    with pytest.raises(ScheduleError, match=f'^line {line}, column {column}: "BW3@0": there is no micro-batch 3'):
        from_json(text)
    flat = text.replace("\n", "").replace('"name"', '"n\\"[{,:ame"')
    with pytest.raises(ScheduleError, match=rf"^line 1, column {flat.index('n' + chr(92))}: .* there is no such field"):
        from_json(flat)


# -- actions -----------------------------------------------------------------------------------------------------------


def torch_cells(text: str) -> dict[int, list[Action | None]]:
    return {
        rank: [Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(text, newline="")))
    }


def leaves(order: list[Action | None]) -> list[Action]:
    return [
        leaf
        for action in order
        if action
        for leaf in (action.sub_actions or (action,))
        if leaf.microbatch_index is not None
    ]


@pytest.mark.simulated
@settings(deadline=None)
@given(made=schedules())
def test_torch_reads_what_is_written(made: PipelineSchedule) -> None:
    """Its parser prints it the same; it validates the computations, and can run the order of the messages."""
    stage_of = dict(enumerate(made.rank_of))
    for messages in (False, True):
        text = to_csv(made, messages=messages)
        actions = torch_cells(text)
        assert (
            "".join(",".join("" if one is None else str(one) for one in order) + "\n" for order in actions.values())
            == text
        )
        orders = {rank: leaves(order) for rank, order in actions.items()}
        assert torch_schedules._validate_schedule(orders, made.ranks, made.stages, made.batches) == stage_of
        if messages:
            torch_schedules._simulate_comms_compute(orders, made.rank_of.__getitem__, made.stages)
            reductions = [
                (rank, action.stage_index)
                for rank, order in actions.items()
                for action in order
                if action.computation_type == "REDUCE_GRAD"
            ]
            assert sorted(stage for _, stage in reductions) == list(range(made.stages))
            assert all(stage_of[stage] == rank for rank, stage in reductions)


@pytest.mark.simulated
@settings(deadline=None)
@given(made=schedules())
def test_csv_is_read_back(made: PipelineSchedule) -> None:
    text = to_csv(made)
    computed = from_csv(text)
    assert to_csv(computed) == text
    assert computed == replace(
        made.without_messages() if "W" in text else whole(made.without_messages()), name="", recompute=False
    )
    text = to_csv(made, messages=True)
    found = from_csv(text)
    assert to_csv(found, messages=True) == text
    assert (found.rank_of, found.batches) == (made.rank_of, made.batches)
    assert orders_of(found) == orders_of(made.with_messages() if "W" in text else whole(made.with_messages()))
    if made.ranks > 1:
        assert all(len(slot.compute) == len(slot.tasks) or len(slot.tasks) == 1 for row in found.slots for slot in row)


def whole(made: PipelineSchedule) -> PipelineSchedule:
    """Where no weight gradient is computed apart, a backward is one task."""
    return replace(
        made,
        slots=tuple(tuple(Slot(tuple(t for t in slot.tasks if t.kind != "WW")) for slot in row) for row in made.slots),
    )


def orders_of(made: PipelineSchedule) -> list[list[Task]]:
    return [[task for _, on, task in made.tasks() if on == rank] for rank in range(made.ranks)]


TORCH = {  # of Schedule1F1B the order is only for show, and of the last rank it is wrong
    "ScheduleGPipe": (1, lambda p, m: True),
    "ScheduleLoopedBFS": (3, lambda p, m: True),
    "ScheduleInterleaved1F1B": (3, lambda p, m: m % max(1, m // p) == 0),
    "ScheduleInterleavedZeroBubble": (3, lambda p, m: m % max(1, m // p) == 0),
    "ScheduleZBVZeroBubble": (2, lambda p, m: True),
    "ScheduleDualPipeV": (2, lambda p, m: m >= 2 * p),
}


def torch_made(name: str, p: int, m: int, v: int) -> tuple[dict[int, list[Action | None]], list[int]]:
    """The computations of torch's own schedule, and the rank of each stage."""
    made = object.__new__(getattr(torch_schedules, name))
    rounds = max(1, m // p)
    made.__dict__.update(pp_group_size=p, _n_microbatches=m, _num_stages=p * v, num_stages=p * v, n_local_stages=v,
                         rank=0, _stages=[None] * v, number_of_rounds=rounds,
                         microbatches_per_round=m // rounds)  # fmt: skip
    rank_of = [s % p if name[8:11] not in ("ZBV", "Dua") or s < p else 2 * p - 1 - s for s in range(p * v)]
    if name == "ScheduleGPipe":
        return made._get_pipeline_order(), rank_of
    made.pipeline_order = {rank: made._calculate_single_rank_operations(rank) for rank in range(p)}
    if name == "ScheduleInterleavedZeroBubble":
        made.pipeline_order = made._add_bubbles_to_actions(p * v)
    return made.pipeline_order, rank_of


def dumped(orders: dict[int, list[Action | None]]) -> str:
    file = io.StringIO()
    csv.writer(file).writerows(orders[rank] for rank in sorted(orders))
    return file.getvalue()


@pytest.mark.simulated
@settings(deadline=None)
@given(name=st.sampled_from(sorted(TORCH)), p=st.integers(1, 4), m=st.integers(1, 9), data=st.data())
def test_torch_schedules_are_read(name: str, p: int, m: int, data: st.DataObject) -> None:
    most, exists = TORCH[name]
    assume(exists(p, m))
    order, rank_of = torch_made(name, p, m, data.draw(st.integers(1, most)) if most == 3 else most)
    computed = from_csv(dumped(order))
    flat = {rank: [str(leaf) for leaf in leaves(own)] for rank, own in order.items()}
    assert {rank: [str(leaf) for leaf in leaves(own)] for rank, own in torch_cells(to_csv(computed)).items()} == flat
    assert computed.verify()

    lowered = {rank: torch_schedules._add_reduce_grad(torch_schedules._add_unshard_reshard([a for a in own if not a
        or a.computation_type != "REDUCE_GRAD"]), m)
               for rank, own in order.items()}  # fmt: skip
    text = dumped(torch_schedules._add_send_recv(lowered, rank_of.__getitem__, len(rank_of)))
    found = from_csv(text)
    assert found.rank_of == tuple(rank_of) and found.batches == m
    assert found.verify(), "parameters are gathered and freed in an order that can be"
    assert to_csv(found, messages=True) == text.replace("\r\n", "\n")
    assert {
        stage for row in found.slots for slot in row for name, stage in slot.parameters if name == "UNSHARD"
    } == set(range(len(rank_of)))


def test_columns_are_times_where_they_can_be() -> None:
    """Torch's columns of 1F1B over several stages are; those whose reader is too early are not, and its order
    counts."""
    text = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,,1B1\n"
    assert to_csv(from_csv(text)) == text
    assert len(from_csv("0F0,,,\n,,1F0\n").slots) == 4
    early = from_csv("0F0,0F1,,,0B0,,0B1\n1F0,1B0,1F1,,1B1\n")
    assert to_csv(early) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"


def test_backwards_that_overlap_or_split() -> None:
    text = "0F0,0F1,,(0F2;1B0)OVERLAP_F_B,1I1,1W1\n".replace("1B0", "0B0").replace("1I1", "0I1").replace("1W1", "0W1")
    made = from_csv(text)
    assert made.slots[3][0] == Slot((Task("FW", 0, 2), Task("BW", 0, 0), Task("WW", 0, 0)))
    assert to_csv(made) == text
    whole = from_csv("(0B0;0F1)OVERLAP_F_B")
    assert whole.slots == ((Slot((Task("BW", 0, 0), Task("FW", 0, 1))),),)
    assert to_csv(whole) == "(0B0;0F1)OVERLAP_F_B\n"
    several = PipelineSchedule(((Slot((Task("FW", 0, 1), Task("FW", 1, 0))), Slot((Task("FW", 2, 0),))),), 2, (0, 0, 1))
    assert to_csv(several) == "0F1,1F0\n2F0\n"


def test_quoted_cells_and_line_ends() -> None:
    plain = from_csv("0F0,0SEND_F0,0UNSHARD\n1UNSHARD,1RECV_F0,1F0\n")
    assert from_csv('"0F0", 0SEND_F0 ,"0UNSHARD"\r\n1UNSHARD,,"1RECV_F0",1F0\r\n\r\n', ranks=2) == plain
    assert from_csv("0F0\r1F0", batches=3).batches == 3
    skip = PipelineSchedule(((Slot((Task("FS", 0, 0, 2),)), Slot(), Slot()),), 1, (0, 1, 2))
    with pytest.raises(
        ScheduleError,
        match=r"^FS00 of stage 0 to stage 2: torch's actions have messages between neighbouring stages alone; keep it "
        r"as JSON$",
    ):
        to_csv(skip, messages=True)


NO_ACTION = (
    "there is no such action; write stage, action and micro-batch with numbers from 0, as in 2F0, 2I0, 2B0, "
    "2W0, 1SEND_F0, 2RECV_F0, 2SEND_B0, 1RECV_B0, or 2REDUCE_GRAD, 2UNSHARD, 2RESHARD, or (0F1;3B0)OVERLAP_F_B"
)
CSV_ERRORS = {
    "": "an empty text is no schedule; it has a line for each rank, as in 0F0,0F1,0B0,0B1",
    "\n \r\n": "an empty text is no schedule; it has a line for each rank, as in 0F0,0F1,0B0,0B1",
    "0F0,0X0": f"line 1, column 5: 0X0: {NO_ACTION}",
    "0F0\n 1F0, -1F0": f"line 2, column 7: -1F0: {NO_ACTION}",
    '"0F0","0F-1"': f"line 1, column 8: 0F-1: {NO_ACTION}",
    '"0F0"0F1': f'line 1, column 1: "0F0"0F1: {NO_ACTION}',
    "0F": f"line 1, column 1: 0F: {NO_ACTION}",
    "0REDUCE_GRAD1": f"line 1, column 1: 0REDUCE_GRAD1: {NO_ACTION}",
    "0F١": f"line 1, column 1: 0F١: {NO_ACTION}",
    "0F0,( 0F1; 0Q0)OVERLAP_F_B": f"line 1, column 12: 0Q0: {NO_ACTION}",
    "0F0,(0F1;0I0)OVERLAP_F_B": "line 1, column 5: (0F1;0I0)OVERLAP_F_B: what overlaps is a forward F and a full "
                                "backward B; write others one after the other",
    "0F0\n1F0,0F1": "line 2, column 5: 0F1: stage 0 is on line 1 already, with 0F0; a stage is on one rank",
    "0F0\n2F0": "line 2, column 1: 2F0: there is a stage 2 and no stage 1; number stages from 0 without gaps",
    "0F0\n999999999F0": "line 2, column 1: 999999999F0: there is a stage 999999999 and no stage 1; number stages from "
                        "0 without gaps",
    "0F0\n,,\n1F0": "line 2: rank 1 does nothing, so it has no stage; leave the line out",
    "0UNSHARD": "no action has a micro-batch; give batches=",
    "0F0,0I0": "line 1, column 5: 0I0: this is the gradient of the input alone, but no 0W0 follows; add it, or write B",
    "0F0,0B0,0W0": "line 1, column 5: 0B0: this is a full backward, but on line 1, column 9 there is 0W0, which is "
                   "part of it; write I, or leave that out",
    "0F0,0SEND_F0": "line 1, column 5: 0SEND_F0: there is no stage 1 at the other end, only 0 to 0; leave it out",
    "0RECV_F0": "line 1, column 1: 0RECV_F0: there is no stage -1 at the other end, only 0 to 0; leave it out",
    "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1SEND_B0,1F0,1B0\n": None,
    "1F0,0F0": "ranks wait for each other forever:\n  rank 0: FW00 of stage 1 waits for FW00 of stage 0 on rank 0, "
               "which comes after FW00 of stage 1 there\nchange the order of the tasks on one of them",
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), CSV_ERRORS.items(), ids=lambda one: repr(one)[:40])
def test_csv_errors(text: str, message: str | None) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_csv(text)
    assert message is None or str(caught.value) == message


def test_csv_sizes() -> None:
    with pytest.raises(ScheduleError, match=r"^there are 2 lines, one for each rank, but there must be 3 ranks$"):
        from_csv("0F0\n1F0", ranks=3)
    with pytest.raises(ScheduleError, match=r"^line 2, column 5: 1F2: there is no micro-batch 2, only 0 to 1$"):
        from_csv("0F0\n1F1,1F2", batches=2)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.simulated
@settings(deadline=None, max_examples=300)
@given(made=schedules(most=3), form=st.sampled_from(["json", "csv", "messages"]), data=st.data())
def test_damaged_texts_are_refused_or_read(made: PipelineSchedule, form: str, data: st.DataObject) -> None:
    text = to_json(made) if form == "json" else to_csv(made, messages=form == "messages")
    at = data.draw(st.integers(0, len(text) - 1))
    edit = data.draw(st.sampled_from(["cut", "delete", "replace", "insert"]))
    new = (
        data.draw(st.sampled_from('0123456789FBWSR@<>,;()[]{}":\\\n\r e-.') | st.characters())
        if edit in ("replace", "insert")
        else ""
    )
    text = text[:at] + new + ("" if edit == "cut" else text[at + (edit != "insert") :])
    try:
        found = from_json(text) if form == "json" else from_csv(text)
    except ScheduleError as error:
        assert str(error)
        return
    assert isinstance(found, PipelineSchedule)
    assert from_json(to_json(found)) == found
    assert len(table(found, messages=False).split("\n")) == found.ranks


def test_a_weight_gradient_that_is_missing_stays_missing() -> None:
    """Its backward is not written as a whole one, which would be right."""
    made = build("zb-h1", 2, 2, messages=False)
    rows = tuple(
        tuple(Slot(tuple(task for task in slot.tasks if task != Task("WW", 0, 1))) for slot in row)
        for row in made.slots
    )
    text = to_csv(PipelineSchedule(rows, 2, (0, 1)))
    assert "0I1" in text and "0B1" not in text
    with pytest.raises(ScheduleError, match="0I1"):
        from_csv(text)
