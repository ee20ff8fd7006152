"""Hold the optimizer's state of a step on a mesh: parameters, groups, and the pieces of each state.

The state stays in ``optimizer.state`` as torch's own steps keep it: under torch's names, with DTensors on processes, so
that ``state_dict``, ``load_state_dict`` and learning-rate schedulers work as usual. Where somebody has replaced the
state, as loading does, the new one is used: full tensors are sharded, DTensors are redistributed.

The state of a parameter on a stage is on the stage's mesh. The other ranks have it under the same names, with empty
pieces, so that groups and names are complete on each rank; and they count its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from autopar.capture.model_state import Named
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.ir.value_names import scheduled_name, state_name, steps_name
from autopar.model.dtensor_parameters import holds_part_of, local_of
from autopar.model.state_dicts import give_public_optimizer_states
from autopar.optimizers import Definition, Update, definition_of
from autopar.optimizers.definition import Group
from autopar.optimizers.update import COUNTED, RATE, scalar
from autopar.runtime.processes.job import Job
from autopar.step.compiling.update import Trained
from autopar.step.states.state_places import StatePlaces
from autopar.torch_private import DisableTorchFunctionSubclass, copy_each, note_a_step, version_of


class OptimizerState:
    """The state of an optimizer over parameters of a model on a mesh.

    Attributes:
        optimizer: the user's optimizer.
        definition: how its class updates parameters.
        parameters: all parameters of the model, each by its first name.
        pieces: this process's pieces of the state, by the names of the parameter and of the state:
            ``up.weight.exp_avg``; and the counters of steps, ``.step.0``. They share the memory of the optimizer's
            state. Parameters of other stages have no pieces.
        offload: whether the state is in host memory; the counters stay on the device of the parameters.

    Args:
        agreed: is called before states are moved, which all ranks must do together. It raises if the ranks make
            different calls.

    Raises:
        TypeError: it is not an optimizer, or its class is not known.
        ValueError: one of its parameters is not the model's, or its step cannot be offloaded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Named, mesh: Mesh, job: Job | None,
                 offload: bool = False, agreed: Callable[[], None] = lambda: None) -> None:  # fmt: skip
        self.optimizer, self.job, self.offload = optimizer, job, offload
        self._agreed, self._places = agreed, StatePlaces(mesh, job, offload)
        self.definition: Definition = definition_of(optimizer)
        self.pieces: dict[str, torch.Tensor] = {}
        self.parameters = dict(parameters)
        self._names = {id(tensor): name for name, tensor in parameters}
        # the facts and objects that the pieces were taken from
        self._taken_from: tuple[object, object, object, object, list[object]] | None = None
        self._versions: list[int] = []
        self._trained: tuple[Trained, ...] = ()
        # counter → the tensors of the optimizer's state that count the same steps
        self._counted: dict[str, list[torch.Tensor]] = {}
        self._elsewhere: dict[str, int] = {}  # counter of other stages alone → its version after the last step
        self.groups()
        self._refuse_to_offload_plain_ops()
        if job is not None:
            give_public_optimizer_states(optimizer)

    def _refuse_to_offload_plain_ops(self) -> None:
        if self.offload and any(self.definition.update(group).op is None for group in self.optimizer.param_groups):
            raise ValueError(
                f"offload=True updates parameters on the host by torch's fused kernels, and there is none for the "
                f"step of {self.definition.name}, which runs where its parameters are: leave offload out"
            )

    def groups(self) -> dict[str, tuple[int, torch.nn.Parameter]]:
        """Return each parameter that requires a gradient, by name, and the number of its group."""
        parameters = {}
        with DisableTorchFunctionSubclass():  # a DTensor of another stage takes a microsecond for an attribute
            for number, group in enumerate(self.optimizer.param_groups):
                for k, parameter in enumerate(group["params"]):
                    name = self._names.get(id(parameter))
                    if name is None:
                        raise ValueError(
                            f"the optimizer has a parameter that is not the model's: number {k} of group {number}, "
                            f"of shape {list(parameter.shape)}; make it of the parameters of what parallelize returns, "
                            f"as in {type(self.optimizer).__name__}(parallel.parameters())"
                        )
                    if parameter.requires_grad:
                        parameters[name] = number, parameter
        return parameters

    def name(self, parameter: torch.Tensor) -> str:
        """Return the user's name of one of the optimizer's parameters."""
        return self._names[id(parameter)]

    def describe(self) -> str:
        """Describe the optimizer and its numbers, to compare them between ranks.

        For example ``AdamW(lr=0.001, betas=(0.9, 0.999))``.
        """
        groups = []
        for group in self.optimizer.param_groups:
            numbers = {
                key: value
                for key, value in group.items()
                if isinstance(value, (int, float, tuple)) and value is not False
            }
            groups.append(", ".join(f"{key}={value}" for key, value in numbers.items()))
        return f"{type(self.optimizer).__name__}({'; '.join(groups)}){self._describe_state()}"

    def _describe_state(self) -> str:
        """Describe how many parameters have a state, and after how many steps.

        Counts on an accelerator are left out: reading them would wait for it.
        """
        with DisableTorchFunctionSubclass():
            states = [
                state
                for group in self.optimizer.param_groups
                for p in group["params"]
                if p.requires_grad and (state := self.optimizer.state.get(p))
            ]
        counts = [state.get("step") for state in states]
        read = [n.item() for n in counts if type(n) is torch.Tensor and n.is_cpu and not n.dim()]
        steps = {*read, *(n for n in counts if isinstance(n, (int, float)))}
        after = f" after {' '.join(f'{count:.0f}' for count in sorted(steps))} steps" if steps else ""
        return f" with a state of {len(states)} parameters{after}" if states else ""

    def keeps_state(self, name: str) -> bool:
        """Return whether the optimizer keeps a state of a parameter: SGD without momentum does not."""
        number, _ = self.groups()[name]
        return bool(self.definition.update(self.optimizer.param_groups[number]).states)

    def check(self, parameter: torch.Tensor, group: Group, known: Mapping[str, object], begun: bool = False) -> None:
        """Raise ``ValueError`` if a parameter's next step cannot continue from its state.

        Args:
            group: the parameter group.
            known: the state of the parameter, by torch's names.
            begun: whether steps were taken. Then a state that is ``None`` was lost.
        """
        name, update = self.name(parameter), self.definition.update(group)
        anew = f"or leave the state of {name} out, and it begins anew"
        lost = [n for n in update.states if begun and n in known and known[n] is None]
        if missing := (*self.definition.lacking(group, known), *lost):
            present = ", ".join(repr(n) for n, value in known.items() if value is not None) or "nothing"
            raise ValueError(
                f"the state of {name} has no {missing[0]!r}, but {present}: it would begin at zero, and the others go "
                f"on; load what {self.definition.name} has saved, {anew}"
            )
        for n in update.states:
            value, shared = known.get(n), n in self.definition.shared
            if value is None or (shared and isinstance(value, (int, float))):
                continue
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"the state of {name} has {n} as {value!r:.40}, which is no tensor; load what "
                    f"{self.definition.name} has saved, {anew}"
                )
            wanted = torch.Size() if shared else parameter.shape
            # states of others may be of any shape
            if value.shape != wanted and (shared or update.op is not None or update.elementwise):
                expected = "it is one number, without dims" if shared else f"the parameter is {list(wanted)}"
                raise ValueError(
                    f"the state of {name} has {n} of shape {list(value.shape)}, and {expected}: load the state of "
                    f"this model, {anew}"
                )

    def forget(self) -> None:
        """Drop what was taken from the optimizer's state, because the state has been replaced."""
        self._taken_from = None

    def numbers(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the present values of the numbers that schedulers change, by group: ``.lr.0``, ``.beta1.0``.

        They are on ``device``, except those that kernels read on the host.
        """
        numbers: dict[str, torch.Tensor] = {}
        for k, group in enumerate(self.optimizer.param_groups):
            scheduled = {RATE: scalar(float(group["lr"]), device), **self.definition.update(group).operands(device)}
            numbers |= {scheduled_name(name, k): value for name, value in scheduled.items()}
        return numbers

    def updates(self) -> dict[str, tuple[Update, dict[str, TensorType]]]:
        """Return how each parameter is updated by one op, with the types of its states but the counted ones."""
        groups = [(group, self.definition.update(group)) for group in self.optimizer.param_groups]
        found = {}
        for name, (number, parameter) in self.groups().items():
            group, update = groups[number]
            if update.op is not None:
                state = self.definition.initial(torch.empty_like(parameter, device="meta"), group)
                types = {n: TensorType(tuple(t.shape), t.dtype) for n, t in state.items() if n not in update.counted}
                found[name] = update, types
        return found

    def trained(
        self, parameters: Mapping[str, TensorType], gradients: Mapping[str, TensorType], states: Mapping[str, DistAttr]
    ) -> tuple[Trained, ...]:
        """Return how the parameters that have a gradient are updated now. Their states get the layouts in ``states``.

        It is the same tuple object as at the last call if nothing has changed since.

        Args:
            parameters: the types of the parameters, by name; ``gradients``: the types of the sums of their gradients.
        """
        updates = [self.definition.update(group) for group in self.optimizer.param_groups]
        groups = self.groups()
        now = self._facts(parameters, groups)
        known = self._taken_from
        if (
            known is None
            or known[:4] != (parameters, gradients, states, updates)
            or list(map(id, known[4])) != list(map(id, now))
            or self._versions != self._counts()
        ):
            self._trained = self._read_states(parameters, gradients, states, updates, groups)
            self._taken_from = parameters, gradients, states, updates, self._facts(parameters, groups)
            self._versions = self._counts()
        return self._trained

    def _facts(self, parameters: Iterable[str], groups: Mapping[str, tuple[int, torch.nn.Parameter]]) -> list[object]:
        """Return the objects that the pieces were taken from."""
        return [
            part
            for name in parameters
            for part in (*groups[name], *self.optimizer.state.get(groups[name][1], {}).values())
        ]

    def _counts(self) -> list[int]:
        """Return the versions of the optimizer's own counts of steps.

        They change if somebody writes to them, as torch's own step does.
        """
        return [version_of(tensor) for tensors in self._counted.values() for tensor in tensors]

    def finish(self, found_inf: torch.Tensor | None = None) -> None:
        """Copy the counters to the optimizer's own counts of steps, after a step.

        A counter of parameters that are on other stages counts here, unless an update on this rank has counted it.

        Args:
            found_inf: 1 if the step has overflowed and changes nothing, else 0; ``None``: it cannot overflow.
        """
        for name, version in self._elsewhere.items():
            counter = self.pieces[name]
            if version_of(counter) == version:
                counter.copy_(COUNTED(counter, found_inf))
            self._elsewhere[name] = version_of(counter)
        for name, tensors in self._counted.items():
            # it waits for an accelerator once
            copy_each(tensors, [self.pieces[name].to(tensors[0].device)] * len(tensors))
        self._versions = self._counts()
        note_a_step(self.optimizer)

    def _read_states(self, parameters: Mapping[str, TensorType], gradients: Mapping[str, TensorType],
                     states: Mapping[str, DistAttr], updates: Sequence[Update],
                     groups: Mapping[str, tuple[int, torch.nn.Parameter]]) -> tuple[Trained, ...]:  # fmt: skip
        self._agreed()
        for name in parameters:
            number, parameter = groups[name]
            self.check(parameter, self.optimizer.param_groups[number], self.optimizer.state.get(parameter, {}))
        self.pieces, self._counted = {}, {}
        trained, by = [], self.optimizer.__class__.__name__
        counters: dict[float, int] = {}
        here: set[str] = set()  # the counters of parameters on this rank
        for name, type in parameters.items():
            number, parameter = groups[name]
            update, attr = updates[number], states[name]
            group = self.optimizer.param_groups[number]
            state = {  # in an order that ranks share, also where they have loaded it in another one
                n: self._tensor(n, value, parameter)
                for n, value in sorted(self.optimizer.state.get(parameter, {}).items())
                if value is not None
            }
            known: dict[str, Any] = {
                n: self._places.placed(value, parameter, attr, n in update.counted)
                if isinstance(value, torch.Tensor) else value
                for n, value in state.items()
            }  # fmt: skip
            pieces = self._begun(known, parameter, attr, group, update)
            if known:
                self.optimizer.state[parameter].update(known)
            steps = 0
            for n in update.counted:
                count = 0.0 if pieces[n].is_meta else float(pieces[n])
                steps = counters.setdefault(count, len(counters))
                counter = steps_name(steps)
                counted = pieces[n].detach().to(self._places.device(parameter), torch.float32)
                self.pieces.setdefault(counter, counted.clone())
                self._counted.setdefault(counter, []).append(known[n])
                here |= {counter} if holds_part_of(parameter) else set()
            uncounted = [n for n in pieces if n not in update.counted]
            if holds_part_of(parameter):
                self.pieces |= {state_name(name, n): pieces[n] for n in uncounted}
            types = {n: TensorType(tuple(known[n].shape), known[n].dtype) for n in uncounted}
            trained.append(Trained(name, type, gradients[name], attr, update, types, number, steps, by))
        self._elsewhere = {name: version_of(self.pieces[name]) for name in self._counted if name not in here}
        return tuple(trained)

    def _begun(self, known: dict[str, Any], parameter: torch.nn.Parameter, attr: DistAttr, group: Group,
               update: Update) -> dict[str, torch.Tensor]:  # fmt: skip
        """Return this process's pieces of all states of a parameter; new ones begin, and join ``known``."""
        pieces = {n: local_of(value) if isinstance(value, torch.Tensor) else value for n, value in known.items()}
        here = holds_part_of(parameter)
        piece = self._places.piece(parameter, attr, stands_in_on="meta" if update.op is not None else None)
        current = self.definition.initial(piece, group, pieces if here else {})
        for n, value in current.items():
            if n not in known or (here and pieces[n] is not value):
                known[n] = self._places.surface(value, parameter, attr, piece.shape, n in update.counted)
        return current if here else {n: local_of(known[n]) for n in current}

    def _tensor(self, name: str, value: object, parameter: torch.Tensor) -> object:
        """Return a state as a tensor, also if it is a plain number, as old counts of steps are."""
        if name in self.definition.shared and isinstance(value, (int, float)):
            return torch.full((), value, dtype=torch.float32, device=self._places.device(parameter))
        return value

    def placed(self, value: torch.Tensor, parameter: torch.nn.Parameter, attr: DistAttr) -> torch.Tensor:
        """Return a state of a parameter, or its average, in the layout ``attr`` and where the parameter is.

        All ranks call it.
        """
        return self._places.placed(value, parameter, attr)
