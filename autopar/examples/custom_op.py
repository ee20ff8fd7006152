"""Use an op of your own: register how it may be split, and let autopar prove that by running it.

    python -m autopar.examples.custom_op
    torchrun --nproc-per-node 4 -m autopar.examples.custom_op

A rule is one line, as in einsum. Equal names are one loop of the op; what is named may be split, and ``!`` marks what
must stay whole. A sum over a loop that the result does not have is left pending, and reduced where it is needed.
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import autopar
from autopar.examples.on_ranks import compare, is_first, on_ranks, train_alone
from autopar.runtime.discovery.proof import prove

MESH = autopar.Mesh(dp=2, tp=2)
PLAN = {"*.up.weight": ("tp", None), "*.down": (None, "tp")}


@torch.library.custom_op("examples::weighted_norm", mutates_args=())
def weighted_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The squares of a row, weighted and summed: [rows, columns], [out, columns] → [rows, out]."""
    return x.square() @ weight.T


@weighted_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = ctx.saved_tensors
    return 2 * x * (gradient @ weight), gradient.T @ x.square()


weighted_norm.register_autograd(_backward, setup_context=_keep)
autopar.register_rule("m k, n k -> m n", "examples::weighted_norm", linear="1", work="2 m n k")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Parameter(torch.rand(3, 16) / 16)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(weighted_norm(self.up(x), self.down), target)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 8, generator=generator), torch.rand(8, 3, generator=generator)) for _ in range(count)]


def main() -> None:
    sample = torch.randn(4, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    proof = prove(torch.ops.examples.weighted_norm.default, sample)
    parallel = autopar.parallelize(model(), MESH, PLAN, strict=True)  # strict: an op without a rule is an error
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.5))
    ours = [step(x, target).item() for x, target in batches(4)]
    line = next(line.strip() for line in str(step.program.micro).splitlines() if "= examples::weighted_norm" in line)
    parallel.close()
    if is_first():
        print(f"the rule is proven: {len(proof.claims)} claims hold, as {proof.claims[0]}")
        alone = model()
        single = train_alone(lambda batch: alone(*batch), torch.optim.SGD(alone.parameters(), lr=0.5), batches(4))
        compare("loss", ours, single)
        print(line)  # split over tp, its result is a partial sum: +tp


if __name__ == "__main__":
    on_ranks(main)
