"""Run optimizers in the graph: one functional op updates a parameter.

One fused kernel updates a list of them in place.

definition = definition_of(torch.optim.AdamW(model.parameters()))
state = definition.initial(param, group)                          # {"exp_avg": …, "exp_avg_sq": …, "step": …}
update = definition.update(group)                                 # autopar::adamw, its states, and the group's numbers
param, state = update(param, grad, state, lr)                     # new tensors; traced, a ``counted`` and an ``adamw``
count(steps, None); IN_PLACE[update.op](params, grads, states, lr, None, None, **update.operands(), **update.constants)
"""

from autopar.optimizers import known  # noqa: F401  # fills the table of definitions
from autopar.optimizers.average import AVERAGED
from autopar.optimizers.definition import Definition
from autopar.optimizers.in_place import IN_PLACE, SHARED, count
from autopar.optimizers.lookup import definition_of, is_known
from autopar.optimizers.offload import HOST, OFFLOADED
from autopar.optimizers.ops import COUNTED
from autopar.optimizers.own_step import stand_in_of
from autopar.optimizers.register import register_optimizer
from autopar.optimizers.update import Update

__all__ = [
    "AVERAGED",
    "COUNTED",
    "HOST",
    "IN_PLACE",
    "OFFLOADED",
    "SHARED",
    "Definition",
    "Update",
    "count",
    "definition_of",
    "is_known",
    "register_optimizer",
    "stand_in_of",
]
