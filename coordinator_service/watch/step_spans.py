"""One trace for each step: the step, its attempts, and under those what the workers add.  [shell]"""

from typing import TYPE_CHECKING

from ayni.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class StepSpans:
    """The spans of the step in progress; nothing where no traces are asked for."""

    def __init__(self, tracing: Tracing | None) -> None:
        """Makes spans, or with None does nothing."""
        self._tracing = tracing
        self._step: Span | None = None
        self._attempt: Span | None = None
        self._now: tuple[str, int] = ("", -1)

    def opened(self, kind: str, step: int, attempt: int, epoch: int) -> str:
        """Begins the span of an attempt, and of its step with the first one; returns the context for its workers."""
        if self._tracing is None:
            return ""
        self._end_attempt("another attempt was opened")
        if self._step is None or self._now != (kind, step):
            self._end_step("")
            self._step, self._now = self._tracing.begin(f"{kind} step", attributes={"ayni.step": step}), (kind, step)
        about = {"ayni.step": step, "ayni.attempt": attempt, "ayni.epoch": epoch}
        self._attempt = self._tracing.begin("attempt", self._tracing.traceparent(self._step), about)
        return self._tracing.traceparent(self._attempt)

    def committed(self, loss: float, num_workers: int) -> None:
        """Ends both spans."""
        if self._step is None or self._attempt is None:
            return
        self._step.set_attributes({"ayni.loss": loss, "ayni.workers": num_workers})
        self._end_attempt("")
        self._end_step("")

    def voided(self, reason: str) -> None:
        """Ends the span of an attempt that was given up."""
        self._end_attempt(reason)

    def close(self) -> None:
        """Ends what is open, and sends what was not sent. Blocks for some seconds at most."""
        self._end_attempt("the run ended")
        self._end_step("the run ended")
        if self._tracing:
            self._tracing.close()

    def _end_attempt(self, problem: str) -> None:
        span, self._attempt = self._attempt, None
        _end(span, problem)

    def _end_step(self, problem: str) -> None:
        span, self._step = self._step, None
        _end(span, problem)


def _end(span: "Span | None", problem: str) -> None:
    if span is None:
        return
    if problem:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, problem))
    span.end()
