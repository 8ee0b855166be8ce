"""python -m worker_agent.portable.probe ENGINE: tries one engine and prints what it found as a line of JSON.  [shell]

A program of its own, so that a driver that crashes or hangs takes nothing along, and so that a process which ends up
elsewhere never has an engine loaded. It trains a small network for one step on the engine and on the CPU (forward,
backward, update) and compares.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from worker_agent.portable.engines import Finding
from worker_agent.portable.opening import EngineAbsent, OpenEngine, open_engine

_ROWS, _INPUTS, _INNER, _CLASSES = 48, 64, 96, 32
ALLOW_SOFTWARE = "--allow-software"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    finding = probe(given[0], allow_software=ALLOW_SOFTWARE in given[1:])
    print(json.dumps(asdict(finding)), flush=True)
    return 0


def probe(engine: str, *, allow_software: bool) -> Finding:
    """Opens an engine and compares one step with the CPU; a software device is only named where it is not allowed."""
    began = time.monotonic()
    try:
        opened = open_engine(engine, min_flops=0)
    except EngineAbsent as absent:
        return Finding(engine=engine, refusal=str(absent))
    finding = Finding(
        engine=engine,
        device_name=opened.device_name,
        software=opened.software,
        bfloat16=opened.bfloat16,
        memory_bytes=opened.memory_bytes,
    )
    if opened.software and not allow_software:
        return finding
    try:
        error = _compare(opened)
    except Exception as problem:
        text = " ".join(str(problem).split())[:300]
        return replace(finding, refusal=f"training a small network on it failed: {type(problem).__name__}: {text}")
    if opened.products and not opened.products():
        return replace(finding, refusal="no matrix product of the probe has run on the GPU")
    return replace(finding, error=error, fallbacks=opened.fallbacks(), seconds=time.monotonic() - began)


def _compare(opened: OpenEngine) -> float:
    """Returns the largest error of loss, gradients and updated parameters, relative to each one's largest element."""
    expected = _one_step(torch.device("cpu"), nullcontext())
    found = _one_step(opened.device, opened.context())
    errors = [(own - other).abs().max() / other.abs().max() for own, other in zip(found, expected, strict=True)]
    # Tensor.max passes NaN on, where Python's max depends on the order.
    return float(torch.stack(errors).max())


def _one_step(device: torch.device, context: AbstractContextManager[object]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(
        nn.Linear(_INPUTS, _INNER), nn.LayerNorm(_INNER), nn.GELU(), nn.Linear(_INNER, _CLASSES, bias=False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    inputs = torch.randn(_ROWS, _INPUTS, generator=generator)
    targets = torch.randint(_CLASSES, (_ROWS,), generator=generator)
    model.to(device)
    # With torch's usual epsilon the first update is near +-lr whatever the gradient, and only its sign would count.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01)
    with context:
        loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [tensor.detach().cpu() for tensor in (loss, *gradients, *model.parameters())]


if __name__ == "__main__":
    sys.exit(main())
