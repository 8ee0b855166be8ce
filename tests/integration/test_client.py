"""WorkerClient with a real coordinator process: what a training script of one's own sees."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ayni.buckets import FLAT
from ayni.endpoints import ClientTls
from ayni.errors import Halted, IdentityTaken, Incompatible, NonFinite, SpecMismatch, TokenRefused
from ayni.settings import SettingsError
from ayni.tree import cover
from scripts import make_certs
from tests.support.coordinator import TOKEN, CoordinatorProcess, coordinator
from worker_agent.client import ClientConfig, WorkerClient
from worker_agent.faults import CoordinatorUnreachable, Interrupted
from worker_agent.session import Commit, MicrobatchStats, Report, ShardAssignment

RUN = {
    "run_id": "own-loop",
    "num_steps": 2,
    "min_workers": 2,
    "num_training_samples": 100,
    "batch": {"samples": 5, "microbatches": 0},
    "timeouts": {"shutdown": "5s"},
}
PATIENCE = timedelta(seconds=60)


def config(server: CoordinatorProcess, name: str, **changes: Any) -> ClientConfig:
    base = ClientConfig(coordinator=server.address, token=TOKEN, worker_name=name)
    return replace(base, connect_timeout=PATIENCE, exchange_timeout=PATIENCE, shard_timeout=PATIENCE, **changes)


@contextmanager
def members(server: CoordinatorProcess, *names: str, **changes: Any) -> Iterator[list[WorkerClient]]:
    with ExitStack() as stack:
        yield [stack.enter_context(WorkerClient.connect(config(server, name, **changes), 0, "cpu")) for name in names]


def on_threads(work: Callable[[WorkerClient], Any], clients: list[WorkerClient]) -> list[Any]:
    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(work, clients))


def shards_of(clients: list[WorkerClient]) -> list[ShardAssignment]:
    shards = [client.receive_shard() for client in clients]
    assert all(shards)
    return [shard for shard in shards if shard]


def sizes_of(num_elements: int) -> list[int]:
    """Nine component sizes that add up; some are 0."""
    return [num_elements - 12, 3, 3, 3, 0, 0, 1, 1, 1]


def test_the_five_lines(tmp_path: Path):
    rng = np.random.default_rng(0)
    means = {shard: rng.standard_normal(700_000).astype(np.float32) for shard in ((0, 0), (0, 1), (1, 0), (1, 1))}

    def my_gradients(shard: ShardAssignment) -> tuple[np.ndarray, float, int, int]:
        samples = shard.shard_end - shard.shard_start
        return means[shard.step, shard.rank], 1.0 + shard.rank, shard.rank, samples

    def work(name: str) -> list[np.ndarray]:
        seen = []
        with WorkerClient.connect(config(server, name), gpu_count=0, backend="cpu") as client:
            while (shard := client.receive_shard()) is not None:
                gradients, loss, correct, total = my_gradients(shard)
                client.send_gradients(shard.step, gradients, loss, correct, total)
                averaged = client.receive_averaged()
                assert averaged.step == shard.step
                assert averaged.global_loss == pytest.approx((2 * 1.0 + 3 * 2.0) / 5)
                assert client.total_workers == 2
                seen.append(averaged.gradients)
            assert client.finished
        return seen

    with coordinator(tmp_path, RUN) as server, ThreadPoolExecutor(2) as pool:
        ant, bee = pool.map(work, ["ant", "bee"])
        assert server.process.wait(30) == 0
    for step in range(2):
        two, three = np.float32(2), np.float32(3)
        expected = (means[step, 0] * two + means[step, 1] * three) / np.float32(5)
        assert ant[step].tobytes() == bee[step].tobytes() == expected.tobytes()
    log = server.read_log()
    assert "worker ant left: done" in log
    assert "worker bee left: done" in log


def test_a_vector_comes_back_as_what_it_was_sent_as(tmp_path: Path):
    with coordinator(tmp_path, {**RUN, "num_steps": 5}) as server, members(server, "ant", "bee") as clients:
        kinds = [
            np.array([1.5, -2.0], np.float32),
            np.array([1.5, -2.0], np.float64),
            np.array([1.5, -2.0], ml_dtypes.bfloat16),
            torch.tensor([1.5, -2.0]),
            torch.tensor([1.5, -2.0], dtype=torch.bfloat16, requires_grad=True),
        ]
        for values in kinds:
            for client, shard in zip(clients, shards_of(clients), strict=True):
                client.send_gradients(shard.step, values, 0.0, 0, 2)
            for client in clients:
                mean = client.receive_averaged().gradients
                assert type(mean) is type(values) or isinstance(values, torch.Tensor)
                assert isinstance(mean, torch.Tensor) == isinstance(values, torch.Tensor)
                assert mean.dtype in (np.float32, torch.float32)
                assert mean.tolist() == [1.5, -2.0]


def test_the_senders_array_may_change_at_once(tmp_path: Path):
    with coordinator(tmp_path, RUN) as server, members(server, "ant", "bee") as clients:
        for client, shard in zip(clients, shards_of(clients), strict=True):
            gradients = np.ones(3_000_000, np.float32)
            client.send_gradients(shard.step, gradients, 1.0, 0, 1)
            gradients.fill(np.nan)
        for client in clients:
            assert np.all(client.receive_averaged().gradients == 1)


def test_forty_buckets_at_once_from_one_thread(tmp_path: Path):
    blocks = 37
    with coordinator(tmp_path, RUN) as server, members(server, "ant", "bee") as clients:
        shards = shards_of(clients)
        for client, shard in zip(clients, shards, strict=True):
            for index in reversed(range(blocks)):
                size = 300_000 + index
                gradients = np.full(size, index + shard.rank, np.float32)
                client.send_block_gradient(shard.step, index, blocks, gradients, sizes_of(size))
            for component in (0, 1, 2):
                client.send_non_block_gradient(shard.step, component, np.full(9, component - shard.rank, np.float32))
            client.finish_step(loss=2.0 + shard.rank, correct=1)
        share = shards[1].shard_end - shards[1].shard_start
        for client in clients:
            commit = client.commit_step()
            assert (commit.step, commit.total_weight, commit.num_correct) == (0, 5, 2)
            assert commit.global_loss == pytest.approx(2 + share / 5)
            for index in reversed(range(blocks)):
                block = client.receive_averaged_block()
                assert (block.step, block.block_idx, block.gradients.size) == (0, index, 300_000 + index)
                assert block.component_sizes == tuple(sizes_of(300_000 + index))
                np.testing.assert_allclose(block.gradients, index + share / 5, rtol=1e-6)
            for component in (0, 1, 2):
                part = client.receive_averaged_non_block()
                assert (part.step, part.component) == (0, component)
                np.testing.assert_allclose(part.gradients, component - share / 5, rtol=1e-6, atol=1e-6)
            assert client.traffic.shared_bytes > 2 * 4 * 300_000 * blocks, "out and in"


def test_a_step_is_committed_by_the_next_receive_shard(tmp_path: Path):
    def work(client: WorkerClient) -> int:
        steps = 0
        while (shard := client.receive_shard()) is not None:
            gradients = np.full(10, 1.0 + shard.rank, np.float32)
            client.send_block_gradient(shard.step, 0, 1, gradients, [10, *[0] * 8], total=7)
            assert client.receive_averaged_block().gradients[0] == 1.5
            steps += 1
        return steps

    with coordinator(tmp_path, RUN) as server:
        with members(server, "ant", "bee") as clients:
            assert on_threads(work, clients) == [2, 2]
        assert server.process.wait(30) == 0
    assert "weight 14" in server.read_log()


def test_a_shard_without_samples_of_weight_counts_for_nothing(tmp_path: Path):
    with coordinator(tmp_path, RUN) as server, members(server, "ant", "bee") as clients:
        for weights, expected in (((4, 0), 1.0), ((0, 0), 0.0)):
            shards = shards_of(clients)
            for client, shard, weight in zip(clients, shards, weights, strict=True):
                gradients = np.full(400_000, 1 + 99 * shard.rank, np.float32)
                client.send_gradients(shard.step, gradients, 1.0, 0, weight)
            for client in clients:
                averaged = client.receive_averaged()
                assert np.all(averaged.gradients == expected)
                assert averaged.global_loss == expected


def test_gradients_may_travel_in_bfloat16(tmp_path: Path):
    with coordinator(tmp_path, {**RUN, "wire_type": "bfloat16"}) as server, members(server, "ant", "bee") as clients:
        values = np.linspace(-3, 3, 600_001, dtype=np.float32)
        for client, shard in zip(clients, shards_of(clients), strict=True):
            assert client.wire_type == "bfloat16"
            client.send_gradients(shard.step, values, 0.0, 0, 1)
        sent = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        for client in clients:
            assert client.receive_averaged().gradients.tobytes() == sent.tobytes()
            assert client.traffic.sent_bytes < 3 * values.size


def test_the_session_half_reduces_along_the_tree(tmp_path: Path):
    run = {**RUN, "num_steps": 1, "batch": {"samples": 20, "microbatches": 5}}
    rng = np.random.default_rng(1)
    sums = rng.standard_normal((5, 400_000)).astype(np.float32)

    def total(start: int, stop: int) -> np.ndarray:
        if stop - start == 1:
            return sums[start]
        middle = start + (1 << ((stop - start - 1).bit_length() - 1))
        return total(start, middle) + total(middle, stop)

    def work(client: WorkerClient) -> bytes:
        lease = client.receive_shard()
        assert lease
        stats = [MicrobatchStats(microbatch=m, weight=3, loss_sum=1.5 * m) for m in lease.microbatches]
        nodes = cover(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches)
        out = np.empty(400_000, np.float32)
        future = client.contribute(lease, FLAT, [total(n.start, n.stop) for n in nodes], stats, out=out)
        # At once: the client waits for what is on its way before it says that the lease is done.
        commit = client.commit(lease, Report(num_buckets=1, microbatches=stats))
        assert isinstance(commit, Commit)
        assert commit.global_loss == 1.0
        assert future.result(60) is out
        assert client.receive_shard() is None
        return out.tobytes()

    with coordinator(tmp_path, run) as server, members(server, "ant", "bee") as clients:
        assert set(on_threads(work, clients)) == {(total(0, 5) / np.float32(15)).tobytes()}


def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent(tmp_path: Path):
    with coordinator(tmp_path, RUN) as server, members(server, "ant", "bee") as clients:
        client = clients[0]
        good = np.ones(10, np.float32)
        with pytest.raises(RuntimeError, match=r"call receive_shard\(\) first"):
            client.send_gradients(0, good, 0.0, 0, 1)
        shards_of(clients)
        total: Any
        for step, gradients, total, error, words in (
            (1, good, 1, ValueError, "in progress is step 0, not step 1"),
            (0, [1.0, 2.0], 1, TypeError, "must be a torch tensor or a numpy array, not list"),
            (0, np.ones(3, np.int64), 1, ValueError, "element type int64; gradients are floats"),
            (0, torch.ones(3, dtype=torch.int32), 1, ValueError, "element type torch.int32"),
            (0, np.ones((2, 3), np.float32), 1, ValueError, r"shape \[2, 3\]; give one flat vector"),
            (0, torch.ones(2, 3), 1, ValueError, r"shape \[2, 3\]"),
            (0, np.ones(0, np.float32), 1, ValueError, "no elements"),
            (0, good, -1, ValueError, "total is -1"),
            (0, good, 4.5, ValueError, "total is 4.5; it must be an int, not float"),
            (0, good, None, ValueError, "total is None; it must be an int"),
            (0, good, 2**63, ValueError, "total is 9223372036854775808; it must be in"),
        ):
            with pytest.raises(error, match=words):
                client.send_gradients(step, gradients, 0.0, 0, total)
        loss: Any
        correct: Any
        for loss, correct, words in (
            (None, 0, "loss is None; it must be a finite number"),
            (float("nan"), 0, "loss is nan; it must be a finite number"),
            (1.0, 2.5, "correct is 2.5; it must be an int, not float"),
            (1.0, 5, r"correct is 5; it must be in \[0, 4\]"),
        ):
            with pytest.raises(ValueError, match=words):
                client.send_gradients(0, good, loss, correct, 4)
        with pytest.raises(RuntimeError, match="no result of kind 'block' is on its way"):
            client.receive_averaged_block()
        assert client.traffic.sent_bytes == 0
        for each in clients:
            each.send_gradients(0, good, 0.0, 0, 1)
        assert clients[1].receive_averaged().gradients.tolist() == [1.0] * 10
        with pytest.raises(RuntimeError, match="averages of flat were never received"):
            client.receive_shard()


@pytest.mark.parametrize("batch", [{"samples": 5, "microbatches": 0}, {"samples": 8, "microbatches": 4}])
def test_a_second_lease_without_work_on_the_first_is_refused_at_once(tmp_path: Path, batch: dict[str, int]):
    run = {**RUN, "min_workers": 1, "batch": batch}
    with coordinator(tmp_path, run) as server, members(server, "ant") as [client]:
        [lease] = shards_of([client])
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"step 0 is still leased to this worker.*contribute to it"):
                client.receive_shard()
        stats = [MicrobatchStats(microbatch=m, weight=1, loss_sum=1.0) for m in lease.microbatches]
        out = np.empty(9, np.float32)
        client.contribute(lease, FLAT, [np.ones(9, np.float32)], stats, out=out)
        client.commit(lease, Report(num_buckets=1, microbatches=stats))
        [later] = shards_of([client])
        assert later.step == 1


def test_a_client_that_is_closed_says_so_at_every_call(tmp_path: Path):
    good = np.ones(10, np.float32)
    with coordinator(tmp_path, {**RUN, "min_workers": 1}) as server:
        with members(server, "ant") as [client]:
            [lease] = shards_of([client])
            client.send_gradients(0, good, 0.0, 0, 5)
        assert "step 0 committed" in server.read_log()
        calls: list[Callable[[], object]] = [
            client.receive_shard,
            lambda: client.send_gradients(0, good, 0.0, 0, 5),
            client.receive_averaged,
            lambda: client.send_block_gradient(0, 0, 1, good, [10, *[0] * 8]),
            client.receive_averaged_block,
            lambda: client.send_non_block_gradient(0, 0, good),
            client.receive_averaged_non_block,
            lambda: client.finish_step(1.0),
            client.commit_step,
            lambda: client.contribute(lease, FLAT, [good], [], out=good),
            lambda: client.commit(lease, Report(num_buckets=0, microbatches=[])),
            lambda: client.report("idle"),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="this client is closed"):
                call()
        client.close()


def test_several_microbatches_in_a_shard_are_refused_with_the_way_out(tmp_path: Path):
    run = {**RUN, "batch": {"samples": 8, "microbatches": 4}}
    with coordinator(tmp_path, run) as server, members(server, "ant", "bee") as clients:
        shards_of(clients)
        with pytest.raises(ValueError, match=r"2 micro-batches.*set batch.microbatches: 0 in the run file"):
            clients[0].send_gradients(0, np.ones(3, np.float32), 0.0, 0, 4)


def test_a_worker_that_is_not_like_the_others_is_refused(tmp_path: Path):
    same = {"dataset_fingerprint": "aa", "dataset_summary": "5 sheep", "task_fingerprint": "cc"}
    with coordinator(tmp_path, RUN) as server, members(server, "ant", **same):
        for changes, error, words in (
            ({"worker_name": "ant"}, IdentityTaken, "worker name 'ant' belongs to live worker 0 at 127.0.0.1"),
            ({"token": "another-token-of-length"}, TokenRefused, "token is missing or wrong"),
            ({"run_id": "other"}, Incompatible, "run_id differs: this coordinator has own-loop, the caller has other"),
            ({"wire_types": ("float16",)}, Incompatible, "wire_type differs: this coordinator has float32"),
            (
                {"dataset_fingerprint": "bb", "dataset_summary": "6 goats"},
                Incompatible,
                r"dataset_fingerprint differs: this run has aa \(5 sheep\), worker 'bee' has bb \(6 goats\)",
            ),
            ({"task_fingerprint": "dd"}, Incompatible, "task_fingerprint differs: this run has cc"),
        ):
            with pytest.raises(error, match=words):
                WorkerClient.connect(config(server, "bee", **{**same, **changes}), 0, "cpu")


def test_a_value_that_is_not_finite_stops_everybody_and_names_its_sender(tmp_path: Path):
    def work(client: WorkerClient) -> str:
        shard = client.receive_shard()
        assert shard
        gradients = np.ones(2_000_000, np.float32)
        if shard.rank == 1:
            gradients[1_234_567] = np.nan
        client.send_gradients(shard.step, gradients, 1.0, 0, 2)
        with pytest.raises((Halted, NonFinite), match="worker bee contributes nan at element 1234567") as caught:
            client.receive_averaged()
        with pytest.raises((Halted, NonFinite), match="worker bee"):
            client.receive_shard()
        return str(caught.value)

    with coordinator(tmp_path, RUN) as server:
        with members(server, "ant", "bee") as clients:
            on_threads(work, clients)
        assert server.process.wait(30) == 1


def test_gradients_of_another_length_are_refused_by_name(tmp_path: Path):
    with coordinator(tmp_path, RUN) as server, members(server, "ant", "bee") as clients:
        for client, shard in zip(clients, shards_of(clients), strict=True):
            client.send_gradients(shard.step, np.ones(10 + shard.rank, np.float32), 1.0, 0, 2)
        for client in clients:
            with pytest.raises((Halted, SpecMismatch), match=r"worker (ant|bee) contributes num_elements 1[01]"):
                client.receive_averaged()
            with pytest.raises((Halted, SpecMismatch), match="num_elements"):
                client.receive_shard()


def test_an_error_in_the_training_script_is_told_to_the_others(tmp_path: Path):
    def train(client: WorkerClient) -> None:
        with client:
            assert client.receive_shard()
            raise KeyError("labels")

    with coordinator(tmp_path, {**RUN, "min_workers": 1}) as server:
        with pytest.raises(KeyError):
            train(WorkerClient.connect(config(server, "ant"), 0, "cpu"))
        server.wait_for_log("worker ant left: failed: KeyError: 'labels'")


def test_a_wait_can_be_interrupted_from_another_thread(tmp_path: Path):
    with coordinator(tmp_path, RUN) as server, members(server, "ant") as [client]:
        server.wait_for_log("1 of 2")
        timer = threading.Timer(0.1, client.interrupt, ["SIGINT"])
        timer.start()
        with pytest.raises(Interrupted, match="SIGINT"):
            client.receive_shard()
        with pytest.raises(Interrupted, match="SIGINT"):
            client.receive_shard()
        timer.join()


def test_a_wait_for_other_workers_ends_and_says_what_was_waited_for(tmp_path: Path):
    with coordinator(tmp_path, RUN) as server:
        patient = replace(config(server, "ant"), shard_timeout=timedelta(seconds=1))
        with WorkerClient.connect(patient, 0, "cpu") as client:
            words = r"waited 1 s in vain for an assignment \(waiting for 1 more worker \(1 of 2\)"
            with pytest.raises(Exception, match=words):
                client.receive_shard()


@pytest.mark.parametrize("mutual", [False, True], ids=["TLS", "mTLS"])
def test_a_run_over_tls(tmp_path: Path, mutual: bool):
    for folder, host in (("ours", "127.0.0.1"), ("foreign", "127.0.0.1")):
        assert make_certs.main(["--out", str(tmp_path / folder), "--host", host, "--worker", "ant"]) == 0
    ours = tmp_path / "ours"
    flags = ["--tls-certificate", str(ours / "server.pem"), "--tls-key", str(ours / "server.key")]
    flags += ["--tls-client-ca", str(ours / "ca.pem")] if mutual else []
    own: dict[str, Any] = {"certificate": ours / "worker-ant.pem", "key": ours / "worker-ant.key"} if mutual else {}
    with coordinator(tmp_path, {**RUN, "min_workers": 1}, *flags) as server:
        with members(server, "ant", tls=ClientTls(ca=ours / "ca.pem", **own)) as [client]:
            [shard] = shards_of([client])
            client.send_gradients(shard.step, np.ones(600_000, np.float32), 1.0, 0, 5)
            assert np.all(client.receive_averaged().gradients == 1)
        brief = replace(config(server, "bee"), connect_timeout=timedelta(seconds=1))
        wrong = [ClientTls(ca=tmp_path / "foreign" / "ca.pem", **own), ClientTls()]
        for tls in [*wrong, ClientTls(ca=ours / "ca.pem")] if mutual else wrong:
            with pytest.raises(CoordinatorUnreachable, match="do both sides use TLS or neither"):
                WorkerClient.connect(replace(brief, tls=tls), 0, "cpu")


def test_another_machine_is_not_dialled_in_clear():
    with pytest.raises(SettingsError, match=r"dialling 192.0.2.1:5 without TLS would show the join token"):
        WorkerClient.connect(ClientConfig(coordinator="192.0.2.1:5", token=TOKEN), 0, "cpu")


@pytest.mark.parametrize("token", ["\u00fc" * 20, "a token with blanks in it", "a-token-with-a-line\n"])
def test_a_token_that_can_not_travel_is_refused_before_dialling(token: str):
    with pytest.raises(SettingsError, match="printable ASCII") as caught:
        WorkerClient.connect(ClientConfig(coordinator="127.0.0.1:5", token=token), 0, "cpu")
    assert token not in str(caught.value)


def test_the_token_is_not_shown():
    assert TOKEN not in repr(ClientConfig(coordinator="127.0.0.1:5", token=TOKEN))
