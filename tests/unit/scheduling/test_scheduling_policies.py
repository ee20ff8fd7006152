"""Check what single policies decide: buckets, priorities, gathers by deadline, messages that are joined, tuning."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest

from autopar.errors import ScheduleError
from autopar.scheduling import POLICIES, ByteScheduler, Line, Op, Part, Schedule, schedule, simulate
from autopar.scheduling.decide import judge
from autopar.scheduling.tuning import CREDITS, PARTITIONS, bayesian, grid

MIB = 2**20


def gradients(sizes: list[int], *, startup: float = 0.0) -> list[Op]:
    """A backward whose layers each have a gradient of so many MiB, and a forward that reads the last first."""
    ops: list[Op] = []
    for k, size in enumerate(sizes):
        ops.append(Op(f"backward{k}", "compute", 1.0, (f"backward{k - 1}",) if k else ()))
        ops.append(Op(f"sum{k}", "dp", startup + size, (f"backward{k}",), bytes=size * MIB))
    last = f"backward{len(sizes) - 1}"
    for k in reversed(range(len(sizes))):
        ops.append(Op(f"forward{k}", "compute", 1.0, (last, f"sum{k}")))
        last = f"forward{k}"
    return ops


def messages(made: Schedule) -> list[str]:
    return [" ".join(part.op for part in line.parts) for line in made.lines if line.kind == "start"]


def test_buckets_are_small_first_and_then_large() -> None:
    ops = gradients([1, 10, 10, 10, 3, 4])
    assert messages(schedule(ops, "today")) == ["sum0", "sum1 sum2 sum3", "sum4 sum5"]
    assert messages(schedule(ops, "ddp")) == ["sum0", "sum1 sum2 sum3", "sum4 sum5"]
    assert messages(schedule(ops, "program")) == [f"sum{k}" for k in range(6)]


def test_buckets_of_ddp_follow_the_parameters_and_not_the_gradients() -> None:
    """Gradient 1 is computed before gradient 0, and its parameter is read first: its bucket is the last."""
    ops = [
        Op("backward", "compute", 1.0),
        Op("sum1", "dp", 1.0, ("backward",), bytes=MIB),
        Op("more", "compute", 1.0, ("backward",)),
        Op("sum0", "dp", 1.0, ("more",), bytes=MIB),
        Op("forward1", "compute", 1.0, ("sum1", "more")),
        Op("forward0", "compute", 1.0, ("sum0", "forward1")),
    ]
    assert messages(schedule(ops, "ddp")) == ["sum0", "sum1"]
    assert messages(schedule(ops, "today")) == ["sum1", "sum0"]


def test_blocking_all_reduces_have_no_bucket() -> None:
    ops: list[Op] = []
    for k in range(3):
        ops.append(Op(f"matmul{k}", "compute", 1.0, (f"sum{k - 1}",) if k else ()))
        ops.append(Op(f"sum{k}", "tp", 1.0, (f"matmul{k}",), bytes=8))
    assert messages(schedule(ops, "today")) == ["sum0", "sum1", "sum2"]


def test_other_kinds_are_other_buckets() -> None:
    ops = gradients([2, 2, 2, 2])
    ops = [Op(op.name, op.stream, op.seconds, op.after, op.bytes, op.name in ("sum1", "sum3")) for op in ops]
    for policy in ("today", ByteScheduler(16 * MIB, 64 * MIB)):
        for message in messages(schedule(ops, policy, startup=0.5)):
            assert len({name in ("sum1", "sum3") for name in message.split()}) == 1


def zero3(blocks: int, seconds: float = 1.0) -> list[Op]:
    """Blocks whose parameters are gathered, one after the other."""
    gathers = [Op(f"gather{k}", "dp", seconds, (), bytes=8, memory=100) for k in range(blocks)]
    blocks_ = [
        Op(f"block{k}", "compute", 2.0, (f"gather{k}", *([f"block{k - 1}"] if k else []))) for k in range(blocks)
    ]
    return [*gathers, *blocks_]


def test_gathers_run_one_ahead_today() -> None:
    made = schedule(zero3(10), "today")
    assert made.order[:5] == ("gather0", "gather1", "block0", "gather2", "block1")
    assert made.memory == 200


@pytest.mark.parametrize("issue", ["enqueue", "direct"])
def test_gathers_start_by_deadline(issue: Any) -> None:
    """All ten could start at once, and would be alive together."""
    made = schedule(zero3(10), issue=issue)
    assert made.makespan == made.bound == 21
    assert made.memory <= 300
    begins = {part.op: span.begin for span in made.spans for part in span.parts}
    assert issue == "enqueue" or begins["gather9"] >= 15


def test_a_limit_of_memory_holds_for_large_steps() -> None:
    assert schedule(zero3(20), memory=200).memory <= 200
    with pytest.raises(ScheduleError, match="no order fits into 99 bytes; the smallest that was found needs 100"):
        schedule(zero3(20), memory=99)
    with pytest.raises(ScheduleError, match=r"'program' needs 2,000 bytes, and the limit is 200; 'longest-tail' looks"):
        schedule(zero3(20), "program", memory=200)


def test_priorities_go_before_the_order_of_the_program() -> None:
    ops = [Op(f"op{k}", "compute", 1.0) for k in range(4)]
    assert schedule(ops, "priorities", priorities={"op3": -1, "op0": 2}).order == ("op3", "op1", "op2", "op0")


def test_what_an_op_needs_has_its_priority() -> None:
    ops = [Op("first", "compute", 1.0), Op("need", "compute", 1.0), Op("urgent", "compute", 1.0, ("need",))]
    assert schedule(ops, "priorities", priorities={"urgent": -1}).order == ("need", "urgent", "first")


def test_priorities_count_more_than_tails() -> None:
    ops = [Op(f"op{k}", "compute", 2.0) for k in range(9)] + [Op("comm", "dp", 4.0, ("op8",))]
    assert schedule(ops).order[0] == "op8"
    made = schedule(ops, priorities={"op8": 1, "comm": 1})
    assert made.order[-2:] == ("op8", "comm")
    assert made.makespan == 22


def test_communication_first_waits_before_it_computes() -> None:
    ops = [Op("sum", "dp", 4.0), Op("read", "compute", 1.0, ("sum",)), Op("also", "compute", 1.0, ("sum",)),
           Op("other", "compute", 1.0)]  # fmt: skip
    assert schedule(ops, "communication-first").order == ("sum", "read", "also", "other")
    assert schedule(ops, "compute-first").order == ("sum", "other", "read", "also")


def test_small_collectives_share_a_start_up_cost() -> None:
    ops = gradients([1] * 12, startup=4.0)
    made = schedule(ops, startup=4.0)
    assert len(messages(made)) < 6
    assert made.makespan < 0.6 * schedule(ops, "program", startup=4.0).makespan


def test_every_policy_has_a_source_and_runs() -> None:
    for name, row in POLICIES.items():
        assert row.title
        given = {"priorities": {"*": 0}} if name == "priorities" else {}
        made = schedule(gradients([1, 2, 3]), name, startup=0.5, **given)
        assert made.policy == name and f"{name}, enqueue: makespan" in str(made)


def test_printing_names_chunks() -> None:
    ops = [Op("late", "dp", 12.0, bytes=12), Op("op", "compute", 1.0), Op("soon", "dp", 1.0, ("op",), bytes=1),
           Op("end", "compute", 9.0, ("soon",))]  # fmt: skip
    printed = str(schedule(ops))
    assert "late[0:1]" in printed and "late[1:12]" in printed and "soon" in printed and "soon[" not in printed
    assert str(schedule([])).startswith("longest-tail, enqueue: makespan 0 s, bound 0 s, ratio 1.000")


def test_the_grid_has_the_best_sizes() -> None:
    ops = gradients([3, 1, 7, 2, 5], startup=0.5)
    tuned = grid(ops, startup=0.5)
    assert tuned.trials == len(PARTITIONS) * len(CREDITS)
    assert tuned.schedule.makespan == min(
        schedule(ops, ByteScheduler(p, p * c), startup=0.5).makespan for p in PARTITIONS for c in CREDITS
    )


def test_bayesian_tuning_is_repeatable_and_near_the_grid() -> None:
    pytest.importorskip("optuna")
    ops = gradients([3, 1, 7, 2, 5], startup=0.5)
    tuned = bayesian(ops, startup=0.5)
    assert tuned == bayesian(ops, startup=0.5)
    assert tuned.trials == 15
    assert tuned.schedule.makespan <= 1.02 * grid(ops, startup=0.5).schedule.makespan
    with pytest.raises(ScheduleError, match="trials=0; give at least 1"):
        bayesian(ops, trials=0)


@pytest.fixture
def without_optuna(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    importing = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "optuna":
            raise ModuleNotFoundError("No module named 'optuna'", name="optuna")
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    yield


@pytest.mark.usefixtures("without_optuna")
def test_a_missing_library_names_the_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"install autopar\[tune\], or tune by grid"):
        bayesian(gradients([1]))


def test_starts_take_time_of_a_host_that_computes_itself() -> None:
    """A start of 1 s moves all that is computed behind it, and its own message."""
    ops = [Op("first", "compute", 1.0), Op("reduce", "dp", 4.0, ("first",), bytes=8), Op("other", "compute", 2.0)]
    made = schedule([*ops, Op("read", "compute", 1.0, ("reduce",))], "program", "direct", start_seconds=1.0)
    spans = {span.parts[0].op: (span.begin, span.end) for span in made.spans}
    assert spans == {"first": (0, 1), "reduce": (2, 6), "other": (2, 4), "read": (6, 7)}
    assert (made.makespan, made.exposed, made.start_seconds) == (7, 2, 1)
    enqueued = schedule([*ops, Op("read", "compute", 1.0, ("reduce",))], "program", start_seconds=1.0)
    assert (enqueued.makespan, enqueued.start_seconds) == (6, 0)


@pytest.mark.parametrize("policy", ["program", "today", "longest-tail", "p3"])
def test_slowed_and_plain_simulations_of_starts_are_alike(policy: str) -> None:
    ops = gradients([1, 2, 3, 4, 5], startup=0.5)
    made = schedule(ops, policy, "direct", startup=0.5, start_seconds=0.25)
    for interference in (0.0, 1e-12):
        simulated = simulate(ops, made.lines, "direct", startup=0.5, start_seconds=0.25, interference=interference)
        assert [span.end for span in simulated.spans] == pytest.approx([span.end for span in made.spans])
        assert simulated.exposed == pytest.approx(made.exposed)


def test_the_default_sends_few_messages_where_starts_are_dear() -> None:
    ops = [Op("forward", "compute", 100.0), *gradients([1] * 20)]
    counts = [len(messages(schedule(ops, issue="direct", start_seconds=cost))) for cost in (0.0, 0.5, 5.0)]
    assert counts[0] > counts[1] >= counts[2] == 1
    with pytest.raises(ScheduleError, match=r"start_seconds=-1; give a finite number from 0"):
        schedule(ops, start_seconds=-1)


@pytest.mark.parametrize("held", [0, 64], ids=["in place", "of its own"])
def test_a_bucket_of_all_reduces_is_alive_as_long_as_any_result(held: int) -> None:
    """They are views of one buffer: the large result stays until the small one has been read."""
    kind = ("all_reduce", "sum", "f32")
    ops = [
        Op("a", "compute", 1.0, memory=64), Op("b", "compute", 1.0, memory=8),
        Op("large", "tp", 1.0, ("a",), bytes=64, kind=kind, memory=held),
        Op("small", "tp", 1.0, ("b",), bytes=8, kind=kind, memory=held and 8),
        Op("reads large", "compute", 1.0, ("large", *(["a"] if not held else []))),
        Op("other", "compute", 1.0, memory=100),
        Op("reads small", "compute", 1.0, ("small", "other", *(["b"] if not held else []))),
    ]  # fmt: skip
    whole = {op.name: Part(op.name, 0, op.bytes) for op in ops}

    def lines(*messages: tuple[str, ...]) -> list[Line]:
        parts = [tuple(whole[name] for name in message) for message in messages]
        compute = {op.name: Line("compute", (whole[op.name],)) for op in ops if op.computes}
        return [
            compute["a"], compute["b"], *(Line("start", part) for part in parts),
            *(Line("wait", part) for part in parts), compute["reads large"], compute["other"], compute["reads small"],
        ]  # fmt: skip

    assert judge(ops, lines(("large",), ("small",)), "apart").memory == max(2 * (held + bool(held) * 8), 72, 108)
    assert judge(ops, lines(("large", "small")), "together").memory == max(2 * (held + bool(held) * 8), 72, 172)
