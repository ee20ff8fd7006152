"""Check the arguments of ``parallelize``, and put the model on the mesh."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import autopar.runtime.discovery  # noqa: F401  # it registers itself with the rules
from autopar.cache.cache import Cache, on_all_ranks
from autopar.cache.folder import folder_of
from autopar.capture.exported import exported_module, is_exported
from autopar.capture.guards import FIRST_VALUES, FirstValues
from autopar.costs.machine import Machine, machine_from, machine_of
from autopar.costs.on_hosts import on_hosts
from autopar.errors import PlanError, class_of, shown
from autopar.ir.dense import require_dense
from autopar.ir.dtensor import is_device_mesh, mesh_of
from autopar.ir.mesh import PIPELINE, Mesh, mesh_of_stage
from autopar.ir.ops.seeded_random import RANDOM, Random
from autopar.model.captures import Dynamic
from autopar.model.choose_mesh import MeshChoice
from autopar.model.compared import compare_scaled_copy, layouts_in
from autopar.model.given_plan import GivenPlan, about_machine, given_plan, without_pipeline
from autopar.model.inputs import INPUTS, Inputs
from autopar.parallel import OUTPUTS, Outputs, Parallel
from autopar.plan.constraints import layouts_of
from autopar.plan.plan import SEARCH, searches
from autopar.report.passes import PassReport
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.lowering.regions import check_compiler
from autopar.runtime.processes.agreement import Agreement
from autopar.runtime.processes.job import job_of
from autopar.runtime.processes.watch.traces import refused_once
from autopar.scheduling.programs.overlap import Given, overlap_of
from autopar.search.devices.meshes import Devices, meshes
from autopar.search.search import check_memory, check_time_limit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@refused_once()
def parallelize(
    model: torch.nn.Module | torch.export.ExportedProgram,
    mesh: Mesh | DeviceMesh | Devices,
    plan: GivenPlan | None = None,
    *,
    example: Any = None,
    inputs: Inputs = "global",
    outputs: Outputs = "sharded",
    recapture: bool = True,
    dynamic: Dynamic = None,
    random: Random = "parallel",
    first_values: FirstValues = "refuse",
    strict: bool = False,
    timeout: float = 60.0,
    machine: Machine | str | Path | None = None,
    time_limit: float = 60.0,
    memory: float | None = None,
    overlap: Given = "longest-tail",
    compile: bool = False,
    verify: bool = False,
    cache: str | Path | bool | None = None,
) -> Parallel:
    """Put ``model`` on ``mesh``: capture it once, give every value a layout, and insert the transfers.

    The capture has the forward and the backward.

    Args:
        model: any ``torch.nn.Module`` on one device; it does not change. Or what ``torch.export.export`` has made of
            one, or ``torch.export.load``: it takes the sizes that the export admits, in the mode of the export.
        mesh: ``autopar.Mesh(dp=2, tp=2)``, or a ``DeviceMesh`` whose dims have names; or ``autopar.devices(64)``: of
            all meshes of so many ranks with up to three axes, the one with the cheapest plan for the ``example``.
        plan: ``"search"``, the default where there is an ``example``: the cheapest layouts of all values on the
            ``machine``, with a certificate in ``parallel.solution``. Or a dict: a glob over names of parameters and
            inputs → an axis (or a tuple of axes, or ``None``) for each dim, or DTensor's placements; ``"*.module()"``
            is for what a module returns. Or the name of a preset (``"ddp"``, ``"fsdp"``, ``"hsdp"``,
            ``"megatron"``, ``"megatron+sp"``, ``"fsdp+tp"``), or a list of such plans, of which later ones override
            earlier ones. Beside ``"search"`` in a list they are constraints, and all else is searched; else tensors
            that the plan does not name are replicated, and, if it names no input, the batch, dim 0 of the inputs, is
            split over the first axis that is not ``tp``, ``cp``, ``ep`` or ``pp``, and over ``ep``; the sequence, dim
            1, over ``cp``.
            Without a plan and an example, an axis ``tp`` uses the preset ``megatron`` for the names that the model has.
            Or a plan that was searched before, as ``parallel.solution``, or the path of the file in which
            ``solution.save`` has written it. In a list, entries after it are constraints: where they want other
            layouts, parameters that they do not name keep those of the plan, and all else is searched. In a list, or
            alone, a pipeline that ``autopar.search.devices.stages.best_pipeline`` has chosen: ``train_step`` takes its
            schedule, its cut and its number of micro-batches, unless it is given others.
        example: the arguments of one call: a tuple, a dict of keywords, or both as a pair. With it, the call is
            captured now, and ``parallel.program`` can be printed; without it, the first call captures.
        inputs: what each process passes. ``"global"``: the same batch, of which it keeps its piece. ``"local"``: a
            piece of its own, as from a ``DistributedSampler``. DTensors may be passed in both.
        outputs: ``"sharded"``: tensors come back as DTensors, numbers as plain tensors. ``"global"``: all come back as
            plain tensors, replicated on every rank.
        recapture: whether a call with other shapes or dtypes than before is captured; else it is refused.
        dynamic: whether sizes are symbols, so that one capture serves many of them. ``True``: from the first call on.
            ``None``: the second size is captured with symbols, which takes longer than with numbers. ``False``: each
            size is captured by itself.
        random: how dropout and other random ops draw. ``"parallel"``: ranks with different pieces draw different
            numbers, and ranks with the same piece draw the same; ``torch.manual_seed`` before a call repeats them on
            this mesh. ``"single"``: the numbers that a single device draws; each rank draws all of them, so it is for
            comparisons.
        first_values: what forward draws in Python (``random``, NumPy, a generator of its own), takes from an iterator,
            reads from a clock, or changes and reads, has another value in each call of the model, and a captured step
            has one. ``"refuse"``: such a call is refused. ``"keep"``: the step keeps the value of the capture, and the
            report says so. All ranks must have the same value there: the call is refused where they do not.
        strict: whether ops without a sharding rule are refused. Else autopar looks for a rule by running the op on
            small pieces. If it finds none, each rank computes the whole op, and the report says so.
        machine: the machine whose seconds decide: its name, as ``torch.cuda.get_device_name`` prints it, the path of a
            machine file, or an ``autopar.costs.machine.Machine``. By default it is that of the model's device, or a
            generic one. Without it, a plan that is not searched is filled in by bytes. A plan that was searched before
            brings its machine; on another one it is priced anew, and nothing is proven.
        time_limit: seconds, after which a search ends with the best plan so far, and says so.
        memory: the most bytes that a rank may use in a searched plan, such as ``80e9``; by default the capacity of the
            machine, if it is known. ``math.inf`` sets no limit. A plan that is given or not searched has none.
        overlap: what decides the order of communication: the name of a policy (``autopar.scheduling.POLICIES``), an
            ``autopar.scheduling.ByteScheduler``, or priorities, a dict of globs over names of values and integers,
            of which smaller ones go first; values without one have 0. ``"today"``: as DistributedDataParallel and FSDP
            do.
        compile: whether Inductor compiles what each rank computes between collectives, in calls and steps; equal blocks
            once. The order of collectives stays as it is. Simulated ranks run uncompiled.
        verify: whether to run a scaled-down copy, too: two ranks along each axis, or three where pieces are uneven, all
            simulated in this process, in float64. Outputs and gradients must be those of a single device; with ``pp``,
            they go through two stages. It needs an ``example``. ``parallel.reports["numbers"]`` says what was compared;
            a model of more than 50 million parameters is not. Of a searched plan, the copy has the layouts of
            parameters and inputs.
        cache: the folder in which captured, searched and verified programs are kept for the next start of such a
            program. By default it is ``AUTOPAR_CACHE``, or the user's cache folder; ``False`` switches it off.
        timeout: seconds without progress after which all processes end, with a message that names the rank and the op.

    On the processes of a job (``torchrun``, or an initialised process group) all ranks call ``parallelize``, and then
    call the result. Its parameters are DTensors with the values of the first rank's model. In a process that is alone,
    ``simulate`` runs all ranks on the model's own parameters; a model on a mesh of one rank can be called there, too.

    Raises:
        MemoryLimitError: no plan was found that fits into ``memory``; the error says how much is missing.
        VerifyError: ``verify=True``, and a number differs from that of a single device; the error names the first one.
        PlanError, CaptureError, RuleError: each names the line or the name at fault, and the remedy; nothing has been
            changed.
        CompileError: ``compile=True``, and there is no C++ compiler.
        FileNotFoundError: there is no file of the plan or of the machine.
        ValueError: the mesh does not have as many ranks as the job has processes.
    """
    if isinstance(model, torch.export.ExportedProgram):
        model = exported_module(model)
    _check_model(model)
    _check_choice("inputs", inputs, INPUTS)
    _check_choice("outputs", outputs, OUTPUTS)
    _check_choice("random", random, RANDOM)
    _check_choice("first_values", first_values, FIRST_VALUES)
    _check_switch("recapture", recapture)
    if dynamic is not None:
        _check_switch("dynamic", dynamic)
    _check_switch("strict", strict)
    _check_switch("compile", compile)
    _check_switch("verify", verify)
    if verify and example is None:
        raise ValueError("verify=True compares a call with a single device; give its arguments as example=(x,)")
    device_mesh = mesh if is_device_mesh(mesh) else None
    if compile:
        check_compiler(_device(model, device_mesh))
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ValueError(
            f"timeout={shown(timeout)} is not a number of seconds above 0, after which processes without progress end"
        )
    check_time_limit(time_limit)
    check_memory(memory)
    overlap_of(overlap, "direct")  # refused before anything is sent
    if isinstance(mesh, Devices):
        return _on_best_mesh(
            model, mesh, plan, example, inputs, strict=strict, machine=machine, time_limit=time_limit, memory=memory,
            timeout=timeout, outputs=outputs, recapture=recapture, dynamic=dynamic, random=random, overlap=overlap,
            compile=compile, verify=verify, cache=cache, first_values=first_values,
        )  # fmt: skip
    if device_mesh is not None:
        mesh = mesh_of(device_mesh)
    if not isinstance(mesh, Mesh):
        raise TypeError(f"parallelize takes an autopar.Mesh, as in autopar.Mesh(dp=2, tp=2), not {type(mesh).__name__}")
    if mesh.name is not None:
        raise ValueError(f"parallelize takes the whole mesh; this one is the stage {mesh.name!r}")
    stage = mesh_of_stage(mesh, 0) if mesh.sizes.get(PIPELINE, 1) > 1 else mesh  # plans are of one stage
    plan, pipelined = without_pipeline(plan, mesh)
    layers, given = given_plan(plan, stage)
    on = machine_from(machine) if machine is not None else None if given is None else given.machine
    if layers is None and example is not None:
        layers = SEARCH
    with _of_one_stage(mesh, stage):
        layouts_of(layers, model, stage)  # refused before anything is sent
    folder = folder_of(cache)
    job = job_of(mesh, _device(model, device_mesh), device_mesh, timeout)
    parallel = Parallel(
        model, mesh, layers, job=job, strict=strict, inputs=inputs, outputs=outputs, recapture=recapture,
        random=random, machine=on, time_limit=time_limit, memory=memory, given=given, overlap=overlap, dynamic=dynamic,
        pipelined=pipelined, compile=compile, first_values=first_values,
        cache=None if folder is None else Cache(folder),
    )  # fmt: skip
    if given is not None:
        parallel.compiler.planner.notes.extend(about_machine(given, None if machine is None else on))
    if example is not None:
        args, kwargs = split_example(example)
        parallel.capture(*args, **kwargs)
        if verify:
            _verify_numbers(parallel, model, layers, given, args, kwargs, strict=strict, inputs_of=inputs, machine=on,
                            first_values=first_values)  # fmt: skip
    return parallel


def _verify_numbers(
    parallel: Parallel, model: torch.nn.Module, plan: Any, given: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    *, strict: bool, inputs_of: Inputs, machine: Machine | None, first_values: FirstValues,
) -> None:  # fmt: skip
    """Compare a scaled-down copy with a single device, and report what was compared.

    Raises:
        VerifyError: a number differs.
    """
    begun = time.perf_counter()
    staged = parallel.mesh.sizes.get(PIPELINE, 1) > 1
    if staged and (given is not None or searches(plan)):
        said = "numbers were not compared with a single device: train_step searches the layouts of each stage"
    elif inputs_of == "local":
        said = 'numbers were not compared with a single device: with inputs="local" the example is a piece of a batch'
    elif is_exported(model):
        said = "numbers were not compared with a single device: an exported program keeps its dtypes and its mode"
    else:
        layouts = layouts_in(parallel.program) if given is not None or searches(plan) else plan

        def parallelized(model: torch.nn.Module, mesh: Mesh, example: Any) -> Parallel:
            made = Parallel(
                model, mesh, layouts, strict=strict, machine=machine, dynamic=False, first_values=first_values
            )
            made.capture(*example[0], **example[1])
            if mesh.sizes.get(PIPELINE, 1) > 1:
                from autopar.step.pipelined.calls.first_cut import first_cut

                inputs = made._calls.inputs(made._calls.bound(*example))
                made._calls.captures.move_to_stages(first_cut(made._calls, inputs))
            return made

        said = compare_scaled_copy(model, args, kwargs, parallel.mesh, parallel.program, parallelized)
    parallel._calls.captures.notes.append(PassReport("numbers", (time.perf_counter() - begun) * 1e3, notes=(said,)))


def devices(count: int, machine: Machine | str | Path | None = None) -> Devices:
    """Return so many devices whose mesh ``parallelize(model, autopar.devices(64), example=…)`` chooses.

    Args:
        count: the number of ranks.
        machine: as for ``parallelize``.

    Raises:
        ValueError: ``count`` is no number of ranks, or there is no such machine.
    """
    next(iter(meshes(count)))
    return Devices(count, None if machine is None else machine_from(machine))


def _on_best_mesh(
    model: torch.nn.Module, devices: Devices, plan: GivenPlan | None, example: Any, inputs: Inputs, *,
    strict: bool, machine: Machine | str | Path | None, time_limit: float, memory: float | None, timeout: float,
    outputs: Outputs, cache: str | Path | bool | None, **options: Any,
) -> Parallel:  # fmt: skip
    """``parallelize`` on the mesh whose cheapest plan is the fastest."""
    if plan not in (None, SEARCH):
        raise ValueError(
            f"autopar.devices({devices.count}) chooses the axes of the mesh together with the plan, so a plan that "
            f"names axes needs a Mesh; leave plan out, or give a mesh, as in Mesh(dp={devices.count})"
        )
    if example is None:
        raise ValueError(
            f"autopar.devices({devices.count}) chooses the mesh for a call; give its arguments as example=(x,)"
        )
    if inputs != "global":
        raise ValueError(
            'autopar.devices() chooses the layouts of inputs, so all ranks bring the batch: inputs="global"'
        )
    device = _device(model, None)
    on = machine_from(machine) if machine is not None else devices.machine or machine_of(device)
    args, kwargs = split_example(example)
    row = Mesh(a=devices.count)
    job = job_of(row, device, None, timeout)
    on = on_hosts(on, None if job is None else job.hosts)
    agreement = None if job is None or devices.count == 1 else Agreement(job.control, row)
    folder = folder_of(cache)
    choice = MeshChoice(
        devices, model, args, kwargs, on, outputs == "global", strict, time_limit, memory,
        options["first_values"] == "keep",
    )  # fmt: skip
    usable, _ = on_all_ranks(None if folder is None else Cache(folder), agreement)
    (solution, note, _), report = choice.best(agreement, usable)
    parallel = parallelize(
        model, solution.mesh, solution, outputs=outputs, strict=strict, timeout=timeout, machine=on,
        time_limit=time_limit, memory=memory, cache=cache, **options,
    )  # fmt: skip
    parallel.compiler.planner.notes.append(note)
    if report is not None:
        parallel._calls.captures.notes.append(report)
    parallel.capture(*args, **kwargs)
    return parallel


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{option}={shown(value)} is none of {', '.join(map(repr, choices))}")


def _check_switch(option: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{option}={shown(value)} is neither True nor False")


def _device(model: torch.nn.Module, device_mesh: DeviceMesh | None) -> torch.device:
    """Return the type of device of the pieces: that of the device mesh, else of the model, else the accelerator."""
    if device_mesh is not None:
        return torch.device(device_mesh.device_type)
    device = next((t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta), None)
    return device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"parallelize takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, Parallel):
        raise TypeError(
            "parallelize takes the model itself, and this one is on a mesh already; pass the model that was given to "
            "parallelize"
        )
    _check_wrappers(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"parallelize takes an eager model, {f'and its module {name} is' if name else 'not'} one of torch.jit; "
                f"pass the module that was scripted or traced"
            )
    if hasattr(model, "_orig_mod"):
        raise TypeError("parallelize takes the model before torch.compile; pass model._orig_mod")
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise TypeError(
                f"the parameter {name} is a DTensor already, as after fully_shard or parallelize_module; parallelize "
                f"takes the model before that, and splits it itself"
            )
        if isinstance(parameter, torch.nn.UninitializedParameter):
            raise TypeError(f"the parameter {name} has no shape yet; run the model once before parallelize")
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        require_dense((f"the {kind} {name}", tensor) for name, tensor in named)


DATA_PARALLEL = {  # class → the remedy
    "DataParallel": "pass the module that it wraps, {path}.module",
    "DistributedDataParallel": "pass the module that it wraps, {path}.module",
    "FullyShardedDataParallel": "it has flattened its parameters; pass the model from before it was wrapped",
}


def _check_wrappers(model: torch.nn.Module) -> None:
    """Refuse wrappers that communicate on their own."""
    for name, module in model.named_modules():
        kind = next(
            (
                base.__name__
                for base in type(module).__mro__
                if base.__name__ in DATA_PARALLEL and base.__module__.startswith("torch.")
            ),
            None,
        )
        if kind is not None:
            path = f"model.{name}".rstrip(".")
            raise TypeError(
                f"parallelize takes the model itself, not {kind}"
                + f" ({path})" * bool(name)
                + f"; {DATA_PARALLEL[kind].format(path=path)}"
            )


def split_example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        if len(example) == 2 and isinstance(example[0], (tuple, list)) and isinstance(example[1], Mapping):
            return tuple(example[0]), dict(example[1])
        return tuple(example), {}
    raise TypeError(
        f"example is the arguments of one call: a tuple (x,), a dict of keywords, or both ((x,), {{'labels': y}}), "
        f"not {class_of(example)}"
    )


@contextlib.contextmanager
def _of_one_stage(mesh: Mesh, own: Mesh) -> Iterator[None]:
    """Say in errors of the plan on which mesh it is, where that is the mesh of one stage."""
    try:
        yield
    except PlanError as error:
        if own is mesh or f"the mesh ({own})" not in str(error):
            raise
        raise PlanError(
            f"{error}\n  a plan is for the mesh of one stage, which is ({mesh}) without pp; keep pp beside the axes "
            f"that you name"
        ) from None
