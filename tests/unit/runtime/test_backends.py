"""Which backend a group has for a device, asked of groups as users and autopar make them; without other processes."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import distributed

from autopar.runtime.processes import job as jobs
from autopar.runtime.processes.groups import DATA, ProcessGroups
from autopar.runtime.wire.wire_groups import backend_of


@pytest.fixture
def alone(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """A job of one process, whose default group has the backend of the test's parameter."""
    distributed.init_process_group(request.param, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("alone", [None, "gloo", "cpu:gloo,cuda:gloo"], indirect=True)
def test_a_group_without_a_name_has_a_backend_for_the_cpu(alone: None) -> None:
    assert backend_of(None, "cpu") == backend_of(distributed.new_group([0]), "cpu") == "gloo"
    assert backend_of(None, "mars") == ""


def configured(monkeypatch: pytest.MonkeyPatch, config: str) -> list[str | None]:
    """Let the default group have a configuration of backends. Returns the backends of the groups that are made."""
    made: list[str | None] = []

    def new_group(ranks: list[int], backend: str | None = None, **options: object) -> SimpleNamespace:
        made.append(backend)
        return SimpleNamespace(group_name=f"group {len(made)}", config=backend or config)

    monkeypatch.setattr(distributed, "new_group", new_group)
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(distributed, "get_backend_config", lambda group=None: getattr(group, "config", config))
    return made


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        ("cpu:gloo", None),  # groups have the backends of the default group
        ("cpu:gloo,cuda:nccl", None),
        ("cuda:nccl", "cpu:gloo,cuda:nccl"),  # init_process_group("nccl"), and without a name on a GPU
        ("xpu:xccl", "cpu:gloo,xpu:xccl"),
    ],
)
def test_groups_for_data_serve_the_cpu_too(monkeypatch: pytest.MonkeyPatch, config: str, backend: str | None) -> None:
    made = configured(monkeypatch, config)
    groups, world = ProcessGroups(), SimpleNamespace(group_name="world", config=config)
    group = groups.take(DATA, [(0, 1), (2, 3)], [])
    assert made == [backend, backend] and backend_of(group, "cpu") == "gloo"
    whole = groups.whole(world, [])  # type: ignore[arg-type]
    assert (whole is world) == (backend is None) and backend_of(whole, "cpu") == "gloo"


@pytest.mark.parametrize(
    ("config", "device", "ends_in_order"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cuda:nccl", "cuda", True),
        ("cpu:gloo,cuda:gloo", "cuda", False),
        ("cpu:gloo", "cpu", False),
    ],
)
def test_a_job_asks_the_backend_of_its_device(
    monkeypatch: pytest.MonkeyPatch, config: str, device: str, ends_in_order: bool
) -> None:
    configured(monkeypatch, config)
    monkeypatch.setattr(jobs, "group_named", lambda name: SimpleNamespace(config=config))
    job = SimpleNamespace(groups={"dp": "group 1"}, device=SimpleNamespace(type=device))
    assert jobs.Job.in_order.fget(job) is ends_in_order  # type: ignore[attr-defined]


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_autopar_names_the_backends_of_the_default_group(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(distributed, "init_process_group", lambda backend, **options: asked.append(backend))
    monkeypatch.setattr(jobs.torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    jobs._initialize(jobs.torch.device(device), 10.0)
    assert asked == [backend]
