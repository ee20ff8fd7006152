"""Stand in for a model as a torch module, with the names, attributes, flags, values and state dicts of the model."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from autopar.capture.model_state import model_state
from autopar.ir.mesh import Mesh
from autopar.model.calls import Calls
from autopar.model.initialize import Init, initialize
from autopar.model.inputs import Inputs
from autopar.model.pretrained_model import PretrainedModel
from autopar.model.state_dicts import fitted_to, full_state_dict, of_pieces, refuse_full_state_dicts
from autopar.model.weights import load_weights, save_pretrained
from autopar.model.wrappers import refuse_composable, refuse_ddp
from autopar.runtime.processes.job import Job

# a module keeps its children and tensors in these
ROOT = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class ModelProxy(PretrainedModel):
    """A module in front of a model whose parameters are on a mesh.

    It has the children, attributes and names of the model: ``named_parameters``, ``state_dict``, ``train``,
    ``requires_grad_`` and the like are the model's, and ``proxy.beta = 2.0`` sets the attribute that the model's
    forward reads.

    Attributes:
        module: the model; on processes, the copy of it whose parameters are DTensors.
        mesh: the mesh.
        job: the processes of the mesh; ``None`` in a process that is alone.
    """

    OWN = frozenset({"module", "mesh", "job"})
    module: torch.nn.Module
    mesh: Mesh
    job: Job | None
    _calls: Calls

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._stand_for(calls)

    def _stand_for(self, calls: Calls) -> None:
        """Become the proxy of the model of these calls.

        The model is not a child, because that would change the names of all tensors.
        """
        module = calls.module
        self.__dict__ |= {
            "_calls": calls,
            "mesh": calls.mesh,
            "job": calls.job,
            "module": module,
            **{key: vars(module)[key] for key in ROOT},
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the model and its proxy, as averages of weights need it. All ranks make the copy."""
        self._calls.complete()
        new = copy.copy(self)
        memo[id(self)] = new
        if self.job is not None:
            for device_mesh in (self.job.device_mesh, *self.job.stages.values()):
                memo[id(device_mesh)] = device_mesh  # DTensors would copy it, with its process groups
        new._stand_for(self._calls.of_copy(copy.deepcopy(self.module, memo)))
        return new

    def __copy__(self) -> Any:
        new = type(self).__new__(type(self))
        new.__dict__ |= vars(self)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a model on a mesh is sharded over its processes and cannot be pickled; save its state_dict()")

    def __getattr__(self, name: str) -> Any:
        refuse_ddp(name)
        if name in self.__dict__.get("_parameters", ()):
            self._calls.ranks.refuse_unfinished(f"the parameter {name} is read")
        return super().__getattr__(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.module).__name__} on {self.mesh})"

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the parameters of the model, by the model's names."""
        refuse_composable(self)
        refuse_full_state_dicts(self.module, self.job)
        self._calls.ranks.refuse_unfinished("parameters are read")
        return super().named_parameters(*args, **kwargs)

    @property
    def training(self) -> bool:
        """The flag ``training`` of the model."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__:  # torch.nn.Module sets it before
            self.module.training = mode

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the model, with the model's own ``train``: it may leave layers in evaluation."""
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Any:
        """Apply a function to the model and to each of its modules, as of their own classes."""
        self.module.apply(fn)
        return self

    @property
    def device(self) -> torch.device:
        """The device of this process's pieces of the parameters."""
        return self._calls.device

    def close(self) -> None:
        """Give back the process groups.

        All models on the same ranks share their process groups, and the last model closes them. All ranks call it, when
        the model's last call has returned; a second time does nothing. Afterwards calls raise ``RuntimeError``, and
        DTensors of the model can no longer be gathered: save them before. ``contextlib.closing(parallel)`` closes at
        the end of a block.

        While an exception is handled it does not wait for the other ranks. Then the groups end with the process, as
        they do without ``close``.

        Raises:
            RuntimeError: another rank makes another call. The model is not closed then.
        """
        if sys.exc_info()[0] is None:
            self._calls.complete()
        self._calls.ranks.membership.close()

    # -- values ----------------------------------------------------------------------------------------------------

    def initialize(self, init: Init | None = None, *, device: torch.device | str | None = None) -> None:
        """Give a model on meta the initial values of a single device. All ranks call it.

        They are the values after ``to_empty`` and ``init``, with the first rank's generator of random numbers. They
        replace values that the model may have already, as those of a pretrained model.
        Parameters are new objects: make the optimizer afterwards.

        Args:
            init: a function of a module, as for ``apply``; ``None``: the model's ``init_weights()``, else each module's
                ``reset_parameters()``.
            device: the device of the values; ``None``: that of the mesh.
        """
        self._calls.ranks.begin("initialize")
        initialize(self.module, init, device, self.job)

    def load_weights(self, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
        """Read safetensors: a file, or a folder of ``save_pretrained``. Each rank reads its pieces. All ranks call it.

        A model on meta gets storage, and tensors that are in no file get their own initialisation. Returns and raises
        as ``load_state_dict``.
        """
        self._calls.ranks.begin(f"load_weights(strict={strict})")
        return load_weights(self.module, path, strict, self.job)

    def save_pretrained(self, path: str | os.PathLike[str], **options: Any) -> Any:
        """Write the folder that the model's own ``save_pretrained`` writes on a single device. All ranks call it.

        For models of transformers and PEFT. The first rank gathers the weights in host memory, and writes. All ranks
        return when the folder is complete.

        Args:
            path: the folder.
            options: those of the model's ``save_pretrained``.

        Raises:
            TypeError: the model has none.
        """
        self._calls.ranks.begin()
        self._calls.captures.leave_stages()
        self._calls.agreement.all_make("save_pretrained")
        return save_pretrained(self.module, path, self.job, options)

    # -- state dicts -----------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the model. On processes it has DTensors, and all ranks call it.

        ``torch.distributed.checkpoint`` saves and loads them; ``torch.save`` warns, since one rank has only pieces.
        A parameter with a merged dim is there in a public layout, as a copy: a state dict that was loaded goes back
        with ``load_state_dict``.
        """
        self._calls.complete()
        return of_pieces(self.module.state_dict(*args, **kwargs))

    def full_state_dict(self) -> dict[str, Any]:
        """Return the model's whole tensors, in host memory, on the first rank, and ``{}`` on the others.

            state = parallel.full_state_dict()  # all ranks call it
            if rank == 0:
                torch.save(state, "model.pt")   # model.load_state_dict(torch.load("model.pt")) on one device

        Parameters on the stages of a pipeline come back to the whole mesh before.
        """
        self._calls.ranks.begin()
        self._calls.captures.leave_stages()
        self._calls.agreement.all_make("full_state_dict")
        return full_state_dict(self.module, self.job)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the model. Full tensors, as of one device, are sharded; DTensors are redistributed."""
        self._calls.ranks.begin()
        state = model_state(self.module)
        return self.module.load_state_dict(
            fitted_to(state_dict, dict([*state.all_parameters, *state.all_buffers]), self.job), *args, **kwargs
        )


class Passed(NamedTuple):
    """What each process passes to a model on a mesh.

    Attributes:
        inputs: ``"global"`` or ``"local"``.
        compare: compares a call with those of the other ranks; ``None`` without other processes.
        axes: the axes over which the plan splits the rows of all inputs; ``None`` where it may name some of them.
    """

    inputs: Inputs
    compare: Callable[[str], None] | None
    axes: tuple[str, ...] | None


def passed_by(parallel: ModelProxy) -> Passed:
    """Return what each process passes to a model on a mesh."""
    calls = parallel._calls
    ranks = calls.agreement.ranks
    return Passed(calls.binding.passed, None if ranks is None else ranks.agree, calls.binding.row_axes())
