"""When a rank fails in a step on stages, is lost, or does other things than the rest: what the user reads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import refused_steps
from failing_jobs import Ended, ended, told
from processes import ranks

RANKS = 4
SOON, NEVER = 2.0, 600.0  # time-outs: where it is never, the processes end at once, or the harness kills them

TP = {"mesh": {"pp": 2, "tp": 2}, "schedule": "1f1b"}
DP = {"mesh": {"pp": 2, "dp": 2}, "schedule": "1f1b", "model": "looked"}
ZB_V = {"mesh": {"pp": 4}, "schedule": "zb-v", "chunks": 2}
TIED = {"mesh": {"pp": 4}, "schedule": "1f1b", "model": "shared"}

FORWARD = "FW01 of stage 5 (micro-batch 1)"  # on rank 2
ADDMM = (
    rf"in {re.escape(FORWARD)}: addmm_6 : f32\[2 8\] = addmm\(.*\)   pipelined_steps\.py:\d+  x = layer\(x\)   "
    r"in module layers\.6\.0"
)
WAITS = [
    r"rank 1 waits for rank 2 in FW01 of stage 6 \(micro-batch 1\): FR01 of stage 6 from stage 5",
    r"rank 3 waits for rank 2 in BW00 of stage 4 \(micro-batch 0\): BR00 of stage 4 from stage 5",
    r"rank 0 waits for rank 1 in FW01 of stage 7 \(micro-batch 1\): FR01 of stage 7 from stage 6",
]
LOST = r"was lost \(killed or crashed\); it was last seen in"
LONGER = "if a rank may take that long .*"
BEHIND = [  # of rank 2, which has left BW01 of stage 1
    r"rank 0 waits for rank 2 in BW01 of stage 0 \(micro-batch 1\): BR01 of stage 0 from stage 1",
    r"rank 3 waits in BW01 of stage 1 \(micro-batch 1\): .* = all_gather\(.*",
    r"rank 1 waits for rank 3 in BW01 of stage 0 \(micro-batch 1\): BR01 of stage 0 from stage 1",
]
COPIES, UPDATE = "the copies of parameters", "the update"
HOME, LOSS = "_s0_s0", "loss_mesh_mesh"  # the sum of a tied parameter that comes home, and the loss of the last stage

PRINTED = (
    r"\n\[rank \d\]     log : f32\[1 8\] = log\(.*\)"
    r"\n\[rank \d\]     failing_steps\.py:\d+  .*torch\.log\(x \+ marked\)"
)

Case = tuple[dict[str, Any], list[int], list[str]]


def waits(rank: int, what: str, wait: str, late: int, before: str = "", **job: Any) -> dict[str, Any]:
    """A job in which something happens to a rank while it waits.

    ``late``: the rank that it waits for, which never comes to ``before``, by default the same words.
    """
    return {**job, "rank": rank, "what": what, "wait": wait, "slow": {"rank": late, "before": before or wait}}


# case → the job; the exit status of each rank, minus the signal that ended it; the lines of the message, or its first
CASES: dict[str, Case] = {
    "no failure": (TP, [0, 0, 0, 0], []),
    "an exception in an op": (
        {**TP, "rank": 2, "slot": "BW03 of stage 1 (micro-batch 3)", "what": "raises"},
        [1, 1, 1, 1],
        [
            r"rank 2 failed in BW03 of stage 1 \(micro-batch 3\): mm : f32\[2 4\] = mm\(.*\)   "
            r"pipelined_steps\.py:\d+  return .*self\.head\(x\).*   in module head: ValueError: a bad value"
        ],
    ),
    "an exception between ops": (
        {**TP, "rank": 0, "raises before": "FS02 of stage 0 to stage 1"},
        [1, 1, 1, 1],
        ["rank 0 failed in BR01 of stage 0 from stage 1 and FS02 of stage 0 to stage 1: ValueError: a bad value"],
    ),
    "an id out of range": (
        {**DP, "bad id in row": 7},  # of the last micro-batch, in the second half of its rows
        [1, 1, 1, 1],
        [
            r"rank 1 failed in FW03 of stage 0 \(micro-batch 3\): embedding : f32\[1 8\] = "
            r"embedding\(embed_weight, x\)   failing_steps\.py:\d+  return .*self\.embed\(x\).*   in module embed: "
            r"IndexError: index out of range in self"
        ],
    ),
    "a NaN": (
        {**DP, "model": "logarithms", "negative row": 5},  # of micro-batch 2, in the second half of its rows
        [1, 1, 1, 1],
        [
            r"rank ([13]) failed in (FW02 of stage [01] \(micro-batch 2\)): .*   failing_steps\.py:\d+  .*: "
            r"AnomalyError: log makes a NaN on rank \1, in \2$"
        ],
    ),
    "an exception between steps": (
        {**TP, "rank": 2, "loop": "raises"},
        [1, 1, 1, 1],
        [r"rank 2 failed at failing_steps\.py:\d+  raise ValueError\(\"a bad value\"\): ValueError: a bad value"],
    ),
    "a kill in W": (
        {**ZB_V, "rank": 2, "slot": "WW01 of stage 5 (micro-batch 1)", "what": "kill"},
        [1, 1, -9, 1],
        [rf"rank 2 {LOST} WW01 of stage 5 \(micro-batch 1\): mm_5 : .*   in module layers\.6\.0"],
    ),
    "a kill in a wait": (
        waits(3, "kill", "FR02 of stage 1 from stage 0", 1, "FS02 of stage 0 to stage 1", **TP),
        [1, 1, 1, -9],
        [rf"rank 3 {LOST} FW02 of stage 1 \(micro-batch 2\): FR02 of stage 1 from stage 0"],
    ),
    "a kill in the copies": (
        waits(2, "kill", COPIES, 0, **TIED),
        [1, 1, -9, 1],
        [rf"rank 2 {LOST} {COPIES}: .* = recv\(.*"],
    ),
    "a kill in the last sends": (
        waits(2, "kill", "BS03 of stage 1 to stage 0", 0, "BR03 of stage 0 from stage 1", **TP),
        [1, 1, -9, 1],
        [f"rank 2 {LOST} BS03 of stage 1 to stage 0"],
    ),
    "a kill on the way home": (
        waits(0, "kill", HOME, 2, UPDATE, **TIED),
        [-9, 1, 1, 1],
        [rf"rank 0 {LOST} {UPDATE}: .*{HOME} : .* = recv\(.*"],
    ),
    "a kill in the loss": (
        waits(1, "kill", LOSS, 3, UPDATE, **TIED),
        [1, -9, 1, 1],
        [rf"rank 1 {LOST} {UPDATE}: {LOSS} : .* = recv\(.*"],
    ),
    "a stop": (
        {**ZB_V, "rank": 2, "slot": FORWARD, "what": "stop", "timeout": SOON},
        [1, 1, -9, 1],
        [rf"rank 2 was stopped \(SIGSTOP\); it was last seen {ADDMM}", *WAITS],
    ),
    "a stop in the loss": (
        {**waits(1, "stop", LOSS, 3, UPDATE, **TIED), "timeout": SOON},
        [1, -9, 1, 1],
        [rf"rank 1 was stopped \(SIGSTOP\); it was last seen in {UPDATE}: {LOSS} : .* = recv\(.*"],
    ),
    "a slow op": (
        {**ZB_V, "rank": 2, "slot": FORWARD, "what": "computes", "timeout": SOON},
        [1, 1, 1, 1],
        [f"no progress for 2 s: rank 2 is {ADDMM}", *WAITS, LONGER],
    ),
    "a rank leaves the step": (
        {**TP, "rank": 2, "slot": "BW01 of stage 1 (micro-batch 1)", "what": "leaves", "timeout": SOON},
        [1, 1, 1, 1],
        [
            r"no progress for 2 s: rank 2 is outside of a step, at failing_steps\.py:\d+  time\.sleep\(100\)",
            *BEHIND,
            LONGER,
        ],
    ),
    "a rank goes on with the next step": (
        {
            **TP,
            "rank": 2,
            "slot": "BW01 of stage 1 (micro-batch 1)",
            "what": "leaves",
            "loop": "goes on",
            "timeout": SOON,
        },
        [1, 1, 1, 1],
        [
            r"rank 2 failed at failing_steps\.py:\d+  step\(batch\): RuntimeError: a step failed on this rank in BW01 "
            r"of stage 1 \(micro-batch 1\): .*, and its messages are still under way: end the job, and start again "
            r"from a checkpoint"
        ],
    ),
    "a message is never sent": (
        {**TP, "rank": 0, "drops": "FS02 of stage 0 to stage 1", "timeout": SOON},
        [1, 1, 1, 1],
        [
            "no progress for 2 s: ranks 0 2 wait for each other",
            r"rank 0 waits for rank 2 in BW02 of stage 0 \(micro-batch 2\): BR02 of stage 0 from stage 1",
            r"rank 2 waits for rank 0 in FW02 of stage 1 \(micro-batch 2\): FR02 of stage 1 from stage 0",
            r"rank 3 waits in FW02 of stage 1 \(micro-batch 2\): .* = all_to_all\(.*",
            r"rank 1 waits for rank 3 in BW02 of stage 0 \(micro-batch 2\): BR02 of stage 0 from stage 1",
            "let all ranks come to these calls in one order",
        ],
    ),
    "a rank ends": ({**TP, "rank": 2, "loop": "ends"}, [1, 1, 0, 1], ["rank 2 ended; "]),
    "a rank skips a step": (
        {**TP, "rank": 2, "loop": "skips"},
        [1, 1, 1, 1],
        [r"rank \d failed in .*: RuntimeError: ranks 0 and 2 bring different values of x, y, which must be equal"],
    ),
}
SWEPT = ["a kill in the copies", "a kill on the way home", "a stop in the loss", "a slow op", "a rank ends"]


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How the ranks of each selected case ended, and what they printed."""
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_what_the_user_reads"
    ]
    jobs = [
        {"case": case, "ranks": RANKS, "reap": True, "rank 0 has the store": False, "timeout": NEVER, **CASES[case][0]}
        for case in selected
    ]
    return ended("failing_steps.py", jobs, tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.sweep("others fail in the same way")) if case in SWEPT else case
        for case in CASES
    ],
)
def test_what_the_user_reads(ends: dict[str, Ended], case: str) -> None:
    codes, output = ends[case]
    _, expected, message = CASES[case]
    if (found := told(codes, output, expected, message)) is None:
        return
    lines, said = found
    if case == "a NaN":
        assert re.search(PRINTED, output), output
    first, *others = lines[said:]
    assert re.match(f"autopar: {message[0]}", first), output
    if len(message) > 1:
        assert len(others) == len(message) - 1, output  # no rank prints below it
        assert all(re.fullmatch(f"  {text}", line) for text, line in zip(message[1:], others, strict=True)), output
    raised = re.match(r"autopar: rank (\d) failed", first)
    tracebacks = {line.partition("] ")[0] + "]" for line in lines if "Traceback" in line}
    if "comparison" not in first:  # which raises on all ranks
        assert tracebacks == ({f"[rank {raised[1]}]"} if raised else set()), output


def test_steps_that_differ_between_ranks_are_refused() -> None:
    """Before anything runs, with what differs."""
    for answers in ranks(RANKS).run(refused_steps.other_options):
        for case, (said, unchanged) in answers.items():
            assert unchanged, case
            assert "the ranks make different calls" in said, (case, said)
            own, others = (re.search(rf"{who}: .*", said) for who in ("rank 2", "ranks 0 1 3"))
            assert own and refused_steps.DIFFERENT[case][1] in own[0], (case, said)
            assert others and refused_steps.DIFFERENT[case][2] in others[0], (case, said)
            assert own[0].removeprefix("rank 2") != others[0].removeprefix("ranks 0 1 3"), (case, said)


@pytest.mark.parametrize("sizes", [{"pp": 2, "tp": 2}, {"dp": 2, "tp": 2}], ids=["stages", "no stages"])
def test_another_batch_is_refused_although_seeds_are_drawn(sizes: dict[str, int]) -> None:
    answers = ranks(RANKS).run(refused_steps.another_batch, sizes)
    for said, losses in answers:
        assert "the ranks make different calls" in said, said
        assert "rank 2: train step (x float32[4, 8], y int64[4])" in said, said
        assert losses == answers[0][1] and len(set(losses)) == 3, "and the ranks go on together"


@pytest.mark.parametrize("across", [False, True])
def test_other_values_are_refused_before_anything_is_written(across: bool) -> None:
    """The first stage has run a forward by then. The ranks go on with the next batch."""
    for said, stay, losses in ranks(RANKS).run(refused_steps.other_values, across):
        assert said.startswith("ranks 0 and 2 bring different values of x"), said
        assert stay and all(loss == pytest.approx(alone, rel=1e-9) for loss, alone in losses), losses


def test_what_a_caller_catches_names_rank_slot_and_wait() -> None:
    world = ranks(2)
    lost, failed = world.run(refused_steps.caught)
    world.end()  # its messages are still under way
    assert lost == (
        "RuntimeError",
        "rank 0 lost the connection to rank 1 in BW00 of stage 0 (micro-batch 0): BR00 of stage 0 from stage 1: "
        "another rank has failed or ended, and the message of the job names it",
        "Connection closed by peer [127.0.0.1]:1234",
    )
    assert failed == (
        "ValueError", "a bad value\nrank 1 failed in FR00 of stage 1 from stage 0", "None"
    )  # fmt: skip
