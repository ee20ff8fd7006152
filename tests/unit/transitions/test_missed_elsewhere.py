"""Transitions that other systems miss, refuse or get wrong, one test for each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode
from transition_runs import addends, check, explicit_program, names, read, run, whole_numbers

from autopar.errors import ChannelError, SimulationError, TransitionError
from autopar.ir import transfers
from autopar.ir.boxes import box_of, most_lacked, volume
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.record import DTYPES, TensorType
from autopar.ir.streams import DEFAULT
from autopar.passes import Reshard, Share, run_passes
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering import collectives, point_to_point
from autopar.runtime.lowering.lower import lower
from autopar.runtime.lowering.point_to_point import exchange_between_stages
from autopar.runtime.processes import job
from autopar.runtime.processes.groups import ProcessGroups
from autopar.runtime.redistribute import Redistribution
from autopar.runtime.simulation.simulate import compile_phases, run_ranks
from autopar.transitions import cost, transitions
from autopar.verify.channels import Group, Send
from autopar.verify.channels.programs import check_programs, creation_order, tasks_of

GRID = "dp=2 tp=2"


def local_programs(source: TensorType, target: TensorType, world: Mesh | None = None) -> LocalPrograms:
    return LocalPrograms(explicit_program(source, target, world), lambda made: made.verify())


def sends(source: TensorType, target: TensorType, world: Mesh) -> list[tuple[int, Send]]:
    """Every message between two meshes, with its sender."""
    programs = local_programs(source, target, world)
    groups = [
        (rank, task) for rank, program in programs.items() for task in tasks_of(program) if isinstance(task, Group)
    ]
    return [(rank, one) for rank, group in groups for one in group.tasks if isinstance(one, Send)]


# -- meshes and pieces ---------------------------------------------------------------------------------------------


def test_target_ranks_partly_overlap_source_ranks() -> None:
    """Static-graph frameworks plan nothing, silently, where two meshes share some ranks; a rank on both keeps what it
    has."""
    stages = {"s0": "dp=2", "s1": "dp=2 ranks 1 2"}
    source, target = (read(text, "w=3", **stages) for text in ("f32[8/dp 3] @s0", "f32[8/dp 3] @s1"))
    check(source, target, world=Mesh(w=3))
    assert names(source, target) == ["send", "recv"]
    assert [(rank, one.to, one.bytes) for rank, one in sends(source, target, Mesh(w=3))] == [(0, 1, 48), (1, 2, 48)]
    kept = read("f32[8 3] @s1", "w=3", **stages)
    check(source, kept, world=Mesh(w=3))
    assert {(rank, one.to, one.bytes) for rank, one in sends(source, kept, Mesh(w=3))} == {
        (0, 1, 48),
        (0, 2, 48),
        (1, 2, 48),
    }


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("dp=2", "x=3 ranks 2 3 4"),
        ("dp=2 tp=2", "x=3 ranks 1 4 5"),
        ("x=6", "dp=2 tp=2"),
        ("dp=2 tp=3", "dp=3 tp=2"),
        ("x=1", "dp=2 tp=3"),
    ],
)
def test_meshes_of_different_shape(here: str, there: str) -> None:
    """Where ranks are paired one to one, 2 → 3 is refused; boxes overlap as they do, whatever the meshes."""
    for shape in ((7, 6), (5, 1), (1, 2)):
        for dims in ((0, 1), (1, 0), (0, None)):
            ends = []
            for name, mesh in (("s0", here), ("s1", there)):
                on = read("f32[1] @s0", "w=6", s0=mesh).layout.mesh
                axes = dict(zip(dims, on.names, strict=False))
                attr = DistAttr.split(*(axes.get(d) for d in (0, 1))).normalize(shape, on)
                ends.append(TensorType(shape, torch.int64, Layout(Mesh(on.sizes, ranks=on.ranks, name=name), attr)))
            check(*ends, world=Mesh(w=6))


@pytest.mark.parametrize("after", ["[12]", "[12/dp]", "[12/tp]", "[12/tp/dp]", "[(3 4/dp/tp)]", "[(2/tp 6/dp)]"])
def test_a_dim_split_by_several_axes(after: str) -> None:
    """DTensor's placements have one order of the axes that split a dim; here the order is part of the Layout, and any
    leads to any."""
    for grid in (GRID, "dp=2 tp=4", "dp=3 tp=2"):
        source, target = read("i64[12/dp/tp]", grid), read(f"i64{after}", grid)
        check(source, target)
        check(target, source)
        assert cost(source, target) == 8 * most_lacked(source.layout, target.layout, source.shape)
    assert names(read("f32[12/dp/tp]", GRID), read("f32[12/tp/dp]", GRID)) == ["redistribute"]


@pytest.mark.parametrize(
    ("size", "ranks", "pieces"),
    [(5, 4, [2, 2, 1, 0]), (6, 4, [2, 2, 2, 0]), (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]), (1, 3, [1, 0, 0])],
)
def test_more_than_the_last_piece_is_short(size: int, ranks: int, pieces: list[int]) -> None:
    """Where only the last piece may be short, 5 over 4 starts its fourth at 6, behind its end at 5; pieces may be
    empty."""
    grid = f"dp={ranks}"
    split = read(f"i64[{size}/dp 3]", grid)
    assert [volume(box_of(split.layout, split.shape, rank)) for rank in range(ranks)] == [3 * n for n in pieces]
    for other in (f"i64[{size} 3]", f"i64[{size} 3/dp]", f"i64[{size} 3] +dp"):
        check(split, read(other, grid))
        check(read(other, grid), split)
    stages = {"s0": grid, "s1": f"x=2 ranks {ranks - 1} {ranks}"}
    on = [read(text, f"w={ranks + 1}", **stages) for text in (f"i64[{size}/dp 3] @s0", f"i64[{size}/x 3] @s1")]
    check(*on, world=Mesh(w=ranks + 1))
    check(*on[::-1], world=Mesh(w=ranks + 1))


# -- pending values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "wanted"), [("max", [4.0, 3, 8, 7]), ("min", [1.0, 2, 5, 0]), ("avg", [2.5, 2.5, 6.5, 3.5])]
)
def test_a_pending_maximum_or_average_becomes_a_split(kind: str, wanted: list[float]) -> None:
    """Where only sums are reduce-scattered, a maximum is refused and an average summed; each kind is reduced as what it
    is."""
    source, target = read(f"f32[4] +{kind}:dp", "dp=2"), read("f32[4/dp]", "dp=2")
    found = run(source, target, {0: torch.tensor([4.0, 2, 5, 7]), 1: torch.tensor([1.0, 3, 8, 0])})
    assert torch.cat([found[0], found[1]]).tolist() == wanted
    assert names(source, target) == ["reduce_scatter"]
    uneven = read(f"f32[5 3] +{kind}:dp +{kind}:tp", GRID)
    for after in ("f32[5/dp 3]", "f32[5/tp/dp 3]", "f32[5/dp 3/tp]"):
        check(uneven, read(after, GRID))


def test_another_kind_of_pending_is_refused() -> None:
    """Where a partial maximum is taken for a partial sum the numbers are wrong; here it is refused, with both and
    why."""
    for before, after, why in [
        (
            "f32[4] +max:dp",
            "f32[4] +dp",
            "candidates for the largest (pending max), and would have to hold addends (pending sum)",
        ),
        (
            "f32[4] +dp",
            "f32[4] +avg:dp",
            "addends (pending sum), and would have to hold values to be averaged (pending avg)",
        ),
    ]:
        message = (
            f"no transfers lead from {before} to {after}: over dp the ranks hold {why}; reduce the value over dp first"
        )
        with pytest.raises(TransitionError, match=f"^{re.escape(message)}$"):
            transitions(read(before, GRID), read(after, GRID))


@pytest.mark.parametrize(
    "pending", ["+dp", "+tp", "+dp +cp", "+dp +tp +cp", "+avg:tp +avg:cp", "+prod:dp +prod:tp", "+max:cp +max:dp"]
)
def test_a_replicated_value_becomes_pending_on_a_mesh_of_several_axes(pending: str) -> None:
    """Where a rank counts as first by its number, all other rows and columns hold nothing; the first along each pending
    axis has the addend, at each point of the others."""
    grid = "dp=2 tp=3 cp=2"
    source, target = read("f32[4 3]", grid), read(f"f32[4 3] {pending}", grid)
    found = check(source, target)
    assert set(names(source, target)) == {"pend"} and cost(source, target) == 0
    if ":" not in pending:
        mesh, axes = target.layout.mesh, [axis for axis, _ in target.attr.pending]
        assert [bool(found[rank].any()) for rank in mesh.ranks] == [
            not any(mesh.coordinates(rank)[a] for a in axes) for rank in mesh.ranks
        ]
    if "dp" not in pending:
        check(read("f32[5/dp 3]", grid), read(f"f32[5/dp 3] {pending}", grid))


def test_the_gradient_of_a_reshard_is_not_left_pending() -> None:
    """Where the backward leads to the source's own Layout, the gradient of P → R is left pending; each addend has the
    whole one."""
    pending, split, whole = (read(text, "dp=2") for text in ("f32[4] +dp", "f32[4/dp]", "f32[4]"))
    scattered, reduced = Redistribution(pending, split), Redistribution(pending, whole)
    assert names(scattered.backward.source, scattered.backward.target) == ["all_gather"]
    assert names(reduced.backward.source, reduced.backward.target) == []
    gradient = torch.tensor([1.0, 2, 3, 4])
    for redistribution, given in (
        (scattered, {0: gradient[:2], 1: gradient[2:]}),
        (reduced, {0: gradient, 1: gradient}),
    ):
        shares = {rank: torch.randn(4, requires_grad=True) for rank in (0, 1)}
        made = redistribution.simulate(shares)
        torch.autograd.backward([made[0], made[1]], [given[0], given[1]])
        assert all(torch.equal(share.grad, gradient) for share in shares.values())


# -- order ---------------------------------------------------------------------------------------------------------

THERE_AND_BACK = """program explicit on w=3
stage a on dp=2
stage b on tp=2 ranks 1 2
  x : f32[4/dp] @a = input
  y : f32[4/dp] @a = input
forward:
  x_b : f32[4/dp] @a = send(x, b)
  y_b : f32[4/dp] @a = send(y, b)
  first : f32[4/tp] @b = recv(x_b, b, splits=((tp,),))
  unread : f32[4] @b = recv(y_b, b, splits=((),))
  first_a : f32[4/tp] @b = send(first, a)
  back : f32[4/dp] @a = recv(first_a, a, splits=((dp,),))
  last : f32[4/tp] @b = recv(y_b, b, splits=((tp,),))
  z : f32[4/tp] @b = sub.Tensor(first, last)
  return z
"""


def test_receives_without_inputs_keep_their_order() -> None:
    """Nothing orders a receive that has no operand, so schedulers move or drop it, and values change places; here the
    order of the program is kept on all ranks, unread ones too, and another order on one is refused."""
    programs = dict(LocalPrograms(Program.parse(THERE_AND_BACK), lambda made: made.verify()))
    assert [str(programs[2]).count(text) for text in ("recv(None", "recv(x")] == [3, 0]
    for rank, program in programs.items():
        lowered = lower(program, {})["forward"].graph
        ordered = [node.name for node in lowered.nodes if node.target is exchange_between_stages]
        assert ordered == ["first", "unread", "back", "last"], rank
    assert simulated(programs) == [-9.0, -18, -27, -36]
    text = str(programs[2]).splitlines(keepends=True)
    first = next(k for k, line in enumerate(text) if line.startswith("  first :"))
    text[first : first + 2] = text[first + 1], text[first]
    broken = {**programs, 2: Program.parse("".join(text))}
    with pytest.raises(
        ChannelError, match=r"message 1 from rank 1 to rank 2 is not the same on both:\n(.|\n)*receive unread from 1"
    ):
        check_programs(broken)
    with pytest.raises(SimulationError, match="rank 2 receives in unread what rank 1 has sent in first"):
        simulated(broken)


def simulated(programs: dict[int, Program]) -> list[float]:
    """x − y, of 1 … 4 and 10 … 40."""
    x = torch.tensor([1.0, 2, 3, 4])
    values = {rank: {"x": piece, "y": 10 * piece} for rank, piece in ((0, x[:2]), (1, x[2:]))} | {2: {}}
    code = {rank: compile_phases(program)["forward"] for rank, program in programs.items()}
    run_ranks(programs[0].meshes, code, values)
    return torch.cat([values[rank]["z"] for rank in (1, 2)]).tolist()


@pytest.mark.parametrize("ranks", [range(8), [0, 4, 2, 6, 1, 5, 3, 7]], ids=["ascending", "permuted"])
def test_all_ranks_create_groups_in_one_order(ranks: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each rank creates the groups that it is in, as it needs them, creation itself hangs; all create all, in one
    order."""
    mesh, axes = Mesh(dp=2, tp=2, cp=2, ranks=ranks), ("dp", "tp", "cp")
    calls: dict[int, list[tuple[int, ...]]] = {}
    found = {}
    for rank in range(8):
        made = calls[rank] = []

        def new_group(members: list[int], made: Any = made, **options: Any) -> SimpleNamespace:
            assert not options.get("use_local_synchronization"), "all ranks take part"
            made.append(tuple(members))
            return SimpleNamespace(group_name=str(members))

        monkeypatch.setattr(distributed, "new_group", new_group)
        monkeypatch.setattr(distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "get_backend_config", lambda group=None: "cpu:gloo")
        monkeypatch.setattr(distributed, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="world")))
        along = SimpleNamespace(get_group=lambda axis: SimpleNamespace(group_name=axis))
        found[rank] = job.groups_of(mesh, along, ProcessGroups(), [])
    assert len(calls[0]) == len(set(calls[0])) == 6
    assert all(made == calls[0] for made in calls.values())
    for left in axes:
        two = [axis for axis in axes if axis != left]
        on = Layout(mesh, DistAttr.split(None, pending=two)), Layout(mesh, DistAttr.replicated(1))
        programs = local_programs(*(TensorType((4,), torch.float32, layout) for layout in on))
        needed = [group for group, stream in creation_order(programs.values()) if stream == DEFAULT]
        assert len(needed) == 2 and needed == [group for group in calls[0] if group in needed]
        assert all(group in found[rank] for group in needed for rank in group)


# -- what is sent --------------------------------------------------------------------------------------------------


def test_only_the_slice_that_is_needed_is_sent() -> None:
    """Elsewhere the owner sends its whole piece and the receiver slices; here a message is what both pieces have in
    common."""
    stages, world = {"s0": "dp=2", "s1": "tp=4 ranks 2 3 4 5"}, Mesh(w=6)
    source, target = (read(text, "w=6", **stages) for text in ("f32[8/dp 4] @s0", "f32[8 4/tp] @s1"))
    check(source, target, world=world)
    assert [one.bytes for _, one in sends(source, target, world)] == [4 * 4] * 8
    rows, columns = read("f32[8/dp 4/tp]", GRID), read("f32[8/tp 4/dp]", GRID)
    assert names(rows, columns) == ["redistribute"] and cost(rows, columns) == 4 * 8


def test_the_sender_is_not_always_the_first_replica() -> None:
    """Where the first that holds a piece sends it, rank 0 serves all and the others idle; here replicas take shares."""
    stages, world = {"s0": "dp=2 tp=2", "s1": "x=8 ranks 4 5 6 7 8 9 10 11"}, Mesh(w=12)
    for before, after in (
        ("f32[16] @s0", "f32[16/x] @s1"),
        ("f32[16] @s0", "f32[16] @s1"),
        ("f32[16/dp] @s0", "f32[16/x] @s1"),
    ):
        source, target = (read(text, "w=12", **stages) for text in (before, after))
        messages = sends(source, target, world)
        assert Counter(rank for rank, _ in messages) == dict.fromkeys(range(4), 2), (before, after)
        assert len({one.bytes for _, one in messages}) == 1


class Copies(TorchDispatchMode):
    """Concatenations, and elements that are written by copying."""

    def __init__(self) -> None:
        super().__init__()
        self.concatenations = self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.cat.default, torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.concatenations += function is torch.ops.aten.cat.default
            self.elements += found.numel()
        return found


@pytest.mark.parametrize("count", [2, 16])
def test_many_pieces_are_joined_at_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """k pieces joined pair by pair are copied k²/2 times; here each element is written once, and a gather is one
    concatenation."""
    grid, size = f"dp={count}", 3 * count * count
    gathered = read(f"f32[3 {count}/dp]", grid), read(f"f32[3 {count}]", grid)
    (program, _), copies = recorded(*gathered, None, 0, torch.float32, monkeypatch), Copies()
    with copies:
        run_lowered(program, torch.zeros(3, 1), {tuple(range(count)): "g"})
    assert (copies.concatenations, copies.elements) == (1, 3 * count)
    stages = {"s0": grid, "s1": f"x=1 ranks {count}"}
    sent = (
        read(text, f"w={count + 1}", **stages)
        for text in (f"f32[{3 * count} {count}/dp] @s0", f"f32[{3 * count} {count}] @s1")
    )
    (program, _), copies = recorded(*sent, Mesh(w=count + 1), count, torch.float32, monkeypatch), Copies()
    with copies:
        run_lowered(program, None, {})
    assert (copies.concatenations, copies.elements) == (0, size)


def recorded(source: TensorType, target: TensorType, world: Mesh | None, rank: int, dtype: torch.dtype,
             monkeypatch: pytest.MonkeyPatch) -> tuple[Program, list[int]]:  # fmt: skip
    """A rank's local program, and the bytes that it will hand to torch's collectives, which move nothing here."""
    handed: list[int] = []

    def bytes_of(x: torch.Tensor) -> None:
        handed.append(x.numel() * x.element_size())

    def gather(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        bytes_of(x)
        return x.new_empty(ranks * x.shape[0], *x.shape[1:])

    def all_to_all(x: torch.Tensor, received: list[int], sent: list[int], group: str) -> torch.Tensor:
        bytes_of(x)
        return x.new_empty(sum(received), *x.shape[1:])

    functional = SimpleNamespace(all_to_all_single=all_to_all, wait_tensor=lambda x: x)
    messages = SimpleNamespace(
        isend=lambda x, *others: bytes_of(x), irecv=lambda x, *others: None,
    )  # fmt: skip
    monkeypatch.setattr(collectives, "FUNCTIONAL", functional)
    monkeypatch.setattr(collectives, "start_gather", gather)
    monkeypatch.setattr(point_to_point, "distributed", messages)
    return local_programs(source, target, world)[rank], handed


def run_lowered(program: Program, piece: torch.Tensor | None, groups: dict[tuple[int, ...], str]) -> None:
    lower(program, groups)["forward"].run([] if piece is None else [piece])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_travels_at_its_own_width(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where masks are sent as int64 they take eight times the bytes; here what is planned and what is packed have one
    width."""
    name = next(text for text, one in DTYPES.items() if one == dtype)
    stages = {"s0": "dp=2 tp=2", "s1": "x=2 ranks 4 5"}
    groups = {(0, 2): "dp", (1, 3): "tp", (0, 1): "g", (2, 3): "g", (0, 1, 2, 3): "all"}
    for before, after, rank, planned, packed in [
        ("[8/dp 4]", "[8 4]", 0, 16, 16),  # planned is what comes, packed what is handed over, with the own part
        ("[8/dp 4]", "[8 4/dp]", 0, 8, 16),
        ("[8/dp 4/tp]", "[8/tp 4/dp]", 1, 8, 8),
        ("[5/tp 1]", "[5 1]", 1, 3, 4),
        ("[8/dp 4] @s0", "[8 4/x] @s1", 0, 16, 8),
    ]:
        source, target = (
            read(f"{name}{text}", "w=6" if "@" in text else GRID, **(stages if "@" in text else {}))
            for text in (before, after)
        )
        program, handed = recorded(source, target, Mesh(w=6) if "@" in before else None, rank, dtype, monkeypatch)
        _, pieces = addends(source, whole_numbers(source))
        run_lowered(program, pieces[rank], groups)
        assert cost(source, target) == planned * dtype.itemsize, (before, after)
        assert handed == [packed * dtype.itemsize], (before, after)


# -- sharing -------------------------------------------------------------------------------------------------------

TWO_USERS = """program placed on dp=2 tp=2
  x : f32[8/dp 4/tp] = input
forward:
  a : f32[8/tp 4/dp] = relu(x as [8/tp 4/dp])
  b : f32[8/tp 4/dp] = sigmoid(x as [8/tp 4/dp])
  c : f32[8 4/tp] = sigmoid(x as [8 4/tp])
  d : f32[8/dp 4/tp] = relu(x)
  return (a, b, c, d)
"""


def test_users_of_one_value_in_one_layout_share_a_transfer() -> None:
    """Elsewhere each use has a reshard of its own; here a mismatch is one transfer, and equal ones are folded into
    it."""
    program = Program.parse(TWO_USERS)
    assert inserted(program) == []
    run_passes(program, [Reshard()])
    assert inserted(program) == [("redistribute", ["a"]), ("redistribute", ["b"]), ("all_gather", ["c"])]
    run_passes(program, [Share()])
    assert inserted(program) == [("redistribute", ["a", "b"]), ("all_gather", ["c"])]
    assert len(program.node("x").users) == 3


def inserted(program: Program) -> list[tuple[str, list[str]]]:
    """Each transfer, and who uses it."""
    return [
        (node.target.__name__, [user.name for user in node.users])
        for node in program.nodes
        if node.target in transfers.BY_FUNCTION
    ]
