"""Trains every case and says, in plain values, how equal the runs were."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from ayni import settings
from ayni.run_config import RunConfig
from tests.support import equality_checks as checks
from tests.support.equality_cases import Case, files_of, make_cases, updated_on_host
from tests.support.equality_checks import MAX_LOSS_DIFF, MAX_REL_ERR, FirstStep, References
from tests.support.equality_counter_examples import CounterExample, counter_examples
from tests.support.equality_places import Crew, is_mixed
from tests.support.equality_reference import PlainLoop
from tests.support.equality_runs import Run, run_case
from worker_agent.training.load import load_task
from worker_agent.training.task import Task

Report = dict[str, Any]
Say = Callable[[str], None]


def train_and_compare(
    context: ForkServerContext, folder: Path, crews: Sequence[Crew], num_steps: int, say: Say
) -> list[Report]:
    """Returns one report for each case; every case is trained by each crew, forked from `context`."""
    torch.set_num_threads(1)
    cases = make_cases(folder)
    reports = []
    for case in map(updated_on_host, cases) if any(map(is_mixed, crews)) else cases:
        runs = []
        for number, crew in enumerate(crews):
            run = run_case(context, case, crew, num_steps, folder / f"{case.name}-{number}")
            backends = f" ({', '.join(place.backend for place in crew)})" if is_mixed(crew) else ""
            say(f"{case.name}: {len(crew)} workers{backends}, {num_steps} steps in {run.wall_s:.1f} s")
            runs.append(run)
        reports.append(compare(case, runs, num_steps))
        say(f"{case.name}: {'equal' if reports[-1]['ok'] else 'NOT EQUAL'}")
    return reports


def compare_counter_examples() -> list[Report]:
    """Returns one report for each known mistake."""
    return [_counter_example(example) for example in counter_examples()]


def summarize(trained: list[Report], examples: list[Report], wall_s: float) -> Report:
    """Returns the program's result."""
    cases = [*trained, *examples]
    return {
        "ok": all(case["ok"] for case in cases),
        "gradient_bytes_equal": all(case["gradient_bytes_equal"] for case in trained),
        "parameter_bytes_equal": all(case["parameter_bytes_equal"] for case in trained),
        "max_rel_err_float64": max(case["max_rel_err_float64"] for case in trained),
        "max_loss_diff": max(case["max_loss_diff"] for case in trained),
        "wall_s": round(wall_s, 1),
        "cases": cases,
    }


def compare(case: Case, runs: Sequence[Run], num_steps: int) -> Report:
    """Returns a case's report; `ok` is true only if every check holds and every check could have failed."""
    config = _config(case, num_steps)
    task = load_task(config.task, files_of(case), config.seed, "cpu")
    references = _references(case, task, config)
    # Another device rounds gradients in another way: then bytes are those of one run's workers, not of all runs'.
    groups = [[run] for run in runs] if any(run.is_mixed for run in runs) else [runs]
    gradients_equal, num_gradients = _of_all(checks.same_gradients(group) for group in groups)
    parameters_equal, num_parameters = _of_all(checks.same_parameters(group) for group in groups)
    weights = checks.weights(runs[0])
    described = [_describe(case, task, config, run, references) for run in runs]
    first = checks.first_step(runs[0].workers[0], task.buckets, references.initial)
    described = [_with_devices(task, one, run, first, references) for one, run in zip(described, runs, strict=True)]
    report = {
        "steps": num_steps,
        "wire_type": config.wire_type,
        "optimizer": f"{config.optimizer.name}, {config.optimizer.update}",
        "buckets": len(task.buckets),
        "least_weight": min(weights),
        "most_weight": max(weights),
        "gradient_bytes_equal": gradients_equal,
        "gradients_compared": num_gradients,
        "parameter_bytes_equal": parameters_equal,
        "parameters_compared": num_parameters,
        "commits_equal": all(map(checks.same_commits, groups)),
        "max_rel_err_float64": max(error for run in described for error in run["rel_err"].values()),
        "max_loss_diff": max(diff for run in described for diff in run["loss_diff"].values()),
        "plain_float32": _describe_plain(references),
        "runs": described,
    }
    return {"name": case.name, "kind": "run", "ok": _holds(report, num_steps), **report}


def _of_all(found: Iterable[tuple[bool, int]]) -> tuple[bool, int]:
    equal, counts = zip(*found, strict=True)
    return all(equal), sum(counts)


def _holds(report: Report, num_steps: int) -> bool:
    runs = report["runs"]
    several = [run for run in runs if run["workers"] > 1]
    workers = sum(run["workers"] for run in runs)
    return bool(
        report["gradient_bytes_equal"]
        and report["parameter_bytes_equal"]
        and report["commits_equal"]
        and report["max_rel_err_float64"] <= MAX_REL_ERR
        and report["max_loss_diff"] <= MAX_LOSS_DIFF
        and report["parameters_compared"] == num_steps * workers
        and report["plain_float32"]["clipped_steps"] > 0
        and report["gradients_compared"] == num_steps * workers * report["buckets"]
        and report["least_weight"] < report["most_weight"]
        and all(run["unequal_shares"] for run in several)
        and all(run["naive_rel_err"] >= checks.LEAST_NAIVE_ERR for run in several)
        and all(_was_mixed(run) for run in runs if "workers_on" in run)
    )


def _was_mixed(run: Report) -> bool:
    """Returns whether each backend had a part in every step, and the other device computed what was given to it."""
    return run["least_part"] > 0 and run["device_rel_err"] > 0 and not any(on["fallbacks"] for on in run["workers_on"])


def _config(case: Case, num_steps: int) -> RunConfig:
    values = {name: value for name, value in case.run_for(1, num_steps).items() if name != "artifacts"}
    return settings.from_mapping(RunConfig, values)


def _references(case: Case, task: Task, config: RunConfig) -> References:
    loops = {dtype: PlainLoop(case, task, config, dtype) for dtype in (torch.float32, torch.float64)}
    microbatches = {dtype: loop.microbatches() for dtype, loop in loops.items()}
    runs = {dtype: loop.run(config.num_steps) for dtype, loop in loops.items()}
    return References(
        float32=runs[torch.float32],
        float64=runs[torch.float64],
        microbatches32=microbatches[torch.float32],
        microbatches64=microbatches[torch.float64],
        initial={name: parameter.detach().clone() for name, parameter in task.trainable()},
    )


def _describe(case: Case, task: Task, config: RunConfig, run: Run, references: References) -> Report:
    differences = {
        f"{split}, plain {precision}": difference
        for precision, plain in (("float32", references.float32), ("float64", references.float64))
        for split, difference in checks.loss_differences(run, plain).items()
    }
    report = {
        "workers": run.num_workers,
        "wall_s": round(run.wall_s, 1),
        "shares_first": run.shares[0],
        "shares_last": run.shares[-1],
        "ways_to_share": len(set(map(tuple, run.shares))),
        "gradients_sha256": _digest(hash_ for step in run.workers[0].steps for hash_ in step["means"].values()),
        "parameters_sha256": run.workers[0].steps[-1]["parameters"],
        "loss": run.workers[0].steps[-1]["commit"]["global_loss"],
        "held_out_loss": run.workers[0].evaluation_loss,
        "rel_err": _errors(case, task, config, run, references),
        "loss_diff": differences,
    }
    if run.num_workers == 1:
        return report
    return {
        **report,
        "unequal_shares": checks.unequal_shares(run),
        "largest_skew": checks.largest_skew(run),
        "naive_rel_err": checks.naive_error(run, references),
    }


def _with_devices(task: Task, described: Report, run: Run, one_process: FirstStep, references: References) -> Report:
    """Adds to a mixed run's report what its devices did, and how far its first mean is from that of one process."""
    if not run.is_mixed:
        return described
    mean = checks.first_step(run.workers[0], task.buckets, references.initial).mean
    error = checks.relative_error(mean, one_process.mean, checks.largest(one_process.mean))
    return {
        **described,
        "rel_err": {**described["rel_err"], "one process": error},
        "workers_on": [{"backend": w.backend, "device": w.device, "fallbacks": w.fallbacks} for w in run.workers],
        "least_part": checks.least_part(run),
        "device_rel_err": checks.device_error(run, references),
    }


def _errors(case: Case, task: Task, config: RunConfig, run: Run, references: References) -> dict[str, float]:
    first = checks.first_step(run.workers[0], task.buckets, references.initial)
    fresh = PlainLoop(case, task, config, torch.float64)
    errors = {
        "gradient": checks.gradient_error(first.mean, references),
        "sum": checks.sum_error(first.mean, checks.own_microbatches(run, references)),
        "update": checks.update_error(fresh, first, references.initial, config.num_steps),
    }
    if config.optimizer.name == "sgd":
        errors["parameters"] = checks.parameters_error(first, references)
    return errors


def _describe_plain(references: References) -> Report:
    return {
        "gradient_rel_err": checks.gradient_error(references.float32.gradient, references),
        "loss": references.float32.losses[-1],
        "held_out_loss": references.float32.evaluation_loss,
        "loss_float64": references.float64.losses[-1],
        "held_out_loss_float64": references.float64.evaluation_loss,
        "first_loss": references.float32.losses[0],
        "clipped_steps": references.float32.clipped_steps,
    }


def _counter_example(example: CounterExample) -> Report:
    naive, ours = ([float(value) for value in formula()] for formula in (example.naive, example.ours))
    naive_fails, ours_passes = not example.is_met_by(naive), example.is_met_by(ours)
    return {
        "name": example.name,
        "kind": "counter_example",
        "ok": naive_fails and ours_passes,
        "expected": list(example.expected),
        "naive": [value if abs(value) < float("inf") else str(value) for value in naive],
        "ours": ours,
        "naive_fails": naive_fails,
        "ours_passes": ours_passes,
    }


def _digest(hashes: Any) -> str:
    return hashlib.sha256("".join(hashes).encode("ascii")).hexdigest()
