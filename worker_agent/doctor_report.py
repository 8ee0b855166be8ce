"""What the doctor found, as sentences and as values for machines.  [core]"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from worker_agent.portable.engines import Finding, title


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What the connection to a coordinator carries."""

    coordinator: str
    run_id: str = ""
    round_trip_s: float | None = None
    """Median time of a small call."""
    out_bytes_per_s: float | None = None
    in_bytes_per_s: float | None = None
    problem: str = ""
    """Why something is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Everything that the doctor looked at."""

    asked: str
    """Backend that was asked for: "auto", "cuda", "wgpu" or "cpu"."""
    system: str
    """Python, torch and operating system."""
    processor: str
    host_memory_bytes: int
    cuda_devices: tuple[str, ...] = ()
    no_cuda: str = ""
    """Why there is no CUDA; empty where there is."""
    engines: tuple[Finding, ...] = ()
    """Engines of backend wgpu, in the order in which they are tried."""
    refusals: tuple[str, ...] = ()
    """One for each engine; empty text for a usable one."""
    link: Link | None = None

    @property
    def portable(self) -> Finding | None:
        """The first usable engine of backend wgpu."""
        usable = (engine for engine, refusal in zip(self.engines, self.refusals, strict=True) if not refusal)
        return next(usable, None)

    @property
    def chosen(self) -> str:
        """The backend that a worker would compute on; empty for none."""
        if self.asked in ("auto", "cuda") and not self.no_cuda:
            return "cuda"
        if self.asked in ("auto", "wgpu") and self.portable:
            return "wgpu"
        return "cpu" if self.asked in ("auto", "cpu") else ""


def values(found: Findings) -> dict[str, Any]:
    """Returns the report for machines."""
    engines = [
        {**asdict(engine), "refusal": refusal, "usable": not refusal}
        for engine, refusal in zip(found.engines, found.refusals, strict=True)
    ]
    portable = found.portable if found.chosen == "wgpu" else None
    return {
        "system": found.system,
        "asked": found.asked,
        "chosen": found.chosen or None,
        "engine": portable.engine if portable else None,
        "why": _why(found),
        "backends": {
            "cuda": {"usable": not found.no_cuda, "devices": list(found.cuda_devices), "reason": found.no_cuda},
            "wgpu": {"usable": found.portable is not None, "engines": engines},
            "cpu": {"usable": True, "devices": [found.processor], "memory_bytes": found.host_memory_bytes},
        },
        "link": asdict(found.link) if found.link else None,
    }


def lines(found: Findings) -> Iterator[str]:
    """Yields the report for people."""
    yield found.system
    yield ""
    yield "What there is:"
    cuda = ", ".join(found.cuda_devices) if not found.no_cuda else f"no: {found.no_cuda}"
    yield f"  cuda           {cuda}"
    yield f"  wgpu           {'usable' if found.portable else 'no usable engine'}"
    for engine, refusal in zip(found.engines, found.refusals, strict=True):
        yield f"    {engine.engine:<12} {f'no: {refusal}' if refusal else _describe(engine)}"
    yield f"  cpu            {found.processor}, {_bytes(found.host_memory_bytes)}"
    yield ""
    yield _why(found)
    if found.link:
        yield ""
        yield from _link(found.link)


def exit_is_good(found: Findings) -> bool:
    """Returns whether a worker can compute, and a coordinator that was asked for has answered."""
    return bool(found.chosen) and not (found.link and found.link.round_trip_s is None)


def _why(found: Findings) -> str:
    chosen, portable = found.chosen, found.portable
    if not chosen:
        return f"A worker can't start here with --backend {found.asked}. Use --backend auto or cpu."
    if chosen == "cuda":
        return f"A worker computes on cuda ({found.cuda_devices[0]})."
    if chosen == "wgpu" and portable:
        before = [engine.engine for engine in found.engines[: found.engines.index(portable)]]
        why = f", because {_and(before)} can't be used" if before else ""
        software = " This is a software driver: right, but slower than backend cpu." if portable.software else ""
        return f"A worker computes on wgpu: {title(portable)}{why}.{software}"
    if found.asked == "auto":
        return "A worker computes on the cpu, because there is neither a CUDA device nor another GPU that can be used."
    return "A worker computes on the cpu, as asked for."


def _describe(engine: Finding) -> str:
    memory = f", {_bytes(engine.memory_bytes)}" if engine.memory_bytes else ""
    fallbacks = f", {engine.fallbacks} operations fell back to the CPU" if engine.fallbacks else ""
    bfloat16 = "float32 and bfloat16" if engine.bfloat16 else "float32"
    software = ", software" if engine.software else ""
    error = f"{engine.error:.0e}" if engine.error is not None else "?"
    return (
        f"{engine.device_name}{software}{memory}, {bfloat16}; a training step is within {error} of the CPU's "
        f"(tried in {engine.seconds:.1f} s){fallbacks}"
    )


def _link(link: Link) -> Iterator[str]:
    if link.round_trip_s is None:
        yield f"Coordinator at {link.coordinator}: {link.problem}"
        return
    yield f"Coordinator at {link.coordinator}, run {link.run_id}:"
    yield f"  a call and its answer take {link.round_trip_s * 1e3:.2f} ms"
    if link.out_bytes_per_s is None or link.in_bytes_per_s is None:
        yield f"  rates are not known: {link.problem}"
        return
    for what, rate in (("out", link.out_bytes_per_s), ("in", link.in_bytes_per_s)):
        yield f"  {what:<4} {rate / 1e6:8.1f} MB/s: 100 MB of gradients take {100e6 / rate:.1f} s"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _bytes(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"


def as_json_values(found: Findings) -> Mapping[str, Any]:
    """Returns the report for machines, with the verdict that the exit code gives."""
    return {"ok": exit_is_good(found), **values(found)}
