"""What is run under chaos: a run file, and the variants of it that are compared."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ayni.process import load_yaml
from ayni.settings import SettingsError
from scripts.chaos_fleet import ROOT
from scripts.chaos_schedule import Event, spoilt_samples

_SOURCES = ("proto/ayni", "coordinator_service", "worker_agent", "scripts/chaos_task.py", "scripts/chaos_model.py")
_BATCH = 24
_SEED = 11


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run file's values and what is known of them."""

    values: Mapping[str, Any]
    spoilt: tuple[Event, ...] = ()
    """Samples that the run leaves out."""

    @property
    def run_id(self) -> str:
        return str(self.values["run_id"])

    @property
    def steps(self) -> int:
        return int(self.values["num_steps"])

    @property
    def batch(self) -> int:
        return int(self.values["batch"]["samples"])

    @property
    def wire_type(self) -> str:
        return str(self.values.get("wire_type", "float32"))

    def with_wire(self, wire_type: str) -> "Job":
        """Returns the same run with gradients in another element type."""
        return replace(self, values={**self.values, "wire_type": wire_type})

    def with_workers(self, workers: int, device_ms: float | None = None) -> "Job":
        """Returns the same run for another number of workers and, for the default job, other waits."""
        task = self.values["task"]
        if device_ms is not None and "device_ms" in task["options"]:
            task = {**task, "options": {**task["options"], "device_ms": device_ms}}
        return replace(self, values={**self.values, "task": task, "min_workers": 1, "start_workers": workers})

    def with_topology(self, topology: str) -> "Job":
        """Returns the same run with others who reduce gradients."""
        return replace(self, values={**self.values, "topology": topology})

    def reference(self) -> "Job":
        """Returns the run whose final parameters all others must have: one worker, without waits."""
        return self.with_workers(1, 0.0).with_topology("star")

    def key(self) -> str:
        """Returns a hash of everything that the final parameters follow from."""
        digest = hashlib.sha256(json.dumps(self.reference().values, sort_keys=True, default=str).encode())
        for source in _SOURCES:
            path = ROOT / source
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(file.read_bytes())
        return digest.hexdigest()[:16]


def default_job(steps: int, workers: int, step_ms: float, *, with_nan: bool, store_every: int) -> Job:
    """Returns the light task: steps of about `step_ms` with all workers there."""
    spoilt = spoilt_samples(_SEED, steps, _BATCH, steps * _BATCH) if with_nan else ()
    options = {
        "num_samples": steps * _BATCH,
        "device_ms": round(step_ms * workers / _BATCH, 3),
        "spoilt": sorted(int(event.target) for event in spoilt),
    }
    values: dict[str, Any] = {
        "run_id": "chaos",
        "seed": _SEED,
        "num_steps": steps,
        "min_workers": 1,
        "start_workers": workers,
        "audit_every": 1,
        "non_finite": "skip",
        "task": {"name": "scripts.chaos_task:ChaosTask", "options": options},
        "batch": {"samples": _BATCH, "microbatches": 8},
        "optimizer": {"name": "adamw", "learning_rate": 3.0e-3, "warmup_steps": 10, "update": "host"},
    }
    if store_every:
        values["state"] = {"publish_every": store_every, "store_every": store_every, "keep": 2}
    return Job(values=values, spoilt=spoilt)


def job_from(path: Path, steps: int) -> Job:
    """Returns the run of a file, with so many steps.

    Raises:
        SettingsError: the run leaves open what must be the same for any number of workers.
    """
    values = load_yaml(path)
    batch = values.get("batch") or {}
    if not batch.get("microbatches"):
        raise SettingsError(f"{path} has no batch.microbatches; without it the sums depend on the number of workers")
    optimizer = {**(values.get("optimizer") or {}), "update": "host"}
    batch = {"samples": 32, **batch}
    artifacts = {"artifacts": str(Path(values["artifacts"]).resolve())} if "artifacts" in values else {}
    return Job(values={**values, **artifacts, "num_steps": steps, "batch": batch, "optimizer": optimizer})
