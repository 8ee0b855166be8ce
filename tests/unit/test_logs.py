"""Log lines: both formats, context, secrets, changes."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from ayni import logs
from ayni.logs import ChangeLogger, log_context, register_secret

logger = logging.getLogger("ayni.test")
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def configured(monkeypatch: pytest.MonkeyPatch, log_format: str, level: str = "INFO") -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    logs.configure(log_format, level)
    return stream


def test_text_is_one_line_for_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = configured(monkeypatch, "text")
    with log_context(step=3, worker="box 1"):
        logger.info("joined as %s\nand more", "w1")
    assert re.fullmatch(TIME + r" INFO ayni\.test: joined as w1\\nand more worker=box 1 step=3\n", stream.getvalue())


def test_json_is_one_object_for_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = configured(monkeypatch, "json")
    with log_context(epoch=2, bucket="q"):
        logger.warning("lost %d", 4)
    event = json.loads(stream.getvalue())
    assert re.fullmatch(TIME, event.pop("time"))
    assert event == {"level": "WARNING", "logger": "ayni.test", "message": "lost 4", "epoch": 2, "bucket": "q"}


def test_context_is_nested_and_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = configured(monkeypatch, "json")
    with log_context(step=1, rank=0):
        with log_context(step=2):
            logger.info("inner")
        with pytest.raises(RuntimeError), log_context(step=9):
            raise RuntimeError
        logger.info("outer")
    logger.info("none")
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(event.get("rank"), event.get("step")) for event in events] == [(0, 2), (0, 1), (None, None)]


def test_context_of_one_task_is_not_that_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = configured(monkeypatch, "json")

    async def work(step: int, mine: asyncio.Event, other: asyncio.Event) -> None:
        with log_context(step=step):
            mine.set()
            await other.wait()
            logger.info("%d", step)

    async def both() -> None:
        one, two = asyncio.Event(), asyncio.Event()
        await asyncio.gather(work(1, one, two), work(2, two, one))

    asyncio.run(both())
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sorted((event["message"], event["step"]) for event in events) == [("1", 1), ("2", 2)]


def test_unknown_context_is_refused() -> None:
    with pytest.raises(
        ValueError, match="log context iteration is unknown; known: run, worker, rank, epoch, step, bucket"
    ):
        log_context(iteration=3).__enter__()


@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_secrets_never_leave(monkeypatch: pytest.MonkeyPatch, log_format: str) -> None:
    stream = configured(monkeypatch, log_format)
    secret = 'a-"hidden"-word-42'
    register_secret(secret)
    register_secret("")
    with log_context(worker=secret):
        try:
            raise ValueError(f"bad {secret}")
        except ValueError:
            logger.exception("token %s and %s", secret, {"authorization": f"Bearer {secret}"})
    written = stream.getvalue()
    assert "word-42" not in written
    assert written.count("[redacted]") == 4
    assert "ValueError: bad [redacted]" in written


def test_a_traceback_follows_in_text_and_is_a_field_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for log_format in logs.FORMATS:
        stream = configured(monkeypatch, log_format)
        try:
            raise KeyError("k")
        except KeyError:
            logger.exception("failed")
        text = json.loads(stream.getvalue())["traceback"] if log_format == "json" else stream.getvalue()
        assert text.rstrip().endswith("KeyError: 'k'")


def test_configuring_again_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    configured(monkeypatch, "text")
    stream = configured(monkeypatch, "json", "warning")
    logger.info("not this")
    logger.warning("this")
    assert json.loads(stream.getvalue())["message"] == "this"


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_other_packages_are_heard_from_warnings_on(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    stream = configured(monkeypatch, "json", level)
    for name in ("torch", "torch._subclasses", "torch._subclasses.fake_tensor"):
        # Once imported, torch keeps some of its loggers to itself.
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    for name in ("torch._subclasses.fake_tensor", "asyncio", "transformers", "peft.tuners"):
        other = logging.getLogger(name)
        other.info("FakeTensor cache stats")
        other.warning("watch out")
    for name in ("ayni.x", "my_task", "worker_agent", "__main__"):
        logging.getLogger(name).info("ours")
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages == ["watch out"] * 4 + ["ours"] * 4


def test_a_notice_is_an_event_where_machines_read(monkeypatch: pytest.MonkeyPatch) -> None:
    configured(monkeypatch, "text")
    assert logs.notice("stopping", "ayni.process") == "stopping"
    configured(monkeypatch, "json")
    event = json.loads(logs.notice("stopping", "ayni.process"))
    assert (event["level"], event["logger"], event["message"]) == ("WARNING", "ayni.process", "stopping")


def test_wrong_words_are_refused() -> None:
    with pytest.raises(ValueError, match="log_format is 'xml'; it must be one of text, json"):
        logs.configure("xml")
    with pytest.raises(ValueError, match="log_level is 'loud'; it must be one of DEBUG, INFO, WARNING, ERROR"):
        logs.configure("text", "loud")


def test_only_changes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    changes = ChangeLogger(logger, logging.WARNING)
    said = [("wait", "1 of 2"), ("wait", "1 of 2"), ("other", "1 of 2"), ("wait", "2 of 2"), ("wait", "1 of 2")]
    assert [changes.log_if_changed(key, sentence) for key, sentence in said] == [True, False, True, True, True]
    changes.forget("wait")
    changes.forget("never said")
    assert changes.log_if_changed("wait", "1 of 2")
    assert [record.getMessage() for record in caplog.records] == ["1 of 2", "1 of 2", "2 of 2", "1 of 2", "1 of 2"]
    assert {record.funcName for record in caplog.records} != {"log_if_changed"}


def test_fields_of_the_process_are_for_machines_and_what_an_event_says_itself_counts_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = configured(monkeypatch, "json")
    logs.set_fields(run="toy", epoch=2, step=7)
    logger.info("worker %s left", "bee", extra={"worker": "bee"})
    with log_context(step=8):
        logger.info("more")
    first, second = stream.getvalue().splitlines()
    stream = configured(monkeypatch, "text")
    logs.set_fields(run="toy")
    logger.info("read by people")
    logs.configure()
    third = stream.getvalue().strip()
    said = {"run": "toy", "worker": "bee", "epoch": 2, "step": 7}
    assert json.loads(first).items() >= said.items()
    assert json.loads(second)["step"] == 8
    assert third.endswith("INFO ayni.test: read by people")
