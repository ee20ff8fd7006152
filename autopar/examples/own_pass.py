"""Write a pass of your own: it edits a captured program, is verified, reported and run on all ranks.

    python -m autopar.examples.own_pass
    torchrun --nproc-per-node 4 -m autopar.examples.own_pass

The program is explicit: each transfer is an op. This pass sends two sums over the same axis in one message.
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
            if node.target is relu and (inner := node.args[0]).target is relu:
                first[node] = first.get(inner, inner)
        with program.edit() as edit:  # one commit; an error in the block leaves the program as it was
            for node, value in first.items():
                edit.replace_all_uses(node, value)
                edit.erase(node)
        return [f"{len(first)} relu removed"]


def main() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 8)
    captured = autopar.parallelize(Block(), MESH, PLAN).capture
    print(captured)


if __name__ == "__main__":
    on_ranks(main)
