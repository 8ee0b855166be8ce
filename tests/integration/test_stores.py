"""What every store of a run's state promises, asked of the embedded one and of a real PostgreSQL server."""

import contextlib
import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator_service.config import RunFile
from coordinator_service.store import RunStore, open_store
from tests.support import postgres, store_writer
from tests.support.commits import commit
from tests.support.coordinator import environment
from tests.support.store_writer import epoch, open_place

_names = (f"stores_{number}" for number in itertools.count())


@pytest.fixture(params=["sqlite", "postgres"])
def place(request, tmp_path: Path) -> Iterator[str]:
    """Where runs are kept."""
    if request.param == "sqlite":
        yield str(tmp_path / "state")
        return
    with postgres.server().database(next(_names)) as url:
        yield url


@contextlib.contextmanager
def opened(place: str, run_id: str = "toy", **options: bool) -> Iterator[RunStore]:
    with contextlib.closing(open_place(place, run_id, **options)) as store:
        yield store


@contextlib.contextmanager
def writer(place: str, *arguments: str) -> Iterator[subprocess.Popen]:
    """A process that commits; killed in the end."""
    process = subprocess.Popen(
        [sys.executable, str(Path(store_writer.__file__)), place, "toy", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout
    try:
        assert process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_new_store_holds_nothing(place):
    with opened(place) as store:
        assert (store.commits(), store.superseded(), store.facts()) == ([], [], {})
        assert (store.last_commit(), store.last_epoch(), store.committed_steps()) == (None, None, 0)


def test_what_was_written_is_there_after_opening_again(place):
    records = [
        commit(0, loss=None, gradient_norm=math.inf, skipped=(1, 2), left_behind=("bee", "n\u00e4me")),
        commit(1, loss=0.1 + 0.2, gradient_norm=5e-324, best=True),
        commit(2, kind="evaluate"),
        commit(2),
    ]
    with opened(place) as store:
        for record in records:
            store.commit(record)
        store.begin_epoch(epoch(3))
        store.begin_epoch(epoch(7))
        store.set_facts({"config": "{}", "number": "1"})
        store.set_facts({"number": "2"})
    with opened(place) as store:
        assert store.commits() == records
        assert (store.last_commit(), store.committed_steps()) == (records[-1], 3)
        assert store.last_epoch() == epoch(7)
        assert store.facts() == {"config": "{}", "number": "2"}


def test_the_newest_commit_may_be_an_evaluation(place):
    with opened(place) as store:
        store.commit(commit(0))
        store.commit(commit(1, kind="evaluate"))
        assert store.last_commit() == commit(1, kind="evaluate")
        assert store.committed_steps() == 1


def test_a_step_is_committed_once(place):
    with opened(place) as store:
        store.commit(commit(0))
        with pytest.raises(OSError, match="can't be written"):
            store.commit(commit(0, attempt=1))
        assert store.commits() == [commit(0)]


def test_an_epoch_begins_once(place):
    with opened(place) as store:
        store.begin_epoch(epoch(1))
        with pytest.raises(OSError, match="can't be written"):
            store.begin_epoch(replace(epoch(1), worker_names=("cat",)))
        assert store.last_epoch() == epoch(1)


def test_the_same_once_more_does_nothing(place):
    """The answer to the first call may have been lost with the connection."""
    with opened(place) as store:
        for _ in range(2):
            store.commit(commit(0))
            store.begin_epoch(epoch(1))
        assert store.commits() == [commit(0)]
        store.rewind(0, "back")
        store.commit(commit(0))
        assert (len(store.commits()), len(store.superseded())) == (1, 1)


def test_what_is_closed_stays_closed(place):
    with opened(place) as store:
        pass
    with pytest.raises(OSError, match="closed"):
        store.commit(commit(0))


def test_going_back_keeps_what_it_takes_back(place):
    made = [commit(0), commit(1, kind="evaluate"), commit(1), commit(2, kind="evaluate"), commit(2)]
    with opened(place) as store:
        for record in made:
            store.commit(record)
        store.rewind(1, "nobody has the newest state")
        assert (store.commits(), store.superseded()) == (made[:2], made[2:])
        assert (store.committed_steps(), store.last_commit()) == (1, made[1])
        again = commit(1, attempt=4)
        store.commit(again)
        assert store.commits() == [*made[:2], again]
        store.rewind(0, "again")
    with opened(place) as store:
        assert store.commits() == []
        assert store.superseded() == [*made, again]


def test_a_fresh_start_throws_away_this_run_alone(place):
    with opened(place, "other") as other:
        other.commit(commit(0))
        with opened(place) as store:
            store.commit(commit(0))
            store.begin_epoch(epoch(1))
            store.set_facts({"a": "b"})
        with opened(place, fresh=True) as store:
            assert (store.commits(), store.last_epoch(), store.facts()) == ([], None, {})
        assert len(other.commits()) == 1


@pytest.mark.parametrize("fresh", [False, True])
def test_a_second_coordinator_is_refused(place, fresh):
    with opened(place) as store:
        store.commit(commit(0))
        with pytest.raises(OSError, match=r"another coordinator has .* open; stop it, or give this run another run_id"):
            open_place(place, "toy", fresh=fresh)
        assert store.committed_steps() == 1
    with opened(place) as store:
        assert store.committed_steps() == 1


def test_one_may_read_while_a_coordinator_writes(place):
    with opened(place) as store:
        store.commit(commit(0))
        with opened(place, to_read=True) as reader:
            assert reader.commits() == [commit(0)]
            store.commit(commit(1))
            assert reader.committed_steps() == 2
            with pytest.raises(OSError, match="can't be written"):
                reader.commit(commit(2))
        assert store.committed_steps() == 2


def test_a_run_that_is_not_there_can_not_be_read(place):
    with opened(place):
        pass
    with pytest.raises(FileNotFoundError):
        open_place(place, "another", to_read=True)


def test_closing_twice_is_no_error(place):
    store = open_place(place, "toy")
    store.close()
    store.close()


def test_threads_may_use_it_at_once(place):
    """Commits leave the event loop; epochs and facts are written on it at the same time."""
    with opened(place) as store:
        problems = []

        def work(first: int) -> None:
            try:
                for step in range(first, first + 20):
                    store.commit(commit(step))
                    store.begin_epoch(epoch(step + 1))
                    store.set_facts({str(step): "there", "last": str(step)})
                    assert str(step) in store.facts()
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(20 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert problems == []
        assert sorted(record.step for record in store.commits()) == list(range(80))
        assert len(store.facts()) == 81


def test_what_was_promised_survives_a_kill(place):
    """Three times in the middle of commits. The next process begins where the promises end, or one step later."""
    promised = 0
    for kill_after in (1, 7, 20):
        with writer(place) as process:
            assert process.stdout
            said = [int(process.stdout.readline()) for _ in range(kill_after)]
            process.kill()
            said += [int(line) for line in process.stdout.read().splitlines()]
        assert said == list(range(said[0], said[0] + len(said)))
        with opened(place) as store:
            assert store.commits() == [commit(step) for step in range(store.committed_steps())]
            last = store.last_epoch()
            assert last
            assert said[-1] + 1 <= store.committed_steps() <= said[-1] + 2
            assert said[-1] + 1 <= last.number <= said[-1] + 2
            assert said[0] == promised
            # What an epoch promised without its step is not begun twice.
            if last.number == store.committed_steps() + 1:
                store.commit(commit(store.committed_steps()))
            promised = store.committed_steps()


def test_the_run_file_says_where_the_state_is(place, tmp_path):
    where = {"database": place} if "://" in place else {"state_dir": Path(place)}
    with contextlib.closing(open_store(RunFile(run_id="toy", **where))) as store:
        store.commit(commit(0))
        assert "toy" in store.path
        assert postgres.PASSWORD not in store.path
    with opened(place, to_read=True) as store:
        assert store.commits() == [commit(0)]
    with contextlib.closing(open_store(RunFile(run_id="toy", fresh=True, **where))) as store:
        assert store.commits() == []
