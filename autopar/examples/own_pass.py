"""Write a pass of your own: it edits a captured program, and is reported, verified and run on all ranks.

    python -m autopar.examples.own_pass
    torchrun --nproc-per-node 4 -m autopar.examples.own_pass

The program is explicit: each transfer is an op in it. ``parallel.program`` is in use, so the pass edits a copy.
"""

import torch
from torch import fx, nn

import autopar
from autopar import Program
from autopar.examples.on_ranks import compare, is_first, on_ranks
from autopar.passes import Pass, run_passes

MESH = autopar.Mesh(dp=2, tp=2)
PLAN = {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(torch.relu(self.up(x))))


class ReluOnce(Pass):
    """Replace relu(relu(x)) by relu(x)."""

    name = "relu once"
    takes = "explicit"
    gives = "explicit"

    def run(self, program: Program) -> list[str]:
        relu, first = torch.ops.aten.relu.default, dict[fx.Node, fx.Node]()  # a second relu → the first one
        for node in program.nodes:
            if node.target is relu and node.all_input_nodes[0].target is relu:
                inner = node.all_input_nodes[0]
                first[node] = first.get(inner, inner)
        with program.edit() as edit:  # one commit; an error in the block leaves the program as it was
            for node, value in first.items():
                edit.replace_all_uses(node, value)
                edit.erase(node)
        return [f"{len(first)} relu removed"]


def main() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 8)
    parallel = autopar.parallelize(model, MESH, PLAN, example=(x,))
    program = parallel.program.copy()
    (report,) = run_passes(program, [ReluOnce()])  # verifies the program, as after each of autopar's own passes
    parallel.close()
    if is_first():
        print(f"{report.name}: {report.notes[0]} in {report.commits} commit; bytes by axis: {report.bytes}")
        print(*(line for line in parallel.program.diff(program).splitlines() if line[0] in "+-"), sep="\n")
        (y,) = autopar.simulate(program, {**dict(model.named_parameters()), "x": x})  # all ranks, in this process
        y.square().sum().backward()
        norms = [p.grad.norm().item() for p in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        single = [p.grad.norm().item() for p in model.parameters()]
        torch.testing.assert_close(y, model(x))
        compare("gradient norm", norms, single, [name for name, _ in model.named_parameters()])


if __name__ == "__main__":
    on_ranks(main)
