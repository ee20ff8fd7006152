"""When a stage of a pipeline fails, is lost or is waited for too long: the watch names it, its slot, and who waits."""

from __future__ import annotations

import pytest
from failing_jobs import Ended, ended, told

RANKS = 4
SOON, NEVER = 2.0, 600.0  # time-outs: where it is never, the processes end at once, or the harness kills them
OP = "mm_12 : f32[4 4] = mm(t, x)   model.py:41  self.down(x)   in module layers.1.mlp"
HERE = f"in FW01 of stage 2 (micro-batch 1): {OP}"
SENDS = "rank 1 waits for rank 2 in FW02 of stage 1 (micro-batch 2): FS02 to stage 2"
RECEIVES = "rank 3 waits for rank 2 in FW01 of stage 3 (micro-batch 1): FR01 from stage 2"
BEHIND = "rank 0 waits for rank 1 in BW00 of stage 0 (micro-batch 0): BR00 from stage 1"
WAITS = [SENDS, RECEIVES, BEHIND]
LONGER = "if a rank may take that long (an evaluation, a checkpoint, a debugger), give a longer timeout="

# case → the time-out; the exit status of each rank, minus the signal that ended it; the message, or how it begins
CASES: dict[str, tuple[float, list[int], list[str]]] = {
    "no failure": (SOON, [0, 0, 0, 0], []),
    "exception": (NEVER, [1, 1, 1, 1], [f"rank 2 failed {HERE}: ValueError: a bad value"]),
    "exception beside the ops": (
        NEVER,
        [1, 1, 1, 1],
        ["rank 2 failed in FW01 of stage 2 (micro-batch 1): ValueError: a bad value"],
    ),
    # the neighbours may have noticed it themselves, so who waits varies
    "kill": (NEVER, [1, 1, -9, 1], [f"rank 2 was lost (killed or crashed); it was last seen {HERE}"]),
    "ends": (NEVER, [1, 1, 0, 1], ["rank 2 ended; "]),
    "stop": (SOON, [1, 1, -9, 1], [f"rank 2 was stopped (SIGSTOP); it was last seen {HERE}", *WAITS]),
    "computes": (SOON, [1, 1, 1, 1], [f"no progress for 2 s: rank 2 is {HERE}", *WAITS, LONGER]),
    "leaves the step": (
        SOON,
        [1, 1, 1, 1],
        ["no progress for 2 s: rank 2 is outside of a step, at failing_pipelines.py:", *WAITS, LONGER],
    ),
    "never sends": (
        SOON,
        [1, 1, 1, 1],
        [
            "no progress for 2 s: ranks 2 3 wait for each other",
            "rank 2 waits for rank 3 in FW02 of stage 2 (micro-batch 2): FS02 to stage 3",
            RECEIVES,
            "rank 1 waits for rank 2 in BW00 of stage 1 (micro-batch 0): BR00 from stage 2",
            BEHIND,
            "let all ranks come to these calls in one order",
        ],
    ),
}


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How the ranks of each selected case ended, and what they printed."""
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_stages"
    ]
    jobs = [
        {"case": case, "ranks": RANKS, "timeout": CASES[case][0], "reap": True, "rank 0 has the store": False}
        for case in selected
    ]
    return ended("failing_pipelines.py", jobs, tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("case", CASES)
def test_stages(ends: dict[str, Ended], case: str) -> None:
    codes, output = ends[case]
    timeout, expected, message = CASES[case]
    if (found := told(codes, output, expected, message)) is None:
        return
    lines, said = found
    assert lines[said].startswith(f"autopar: {message[0]}"), output
    if timeout == SOON:
        assert lines[said + 1 :] == [f"  {line}" for line in message[1:]]
    tracebacks = {line.partition("] ")[0] + "]" for line in lines if "Traceback" in line}
    assert tracebacks == ({"[rank 2]"} if "exception" in case else set()), output
