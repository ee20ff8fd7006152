"""Map the role of a value in a training step to its name, and the name back to its role.

The programs of a step hand values to each other by name. A value that the step makes for a parameter has the
parameter's name and a suffix; a value of the step as a whole has a name that begins with a dot. A state is
handed to the next run of its program.

| name | role | value |
| --- | --- | --- |
| ``up.weight.grad`` | ``GRADIENT`` | the state in which the gradients of a parameter add up |
| ``up.weight.copy`` | ``COPY`` | the low-precision copy of a parameter |
| ``up.weight.ema`` | ``AVERAGE`` | the moving average of a parameter |
| ``up.weight.before`` | ``BEFORE`` | the gradient or the piece of a parameter that the next step reduces or gathers |
| ``up.weight.exp_avg`` | ``STATE`` | the optimizer's state of a parameter |
| ``.loss`` | ``LOSS`` | the state in which the losses of micro-batches add up |
| ``.scale`` | ``SCALE`` | the factor of the loss in mixed precision |
| ``.growth`` | ``GROWTH`` | the number of steps since the scale was changed |
| ``.averages`` | ``AVERAGES`` | the number of steps that the averages were updated in |
| ``.step.0`` | ``STEPS`` | the number of optimizer steps, for all parameters that took equally many |
| ``.count.0`` | ``COUNT`` | the mean count that the loss of a micro-batch is divided by |
| ``.total.0`` | ``COUNT`` | a sum over all micro-batches that counts are made of |
| ``.outputs.0`` | ``OUTPUTS`` | an output of all micro-batches, stacked |
| ``.received.mm_1`` | ``RECEIVED`` | a value that another stage of a pipeline sends |
| ``.lr.0`` | ``SCHEDULED`` | a number of a parameter group that schedulers change |
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from torch import fx

from autopar.ir.nodes import name_of, operands, record_of
from autopar.ir.program import Program

ValueRole = Enum("ValueRole", "GRADIENT COPY AVERAGE BEFORE STATE "
                              "LOSS SCALE GROWTH AVERAGES STEPS COUNT OUTPUTS RECEIVED SCHEDULED")  # fmt: skip

SUFFIXES = {
    ValueRole.GRADIENT: "grad", ValueRole.COPY: "copy", ValueRole.AVERAGE: "ema", ValueRole.BEFORE: "before",
}  # fmt: skip
LOSS, SCALE, GROWTH, AVERAGES = ".loss", ".scale", ".growth", ".averages"

_OF_SUFFIX = {suffix: role for role, suffix in SUFFIXES.items()}
_OF_STEP = {LOSS: ValueRole.LOSS, SCALE: ValueRole.SCALE, GROWTH: ValueRole.GROWTH, AVERAGES: ValueRole.AVERAGES}
_NUMBERED = {
    ".step": ValueRole.STEPS, ".count": ValueRole.COUNT, ".total": ValueRole.COUNT, ".received": ValueRole.RECEIVED,
    ".outputs": ValueRole.OUTPUTS,
}  # fmt: skip


def gradient_name(parameter: str) -> str:
    """Return the name of the sum of a parameter's gradients: ``up.weight.grad``."""
    return f"{parameter}.{SUFFIXES[ValueRole.GRADIENT]}"


def copy_name(parameter: str) -> str:
    """Return the name of a parameter's low-precision copy: ``up.weight.copy``."""
    return f"{parameter}.{SUFFIXES[ValueRole.COPY]}"


def average_name(parameter: str) -> str:
    """Return the name of a parameter's moving average: ``up.weight.ema``."""
    return f"{parameter}.{SUFFIXES[ValueRole.AVERAGE]}"


def before_name(parameter: str) -> str:
    """Return the name of what a step leaves of a parameter's update for the next one: ``up.weight.before``."""
    return f"{parameter}.{SUFFIXES[ValueRole.BEFORE]}"


def state_name(parameter: str, state: str) -> str:
    """Return the name of one of the optimizer's states of a parameter: ``up.weight.exp_avg``."""
    return f"{parameter}.{state}"


def steps_name(number: int) -> str:
    """Return the name of a counter of optimizer steps: ``.step.0``."""
    return f".step.{number}"


def count_name(number: int) -> str:
    """Return the name of a mean count, which the loss of each micro-batch is divided by: ``.count.0``."""
    return f".count.{number}"


def stacked_name(number: int) -> str:
    """Return the name of an output of all micro-batches, stacked: ``.outputs.0``."""
    return f".outputs.{number}"


def total_name(number: int) -> str:
    """Return the name of a sum over all micro-batches that counts are made of: ``.total.0``."""
    return f".total.{number}"


def received_name(value: str) -> str:
    """Return the name of a value that another stage of a pipeline sends: ``.received.mm_1``."""
    return f".received.{value}"


def scheduled_name(option: str, group: int) -> str:
    """Return the name of a number that schedulers change in a parameter group, as the learning rate: ``.lr.0``."""
    return f".{option}.{group}"


def batch_input_name(input: str, microbatch: int) -> str:
    """Return the name of an input of one micro-batch in the program of all of them: ``labels.0``."""
    return f"{input}.{microbatch}"


def input_of_batch(name: str) -> str:
    """Return the input of a micro-batch from its name in the program of all micro-batches.

    It is ``labels`` for ``labels.0``.
    """
    return name.rpartition(".")[0]


def belongs_to_step(name: str) -> bool:
    """Return whether a value belongs to the step as a whole: then its name begins with a dot.

    No name of the model begins with a dot.
    """
    return name.startswith(".")


def gradient_parameter(name: str) -> str | None:
    """Return the parameter whose gradients a value of this name would add up.

    ``None`` where the name does not end in ``.grad``. A parameter or buffer of the model may be called ``grad``, too:
    ``role_and_parameter`` tells them apart.
    """
    parameter, _, suffix = name.rpartition(".")
    return parameter if parameter and _OF_SUFFIX.get(suffix) is ValueRole.GRADIENT else None


def role_and_parameter(name: str, names: Collection[str]) -> tuple[ValueRole, str] | None:
    """Return the role of a value of a step, and its parameter; ``None`` for values of the model.

    The parameter is ``""`` for a value of the step as a whole.

    Args:
        name: the name of a placeholder, as the user sees it.
        names: those of the parameters, buffers and states that the program takes. They tell the gradients of the
            parameter ``up``, which are called ``up.grad``, from the parameter ``grad`` of a module ``up``.
    """
    if belongs_to_step(name):
        return _OF_STEP.get(name) or _NUMBERED.get(name.rpartition(".")[0], ValueRole.SCHEDULED), ""
    parameter, _, suffix = name.rpartition(".")
    return (_OF_SUFFIX.get(suffix, ValueRole.STATE), parameter) if parameter in names else None


def roles_in(program: Program) -> dict[str, tuple[ValueRole, str]]:
    """Return the values of a step that a program takes: name → role and parameter.

    They are as by ``role_and_parameter``. Linear in the placeholders.
    """
    taken = {name_of(node): record_of(node).role for node in program.placeholders}
    names = {name for name, role in taken.items() if role in ("param", "buffer", "state")}
    values = {name: role_and_parameter(name, names) for name in taken if name in names or belongs_to_step(name)}
    return {name: value for name, value in values.items() if value is not None}


def sums_in(program: Program) -> frozenset[str]:
    """Return the names of the values that a program adds to: the sums of gradients and of losses."""
    return frozenset(
        name for name, (role, _) in roles_in(program).items() if role in (ValueRole.GRADIENT, ValueRole.LOSS)
    )


def next_values(program: Program) -> dict[str, fx.Node]:
    """Return the next value of each state of a program, by placeholder."""
    rows = zip(operands(program.output), record_of(program.output).results, strict=True)
    return {result.of: value for value, result in rows if result.kind == "state"}


def next_values_by_name(program: Program) -> dict[str, fx.Node]:
    """Return the next value of each state of a program, by the user's names."""
    names = {node.name: name_of(node) for node in program.placeholders}
    return {names[state]: value for state, value in next_values(program).items()}


def started_states(program: Program) -> dict[fx.Node, fx.Node]:
    """Map each state that the run before has started to its next value: the start of the same collective."""
    homes = {node.name: node for node in program.placeholders if record_of(node).started}
    nexts = next_values(program) if homes else {}
    return {homes[name]: value for name, value in nexts.items() if name in homes}
