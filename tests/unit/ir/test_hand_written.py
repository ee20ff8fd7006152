"""Programs that people wrote before any pass made one like them: stages, a ZeRO-1 update, uneven pieces, two
streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx

from autopar.errors import EditError, VerifyError
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.text.printer import print_program

FOLDER = Path(__file__).parents[2] / "golden" / "text"
CASES = sorted(FOLDER.glob("*.txt"))


def load(name: str) -> tuple[Program, str]:
    """The program, and its text without the comments on top."""
    text = (FOLDER / name).read_text()
    return Program.parse(text), "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def run(program: Program, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """An explicit program on global tensors, on one device: transfers are the identity."""
    return list(fx.Interpreter(fx.GraphModule({}, program.copy().graph)).run(*tensors))


def test_the_four_programs_are_there() -> None:
    assert [path.stem for path in CASES] == ["two_stages", "two_streams", "uneven_local", "zero1_update"]


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_it_parses_prints_and_verifies(path: Path) -> None:
    program, text = load(path.name)
    assert print_program(program) == text
    assert Program.parse(text) == program == program.copy()
    program.verify()


def test_two_stages_compute_the_gradients() -> None:
    program, _ = load("two_stages.txt")
    up, down, x, d_out = (torch.randn(p_type.shape) for p_type in (record_of(p).type for p in program.placeholders))
    up.requires_grad_(), down.requires_grad_()
    out = torch.relu(x @ up.t()) @ down.t()
    out.backward(d_out)
    for made, wanted in zip(run(program, up, down, x, d_out), (out, up.grad, down.grad), strict=True):
        torch.testing.assert_close(made, wanted)


def test_what_is_sent_must_be_received_by_that_stage() -> None:
    _, text = load("two_stages.txt")
    unsent = Program.parse(text.replace("recv(relu_s1, s1)", "recv(relu, s1)"))
    with pytest.raises(VerifyError, match=r"relu was not sent to s1: receive a send\(relu, s1\)"):
        unsent.verify()
    elsewhere = Program.parse(
        text.replace(
            "relu_s1_s1 : f32[6/dp 16] @s1 = recv(relu_s1, s1)", "relu_s1_s1 : f32[6/dp 16] @s0 = recv(relu_s1, s0)"
        )
    )
    with pytest.raises(VerifyError, match="relu_s1 was not sent to s0"):
        elsewhere.verify()
    read = Program.parse(
        text.replace("threshold_backward(mm_3_s0_s0, relu, 0)", "threshold_backward(mm_3_s0_s0, relu_s1, 0)")
    )
    with pytest.raises(VerifyError, match=r"relu_s1 is on its way to s1: read a recv\(relu_s1, s1\)"):
        read.verify()
    across = Program.parse(text.replace("mm(relu_s1_s1, t_1)", "mm(relu, t_1)"))
    with pytest.raises(
        VerifyError, match="operands and results are on different meshes; an op runs on one: insert a send and a recv"
    ):
        across.verify()


def test_the_update_is_an_update() -> None:
    program, _ = load("zero1_update.txt")
    tensors = [torch.rand(t.shape).to(t.dtype) for t in (record_of(p).type for p in program.placeholders)]
    weight, average, square, gradient, bias, momentum, gradient_1, steps, lr = tensors
    new_average, new_square = 0.9 * average + 0.1 * gradient, 0.999 * square + 0.001 * gradient * gradient
    new_momentum = 0.9 * momentum + gradient_1
    wanted = (
        0.99 * weight - lr * new_average / (new_square.sqrt() + 1e-8), new_average, new_square, torch.zeros(8, 4),
        bias - lr * new_momentum, new_momentum, torch.zeros(5), steps + 1,
    )  # fmt: skip
    for made, want in zip(run(program, *tensors), wanted, strict=True):
        torch.testing.assert_close(made, want)
    returned = [record_of(value).type for value in operands(program.output)]
    assert returned == [record_of(p).type for p in program.placeholders if record_of(p).role == "state"]


def test_a_state_must_keep_its_layout() -> None:
    _, text = load("zero1_update.txt")
    with pytest.raises(
        VerifyError, match=r"gradient and its next value must have the same Layout: require zeros as f32\[8 4\] \+dp"
    ):
        Program.parse(text.replace("state(zeros_dp, 'grad.up.weight')", "state(zeros, 'grad.up.weight')")).verify()


def test_a_started_collective_is_only_read_by_its_wait() -> None:
    program, text = load("two_streams.txt")
    with pytest.raises(VerifyError, match=r"mm_4_tp is only started here: return wait\(mm_4_tp\)"):
        Program.parse(text.replace("grad x = wait\n", "grad x = mm_4_tp\n")).verify()
    with pytest.raises(VerifyError, match=r"mm_2_dp is started and never waited for: insert wait\(mm_2_dp\)"):
        Program.parse(
            text.replace("  wait_1 : f32[4 8] = wait(mm_2_dp)\n", "").replace("down = wait_1", "down = mm_2")
        ).verify()
    overlapped = [node.name for node in program.nodes]
    assert overlapped.index("mm_2_dp") < overlapped.index("mm_4") < overlapped.index("wait_1")


def test_edits_work_on_a_scheduled_program() -> None:
    """A wait can be put in later; transfers between Layouts cannot, for there are none."""
    program, text = load("two_streams.txt")
    node = program.node
    with program.edit() as edit:
        late = edit.insert(
            node("wait").target, (node("mm_4_tp"),), before=program.output, name="late", phase="backward"
        )
        edit.replace_use(program.output, node("wait"), late)
        edit.erase(node("wait"))
    program.verify()
    assert str(program) == text.replace("  wait : f32[3 4] = wait(mm_4_tp)\n", "").replace(
        "  return", "  late : f32[3 4] = wait(mm_4_tp)\n  return"
    ).replace("grad x = wait", "grad x = late")
    with pytest.raises(EditError, match="x has no Layout"), program.edit() as edit:
        edit.all_reduce(node("x"), "dp", before=node("mm"))
