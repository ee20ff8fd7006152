"""The mesh that fits the ranks that are there, and the micro-batches with which the global batch stays as it is."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar import Mesh
from autopar.elastic import choose
from autopar.elastic.choice import mesh_of_ranks, microbatches_on
from autopar.elastic.pattern import pattern_of
from autopar.elastic.torchrun import check_stores, restarts_left

AXES = st.sampled_from(["dp", "tp", "ep", "cp", "pp", "a"])
MESHES = st.dictionaries(AXES, st.integers(1, 4), min_size=1, max_size=3)


@given(MESHES, st.integers(1, 6), st.integers(1, 6))
def test_a_step_has_the_rows_of_the_global_batch_on_any_mesh(sizes: dict[str, int], micro: int, count: int) -> None:
    """Each rank that splits the batch computes ``micro`` rows in each micro-batch."""
    mesh = Mesh(sizes)
    assume(not (sizes.get("dp", 1) > 1 and sizes.get("a", 1) > 1))  # which are refused
    first = next((axis for axis in sizes if axis in ("dp", "a")), None)
    pieces = sizes.get(first or "", 1) * sizes.get("ep", 1)
    assert microbatches_on(mesh, pieces * micro * count, micro) == count
    chosen = choose(mesh, global_batch=pieces * micro * count, micro_batch=micro, ranks=mesh.size)
    assert chosen.mesh == mesh and chosen.microbatches * chosen.micro_batch * pieces == chosen.global_batch


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 100))
def test_what_does_not_divide_is_refused_with_numbers_that_do(pieces: int, micro: int, batch: int) -> None:
    assume(batch % (pieces * micro))
    mesh = Mesh(dp=pieces, tp=2)
    with pytest.raises(ValueError, match="do not divide the global batch") as refused:
        microbatches_on(mesh, batch, micro)
    remedy = str(refused.value).partition("; use ")[2]
    options = dict(part.split("=") for part in remedy.replace(", or leave this mesh out", "").split(", or "))
    assert microbatches_on(mesh, int(options["global_batch"]), micro) >= 1
    if "micro_batch" in options:
        assert int(options["micro_batch"]) <= micro and microbatches_on(mesh, batch, int(options["micro_batch"]))
    else:
        assert all(batch % (pieces * n) for n in range(1, micro + 1))


@given(st.lists(MESHES, min_size=1, max_size=4), st.integers(1, 64))
def test_the_first_mesh_that_fits_is_chosen(meshes: list[dict[str, int]], ranks: int) -> None:
    fitting = [Mesh(sizes) for sizes in meshes if math.prod(sizes.values()) == ranks]
    patterns = [pattern_of(Mesh(sizes)) for sizes in meshes]
    if fitting:
        assert mesh_of_ranks(patterns, ranks) == fitting[0]
    else:
        with pytest.raises(ValueError, match=f"the job has {ranks} rank"):
            mesh_of_ranks(patterns, ranks)


@given(st.integers(1, 8), st.integers(1, 8))
def test_an_open_axis_takes_the_ranks_that_are_there(hosts: int, tp: int) -> None:
    assert mesh_of_ranks([pattern_of(f"dp=*,tp={tp}")], hosts * tp) == Mesh(dp=hosts, tp=tp)
    if tp > 1:
        with pytest.raises(ValueError, match=rf"dp=\*,tp={tp} has multiples of {tp}\n  allow a mesh of"):
            mesh_of_ranks([pattern_of(f"dp=*,tp={tp}")], hosts * tp + 1)


def test_the_ranks_of_the_job_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    allowed = ("dp=2,tp=2", Mesh(tp=2))
    assert choose(*allowed, global_batch=16, micro_batch=4).mesh == Mesh(dp=2, tp=2), "alone, for simulate"
    monkeypatch.setenv("WORLD_SIZE", "2")
    chosen = choose(*allowed, global_batch=16, micro_batch=4)
    assert str(chosen) == "tp=2: 16 rows a step in 4 micro-batches of 4 rows a rank"
    assert choose("a=2,dp=2", global_batch=8, micro_batch=2, axes=("a",), ranks=4).microbatches == 2
    assert choose("a=2,dp=2", global_batch=8, micro_batch=2, axes=("a", "dp"), ranks=4).microbatches == 1


NO_MESH = {  # ranks of the job → what is said, with two ranks a host
    1: "the job has 1 rank, and no allowed mesh has as many: dp=2,tp=2 has 4; tp=2 has 2\n  allow a mesh of 1; or "
    "start with torchrun --nnodes 1:2: the hosts that are left wait for another one",
    3: "the job has 3 ranks, and no allowed mesh has as many: dp=2,tp=2 has 4; tp=2 has 2\n  allow a mesh of 3, or "
    "leave out hosts",
    6: "the job has 6 ranks, and no allowed mesh has as many: dp=2,tp=2 has 4; tp=2 has 2\n  allow a mesh of 6; or "
    "start with torchrun --nnodes 1:2: further hosts wait, and step in when one is lost",
}


@pytest.mark.parametrize("ranks", NO_MESH)
def test_no_mesh_fits(ranks: int) -> None:
    patterns = [pattern_of("dp=2,tp=2"), pattern_of("tp=2")]
    with pytest.raises(ValueError) as refused:
        mesh_of_ranks(patterns, ranks, {"LOCAL_WORLD_SIZE": "2"})
    assert str(refused.value) == NO_MESH[ranks]


@pytest.mark.parametrize(
    ("meshes", "rows", "said"),
    [
        ((), {}, r"no mesh is allowed; name one or more"),
        (("dp=2,dp=2",), {}, r"'dp=2,dp=2' is not a list of different axes with their sizes; write it as in 'dp=2,tp="),
        (("dp",), {}, r"'dp' is not a list of different axes"),
        (("dp=*,tp=*",), {}, r"'dp=\*,tp=\*' leaves two sizes open, so no mesh follows; write one \* at most"),
        (("dp=0",), {}, "dp"),
        ((4,), {}, r"4 is neither a Mesh nor its text; write an allowed mesh as in 'dp=2,tp=2'"),
        (("dp=2",), {"micro_batch": 0}, r"micro_batch=0 is no number of rows; give 1 or more"),
        (("dp=2",), {"global_batch": True}, r"global_batch=True is no number of rows"),
        (("dp=2",), {"ranks": "2"}, r"ranks='2' is no number of ranks; give 1 or more"),
        (("dp=2", "dp=3"), {}, r"on the mesh \(dp=3\) 3 ranks split the batch, and 3 × 4 rows do not divide the global "
         r"batch of 16; use global_batch=12, or leave this mesh out"),
        (("dp=2", "tp=2,dp=4"), {"micro_batch": 8}, r"on the mesh \(tp=2 dp=4\) 4 ranks split the batch, and 4 × 8 "
         r"rows do not divide the global batch of 16; use micro_batch=4, or global_batch=32, or leave this mesh out"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_starts(meshes: tuple[object, ...], rows: dict[str, object], said: str) -> None:
    """Also a mesh that does not fit the ranks that are there now: it would fail when a host was lost."""
    with pytest.raises((TypeError, ValueError), match=said):
        choose(*meshes, **{"global_batch": 16, "micro_batch": 4, "ranks": 2, **rows})  # type: ignore[arg-type]


def test_the_shared_store_of_agents_is_refused_on_several_hosts() -> None:
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match=r"hang when a host comes back\n  set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in"):
        check_stores(shared)
    for fine in ({}, {**shared, "TORCHELASTIC_USE_AGENT_STORE": "False"}, {**shared, "GROUP_WORLD_SIZE": "1"}):
        check_stores(fine)
    assert restarts_left({}) is None
    assert restarts_left({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "2"}) == 1


def test_several_axes_of_data_are_named() -> None:
    with pytest.raises(ValueError, match=r"the mesh \(fsdp=2 dp=2\) has several data axes, fsdp and dp; name those"):
        choose("fsdp=2,dp=2", global_batch=8, micro_batch=1, ranks=4)
    assert choose("fsdp=2,dp=2", global_batch=8, micro_batch=1, ranks=4, axes=("fsdp", "dp")).microbatches == 2


def test_spaces_do_not_count() -> None:
    assert choose(" dp = 2 , tp=2", "dp = *", global_batch=8, micro_batch=1, ranks=4).mesh == Mesh(dp=2, tp=2)
