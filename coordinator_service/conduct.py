"""What becomes of workers whose values are wrong: not finite, unusually large, or not those of the others.  [shell]"""

import logging
import math
from collections.abc import Iterable, Mapping

from ayni.errors import AyniError, Diverged, NonFinite, Quarantined, StepVoided
from ayni.step_values import Report
from coordinator_service.audit import compare_hashes, judge
from coordinator_service.config import RunFile
from coordinator_service.epochs import Epochs, Seat
from coordinator_service.leases import Lease
from coordinator_service.live import LiveStep
from coordinator_service.norms import NormHistory
from coordinator_service.progress import Progress
from coordinator_service.store_records import CommitRecord
from coordinator_service.writing import Notes

_log = logging.getLogger(__name__)

SHUT_OUT = "shut_out/"
"""Facts of the store that begin so name a worker that may not join again, and its strikes."""


class Conduct:
    """Applies the run's policies to its members."""

    def __init__(
        self, file: RunFile, epochs: Epochs, progress: Progress, notes: Notes, facts: Mapping[str, str]
    ) -> None:
        """Takes over whom an earlier process has shut out, as the store's facts say."""
        self._file = file
        self._epochs = epochs
        self._progress = progress
        self._notes = notes
        self._norms = NormHistory()
        given = {k.removeprefix(SHUT_OUT): v for k, v in facts.items() if k.startswith(SHUT_OUT)}
        epochs.core.shut_out.update({name: int(strikes) for name, strikes in given.items()})

    def remember(self, records: Iterable[CommitRecord]) -> None:
        """Counts the strikes of all commits so far: they end neither with a membership nor with a process."""
        strikes, shut_out = self._epochs.core.strikes, self._epochs.core.shut_out
        for record in records:
            strikes.update(record.skipped_of().values())
        if self._file.non_finite == "quarantine":
            late = {name: count for name, count in strikes.items() if count >= self._file.quarantine_after}
            shut_out.update({name: count for name, count in late.items() if name not in shut_out})

    def tolerates(self, error: AyniError) -> bool:
        """Returns whether the run goes on in spite of a contribution that was refused with this error."""
        return isinstance(error, NonFinite) and self._file.non_finite != "halt" and "sum of all" not in error.message

    def refuse(self, seat: Seat, error: AyniError) -> None:
        """Ends the membership of a worker that let values through which it had to find itself."""
        name, strikes = seat.member.name, self._epochs.core.strikes
        strikes[name] += 1
        if self._file.non_finite == "quarantine":
            strikes[name] = max(strikes[name], self._file.quarantine_after)
            self._shut_out(name)
        else:
            self._epochs.expel(seat.member.worker_id, error.message)

    def note_report(self, live: LiveStep, lease: Lease, report: Report) -> None:
        """Warns when a contribution's norm is far from what is usual."""
        weight = sum(stats.weight for stats in report.microbatches)
        if live.core.kind != "train" or not weight or report.square_sum <= 0:
            return
        norm = math.sqrt(report.square_sum) / weight
        if self._norms.is_outlier(norm):
            self._progress.norm_alarms += 1
            _log.warning(
                "%s: the gradient of worker %s on micro-batches [%d, %d) has norm %.3g, far above what is usual",
                live.core.label,
                lease.worker_name,
                lease.start,
                lease.stop,
                norm,
                extra={"worker": lease.worker_name},
            )

    def note_commit(self, label: str, record: CommitRecord) -> None:
        """Counts the micro-batches that were skipped, against those who computed them."""
        core, skipped = self._epochs.core, record.skipped_of()
        for microbatch, name in skipped.items():
            self._progress.skipped_microbatches += 1
            core.strikes[name] += 1
            _log.warning("%s: micro-batch %d of worker %s is not finite: skipped", label, microbatch, name)
        for name in dict.fromkeys(skipped.values()):
            is_too_many = core.strikes[name] >= self._file.quarantine_after
            if self._file.non_finite == "quarantine" and is_too_many and name not in core.shut_out:
                self._shut_out(name)

    def audit(self, live: LiveStep) -> None:
        """Compares the workers' parameter hashes.

        Raises:
            StepVoided: a minority differs; its workers follow from now on, until they have the others' state.
            Diverged: nobody knows who is right, or one that differs can't be handed the state.
        """
        hashes, names = live.core.hashes, self._names(live.core.hashes)
        verdict = judge(hashes)
        if verdict.tie:
            compare_hashes(live.core.label, {names[worker]: value for worker, value in hashes.items()})
        if not verdict.divergent:
            return
        who = ", ".join(names[worker] for worker in verdict.divergent)
        detail = f"the parameters of {who} are not those of the other {len(hashes) - len(verdict.divergent)} workers"
        self._progress.divergences += len(verdict.divergent)
        for worker_id in verdict.divergent:
            seat = self._epochs.seats.get(worker_id)
            if seat and not seat.elastic:
                raise Diverged(f"{live.core.label}: {detail}", step=live.core.label, worker=who)
            if seat:
                seat.follow(tainted=True)
        _log.error("%s: %s; they get the state of another worker", live.core.label, detail)
        raise StepVoided(
            f"{live.core.label} attempt {live.core.attempt} was given up: {detail}",
            step=live.core.step,
            attempt=live.core.attempt,
            detail=detail,
        )

    def _names(self, hashes: Mapping[int, str]) -> dict[int, str]:
        return dict(zip(hashes, self._epochs.core.names(hashes), strict=True))

    def _shut_out(self, name: str) -> None:
        strikes = self._epochs.core.strikes[name]
        self._epochs.core.shut_out[name] = strikes
        self._notes.add({SHUT_OUT + name: str(strikes)})
        sentence = f"worker {name!r} was shut out of the run: {strikes} of its micro-batches were not finite"
        _log.error("%s", sentence)
        error = Quarantined(sentence, worker_name=name, strikes=strikes)
        for seat in [seat for seat in self._epochs.seats.values() if seat.member.name == name]:
            self._epochs.expel(seat.member.worker_id, sentence, error)
