"""What each executor of NeMo-Run would submit carries the plan's variables: its own code builds the request.

Nothing is submitted. Kubernetes' and SkyPilot's clients stand in where they are not installed.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import nemo_run as run
import pytest
from nemo_run_launches import PLAN_ENV, RECIPE, folder_of, home, recipe, script, slurm

from overlapkit.errors import RecipeError
from overlapkit.integrations.nemo_run import OverlapPlugin

__all__ = ["home"]  # the fixture

pytestmark = pytest.mark.usefixtures("home")
ENV = {**PLAN_ENV, "NCCL_DEBUG": "INFO"}
WITH_ENV = {**RECIPE, "env_vars": {"NCCL_DEBUG": "INFO"}}


def requested(executor: Any, task: Any = None, *, dryrun: bool = True, **fields: Any) -> tuple[Any, Any, Any]:
    """The experiment, the job's executor, and the request that NeMo-Run's scheduler would submit."""
    plugin = OverlapPlugin(**{"recipe": WITH_ENV, "script_args": None, **fields})
    with run.Experiment("requests", executor=executor) as experiment:
        experiment.add(task or script(), name="one", plugins=[plugin])
        job = experiment.jobs[0]
        if dryrun:
            experiment.dryrun(log=False, delete_exp_dir=False)
    return experiment, job.executor, job._dryrun_info.request if dryrun else None


def named(entries: Any) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in entries}


# --- Slurm ---------------------------------------------------------------------------------------


def sbatch_of(executor: Any, task: Any = None, **fields: Any) -> str:
    experiment, _, request = requested(executor, task, **fields)
    text = (folder_of(experiment) / "one_sbatch.sh").read_text("utf-8")
    assert text == request.materialize()
    return text


def test_slurm_exports_every_variable(home: Path) -> None:
    lines = sbatch_of(slurm(home)).splitlines()
    for name, value in ENV.items():
        assert f"export {name}={value}" in lines


def test_slurm_names_every_variable_to_the_container(home: Path) -> None:
    text = sbatch_of(slurm(home, container_image="nemo:26.04", container_env=["MINE"]))
    command = next(line for line in text.splitlines() if "--container-image" in line)
    words = shlex.split(command)
    assert words[words.index("--container-image") + 1] == "nemo:26.04"
    assert words[words.index("--container-env") + 1].split(",") == ["MINE", *ENV]
    for name, value in ENV.items():
        assert f"export {name}={value}" in text.splitlines()


def test_slurm_runs_vboost_before_the_job(home: Path) -> None:
    text = sbatch_of(slurm(home, nodes=2, ntasks_per_node=4), enable_vboost=True)
    vboost = text.index("bash -c  'sudo nvidia-smi boost-slider --vboost 1'")
    assert text.index("srun --ntasks=2 --output") < vboost < text.index("train.py")


@pytest.mark.parametrize("launcher", [None, "torchrun"])
def test_the_shell_of_a_slurm_job_hands_the_arguments_on_as_they_are(home: Path, launcher: str | None) -> None:
    text = sbatch_of(slurm(home, launcher=launcher), recipe=HARD, script_args="bridge")
    command = next(line for line in text.splitlines() if "train.py" in line)
    assert shlex.split(command)[-len(HARD_OVERRIDES) :] == HARD_OVERRIDES


# A list and a text that a shell would read, among Bridge's overrides.
HARD = recipe(
    model={
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp"],
        "pipeline_model_parallel_layout": "Et|tL",
        "num_layers": 2,
    }
)


def overrides_of(given: dict[str, Any]) -> list[str]:
    seen: list[Any] = []
    executor = run.LocalExecutor(ntasks_per_node=8)
    task = script()
    OverlapPlugin(recipe=given, script_args="bridge").setup(task, executor)
    seen += task.args
    return seen


HARD_OVERRIDES = overrides_of(HARD)


def test_a_local_process_gets_them_as_they_are() -> None:
    assert "++model.recompute_modules=[core_attn, mlp]" in HARD_OVERRIDES
    assert '++model.pipeline_model_parallel_layout="Et|tL"' in HARD_OVERRIDES


def test_local_torchrun_would_get_quotes_and_is_refused(home: Path) -> None:
    executor = run.LocalExecutor(ntasks_per_node=8, launcher="torchrun")
    with pytest.raises(
        RecipeError, match=r"LocalExecutor: it cannot pass .*: NeMo-Run puts quotes around it for torchrun"
    ):
        requested(executor, recipe=HARD, script_args="bridge", dryrun=False)
    requested(executor, script_args="bridge", recipe=RECIPE)


@pytest.mark.parametrize("word", ["--name=$$", "--port=$nproc_per_node_var", "--app=$app_id"])
def test_what_nemo_run_would_replace_is_refused(home: Path, word: str) -> None:
    for executor in (run.LocalExecutor(ntasks_per_node=8), slurm(home)):
        with pytest.raises(RecipeError, match=r"Executor: it cannot pass --.*: NeMo-Run would replace what begins"):
            requested(executor, script_args_converter_fn=lambda _: [word], dryrun=False)
    with pytest.raises(RecipeError, match=r"env_vars\.MINE: NeMo-Run would replace what begins with \$"):
        requested(run.LocalExecutor(ntasks_per_node=8), recipe={**RECIPE, "env_vars": {"MINE": word}}, dryrun=False)


@pytest.mark.parametrize(
    "launcher",
    [
        run.SlurmTemplate(template_inline="{{ command }}"),
        run.SlurmRay(),
        "slurm_ray",
        run.Torchrun(nsys_profile=True, nsys_gpu_metrics=True),
    ],
)
def test_a_launcher_with_quotes_of_its_own_gets_no_word_that_needs_some(home: Path, launcher: Any) -> None:
    with pytest.raises(RecipeError, match=r"SlurmExecutor: it cannot pass .*: the launcher puts quotes of its own"):
        requested(slurm(home, launcher=launcher), recipe=HARD, script_args="bridge", dryrun=False)
    requested(slurm(home, launcher=launcher), recipe=RECIPE, script_args="bridge", dryrun=False)


def test_the_shell_of_a_direct_run_gets_quotes(home: Path) -> None:
    """NeMo-Run joins the words of a direct run for a shell, and starts a local job without one."""
    hostile = recipe(checkpoint={"save": f"/x/$(touch {home}/pwned)"})
    program = home / "program.py"
    program.write_text("import sys, pathlib; pathlib.Path(sys.argv[0] + '.args').write_text('\\n'.join(sys.argv[1:]))")
    plugin = OverlapPlugin(recipe=hostile, script_args="bridge")
    with run.Experiment("direct", executor=run.LocalExecutor(ntasks_per_node=8)) as experiment:
        experiment.add(script(path=str(program), entrypoint=sys.executable), name="one", plugins=[plugin])
        task = experiment.jobs[0].task
        experiment.run(direct=True)
    assert (home / "program.py.args").read_text().splitlines() == task.args
    assert f'++checkpoint.save="/x/$(touch {home}/pwned)"' in task.args
    assert not (home / "pwned").exists()


# --- Docker --------------------------------------------------------------------------------------


class Docker:
    """A client of docker-py that remembers what it is to run."""

    def __init__(self) -> None:
        self.networks = SimpleNamespace(
            list=lambda **_: [SimpleNamespace(name="nemo_run")], create=lambda *_, **__: None
        )
        self.containers = self
        self.asked: dict[str, Any] = {}

    def run(self, image: str, command: str, **fields: Any) -> None:
        self.asked = {"image": image, "command": command, **fields}


@pytest.mark.parametrize("launcher", [None, "torchrun"])
def test_docker_runs_the_container_with_the_variables_and_arguments(launcher: str | None) -> None:
    executor = run.DockerExecutor(
        container_image="nemo:26.04", ntasks_per_node=8, launcher=launcher, packager=run.Packager()
    )
    given = {**HARD, "env_vars": {"NCCL_DEBUG": "INFO"}}
    _, _, request = requested(executor, recipe=given, script_args="bridge")
    client = Docker()
    request.containers[0].run(client, "id")
    assert {name: client.asked["environment"][name] for name in ENV} == ENV
    bash, option, command = shlex.split(client.asked["command"])  # as docker-py splits it
    assert (bash, option) == ("bash", "-c")
    words = shlex.split(command.partition(" 2>&1 | tee")[0])
    assert words[-len(HARD_OVERRIDES) :] == HARD_OVERRIDES


def test_docker_with_torchrun_cannot_pass_a_single_quote() -> None:
    executor = run.DockerExecutor(container_image="nemo:26.04", ntasks_per_node=8, launcher="torchrun")
    with pytest.raises(RecipeError, match="DockerExecutor: it cannot pass --name='x'"):
        requested(executor, script_args_converter_fn=lambda _: ["--name='x'"], dryrun=False)


# --- Lepton --------------------------------------------------------------------------------------


def test_lepton_asks_for_a_job_with_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_run.core.execution import lepton

    created: list[Any] = []
    client = SimpleNamespace(job=SimpleNamespace(create=lambda job: created.append(job) or job))
    monkeypatch.setattr(lepton, "APIClient", lambda: client)
    group = SimpleNamespace(metadata=SimpleNamespace(id_="group"))
    monkeypatch.setattr(lepton.LeptonExecutor, "_node_group_id", lambda *_: group)
    monkeypatch.setattr(lepton.LeptonExecutor, "_valid_node_ids", lambda *_: {"node"})
    executor = run.LeptonExecutor(
        container_image="nemo:26.04",
        nemo_run_dir="/nemo_run",
        mounts=[{"path": "/", "mount_path": "/nemo_run", "from": "node-nfs:x"}],
        node_group="group",
        gpus_per_node=8,
        packager=run.Packager(),
    )
    _, executor, _ = requested(executor)
    executor.create_lepton_job("one")
    assert {each.name: each.value for each in created[0].spec.envs} == ENV


# --- DGX Cloud -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_dgx_cloud_posts_a_workload_with_the_variables(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    from nemo_run.core.execution import dgxcloud

    posted: list[dict[str, Any]] = []

    def post(url: str, json: dict[str, Any], **_: Any) -> Any:
        posted.append(json)
        return SimpleNamespace(text="", status_code=202)

    monkeypatch.setattr(dgxcloud.requests, "post", post)
    executor = run.DGXCloudExecutor(
        base_url="https://nowhere.invalid",
        kube_apiserver_url="https://nowhere.invalid",
        client_id="i",
        client_secret="s",
        project_name="p",
        container_image="nemo:26.04",
        pvc_nemo_run_dir="/data/nemo_run",
        nodes=nodes,
        gpus_per_node=8,
        pvcs=[{"path": "/data", "name": "d"}],
        packager=run.Packager(),
    )
    experiment, executor, _ = requested(executor)
    executor.create_training_job("token", "project", "cluster", "one")
    assert named(posted[0]["spec"]["environmentVariables"]) == ENV
    lines = (folder_of(experiment) / "torchrun_job.sh").read_text("utf-8").splitlines()
    for name, value in ENV.items():
        assert f"export {name}={value}" in lines


# --- Kubernetes ----------------------------------------------------------------------------------


@pytest.fixture
def kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package kubernetes, or where it is not installed a stand-in: building a manifest asks nothing of it."""
    try:
        import kubernetes  # noqa: F401
    except ImportError:
        for name in (
            "kubernetes",
            "kubernetes.client",
            "kubernetes.client.rest",
            "kubernetes.config",
            "kubernetes.watch",
        ):
            monkeypatch.setitem(sys.modules, name, _Anything(name))


class _Anything(ModuleType):
    """A module that has whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or type(name, (Exception,), {})


@pytest.mark.usefixtures("kubernetes")
def test_kubeflow_submits_a_train_job_with_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_run.core.execution import kubeflow

    monkeypatch.setattr(kubeflow, "_KUBERNETES_AVAILABLE", True)
    monkeypatch.setattr(kubeflow.KubeflowExecutor, "_load_kube_clients", lambda _: None)
    executor = run.KubeflowExecutor(
        image="nemo:26.04", num_nodes=1, gpus_per_node=8, workdir_pvc="claim", packager=run.Packager()
    )
    experiment, executor, request = requested(executor)
    trainer = executor.get_job_body("one", request.cmd)["spec"]["trainer"]
    assert named(trainer["env"]) == ENV
    lines = (folder_of(experiment) / "one" / "launch.sh").read_text("utf-8").splitlines()
    for name, value in ENV.items():
        assert f"export {name}={value}" in lines


@pytest.mark.usefixtures("kubernetes")
def test_kubeflow_takes_the_users_list_of_variables_last(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_run.core.execution import kubeflow

    monkeypatch.setattr(kubeflow, "_KUBERNETES_AVAILABLE", True)
    monkeypatch.setattr(kubeflow.KubeflowExecutor, "_load_kube_clients", lambda _: None)
    mine = [{"name": "CUDA_DEVICE_MAX_CONNECTIONS", "value": "8"}, {"name": "TOKEN", "valueFrom": {"secretKeyRef": {}}}]
    executor = run.KubeflowExecutor(image="nemo:26.04", gpus_per_node=8, env_list=mine, packager=run.Packager())
    _, executor, _ = requested(executor)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in executor.env_vars


@pytest.mark.usefixtures("kubernetes")
@pytest.mark.parametrize("volume", [None, "claim"])
def test_kubeflows_container_gets_the_arguments_as_they_are(
    monkeypatch: pytest.MonkeyPatch, volume: str | None
) -> None:
    from nemo_run.core.execution import kubeflow

    monkeypatch.setattr(kubeflow, "_KUBERNETES_AVAILABLE", True)
    monkeypatch.setattr(kubeflow.KubeflowExecutor, "_load_kube_clients", lambda _: None)
    executor = run.KubeflowExecutor(image="nemo:26.04", gpus_per_node=8, workdir_pvc=volume, packager=run.Packager())
    experiment, executor, request = requested(executor, recipe=HARD, script_args="bridge")
    words = executor.get_job_body("one", request.cmd)["spec"]["trainer"]["command"]
    if volume:
        lines = (folder_of(experiment) / "one" / "launch.sh").read_text("utf-8").splitlines()
        words = shlex.split(next(line for line in lines if "train.py" in line))
    assert words[-len(HARD_OVERRIDES) :] == HARD_OVERRIDES


@pytest.mark.usefixtures("kubernetes")
def test_a_ray_cluster_has_the_variables_in_every_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nemo_run.core.execution.kuberay", raising=False)
    from nemo_run.core.execution.kuberay import KubeRayExecutor, KubeRayWorkerGroup

    workers = [KubeRayWorkerGroup(group_name=name, replicas=1, gpus_per_worker=4) for name in ("first", "second")]
    executor = KubeRayExecutor(image="nemo:26.04", worker_groups=workers)
    OverlapPlugin(recipe=WITH_ENV, script_args=None).setup(script(), executor)
    spec = executor.get_cluster_body("cluster")["spec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    containers = [container for pod in pods for container in pod["template"]["spec"]["containers"]]
    assert len(containers) == 3
    for container in containers:
        assert {name: named(container["env"])[name] for name in ENV} == ENV


# --- SkyPilot ------------------------------------------------------------------------------------


class Task:
    """sky.Task, as far as NeMo-Run asks: where SkyPilot is not installed."""

    def __init__(self, *, envs: dict[str, str], run: str, **_: Any) -> None:
        self.envs, self.run = dict(envs), run

    def update_envs(self, envs: dict[str, str]) -> None:
        self.envs.update(envs)

    def set_file_mounts(self, _: Any) -> None: ...

    def set_resources(self, _: Any) -> None: ...


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import sky  # noqa: F401
    except ImportError:
        module = ModuleType("sky.task")
        module.Task = Task  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "sky", ModuleType("sky"))
        monkeypatch.setitem(sys.modules, "sky.task", module)


@pytest.mark.usefixtures("sky")
@pytest.mark.parametrize("name", ["skypilot.SkypilotExecutor", "skypilot_jobs.SkypilotJobsExecutor"])
def test_skypilots_task_has_the_variables(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import importlib

    module, _, kind = name.partition(".")
    found = importlib.import_module(f"nemo_run.core.execution.{module}")
    monkeypatch.setattr(found, "_SKYPILOT_AVAILABLE", True)
    cls = getattr(found, kind)
    if not isinstance(sys.modules["sky"].__dict__.get("__file__"), str):
        monkeypatch.setattr(cls, "to_resources", lambda _: None)
    executor = cls(container_image="nemo:26.04", num_nodes=1, gpus="H100", gpus_per_node=8)
    _, executor, _ = requested(executor, dryrun=False)
    task = executor.to_task(name="one", cmd=["python", "train.py"])
    assert task.envs == ENV
