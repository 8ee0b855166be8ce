"""The manifests of docs/launch, against the schemas of Kubernetes and JobSet. No cluster is started here."""

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from ayni.settings import leaves
from coordinator_service.config import RunFile
from worker_agent.config import WorkerConfig

FOLDER = Path(__file__).parents[2] / "docs" / "launch"
VERSION = "1.33"
FLAGS = {
    "coordinator_service": {leaf.path for leaf in leaves(RunFile)} | {"config"},
    "worker_agent": {leaf.path for leaf in leaves(WorkerConfig)},
}


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def jobs(name: str) -> list[dict[str, Any]]:
    """Every Job of a file; those inside a JobSet as Jobs of their own."""
    found = [one for one in manifests(name) if one["kind"] == "Job"]
    for job_set in (one for one in manifests(name) if one["kind"] == "JobSet"):
        for part in job_set["spec"]["replicatedJobs"]:
            found.append(
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": part["name"]}, **part["template"]}
            )
    return found


def validate(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def without_nothing(value: Any) -> Any:
    """The value without empty entries, which typed models add."""
    if isinstance(value, dict):
        return {key: without_nothing(item) for key, item in value.items() if item is not None}
    return [without_nothing(item) for item in value] if isinstance(value, list) else value


def check_job_set(manifest: dict[str, Any]) -> None:
    """The typed model drops what it does not know, so what comes back must be what went in."""
    model = JobsetV1alpha2JobSet.from_dict(copy.deepcopy(manifest))
    assert model is not None
    assert without_nothing(model.to_dict()) == manifest
    named = {part["name"] for part in manifest["spec"]["replicatedJobs"]}
    assert manifest["spec"]["coordinator"]["replicatedJob"] in named
    assert set(manifest["spec"]["successPolicy"]["targetReplicatedJobs"]) <= named


def test_the_indexed_job_is_valid() -> None:
    kinds = [manifest["kind"] for manifest in manifests("indexed-job.yaml")]
    assert kinds == ["Service", "PersistentVolumeClaim", "Job", "Job"]
    for manifest in manifests("indexed-job.yaml"):
        validate(manifest)


def test_the_job_set_and_the_jobs_in_it_are_valid() -> None:
    [job_set] = manifests("jobset.yaml")
    check_job_set(job_set)
    assert [job["metadata"]["name"] for job in jobs("jobset.yaml")] == ["coordinator", "agent"]
    for job in jobs("jobset.yaml"):
        validate(job)


@pytest.mark.parametrize("name", ["indexed-job.yaml", "jobset.yaml"])
def test_flags_are_ours_and_hints_are_what_the_agent_reads(name: str) -> None:
    for job in jobs(name):
        [container] = job["spec"]["template"]["spec"]["containers"]
        known = FLAGS[container["command"][-1]]
        flags = [argument.removeprefix("--").partition("=")[0] for argument in container["args"]]
        assert set(flags) <= {path.replace(".", "-").replace("_", "-") for path in known}
        for variable in container.get("env", []):
            paths = {f"AYNI_{path.replace('.', '_').upper()}" for path in known}
            assert variable["name"] in paths | {"JOBSET_COORDINATOR", "JOBSET_RESTART_ATTEMPT"}


def test_the_checks_can_fail() -> None:
    misspelt = copy.deepcopy(jobs("indexed-job.yaml")[1])
    misspelt["spec"]["completionsMode"] = misspelt["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(misspelt)
    [job_set] = manifests("jobset.yaml")
    job_set["spec"]["sucessPolicy"] = {}
    with pytest.raises(AssertionError):
        check_job_set(job_set)
    job_set = manifests("jobset.yaml")[0]
    job_set["spec"]["replicatedJobs"][0]["replicas"] = "one"
    with pytest.raises(ValueError, match="replicas"):
        check_job_set(job_set)
