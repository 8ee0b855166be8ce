"""What trackers of other projects are given in tests: nothing outside of this machine; and how they are read back."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.coordinator import environment

NOWHERE = "http://127.0.0.1:9"
"""A proxy that is not there: whatever would leave this machine fails."""

_READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
[experiment] = client.search_experiments(filter_string=f"name = '{sys.argv[1]}'")
runs = client.search_runs([experiment.experiment_id])
print(json.dumps({run.info.run_name: {
    "status": run.info.status,
    "metrics": {key: [[one.step, one.value] for one in client.get_metric_history(run.info.run_id, key)]
                for key in run.data.metrics},
} for run in runs}))
"""


def settings(folder: Path, **extra: str) -> dict[str, str]:
    """Environment of a process with trackers: all that they keep is below `folder`, and they send nothing anywhere."""
    return {
        "HOME": str(folder),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        **{name: NOWHERE for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")},
        **{name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")},
        **extra,
    }


def told(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one line of metrics.jsonl, under the names that trackers are told."""
    if event["kind"] == "train":
        names = ("loss", "accuracy", "learning_rate", "gradient_norm", "samples_per_s")
        values = {name: event[name] for name in names} | {f"{name}_s": value for name, value in event["times"].items()}
    else:
        values = {"loss": event["loss"], "accuracy": event["accuracy"]}
    prefix = "train" if event["kind"] == "train" else "evaluation"
    return {f"{prefix}/{name}": value for name, value in {**values, **event["derived"]}.items() if value is not None}


def read_wandb(folder: Path) -> list[dict[str, Any]]:
    """The records of each run below a folder, by W&B's own reader, as {"run": ..., "history": [...], "exit": ...}."""
    runs = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        lines = _output(["-m", "wandb", "leet", "inspect", "--json", str(file)], settings(folder)).splitlines()
        records = [json.loads(line) for line in lines]
        found = {record["type"]: record[record["type"]] for record in records if record["type"] in ("run", "exit")}
        found["history"] = [record["history"]["item"] for record in records if record["type"] == "history"]
        runs.append(found)
    return runs


def read_mlflow(folder: Path, experiment: str) -> dict[str, Any]:
    """Status and metrics of each run of an experiment, by MLflow's own client."""
    found: dict[str, Any] = json.loads(_output(["-c", _READ_MLFLOW, experiment], settings(folder)).splitlines()[-1])
    return found


def python(program: str, folder: Path, *arguments: str, **extra: str) -> str:
    """Runs a program with trackers' settings; returns what it printed."""
    return _output(["-c", program, *arguments], settings(folder, **extra))


def _output(command: Sequence[str], extra: Mapping[str, str]) -> str:
    finished = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, env=environment(**extra), check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout
