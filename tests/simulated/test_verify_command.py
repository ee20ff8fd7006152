"""``autopar verify``: what is right, what is wrong and what is too large; wrong programs and numbers are made here."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from autopar.cli.app import app
from autopar.cli.plan import compared, verify
from autopar.cli.plan import rank as rank_command
from autopar.ir.program import Program
from autopar.runtime.processes.free_memory import free_memory
from autopar.step.reports import measured_rank
from autopar.verify.channels.classes import RankClass

MODEL = """\
import torch
import autopar

@torch.library.custom_op("verified::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None]

shift.register_fake(torch.empty_like)
shift.register_autograd(lambda context, gradient: gradient)
autopar.register_rule("b d -> b d", "verified::shift")     # wrong: pieces count from 0 again

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Linear(8, 16)
        self.down_proj = torch.nn.Linear(16, 8)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.down_proj(torch.relu(self.up_proj(x)))).square().mean()

class Wide(Net):                     # without dropout: torch's kernel of it takes a buffer of its own
    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Linear(64, 512)
        self.down_proj = torch.nn.Linear(512, 64)
        self.drop = torch.nn.Identity()

class Shifted(Net):
    def forward(self, x):
        return self.down_proj(shift(self.up_proj(x))).square().mean()
"""
X = ("--inputs", "x=f32[6,8]", "--machine", "cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("models") / "verified_models.py"
    file.write_text(MODEL)
    return str(file)


def asked(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["verify", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def answered(*arguments: str) -> dict[str, Any]:
    status, out, _ = asked(*arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    assert found["verified"] == (status == 0)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "what", "count"),
    [
        (("--plan", "ddp"), "outputs and gradients", 5),
        (("--plan", "megatron", "--mesh", "dp=4,tp=2"), "outputs and gradients", 5),
        ((), "outputs and gradients", 5),
        (("--plan", "fsdp", "--optimizer", "adamw"), "the loss and the parameters after a step", 5),
        (("--devices", "4"), "outputs and gradients", 5),
    ],
)
def test_what_is_right(path: str, more: tuple[str, ...], what: str, count: int) -> None:
    """Uneven pieces make several classes of ranks: 6 rows on 4 ranks of dp."""
    found = answered(f"{path}:Net", *X, *more, "--run")
    numbers = found["numbers"]
    assert numbers["what"] == what and numbers["count"] == count and 0 <= numbers["largest"] < 1e-12
    assert numbers["tolerance"] == 1e-9
    (ranks,) = (row for name, row in found.items() if name in ("scheduled call", "scheduled last"))
    assert (ranks["ranks"], ranks["classes"]) == ((8, 2) if "dp=4,tp=2" in more else (4, ranks["classes"]))
    status, out, _ = asked(f"{path}:Net", *X, *more, "--run")
    assert status == 0 and "each was verified after it ran" in out and "no rank waits forever" in out
    assert out.splitlines()[-1].endswith("within 1e-09: those of a single device, in float64 and without dropout")


def test_it_says_where_ranks_do_the_same(path: str) -> None:
    status, out, _ = asked(f"{path}:Net", "--plan", "ddp", "--mesh", "dp=2,extra=2", *X)
    assert status == 0
    assert "the axis extra splits nothing: its 2 ranks do the same work" in out


@pytest.mark.long
def test_without_running_nothing_has_values(path: str) -> None:
    found = answered(f"{path}:Net", *X, "--plan", "ddp")
    assert list(found) == ["verified", "passes", "explicit call", "scheduled call"]
    assert found["scheduled call"]["transfers"] > 0 and found["scheduled call"]["ranks"] == 4
    assert "reshard" in found["passes"]["names"] and "price" not in found["passes"]["names"]


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--optimizer", "sgd")])
def test_a_wrong_rule_gives_wrong_numbers(path: str, more: tuple[str, ...]) -> None:
    """The programs are consistent, and only running them shows it."""
    wrong = (f"{path}:Shifted", *X, "--plan", "ddp", *more)
    assert asked(*wrong)[0] == 0
    status, out, error = asked(*wrong, "--run")
    assert status == 1 and "numbers:" not in out
    assert (
        error.startswith("autopar: 5 values, ") and "the largest difference is" in error and "more than 1e-09" in error
    )
    found = answered(*wrong, "--run")
    assert found["numbers"]["largest"] > 1e-3 and found["why"] in error


@pytest.mark.long
@pytest.mark.parametrize("at", ["explicit", "scheduled", "channels"])
def test_a_wrong_program_is_named(path: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was changed after the passes: a transfer is missing, or one rank has another program."""
    run = verify._of_ranks

    def without_transfers(program: Program) -> Program:
        copy = program.copy()
        node = copy.node("sum_1_dp")  # of the loss: an all-reduce, or the wait for one
        with copy.edit() as edit:
            edit.replace_all_uses(node, node.args[0])
            edit.erase(node)
        return copy

    if at == "explicit":
        explicit = verify._explicit
        monkeypatch.setattr(verify, "_explicit", lambda planned: {"call": without_transfers(explicit(planned)["call"])})
    else:

        def of_ranks(planned: Any) -> Any:
            ((name, (one,)),) = run(planned).items()
            others = RankClass(one.program, [rank for rank in one.ranks if rank != 1])
            if at == "channels":
                return {name: [others]}
            mesh = one.program.mesh
            return {name: [others, RankClass(without_transfers(one.program.at(mesh.coordinates(1))), [1])]}

        monkeypatch.setattr(verify, "_of_ranks", of_ranks)
    status, out, error = asked(f"{path}:Net", *X, "--plan", "ddp", "--json", "--quiet")
    assert status == 1 and error.startswith("autopar: ") and not json.loads(out)["verified"]
    said = {"explicit": "explicit program is inconsistent", "scheduled": "is inconsistent at", "channels": "rank"}
    assert said[at] in error


@pytest.mark.simulated
def test_what_is_too_large(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared, "MOST_PARAMETERS", 100)
    status, out, error = asked(f"{path}:Net", *X, "--run")
    assert (status, out) == (2, "")
    assert error == (
        "autopar: --run simulates all ranks in this process, and the model has 280 parameters, more than 100; make it "
        "smaller, as with --set num_hidden_layers=2, or leave --run out\n"
    )
    monkeypatch.undo()
    for more in (("--mesh", "dp=65"), ("--devices", "65")):
        status, _, error = asked(f"{path}:Net", *X, "--run", *more)
        assert status == 2 and "and 65 are more than 64; use a smaller --mesh, or leave --run out" in error


@pytest.mark.long
def test_a_model_that_computes_in_float32_inside_has_its_tolerance() -> None:
    found = answered("tiny", "--run", "--machine", "cpu", "--batch", "2", "--sequence", "8", "--plan", "megatron")
    assert found["numbers"]["tolerance"] == 1e-4 and found["numbers"]["largest"] < 1e-6


# -- one rank of a large job

RANK = ("--mesh", "dp=512,tp=8", "--plan", "megatron", "--inputs", "x=f32[1024,8]", "--machine", "cpu")


@pytest.mark.long
def test_a_rank_runs_without_the_others(path: str) -> None:
    found = answered(f"{path}:Wide", *RANK, "--inputs", "x=f32[524288,64]", "--rank", "17")
    rank = found["rank"]
    assert (rank["rank"], rank["coordinates"], rank["alone"]) == (17, {"dp": 2, "tp": 1}, True)
    assert abs(rank["measured"] / rank["predicted"] - 1) <= 0.1
    assert {"matmul", "optimizer", "communication"} <= rank["classes"].keys() and rank["seconds"] > 0
    rows = [(row["op"], row["axes"], row["ranks"]) for row in rank["communication"]]
    assert ("all_reduce", ["tp"], "16-23") in rows and ("all_reduce", ["dp"], "1-4089:8") in rows
    assert found["scheduled last"] == {**found["scheduled last"], "ranks": 4096, "classes": 1}
    status, out, _ = asked(
        f"{path}:Net", *RANK, "--rank", "17", "--zero", "1", "--microbatches", "2", "--optimizer", "sgd"
    )
    assert status == 0 and "a training step with sgd" in out
    assert "rank 17: a step needs " in out and "that are free here" in out
    assert "rank 17 (dp=2 tp=1) of dp=512 tp=8\nmemory: predicted" in out and "nothing is exchanged" in out


@pytest.mark.long
def test_stages_of_a_pipeline(path: str) -> None:
    """Their programs and messages, their numbers, and one rank."""
    given = (f"{path}:Wide", "--plan", "ddp", "--machine", "cpu", "--microbatches", "2")
    found = answered(*given, "--mesh", "pp=2,dp=2", "--inputs", "x=f32[8,64]", "--run")
    assert (
        found["numbers"]["what"] == "the loss and the parameters after a step" and found["numbers"]["largest"] < 1e-12
    )
    assert found["scheduled micro"]["ranks"] == 4 and found["scheduled micro"]["transfers"] >= 2
    rank = answered(*given, "--mesh", "pp=2,dp=64", "--inputs", "x=f32[131072,64]", "--rank", "70")["rank"]
    assert rank["coordinates"] == {"pp": 1, "dp": 6} and abs(rank["measured"] / rank["predicted"] - 1) <= 0.1
    assert {(row["op"], row["ranks"]) for row in rank["communication"]} >= {("recv", "6"), ("send", "6")}
    searched = (*given[:2], "search", *given[3:], "--mesh", "pp=2,dp=4", "--inputs", "x=f32[8192,64]", "--rank", "5")
    assert answered(*searched)["rank"]["coordinates"] == {"pp": 1, "dp": 1}


@pytest.mark.long
def test_a_rank_that_takes_another_memory_than_predicted_is_wrong(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = measured_rank.peak_bytes
    monkeypatch.setattr(rank_command, "LITTLE", 0)
    monkeypatch.setattr(measured_rank, "peak_bytes", lambda *call: 2 * made(*call))
    status, out, error = asked(f"{path}:Net", *RANK, "--rank", "17", "--json")
    assert status == 1 and not json.loads(out)["verified"]
    assert error.splitlines()[-1].startswith("autopar: memory: predicted ") and error.endswith("%, more than 10%\n")


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--rank", "4096"), "--rank 4096 is not on the mesh (dp=512 tp=8); give a rank from 0 to 4095"),
        (("--rank", "-1"), "--rank -1 is not on the mesh (dp=512 tp=8); give a rank from 0 to 4095"),
        (("--rank", "0", "--mesh", "dp=1"), "--rank 0 is for a mesh of several ranks, and (dp=1) has one"),
        (("--rank", "0", "--schedule", "1f1b"), "--schedule 1f1b is for the stages of a pipeline, and --mesh dp=512,"),
        (("--rank", "0", "--mesh", "pp=2,tp=2", "--schedule", "none"), "--schedule none: "),
        (("--rank", "0", "--zero", "4"), "--zero 4 must be 0, 1, 2 or 3"),
        (("--zero", "1"), "--zero 1 is of a training step; add --optimizer adamw"),
    ],
)
def test_what_is_no_rank(path: str, more: tuple[str, ...], said: str) -> None:
    status, out, error = asked(f"{path}:Net", *RANK, *more)
    assert (status, out) == (2, "") and said in error


def test_a_rank_of_devices(path: str) -> None:
    status, _, error = asked(f"{path}:Net", *X, "--devices", "8", "--rank", "1")
    assert status == 2 and "--rank 1 is a rank of a mesh, and --devices chooses one; give --mesh dp=8" in error


@pytest.mark.long
def test_a_rank_that_does_not_fit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is allocated."""
    monkeypatch.setattr(rank_command, "free_memory", lambda device: 100)
    monkeypatch.setattr(rank_command, "one_rank", lambda *given: pytest.fail("it has run"))
    status, _, error = asked(f"{path}:Net", *RANK, "--rank", "17")
    assert status == 2 and "--rank 17 needs " in error
    assert "at the peak of a step, and 100 bytes are free here: make the model smaller, as with --set" in error


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**20 < free_memory(torch.device("cpu")) < 2**50
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (300, 1000))
    assert free_memory(torch.device("cuda")) == 300


def test_the_batch_of_a_rank_is_on_its_device() -> None:
    args, kwargs = rank_command.step_arguments(((torch.ones(4, 2), 3), {"ids": torch.zeros(4)}), torch.device("meta"))
    assert args[0].is_meta and args[1] == 3 and kwargs["ids"].is_meta and kwargs["ids"].shape == (4,)
