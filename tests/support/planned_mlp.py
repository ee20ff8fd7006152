"""A file of a user's, with a model that commands plan."""

MLP = """\
import torch

class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Linear(256, 1024, bias=False)
        self.down_proj = torch.nn.Linear(1024, 256, bias=False)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x))).square().mean()
"""

PLANNED = (
    MLP
    + """
def make():
    with torch.device("meta"):
        return MLP(), (torch.empty(512, 256),)
"""
)
