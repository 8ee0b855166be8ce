"""Training over an int8 wire: what rounding keeps back comes with the next step, once, whatever happens in between."""

import logging
import shutil
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ayni import tensors
from ayni.buckets import Bucket
from ayni.run_config import OptimizerConfig, RunConfig, StateConfig
from tests.support import elastic_loops
from tests.support.elastic_loops import SEED, STEPS
from tests.support.local_session import Faults, LocalRun, LocalSession, LocalSource
from tests.support.toy_task import ToyTask, toy_task
from worker_agent.session import Commit, MicrobatchStats, Report, ShardAssignment, Vector
from worker_agent.training.error_feedback import ErrorFeedback
from worker_agent.training.events import StepEvent, TrainResult
from worker_agent.training.following import State
from worker_agent.training.loop import Trainer, TrainingConfig


def config(**changes: object) -> RunConfig:
    return elastic_loops.config(**{"wire_type": "int8", **changes})


def new_task(seed: int = SEED) -> ToyTask:
    return toy_task(seed, buckets=2, width=150)


@dataclass
class Sent:
    """One lease's part in one bucket: the vectors that are kept, and the bytes that left."""

    lease: ShardAssignment
    bucket: Bucket
    parts: Sequence[Vector | None]
    payloads: list[bytes | None]


def payloads_of(parts: Sequence[Vector | None]) -> list[bytes | None]:
    return [None if part is None else bytes(tensors.encode(part, "int8")) for part in parts]


class Rounding(LocalSession):
    """A session whose wire rounds, in both directions."""

    def __init__(self, run: LocalRun, rank: int) -> None:
        super().__init__(run, rank)
        self.sent = list[Sent]()
        self._outs = dict[Bucket, Vector]()

    def contribute(
        self,
        assignment: ShardAssignment,
        bucket: Bucket,
        parts: Sequence[Vector | None],
        microbatches: Sequence[MicrobatchStats],
        *,
        out: Vector,
        component_sizes: Sequence[int] = (),
    ) -> "Future[Vector]":
        sent = Sent(assignment, bucket, parts, payloads_of(parts))
        received = [None if payload is None else tensors.decode(payload, "int8") for payload in sent.payloads]
        future = super().contribute(
            assignment, bucket, received, microbatches, out=out, component_sizes=component_sizes
        )
        self.sent.append(sent)
        self._outs[bucket] = out
        return future

    def commit(self, assignment: ShardAssignment, report: Report) -> Commit | ShardAssignment:
        answer = super().commit(assignment, report)
        for sent in self.sent:
            if (sent.lease.step, sent.lease.attempt) == (assignment.step, assignment.attempt):
                assert sent.payloads == payloads_of(sent.parts), "what was sent could not be sent again"
        for out in self._outs.values() if isinstance(answer, Commit) else ():
            out[...] = tensors.decode(tensors.encode(out, "bfloat16"), "bfloat16")
        return answer

    def bytes_of(self, step: int, attempt: int, *, extra: bool = False) -> list[list[bytes | None]]:
        key = (step, attempt, extra)
        return [s.payloads for s in self.sent if (s.lease.step, s.lease.attempt, s.lease.extra) == key]


class Recording(ErrorFeedback):
    """Adds up what was true, and what was sent of it, as far as it was committed."""

    def __init__(self, wire_type: str, num_elements: dict[Bucket, int]) -> None:
        super().__init__(wire_type, num_elements)
        self.true = {bucket: np.zeros(count) for bucket, count in num_elements.items()}
        self.sent = {bucket: np.zeros(count) for bucket, count in num_elements.items()}
        self._sums = dict[int, np.ndarray]()

    def correct(self, bucket: Bucket, parts: Sequence[Vector | None]) -> None:
        with_weight = [part for part in parts if part is not None]
        if with_weight:
            self._sums[id(with_weight[0])] = np.asarray(np.sum(with_weight, axis=0, dtype=np.float64))
        super().correct(bucket, parts)

    def commit(self, bucket: Bucket, parts: Sequence[Vector | None]) -> None:
        with_weight = [part for part in parts if part is not None]
        if with_weight:
            self.true[bucket] += self._sums[id(with_weight[0])]
            for part in with_weight:
                self.sent[bucket] += tensors.decode(tensors.encode(part, "int8"), "int8")
        super().commit(bucket, parts)

    def check(self) -> None:
        for bucket, true in self.true.items():
            assert np.abs(true).max() > 0
            difference = np.abs(self.sent[bucket] + self.residuals[bucket] - true)
            assert difference.max() <= 1e-5 * np.abs(true).max()
            assert np.abs(self.residuals[bucket]).max() > 1e-5


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_agent.training.loop.ErrorFeedback", Recording)


def run_with(
    local: LocalRun, training: TrainingConfig | None = None
) -> tuple[list[TrainResult], list[Trainer], list[Rounding]]:
    trainers = [Trainer(new_task(), local.config, training or TrainingConfig()) for _ in range(local.world_size)]
    sessions = [Rounding(local, rank) for rank in range(local.world_size)]
    results = local.run(lambda session: trainers[session.worker_id].train(sessions[session.worker_id]))
    return [result for result in results if isinstance(result, TrainResult)], trainers, sessions


def feedback_of(trainer: Trainer) -> Recording:
    feedback = trainer._feedback
    assert isinstance(feedback, Recording)
    return feedback


def after(step: int, attempt: int, *ranks: int) -> Any:
    return lambda s, a: ranks if (s, a) > (step, attempt) else ()


def only(step: int, attempt: int, *ranks: int) -> Any:
    return lambda s, a: ranks if (s, a) == (step, attempt) else ()


def never(step: int, attempt: int) -> Collection[int]:
    return ()


def outcome_of(*, rounds: bool, wire_type: str, steps: int = 40) -> tuple[np.ndarray, float]:
    """Parameters and held-out loss after plain descent; a wire that rounds and a run file that says float32 is int8
    without feedback."""
    descent = OptimizerConfig(name="sgd", learning_rate=0.05, schedule="constant", clip_norm=0.0)
    local = LocalRun(config(num_steps=steps, optimizer=descent, wire_type=wire_type), 12, [3, 5])
    tasks = [new_task(), new_task()]

    def worker(session: LocalSession) -> object:
        used = Rounding(local, session.worker_id) if rounds else session
        return Trainer(tasks[session.worker_id], local.config).train(used)

    local.run(worker)
    values = np.concatenate([p.detach().numpy().ravel() for _, p in tasks[0].trainable()])
    return values, local.evaluations[-1].global_loss


def test_feedback_keeps_training_near_float32_and_plain_rounding_does_not() -> None:
    exact, exact_loss = outcome_of(rounds=False, wire_type="float32")
    with_feedback, loss = outcome_of(rounds=True, wire_type="int8")
    without, loss_without = outcome_of(rounds=True, wire_type="float32")
    near, far = np.abs(with_feedback - exact).mean(), np.abs(without - exact).mean()
    assert near < far / 2
    assert abs(loss - exact_loss) < abs(loss_without - exact_loss)
    # How far apart they come depends on the processor's own order of sums: 1e-5 to 2e-4 were seen.
    assert loss == pytest.approx(exact_loss, rel=1e-3)


def test_over_a_run_what_was_sent_and_the_residuals_are_what_was_true() -> None:
    results, trainers, _ = run_with(LocalRun(config(num_steps=20), 0, [3, 5]))
    assert len({result.parameters_sha256 for result in results}) == 1
    for trainer in trainers:
        feedback_of(trainer).check()


def test_the_bytes_depend_on_who_computed_what() -> None:
    hashes = []
    for shares in ([8], [3, 5], [3, 5]):
        local = LocalRun(config(num_steps=3), 0, shares)
        results, _, _ = run_with(local)
        assert len({result.parameters_sha256 for result in results}) == 1
        hashes.append(results[0].parameters_sha256)
    assert hashes[0] != hashes[1] == hashes[2]


def test_shares_that_change_from_step_to_step_lose_nothing() -> None:
    shares_of = lambda step, attempt: [[3, 5], [8, 0], [1, 7], [0, 8]][step % 4]  # noqa: E731
    _, trainers, _ = run_with(LocalRun(config(num_steps=18), 0, [3, 5], shares_of=shares_of))
    for trainer in trainers:
        feedback_of(trainer).check()


def test_a_voided_attempt_is_sent_again_with_the_same_bytes() -> None:
    (expected, _), _, _ = run_with(LocalRun(config(), 0, [3, 5]))
    faults = Faults(voided={(2, 0), (2, 1), (5, 0)})
    results, trainers, sessions = run_with(LocalRun(config(), 0, [3, 5], faults=faults))
    assert {result.parameters_sha256 for result in results} == {expected.parameters_sha256}
    for session, trainer in zip(sessions, trainers, strict=True):
        assert session.bytes_of(2, 0) == session.bytes_of(2, 1) == session.bytes_of(2, 2)
        assert session.bytes_of(5, 0) == session.bytes_of(5, 1) != session.bytes_of(4, 0)
        feedback_of(trainer).check()


def test_a_voided_attempt_that_is_cut_in_another_way_counts_the_residual_once() -> None:
    other = lambda step, attempt: [5, 3] if step == 2 else [3, 5]  # noqa: E731
    (expected, _), _, _ = run_with(LocalRun(config(), 0, [3, 5], shares_of=other))
    shares_of = lambda step, attempt: [5, 3] if (step, attempt) == (2, 1) else [3, 5]  # noqa: E731
    results, trainers, _ = run_with(LocalRun(config(), 0, [3, 5], shares_of=shares_of, faults=Faults(voided={(2, 0)})))
    assert {result.parameters_sha256 for result in results} == {expected.parameters_sha256}
    for trainer in trainers:
        feedback_of(trainer).check()


def test_a_first_lease_that_comes_back_as_an_additional_one_leaves_its_residual_at_home() -> None:
    """Rank 1 has micro-batches 4 and 5 first, and then 1 first and 4 and 5 on top."""
    late = lambda step, attempt: [1, 1, 6] if step >= 2 and (step, attempt) != (2, 0) else [4, 2, 2]  # noqa: E731
    shares_of = lambda step, attempt: [1, 1, 6] if step >= 2 else [4, 2, 2]  # noqa: E731
    absent = lambda step, attempt: (2,) if step >= 2 else ()  # noqa: E731
    calm = LocalRun(config(), 0, [4, 2, 2], shares_of=shares_of, faults=Faults(absent=absent, largest_extra=2))
    (expected, _, _), _, _ = run_with(calm)
    faults = Faults(absent=after(2, 0, 2), largest_extra=2, voided={(2, 0)})
    results, trainers, sessions = run_with(LocalRun(config(), 0, [4, 2, 2], shares_of=late, faults=faults))
    spans = [(s.lease.microbatch_start, s.lease.microbatch_stop) for s in sessions[1].sent if s.lease.step == 2]
    assert spans == [(4, 6), (4, 6), (1, 2), (1, 2), (4, 6), (4, 6)]
    assert sessions[1].bytes_of(2, 0) != sessions[1].bytes_of(2, 1, extra=True)
    assert {result.parameters_sha256 for result in results[:2]} == {expected.parameters_sha256}
    for trainer in trainers[:2]:
        feedback_of(trainer).check()


def test_an_additional_lease_that_comes_back_as_a_first_one_brings_the_residual() -> None:
    """Rank 1 has micro-batch 1 first and 4 and 5 on top, and then 4 and 5 first: they need not be computed again."""
    (expected, _, _), _, _ = run_with(LocalRun(config(), 0, [4, 2, 2]))
    shares_of = lambda step, attempt: [1, 1, 6] if (step, attempt) == (2, 0) else [4, 2, 2]  # noqa: E731
    faults = Faults(absent=only(2, 0, 2), largest_extra=2, voided={(2, 0)})
    results, trainers, sessions = run_with(LocalRun(config(), 0, [4, 2, 2], shares_of=shares_of, faults=faults))
    assert sessions[1].bytes_of(2, 0, extra=True) != sessions[1].bytes_of(2, 1)
    assert {result.parameters_sha256 for result in results} == {expected.parameters_sha256}
    for trainer in trainers:
        feedback_of(trainer).check()


def test_a_first_lease_that_was_taken_back_in_the_middle_is_corrected_once() -> None:
    """The session refuses the second bucket, when the first one has its residual already."""
    (expected,), _, _ = run_with(LocalRun(config()))
    local, refused = LocalRun(config()), list[int]()

    class Refusing(Rounding):
        def contribute(self, assignment: ShardAssignment, *args: Any, **options: Any) -> Any:
            from ayni.errors import StepVoided

            if assignment.step == 3 and len([s for s in self.sent if s.lease.step == 3]) == 1 and not refused:
                refused.append(assignment.lease_id)
                with self._run._condition:
                    attempt = self._run._attempt
                    assert attempt is not None
                    error = StepVoided("a worker left")
                    attempt.void(error)
                    self._run._attempt = self._run._next(attempt)
                raise error
            return super().contribute(assignment, *args, **options)

    trainer = Trainer(new_task(), local.config)
    result = trainer.train(Refusing(local, 0))
    assert refused
    assert result.parameters_sha256 == expected.parameters_sha256
    feedback_of(trainer).check()


class Half(Rounding):
    """Ends in the middle of the run."""

    stops_at = STEPS // 2

    def receive_shard(self) -> ShardAssignment | None:
        lease = super().receive_shard()
        return None if lease is not None and lease.step == self.stops_at else lease


def half_a_run(folder: Path, run_config: RunConfig, every: int = 0) -> tuple[LocalRun, Trainer]:
    """One worker that has made a half of the run and is gone."""
    local = LocalRun(run_config)
    trainer = Trainer(new_task(), run_config, TrainingConfig(checkpoint_folder=folder, checkpoint_every=every))
    trainer.train(Half(local, 0))
    trainer.close()
    return local, trainer


def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_run(tmp_path: Path) -> None:
    (whole,), _, _ = run_with(LocalRun(config()))
    local, before = half_a_run(tmp_path, config())
    again = Trainer(new_task(99), local.config)
    again.load(tmp_path / "last", "host")
    for bucket, residual_N in feedback_of(before).residuals.items():
        assert residual_N.any()
        assert feedback_of(again).residuals[bucket].tobytes() == residual_N.tobytes()
    assert again.train(Rounding(local, 0)).parameters_sha256 == whole.parameters_sha256


def test_a_run_that_goes_on_without_its_residuals_begins_with_zeros_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (whole,), _, _ = run_with(LocalRun(config()))
    local, _ = half_a_run(tmp_path, config())
    shutil.rmtree(tmp_path / "residuals")
    again = Trainer(new_task(99), local.config)
    again.load(tmp_path / "last", "host")
    assert not any(residual_N.any() for residual_N in feedback_of(again).residuals.values())
    assert f"no residuals of step {STEPS // 2} in" in caplog.text
    assert again.train(Rounding(local, 0)).parameters_sha256 != whole.parameters_sha256


def test_a_run_that_goes_on_from_a_stored_state_finds_the_residuals_of_that_step(tmp_path: Path) -> None:
    """The worker's own file of the step that the state is of, not its newest one."""
    run_config = config(num_steps=7, state=StateConfig(publish_every=3, store_every=3))
    (whole,), _, _ = run_with(LocalRun(run_config))
    local, states = LocalRun(run_config), list[tuple[Any, Any]]()
    training = TrainingConfig(checkpoint_folder=tmp_path)
    trainer = Trainer(new_task(), run_config, training)

    def note(event: StepEvent) -> None:
        if trainer.completed_steps == 3:
            states.append(trainer.state())

    trainer.train(Rounding(local, 0), note)
    trainer.close()
    assert sorted(path.name for path in (tmp_path / "residuals").iterdir()) == [f"{n}.safetensors" for n in (3, 6, 7)]
    again, rest = Trainer(new_task(99), run_config, training), LocalRun(run_config)
    again.restore("the train state", *states[0])
    assert any(residual_N.any() for residual_N in feedback_of(again).residuals.values())
    rest._plan = rest._plan[2:]
    rest._attempt = rest._next(None)
    assert again.train(Rounding(rest, 0)).parameters_sha256 == whole.parameters_sha256


def test_every_worker_keeps_its_own_residuals(tmp_path: Path) -> None:
    local = LocalRun(config(num_steps=4), 0, [3, 5])
    tasks = [new_task(), new_task()]

    def worker(session: LocalSession) -> object:
        training = TrainingConfig(checkpoint_folder=tmp_path / str(session.worker_id), checkpoint_every=2)
        trainer = Trainer(tasks[session.worker_id], local.config, training)
        try:
            return trainer.train(Rounding(local, session.worker_id))
        finally:
            trainer.close()

    local.run(worker)
    files = {rank: sorted(path.name for path in (tmp_path / rank).rglob("*.safetensors")) for rank in ("0", "1")}
    assert files["1"] == ["2.safetensors", "4.safetensors"]
    assert {"2.safetensors", "4.safetensors", "state.safetensors"} < set(files["0"])
    one, two = ((tmp_path / rank / "residuals" / "4.safetensors").read_bytes() for rank in ("0", "1"))
    assert one != two


def test_a_follower_begins_with_zeros_when_it_has_another_workers_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 misses steps 2 and 3, follows, and takes the state behind step 5."""
    local = LocalRun(config(num_steps=12), 0, [4, 4], faults=Faults(absent=lambda s, a: (1,) if 2 <= s < 4 else ()))
    source, residuals = LocalSource(), dict[int, bool]()
    trainers = [
        Trainer(new_task(), local.config),
        Trainer(new_task(), local.config, TrainingConfig(state_source=source)),
    ]

    def worker(session: LocalSession) -> object:
        rank = session.worker_id
        trainer = trainers[rank]

        def note(event: StepEvent) -> None:
            if rank == 1:
                residuals[event.step] = any(values.any() for values in feedback_of(trainer).residuals.values())
            elif trainer.completed_steps == 5:
                tensors_, facts = trainer.state()
                source.deliver(State(tensors=tensors_, facts=facts, completed_steps=5))

        return trainer.train(Rounding(local, rank), note)

    taken = list[bool]()
    restore = trainers[1].replica.restore

    def restored(*args: Any) -> None:
        taken.append(any(values.any() for values in feedback_of(trainers[1]).residuals.values()))
        restore(*args)

    monkeypatch.setattr(trainers[1].replica, "restore", restored)
    first, second = local.run(worker)
    assert isinstance(first, TrainResult)
    assert isinstance(second, TrainResult)
    assert first.parameters_sha256 == second.parameters_sha256
    assert taken == [False]
    assert residuals[1]
    assert residuals[11]


def test_other_wire_types_keep_nothing_back() -> None:
    for wire_type in tensors.MEAN_DTYPES:
        assert Trainer(new_task(), config(wire_type=wire_type))._feedback is None


class Changing(Rounding):
    """A session whose wire begins to round with step 4."""

    def receive_shard(self) -> ShardAssignment | None:
        lease = super().receive_shard()
        return None if lease is None else replace(lease, wire_type="float32" if lease.step < 4 else "int8")

    def contribute(
        self,
        assignment: ShardAssignment,
        bucket: Bucket,
        parts: Sequence[Vector | None],
        microbatches: Sequence[MicrobatchStats],
        *,
        out: Vector,
        component_sizes: Sequence[int] = (),
    ) -> "Future[Vector]":
        contribute = Rounding.contribute if assignment.wire_type == "int8" else LocalSession.contribute
        return contribute(self, assignment, bucket, parts, microbatches, out=out, component_sizes=component_sizes)


@pytest.mark.parametrize("said", ["float32", "int8"])
def test_feedback_begins_with_the_first_step_whose_wire_rounds(said: str) -> None:
    """Whatever was said of the run before: a worker may hear of a change early."""
    local = LocalRun(config(num_steps=12, wire_type=said), 0, [3, 5])
    trainers = [Trainer(new_task(), local.config) for _ in range(2)]
    kept = list[float]()

    def worker(session: LocalSession) -> object:
        rank = session.worker_id

        def note(event: StepEvent) -> None:
            feedback = trainers[rank]._feedback
            residuals = feedback.residuals.values() if feedback else ()
            if rank == 0:
                kept.append(max((float(np.abs(values).max()) for values in residuals), default=0.0))

        return trainers[rank].train(Changing(local, rank), note)

    first, second = local.run(worker)
    assert isinstance(first, TrainResult)
    assert isinstance(second, TrainResult)
    assert first.parameters_sha256 == second.parameters_sha256
    assert [value > 0 for value in kept] == [False] * 4 + [True] * 8
    for trainer in trainers:
        feedback_of(trainer).check()
