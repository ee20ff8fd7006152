"""Load and save the state of parameters on stages, in all the ways that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from calls_of_stages import MESHES, PLAN, Net, values_here
from checkpoints import same as same_state
from loops import whole as whole_value
from stage_training import DECAY, OPTIMIZERS, ByHand, alone, groups, same
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import autopar
from autopar import Mesh, checkpoint
from autopar.runtime.dtensors import is_dtensor

State = dict[str, Any]


def everything(value: Any) -> Any:
    """The full values of a state, each from a rank that has them."""
    if isinstance(value, dict):
        return {key: everything(one) for key, one in value.items()}
    if isinstance(value, list):
        return [everything(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    if not is_dtensor(value):
        return value.detach().clone()
    here = values_here(value)
    full = torch.zeros(value.shape, dtype=value.dtype) if here is None else here.clone()
    distributed.broadcast(full, int(value.device_mesh.mesh.flatten()[0]))
    return full


def in_order(state: Any) -> Any:
    return {key: in_order(state[key]) for key in sorted(state)} if isinstance(state, dict) else state


def by_hand(mesh: str, seed: int = 0) -> ByHand:
    """A training whose optimizer has a state, of a step that all parameters take part in."""
    training = ByHand(MESHES[mesh], seed=seed)
    training.step()
    training.step()
    return training


def other_start(mesh: str) -> ByHand:
    """A training of other values, into which a state is loaded."""
    training = by_hand(mesh, seed=7)
    training.step()
    return training


def batch() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(4, 6, dtype=torch.float64)


def on_one_mesh(sizes: Mapping[str, int], seed: int = 0, steps: int = 1, **options: Any) -> Any:
    """A training step on a mesh without stages."""
    torch.manual_seed(seed)
    plan = {**PLAN, "qkv.weight": ("(3 8/tp)", None)} if "tp" in sizes else "ddp"
    parallel = autopar.parallelize(Net().double(), Mesh(sizes), plan)
    step = parallel.train_step(OPTIMIZERS["AdamW"](groups(parallel)), ema=DECAY, **options)
    for _ in range(steps):
        step(batch())
    return step


ONE_MESH: dict[str, dict[str, Any]] = {"dp2 tp2": {"dp": 2, "tp": 2}, "zero dp4": {"dp": 4}}


def state_of(training: Any) -> State:
    return training.state.state_dict(training.steps) if isinstance(training, ByHand) else training.state_dict()


def load_into(training: Any, state: State) -> None:
    if isinstance(training, ByHand):
        training.steps = training.state.load(state)
        training.trained(training.steps)
    else:
        training.load_state_dict(state)


def close(*trainings: Any) -> None:
    for training in trainings:
        training.parallel.close()


def start(name: str, seed: int = 0) -> Any:
    if name in MESHES:
        return by_hand(name) if seed == 0 else other_start(name)
    zero = 3 if name.startswith("zero") else 0
    return on_one_mesh(ONE_MESH[name], seed, steps=2 if seed == 0 else 1, zero=zero)


# -- on ranks -----------------------------------------------------------------------------------------------------


def through_checkpoints(folder: str, names: list[str]) -> None:
    """The state of the first goes through checkpoints from mesh to mesh, and stays the same to the bit."""
    first = start(names[0])
    wanted = everything(state_of(first))
    checkpoint.save(folder, state_of(first))
    for name in names[1:]:
        other = start(name, seed=7)
        load_into(other, checkpoint.load(folder, state_of(other)))
        same_state(in_order(everything(state_of(other))), in_order(wanted))
        checkpoint.async_save(folder, state_of(other)).result()
        close(other)
    close(first)


def through_torchs_checkpoints(folder: str, names: list[str]) -> None:
    """Torch's checkpoints have merged dims in a public layout."""
    first = start(names[0])
    wanted = everything(state_of(first))

    def parts(training: Any) -> State:
        state = state_of(training)
        return {key: state[key] for key in ("model", "optimizer", "ema")}

    dcp.save(parts(first), checkpoint_id=f"{folder}/0")
    for k, name in enumerate(names[1:], 1):
        other = start(name, seed=7)
        state = state_of(other)
        loaded = {key: state[key] for key in ("model", "optimizer", "ema")}
        dcp.load(loaded, checkpoint_id=f"{folder}/{k - 1}")
        load_into(other, {**state, **loaded, "step": wanted["step"], "rng": wanted["rng"]})
        same_state(in_order(everything(state_of(other))), in_order(wanted))
        dcp.save(parts(other), checkpoint_id=f"{folder}/{k}")
        close(other)
    close(first)


def directly(names: list[str]) -> None:
    """DTensors of one mesh are loaded on another; and full tensors, of which the first rank's count."""
    first = start(names[0])
    wanted = everything(state_of(first))
    random = wanted["rng"]
    trainings = [first]
    for name in names[1:]:
        other = start(name, seed=7)
        load_into(other, {**state_of(trainings[-1]), "rng": random})
        same_state(in_order(everything(state_of(other))), in_order(wanted))
        trainings.append(other)
    for name in names:
        other = start(name, seed=7)
        factor = 1.0 + distributed.get_rank()
        scaled = {
            key: {n: value * factor if value.is_floating_point() else value for n, value in part.items()}
            for key, part in (("model", wanted["model"]), ("ema", wanted["ema"]["weights"]))
        }
        ema = {"count": wanted["ema"]["count"], "weights": scaled["ema"]}
        load_into(other, {**wanted, "model": scaled["model"], "ema": ema})
        same_state(in_order(everything(state_of(other))), in_order(wanted))
        trainings.append(other)
    close(*trainings)


def goes_on(mesh: str, other: str) -> None:
    """A training that goes on on other stages ends where one device does, which has not been interrupted."""
    first = by_hand(mesh)
    second = other_start(other)
    load_into(second, state_of(first))
    for _ in range(2):
        second.step()
    second.check(alone("AdamW", 4))
    close(first, second)


def in_place_of_its_weights(mesh: str) -> None:
    """The averages, and then the weights again; also when the averages are still where the parameters were."""
    training = by_hand(mesh)
    wanted = alone("AdamW", 2)
    before = {name: whole_value(p.detach()) for name, p in training.parallel.named_parameters()}
    for shift in (0, 1):
        training.move(shift)
        with training.averages.in_model():
            for name, p in training.parallel.named_parameters():
                same(p, wanted["ema"].get(name, wanted["model"][name]), 1e-12)
        for name, p in training.parallel.named_parameters():
            same(p, wanted["model"][name], 1e-12)
    assert before.keys() == wanted["ema"].keys() | {"frozen"}
    close(training)


def with_torchs_functions(mesh: str) -> None:
    """``optimizer.state_dict()`` and the functions of ``torch.distributed.checkpoint.state_dict``."""
    first, wanted = by_hand(mesh), alone("AdamW", 2)
    saved = first.optimizer.state_dict()
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    assert sorted(numbers) == list(range(8)) and len(saved["state"]) == 7
    second = other_start(mesh)
    second.optimizer.load_state_dict(saved)
    second.parallel.load_state_dict(first.parallel.state_dict())
    second.averages.load_state_dict(first.averages.state_dict())
    second.steps = 2
    second.trained(1)
    second.check(wanted)

    third = other_start(mesh)
    model = third.parallel.module
    set_model_state_dict(model, get_model_state_dict(first.parallel.module))
    set_optimizer_state_dict(model, third.optimizer, get_optimizer_state_dict(first.parallel.module, first.optimizer))
    third.averages.load_state_dict(first.averages.state_dict())
    third.steps = 2
    third.trained(1)
    third.check(wanted)

    whole = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(first.parallel.module, options=whole)
    states = get_optimizer_state_dict(first.parallel.module, first.optimizer, options=whole)["state"]
    rank = distributed.get_rank()
    for name, home in first.homes.items():  # on the ranks of its stage; on the others torch leaves it empty
        if rank in home.mesh:
            torch.testing.assert_close(full[name], wanted["model"][name])
            for key, value in wanted["state"].get(name, {}).items():
                torch.testing.assert_close(states[name][key], value, check_dtype=False)
    fourth = other_start(mesh)
    set_model_state_dict(fourth.parallel.module, dict(wanted["model"]), options=whole)
    for name, p in fourth.parallel.named_parameters():
        same(p, wanted["model"][name], 0)
    second.step()  # last, because torch's optimizers share the tensors that they load
    second.check(alone("AdamW", 3))
    close(first, second, third, fourth)


def reads_weights(file: str, mesh: str) -> None:
    """Safetensors, into parameters on stages."""
    training, wanted = ByHand(MESHES[mesh], seed=7), alone("AdamW", 0)
    training.parallel.load_weights(file)
    for name, p in training.parallel.named_parameters():
        same(p, wanted["model"][name], 0)
    close(training)


def told_apart(folder: str) -> str:
    """Ranks that bring one parameter on different stages are refused."""
    training = by_hand("pp4")
    other = by_hand("pp4")
    other.move(1)
    chosen = other if distributed.get_rank() == 2 else training
    text = ""
    try:
        checkpoint.save(folder, {"w": dict(chosen.parallel.named_parameters())["up.weight"].detach()})
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    close(training, other)
    return text


def copied(mesh: str) -> None:
    """A copy of the model has parameters of its own on the same stages."""
    import copy

    training, wanted = by_hand(mesh), alone("AdamW", 2)
    new = copy.deepcopy(training.parallel)
    with torch.no_grad():
        training.parallel.up.weight.zero_()
    for name, p in new.named_parameters():
        same(p, wanted["model"][name], 1e-12)
        assert p.device_mesh is dict(training.parallel.named_parameters())[name].device_mesh  # with its process groups
    new.close()
    close(training)
