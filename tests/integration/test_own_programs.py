"""Programs with loops of their own as workers of a run: the optimizer's step, the hook of DistributedDataParallel."""

import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ayni.errors import Deadline, Diverged, Halted, Incompatible, PeerLost, RunEnded, RunStarted
from ayni.settings import SettingsError
from tests.support.coordinator import ROOT, CoordinatorProcess, coordinator
from tests.support.joined_runs import (
    OWN,
    example,
    flat,
    free_port,
    joined,
    outputs,
    programs,
    settings,
    side_by_side,
    small_model,
)
from worker_agent.faults import CoordinatorLost
from worker_agent.integrations import JoinedRun, ddp_hook, join
from worker_agent.integrations.averaging import Averaging

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(2))


def loss_of(model: nn.Module, rows: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(X[rows]), Y[rows])


@pytest.fixture(scope="module")
def group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path, {**OWN, "start_workers": 2}) as server:
        yield server


@pytest.fixture
def three(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with coordinator(tmp_path, {**OWN, "start_workers": 3}) as server:
        yield server


def one_process(steps: int, batches: list[list[range]]) -> nn.Module:
    """What one process makes of all workers' samples: batches[step][rank]."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, [row for rows in batches[step] for row in rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


def test_a_loop_with_unequal_batches_is_one_process_with_all_samples(three: CoordinatorProcess):
    # Weighted by samples, clipped after the mean; every worker begins with other weights and ends with rank 0's.
    batches = [
        [range(start, start + 2), range(start + 2, start + 7), range(start + 7, start + 10)]
        for start in range(0, 60, 10)
    ]

    def work(index: int) -> nn.Module:
        model = small_model(seed=index)
        with joined(three, model, f"w{index}", bucket_elements=30) as run:
            if run.rank == 0:
                model.load_state_dict(small_model(seed=0).state_dict())
            run.vectors.share_first()
            optimizer = run.attach(torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-4))
            for step in batches:
                optimizer.zero_grad()
                loss_of(model, list(step[run.rank])).backward()
                run.average_gradients(weight=len(step[run.rank]))
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        return model

    ends = [flat(model) for model in side_by_side(work, 3)]
    assert ends[0].equal(ends[1])
    assert ends[0].equal(ends[2])
    torch.testing.assert_close(ends[0], flat(one_process(6, batches)), rtol=0, atol=2e-6)
    # The mean that is not weighted is another one, by far more than rounding.
    unweighted = torch.stack([_gradient(rows) for rows in batches[0]]).mean(0)
    assert (unweighted - _gradient([row for rows in batches[0] for row in rows])).abs().max() > 1e-3


def _gradient(rows: Any) -> torch.Tensor:
    model = small_model()
    loss_of(model, list(rows)).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def test_a_closure_makes_the_gradients_that_are_averaged(two: CoordinatorProcess):
    def work(index: int) -> nn.Module:
        model = small_model(seed=0)
        with joined(two, model, f"w{index}") as run:
            optimizer = run.attach(torch.optim.SGD(model.parameters(), lr=0.1))

            def closure() -> Any:
                optimizer.zero_grad()
                loss = loss_of(model, range(run.rank * 10, run.rank * 10 + 10))
                loss.backward()
                return loss

            for _ in range(2):
                assert optimizer.step(closure) is not None
            optimizer.step(closure=closure)
            with pytest.raises(ValueError, match="LBFGS"):
                run.attach(torch.optim.LBFGS(model.parameters()))
            with pytest.raises(ValueError, match="parameters that are not exchanged"):
                run.attach(torch.optim.SGD(small_model(seed=1).parameters()))
            with pytest.raises(ValueError, match="it must be a whole number"):
                run.average_gradients(weight=10**30)
        return model

    ends = [flat(model) for model in side_by_side(work, 2)]
    assert ends[0].equal(ends[1])
    model = small_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, range(20)).backward()
        optimizer.step()
    torch.testing.assert_close(ends[0], flat(model), rtol=0, atol=1e-6)


def test_a_step_that_is_left_out_after_the_mean_leaves_the_next_one_to_be_averaged(two: CoordinatorProcess):
    def work(index: int) -> nn.Module:
        model = small_model(seed=0)
        with joined(two, model, f"w{index}") as run:
            optimizer = run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, range(run.rank * 10 + step, run.rank * 10 + step + 5)).backward()
                if step == 1:
                    run.average_gradients()
                else:
                    optimizer.step()
        return model

    ends = [flat(model) for model in side_by_side(work, 2)]
    assert ends[0].equal(ends[1])


def test_the_attached_optimizer_averages_by_itself(two: CoordinatorProcess):
    def work(index: int) -> nn.Module:
        model = small_model(seed=0)
        with joined(two, model, f"w{index}") as run:
            optimizer = run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(3):
                optimizer.zero_grad()
                # Two backward passes before a step accumulate, as they do without a run.
                for half in (0, 5):
                    (loss_of(model, range(run.rank * 10 + half, run.rank * 10 + half + 5)) / 2).backward()
                optimizer.step()
        return model

    ends = [flat(model) for model in side_by_side(work, 2)]
    model = small_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, range(20)).backward()
        optimizer.step()
    assert ends[0].equal(ends[1])
    torch.testing.assert_close(ends[0], flat(model), rtol=0, atol=1e-6)


def ddp_of(model: nn.Module, run: JoinedRun, **options: Any) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model, **options)
    wrapped.register_comm_hook(run, ddp_hook)
    return wrapped


@pytest.mark.usefixtures("group_of_one")
def test_no_sync_accumulates_and_unused_parameters_count_as_zeros(two: CoordinatorProcess):
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, inputs: torch.Tensor, side: str) -> torch.Tensor:
            return (self.left if side == "left" else self.right)(torch.tanh(self.body(inputs)))

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

    def head_loss(model: nn.Module, rank: int, half: int) -> torch.Tensor:
        rows = range(rank * 10 + half * 5, rank * 10 + half * 5 + 5)
        return nn.functional.cross_entropy(model(X[rows], "left" if rank == 0 else "right"), Y[rows])

    torch.manual_seed(3)
    first = TwoHeads().state_dict()

    def work(index: int) -> list[torch.Tensor]:
        model = TwoHeads()
        model.load_state_dict(first)
        with joined(two, model, f"w{index}", bucket_elements=20) as run:
            wrapped = ddp_of(model, run, find_unused_parameters=True)
            with wrapped.no_sync():
                head_loss(wrapped, run.rank, 0).backward()
            head_loss(wrapped, run.rank, 1).backward()
            return gradients(model)

    one, other = side_by_side(work, 2)
    plain = TwoHeads()
    plain.load_state_dict(first)
    for rank in range(2):
        for half in range(2):
            (head_loss(plain, rank, half) / 2).backward()
    for mine, theirs, expected in zip(one, other, gradients(plain), strict=True):
        assert mine.equal(theirs)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("group_of_one")
def test_a_worker_that_is_done_leaves_and_the_others_go_on(three: CoordinatorProcess, caplog: pytest.LogCaptureFixture):
    # torch's `join` with divide_by_initial_world_size=False: the mean is over those who still have data.
    def work(index: int) -> tuple[int, list[torch.Tensor]]:
        model, seen = small_model(), []
        with joined(three, model, f"w{index}") as run:
            wrapped = ddp_of(model, run)
            for _ in range(2 if run.rank == 2 else 4):
                wrapped.zero_grad()
                loss_of(wrapped, range(run.rank * 10, run.rank * 10 + 10)).backward()
                seen.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
            return run.rank, seen

    seen = dict(side_by_side(work, 3))
    assert [len(seen[rank]) for rank in range(3)] == [4, 4, 2]
    of_three = torch.stack([_gradient(range(r * 10, r * 10 + 10)) for r in range(3)]).mean(0)
    of_two = torch.stack([_gradient(range(r * 10, r * 10 + 10)) for r in range(2)]).mean(0)
    for step in range(4):
        assert seen[0][step].equal(seen[1][step])
        torch.testing.assert_close(seen[0][step], of_three if step < 2 else of_two, rtol=0, atol=1e-6)
    assert "1 of 3 workers left or died before step 3 was committed" in caplog.text


@pytest.mark.usefixtures("group_of_one")
def test_on_loss_raise_stops_all_with_a_typed_error(two: CoordinatorProcess):
    def work(index: int) -> int:
        model = small_model()
        with joined(two, model, f"w{index}", on_loss="raise") as run:
            wrapped = ddp_of(model, run)
            loss_of(wrapped, range(5)).backward()
            if run.rank == 1:
                return run.rank
            before = flat(model)
            with pytest.raises(PeerLost, match=r'1 of 2 workers left .* on_loss="raise"'):
                loss_of(wrapped, range(5)).backward()
            assert flat(model).equal(before)
            return run.rank

    assert sorted(side_by_side(work, 2)) == [0, 1]


@pytest.mark.usefixtures("group_of_one")
def test_a_gradient_that_is_not_finite_stops_all_with_a_typed_error(two: CoordinatorProcess):
    def work(index: int) -> None:
        model = small_model()
        with joined(two, model, f"w{index}") as run:
            wrapped = ddp_of(model, run)
            factor = float("nan") if run.rank == 1 else 1.0
            with pytest.raises(Halted, match=r"not finite|NaN|nan"):
                (loss_of(wrapped, range(5)) * factor).backward()

    side_by_side(work, 2)


def test_a_program_with_more_steps_than_the_run_is_told_so(tmp_path: Path):
    with coordinator(tmp_path, {**OWN, "num_steps": 2}) as server:
        model = small_model()
        with joined(server, model, "w0") as run:
            loss_of(model, range(5)).backward()
            run.average_gradients()
            with pytest.raises(RunEnded, match="num_steps"):
                run.average_gradients()


def test_a_program_that_comes_late_is_refused_and_changes_nothing(two: CoordinatorProcess):
    begun, come = threading.Event(), threading.Event()

    def work(index: int) -> list[torch.Tensor]:
        if index == 2:
            begun.wait(60)
            with pytest.raises(RunStarted, match="all programs of a run together"):
                joined(two, small_model(), "late")
            come.set()
            return []
        model = small_model()
        seen: list[torch.Tensor] = []
        with joined(two, model, f"w{index}") as run:
            while not come.is_set() and len(seen) < 2000:
                model.zero_grad()
                loss_of(model, range(run.rank * 10, run.rank * 10 + 10)).backward()
                run.average_gradients()
                seen.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
                begun.set()
        return seen

    one, other, _ = side_by_side(work, 3)
    expected = torch.stack([_gradient(range(r * 10, r * 10 + 10)) for r in range(2)]).mean(0)
    assert come.is_set()
    for mine, theirs in zip(one, other, strict=False):  # One of them may have made a last step alone.
        assert mine.equal(theirs)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_workers_with_another_model_are_refused_at_join(two: CoordinatorProcess):
    def work(index: int) -> str:
        model = small_model() if index == 0 else nn.Linear(4, 3)
        try:
            joined(two, model, f"w{index}").close()
        except Incompatible as error:
            server.process.terminate()  # The other one waits for a second worker.
            return error.message
        except Exception:
            return ""
        return ""

    server = two
    told = [text for text in side_by_side(work, 2) if text]
    assert len(told) == 1
    assert "elements trained" in told[0]


def test_weights_that_differ_are_found_where_they_are_not_shared(two: CoordinatorProcess):
    def work(index: int) -> str:
        try:
            with joined(
                two, small_model(seed=index), f"w{index}", share_weights=False, wait=timedelta(seconds=8)
            ) as run:
                run.average_gradients()
        except (Diverged, Deadline) as error:
            return type(error).__name__
        return ""

    # One is refused; the other waits for another one, in vain.
    assert sorted(side_by_side(work, 2)) == ["Deadline", "Diverged"]


def test_weights_are_not_shared_where_they_would_be_rounded(tmp_path: Path):
    with coordinator(tmp_path, {**OWN, "wire_type": "bfloat16"}) as server:
        with pytest.raises(ValueError, match="wire_type is bfloat16, so weights would be rounded"):
            joined(server, small_model(), "w0")
        model = small_model()
        with joined(server, model, "w1", share_weights=False) as run:
            loss_of(model, range(5)).backward()
            run.average_gradients()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(gradient, _gradient(range(5)), rtol=2**-7, atol=0)


def test_a_hook_of_ours_is_registered_once(group_of_one: None, tmp_path: Path):
    with coordinator(tmp_path, OWN) as server:
        model = small_model()
        with joined(server, model, "w0") as run:
            wrapped = ddp_of(model, run)
            with pytest.raises(RuntimeError, match="register_comm_hook"):
                wrapped.register_comm_hook(run, ddp_hook)


def test_what_is_missing_or_wrong_is_said():
    model = small_model()
    with pytest.raises(SettingsError, match="AYNI_COORDINATOR is not set"):
        join(model, environ={})
    with pytest.raises(ValueError, match="on_loss is 'hope'"):
        Averaging(None, (), "hope")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"parameter 0.weight is torch.float64"):
        join(model.double(), environ={})


SEEDED = "import runpy, sys, torch; torch.manual_seed(5); sys.argv.pop(0); runpy.run_path(sys.argv[0], {}, '__main__')"


def without_ayni(script: str) -> str:
    """The example's script as it was before its marked lines."""
    lines = [line for line in script.splitlines() if not re.search(r"# ayni: [123]$|run\.close\(\)", line)]
    text = "\n".join(lines).replace("dataset, num_replicas=run.world_size, rank=run.rank", "dataset")
    return text.replace("{run.rank} of {run.live_workers}", "{dist.get_rank()}")


def test_the_example_of_ddp_is_plain_ddp_to_the_bit(two: CoordinatorProcess, tmp_path: Path):
    ours, stock = ([str(tmp_path / f"{kind}-{index}.pt") for index in range(2)] for kind in ("ours", "stock"))
    script = tmp_path / "stock.py"
    script.write_text(without_ayni((ROOT / example("ddp/train.py")).read_text()))
    assert not re.search(r"\brun\.(?!token)|join|hook", script.read_text())
    commands = [["-c", SEEDED, example("ddp/train.py"), "--save", path] for path in ours]
    commands += [["-c", SEEDED, str(script), "--save", path] for path in stock]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [{**settings(two, f"w{index}"), **alone} for index in range(2)]
    environments += [{**together, "RANK": str(rank)} for rank in range(2)]
    with programs(commands, environments) as started:
        texts = outputs(started)
    first, *others = (torch.load(path, weights_only=True) for path in ours + stock)
    for state in others:
        assert all(state[name].equal(first[name]) for name in first)
    assert all(float(text.split("epoch 1, loss ")[1].split()[0]) < 0.5 for text in texts), texts


def test_the_example_of_a_loop_learns_the_line(two: CoordinatorProcess, tmp_path: Path):
    saved = [str(tmp_path / f"{index}.pt") for index in range(2)]
    commands = [[example("own_loop/train.py"), "--save", path] for path in saved]
    with programs(commands, [settings(two, f"w{index}") for index in range(2)]) as started:
        outputs(started)
    one, other = (torch.load(path, weights_only=True) for path in saved)
    assert all(one[name].equal(other[name]) for name in one)
    torch.testing.assert_close(one["weight"], torch.tensor([[1.0, -2.0, 0.5]]), rtol=0, atol=0.2)


def test_an_optimizer_that_accelerate_prepares_averages_once_for_each_of_its_steps(tmp_path: Path):
    with coordinator(tmp_path, OWN) as server:
        model = small_model()
        with joined(server, model, "w0") as run:
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            optimizer = run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
            prepared, optimizer = accelerator.prepare(model, optimizer)
            for start in range(0, 20, 5):
                with accelerator.accumulate(prepared):
                    accelerator.backward(loss_of(prepared, range(start, start + 5)))
                    optimizer.step()
                    optimizer.zero_grad()
        log = server.read_log()
    assert "step 2 committed" in log
    assert "step 3 committed" not in log


FORKING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from worker_agent.integrations import join

model = torch.nn.Linear(3, 1)
run = join(model)
optimizer = run.attach(torch.optim.SGD(model.parameters(), lr=0.01))
for _ in range(3):
    for (rows,) in DataLoader(run.shard(TensorDataset(torch.randn(24, 3))), batch_size=4, num_workers=2):
        optimizer.zero_grad()
        model(rows).pow(2).sum().backward()
        optimizer.step()
run.close()
print("made", flush=True)
"""


def test_a_program_that_has_joined_may_fork_to_load_its_data(tmp_path: Path):
    with coordinator(tmp_path, OWN) as server, programs([["-c", FORKING]], [settings(server, "w0")]) as started:
        assert outputs(started) == ["made\n"]


WAITS = """
import logging, sys, torch
from datetime import timedelta
from worker_agent import reminders
from worker_agent.integrations import join
reminders.FIRST_S = 0.3
try:
    join(torch.nn.Linear(4, 2), wait=timedelta(seconds=2))
except Exception as error:
    print(type(error).__name__)
"""


def test_who_waits_for_one_that_could_not_join_says_so_without_any_set_up_of_logging(two: CoordinatorProcess):
    # The other one is refused before it is a member: it has no coordinator to go to.
    with pytest.raises(SettingsError, match="AYNI_COORDINATOR is not set"):
        join(small_model(), environ={"AYNI_TOKEN": "x" * 20})
    with programs([["-c", WAITS]], [settings(two, "ant")]) as started:
        [text] = outputs(started)
    assert "s now: waiting for 1 more worker (1 of 2)" in text
    assert text.endswith("Deadline\n")


def test_a_lost_coordinator_is_told_with_what_helps_a_program_of_ones_own(two: CoordinatorProcess):
    timer = threading.Timer(1.0, two.process.kill)
    timer.start()
    with pytest.raises(
        CoordinatorLost, match=r"start all of the run's programs again, and the coordinator with another"
    ):
        joined(two, small_model(), "ant")
    timer.join()
