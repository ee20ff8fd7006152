"""The communication of local programs: in order, broken by hand, on stages; and the groups they need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from channel_programs import EXCHANGES, GOLDEN, local_programs, one_each, swapped

from autopar.errors import ChannelError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.streams import DEFAULT, Ranks, Stream
from autopar.runtime import localize
from autopar.runtime.localize import LocalPrograms
from autopar.verify import channels
from autopar.verify.channels import Collective, Group, Receive, Send, check
from autopar.verify.channels.programs import check_programs, creation_order, tasks_of


@pytest.mark.parametrize("name", [path.stem for path in sorted(GOLDEN.glob("*.txt"))])
def test_localized_programs_finish(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = local_programs(name)
    check_programs(programs)
    check({rank: tasks_of(program) for rank, program in programs.items()})
    if not programs[0].stages:  # ranks of two stages run different sequences
        monkeypatch.setattr(
            channels.programs, "_tasks", lambda *arguments: pytest.fail("equal sequences need no tasks")
        )
    check_programs(one_each(programs))


def test_tasks_come_phase_by_phase_in_the_order_of_the_graph() -> None:
    text = "program local on dp=2 tp=2 at dp=1 tp=0\n  x : f32[4] = input\n  d : f32[4] = tangent(0)\n"
    text += "forward:\n  a : f32[4] = all_reduce(x, tp)\nbackward:\n  b : f32[4] = all_reduce(d, dp)\nforward:\n"
    text += "  c : f32[8] = all_gather(x, 0, dp, sizes=[4, 4])\n  p : f32[4] = pend(x, tp)\n  return c\n"
    program = Program.parse(text)
    wanted = [
        Collective("a", "all_reduce", (2, 3)),
        Collective("c", "all_gather", (0, 2)),
        Collective("b", "all_reduce", (0, 2)),
    ]
    assert tasks_of(program) == wanted
    assert [task.ranks for task in tasks_of(program.at({"dp": 0, "tp": 1}))] == [(0, 1), (1, 3), (1, 3)]


def test_two_collectives_swapped_on_one_rank() -> None:
    programs = local_programs("column_row_pair")
    broken = one_each(programs, lambda rank, text: swapped(text, "mm_3_dp", "view_1_dp") if rank == 2 else text)
    with pytest.raises(ChannelError) as found:
        check_programs(broken)
    assert str(found.value) == (
        "collective 1 of ranks 0 2 is not the same on both:\n"
        "  rank 0: mm_3_dp = all_reduce of ranks 0 2\n"
        "      mm_3_dp : f32[128 64] = all_reduce(mm_3, dp)\n"
        "  rank 2: view_1_dp = all_reduce of ranks 0 2\n"
        "      view_1_dp : f32[128] = all_reduce(view_1, dp)\n"
        "give both ranks the same order"
    )


def test_crossing_axes_in_programs_quote_their_lines() -> None:
    """Of each group the order is right; two ranks of four have their tp collective first."""
    programs = local_programs("column_row_pair")
    broken = one_each(programs, lambda rank, text: swapped(text, "view_dp", "mm_2_tp") if rank in (0, 3) else text)
    with pytest.raises(ChannelError) as found:
        check_programs(broken)
    assert str(found.value) == (
        "ranks wait for each other forever on asynchronous channels (only receives wait):\n"
        "  rank 0 waits for rank 1 in mm_2_tp = all_reduce of ranks 0 1\n"
        "      mm_2_tp : f32[16 64] = all_reduce(mm_2, tp)\n"
        "  rank 1 waits for rank 3 in view_dp = all_reduce of ranks 1 3\n"
        "      view_dp : f32[64] = all_reduce(view, dp)\n"
        "  rank 3 waits for rank 2 in mm_2_tp = all_reduce of ranks 2 3\n"
        "      mm_2_tp : f32[16 64] = all_reduce(mm_2, tp)\n"
        "  rank 2 waits for rank 0 in view_dp = all_reduce of ranks 0 2\n"
        "      view_dp : f32[64] = all_reduce(view, dp)\n"
        "put the collectives of all groups into one order"
    )
    half = one_each(programs, lambda rank, text: swapped(text, "view_dp", "mm_2_tp") if rank in (0, 1) else text)
    check_programs(half)  # both ranks of one tp group: they wait for nobody who waits for them


def test_a_rank_without_a_program() -> None:
    programs = local_programs("column_row_pair")
    del programs[3]
    with pytest.raises(
        ChannelError, match=r"collective 1 of ranks 1 3 is not the same on both:\n(.|\n)*\n  rank 3: none at all\n"
    ):
        check_programs(programs)


def test_programs_of_another_rank_or_level() -> None:
    programs = local_programs("column_row_pair")
    with pytest.raises(
        ChannelError, match=r"the program given as that of rank 0 is at {'dp': 0, 'tp': 1}, which is rank 1"
    ):
        check_programs({**programs, 0: programs[1]})
    explicit = Program.parse((GOLDEN / "column_row_pair.txt").read_text().partition("---\n")[0])
    with pytest.raises(ChannelError, match="in the local programs of all ranks; this program is explicit"):
        check_programs({0: explicit})


STAGES = """\
program local on pp=2 dp=2 tp=2 at pp={} dp={} tp={}
stage s0 on dp=2 tp=2
stage s1 on dp=2 tp=2 ranks 4 5 6 7
  x : f32[4] = input
forward:
  joint : f32[4] = all_reduce(x, dp)
  both : f32[4] = all_reduce(joint, pp)
  return both
"""


def staged() -> dict[int, Program]:
    """Each stage reduces over its two axes at once, then the stages with each other; a graph a stage."""
    mesh, programs = Mesh(pp=2, dp=2, tp=2), {}
    for stage in (0, 1):
        program = Program.parse(STAGES.format(stage, 0, 0))
        node = program.node("joint")
        node.args, node.kwargs = (node.args[0], ("tp", "dp")), {"stage": f"s{stage}"}
        for rank in mesh.ranks[4 * stage : 4 * stage + 4]:
            programs[rank] = program.at(mesh.coordinates(rank))
    return programs


def test_joint_groups_lie_on_their_stage() -> None:
    programs = staged()
    assert tasks_of(programs[5]) == [
        Collective("joint", "all_reduce", (4, 6, 5, 7)),
        Collective("both", "all_reduce", (1, 5)),
    ]
    assert creation_order(programs.values()) == default_streams(
        (0, 1, 2, 3), (0, 4), (1, 5), (2, 6), (3, 7), (4, 5, 6, 7)
    )
    check_programs(programs)


def test_a_collective_of_a_stage_that_the_rank_is_not_on() -> None:
    programs = staged()
    line = r"rank 4 cannot take part in a collective:\n  joint : f32\[4\] = all_reduce\(.*\)\n"
    with pytest.raises(ChannelError, match=line + r"rank 4 is not on the mesh \(dp=2 tp=2\), whose ranks are 0-3"):
        check_programs({**programs, 4: programs[0].at(programs[4].coordinates)})
    for program in programs.values():
        program.node("joint").kwargs = {"stage": "s0"}
    with pytest.raises(ChannelError, match=line + "rank 4 is not on the mesh"):  # all alike, and still wrong
        check_programs(programs)
    programs[4].node("joint").kwargs = {"stage": "s9"}
    with pytest.raises(ChannelError, match=line + "there is no stage 's9'"):
        check_programs(programs)


def test_equal_sequences_on_other_meshes_are_not_alike() -> None:
    """The same lines on stages of other ranks mean other groups."""
    programs = staged()
    other = Program.parse(STAGES.format(1, 1, 1).replace("ranks 4 5 6 7", "ranks 4 6 5 7"))
    with pytest.raises(ChannelError, match=r"collective 1 of ranks 4 [56] [56] 7 is not the same on both"):
        check_programs({**programs, 7: other})
    turned = (
        "program local on dp=2 tp=2 ranks {} at dp={} tp={}\n  x : f32[4] = input\nforward:\n  y : f32[4] = "
        "all_reduce(x, (dp, tp))\n  return y\n"
    )
    of_ranks = {
        rank: Program.parse(turned.format("0 1 2 3" if rank else "0 2 1 3", rank // 2, rank % 2)) for rank in range(4)
    }
    with pytest.raises(ChannelError, match=r"collective 1 of ranks 0 [12] [12] 3 is not the same on both"):
        check_programs(of_ranks)


def test_exchanges_between_stages_are_messages() -> None:
    """Rank 1 lies on both: it sends and receives in one go."""
    programs = dict(LocalPrograms(Program.parse(EXCHANGES), lambda made: made.verify()))
    assert tasks_of(programs[0]) == [Group((Send("x_b_b", 1, 8),)), Group((Receive("y_a_a", 1, 8),))]
    assert tasks_of(programs[1]) == [
        Group((Receive("x_b_b", 0, 8), Send("x_b_b", 2, 8))),
        Group((Send("y_a_a", 0, 8), Receive("y_a_a", 2, 8))),
    ]
    check_programs(programs)


def test_exchanges_in_another_order_on_one_rank() -> None:
    programs = dict(LocalPrograms(Program.parse(EXCHANGES), lambda made: made.verify()))
    lines = str(programs[1]).splitlines(keepends=True)
    first = next(k for k, line in enumerate(lines) if "recv" in line)
    lines[first : first + 2] = lines[first + 1], lines[first]
    broken = {**programs, 1: Program.parse("".join(lines))}
    with pytest.raises(ChannelError) as caught:
        check_programs(broken)
    assert str(caught.value) == ORDERED_OTHERWISE


ORDERED_OTHERWISE = """\
ranks wait for each other forever on asynchronous channels (only receives wait):
  rank 1 waits for rank 2 in receive y_a_a from 2
      y_a_a : f32[2] = recv(y, a, splits=((dp,),), shape=(4,), source=((tp,),), home=b)
  rank 2 waits for rank 1 in receive x_b_b from 1
      x_b_b : f32[2] = recv(None, b, splits=((tp,),), shape=(4,), source=((dp,),), home=a)
send earlier what another rank waits for"""


def test_local_programs_are_checked_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All classes together, though one rank was asked for."""
    checked: list[list[int]] = []
    ranks_of = lambda classes: sorted(rank for one in classes for rank in one.ranks)  # noqa: E731
    monkeypatch.setattr(localize, "check_classes", lambda classes: checked.append(ranks_of(classes)))
    local = LocalPrograms(Program.parse(EXCHANGES), lambda made: made.verify())
    assert not checked
    _ = local[2]
    assert checked == [[0, 1, 2]]


# -- streams --------------------------------------------------------------------------------------------------------


TWO_STREAMS = """\
program scheduled on dp=2 tp=2 at dp=0 tp=0
stream dp
stream late
stream tp
  x : f32[4] = input
forward:
  a : f32[4] = start all_reduce(x, dp) on dp
  b : f32[4] = start all_reduce(x, dp) on late
  c : f32[4] = all_reduce(x, (dp, tp)) on late
  d : f32[4] = all_reduce(x, tp) on tp
  wait : f32[4] = wait(a)
  wait_1 : f32[4] = wait(b)
  return wait, wait_1, c, d
"""
MESSAGES = """\
program scheduled on w=2 at w={}
stage a on s=1
stage b on t=1 ranks 1
stream late
{}forward:
  y : f32[4] = {}, b, splits=((),), shape=(4,), source=((),), home=a) on late
"""


def test_a_stream_that_is_called_like_its_axes_is_the_default_one() -> None:
    program = Program.parse(TWO_STREAMS)
    assert [task.stream for task in tasks_of(program)] == [DEFAULT, "late", "late", DEFAULT]
    everyone, dp, tp = (0, 1, 2, 3), ((0, 2), (1, 3)), ((0, 1), (2, 3))
    wanted = {(everyone, "late"), *((ranks, stream) for ranks in dp for stream in ("", "late")), *default_streams(*tp)}
    assert creation_order([program]) == sorted(wanted)


def test_each_stream_has_its_own_order() -> None:
    """Rank 2 starts the collectives in the other order. The pieces have one size: in one group the sums would cross."""
    program = Program.parse(TWO_STREAMS)
    first, second = tasks_of(program)[:2]
    assert first.group == ((0, 2), DEFAULT) and second.group == ((0, 2), "late")
    check({0: [first, second], 2: [second, first]}, ())
    with pytest.raises(ChannelError) as found:
        check({0: [first, second], 2: [second, second]}, ())
    assert str(found.value) == (
        "collective 1 of ranks 0 2 is not the same on both:\n"
        "  rank 0: a = all_reduce of ranks 0 2\n"
        "  rank 2: none at all\n"
        "rank 0 does a = all_reduce once, rank 2 never; let both do it as often"
    )
    with pytest.raises(ChannelError) as found:
        check({0: [second, second], 2: [second, replace(second, value="c")]}, ())
    assert str(found.value) == (
        "collective 2 of ranks 0 2 on late is not the same on both:\n"
        "  rank 0: b = all_reduce of ranks 0 2 on late\n"
        "  rank 2: c = all_reduce of ranks 0 2 on late\n"
        "rank 0 does b = all_reduce twice, rank 2 once; rank 0 does c = all_reduce never, rank 2 once; let both do it "
        "as often"
    )


def test_each_rank_has_one_that_waits_in_its_stream() -> None:
    """Collectives that block, one after the other, on two streams in crossed orders: ranks wait for each other."""
    first, second = tasks_of(Program.parse(TWO_STREAMS))[:2]
    with pytest.raises(ChannelError, match=r"forever on asynchronous(.|\n)*put the collectives of all groups into one"):
        check({0: [first, second], 2: [second, first]})


def test_messages_on_a_stream_need_the_group_of_all_ranks() -> None:
    programs = {
        0: Program.parse(MESSAGES.format(0, "  x : f32[4] = input\n", "send(x") + "  return\n"),
        1: Program.parse(MESSAGES.format(1, "", "recv(None") + "  return y\n"),
    }
    assert tasks_of(programs[0]) == [Group((Send("y", 1, 16, stream="late"),))]
    assert tasks_of(programs[1]) == [Group((Receive("y", 0, 16, stream="late"),))]
    check_programs(programs)
    assert creation_order(programs.values()) == [((0, 1), "late")]
    late, early = Send("x", 1, stream="late"), Send("y", 1)
    received = Receive("x", 0, stream="late"), Receive("y", 0)
    check({0: [late, early], 1: received[::-1]}, [channels.ASYNCHRONOUS])
    with pytest.raises(ChannelError, match=r"message 1 from rank 0 to rank 1 on late is not the same"):
        check({0: [late], 1: [replace(received[1], stream="late")]}, ())


# -- groups ----------------------------------------------------------------------------------------------------------


def default_streams(*groups: Ranks) -> list[Stream]:
    return [(ranks, DEFAULT) for ranks in groups]


def test_groups_are_created_in_an_order_that_no_rank_decides() -> None:
    programs = local_programs("column_row_pair")
    wanted = default_streams((0, 1), (0, 2), (1, 3), (2, 3))
    assert creation_order(programs.values()) == wanted
    assert all(creation_order([program]) == wanted for program in programs.values()), "a rank asks with its own"
    shuffled = one_each(programs, lambda rank, text: swapped(text, "view_dp", "mm_2_tp"))
    assert creation_order(reversed(shuffled.values())) == wanted


def test_groups_of_one_rank_are_not_created() -> None:
    program = Program.parse(
        "program local on dp=2 tp=1 at dp=0 tp=0\n  x : f32[4] = input\nforward:\n"
        "  a : f32[4] = all_reduce(x, tp)\n  b : f32[4] = all_reduce(x, dp)\n  return a, b\n"
    )
    assert creation_order([program]) == default_streams((0, 1))
    check_programs({0: program, 1: program.at({"dp": 1, "tp": 0})})
    check({0: tasks_of(program), 1: tasks_of(program.at({"dp": 1, "tp": 0}))})


# -- cost ------------------------------------------------------------------------------------------------------------


def test_64_ranks_that_share_a_graph_take_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(dp=8, tp=8)
    lines = [f"  v{i} : f32[4] = all_reduce(x, {'dp' if i % 2 else 'tp'})\n" for i in range(200)]
    text = f"program local on dp=8 tp=8 at dp=0 tp=0\n  x : f32[4] = input\nforward:\n{''.join(lines)}  return v0\n"
    program = Program.parse(text)
    walks, walk = [], channels.programs.communication_of
    monkeypatch.setattr(channels.programs, "communication_of", lambda program: walks.append(program) or walk(program))
    check_programs({rank: program.at(mesh.coordinates(rank)) for rank in mesh.ranks})
    assert len(walks) == 1
