"""The page in Debian's Chromium: 1 worker and 64, light and dark, on a phone, with hostile names, by keyboard."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.coordinator import TOKEN
from tests.support.watched_run import Watched, watched_run

ROOT = Path(__file__).parents[2]
LIBRARY = Path(os.environ.get("AYNI_PLAYWRIGHT", ROOT / "build" / "dashboard" / "node_modules" / "playwright-core"))
SHOTS = ROOT / "build" / "dashboard" / "shots"
CHROMIUM = Path("/usr/bin/chromium")

HOSTILE = (
    "<img src=x onerror=hacked=true>",
    "</script><script>hacked=true</script>",
    "\"'><b onmouseover=hacked=true>bold</b>",
    "{{7*7}} ${hacked=true} `hacked=true`",
    "very-" * 20 + "long",
)
DESK: dict[str, Any] = {"width": 1280, "height": 900, "scheme": "light"}
PHONE: dict[str, Any] = {"width": 390, "height": 844, "scheme": "light"}


def look(watched: Watched, *looks: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a browser saw, by the name of each look."""
    assert shutil.which("node"), "node is not installed; on Debian: apt-get install nodejs npm"
    assert CHROMIUM.exists(), f"{CHROMIUM} is not there; on Debian: apt-get install chromium"
    assert LIBRARY.exists(), f"playwright-core is not in {LIBRARY}; make test-dashboard installs it"
    SHOTS.mkdir(parents=True, exist_ok=True)
    command = [
        "node",
        str(Path(__file__).with_name("look.mjs")),
        str(LIBRARY),
        watched.url,
        str(SHOTS),
        json.dumps(looks),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{done.stderr}\n{watched.coordinator.read_log()[-2000:]}"
    return json.loads(done.stdout)


def check(name: str, seen: dict[str, Any]) -> None:
    """What holds for every look."""
    assert seen["problems"] == [], name
    assert seen["foreign"] == [], f"{name}: the page may load nothing from elsewhere"
    assert seen["overflow"] <= 0, f"{name}: wider than the screen by {seen['overflow']} pixels"
    assert seen["clipped"] <= 0, f"{name}: the table is wider than its place by {seen['clipped']} pixels"
    assert seen["contrast"]["ratio"] >= 4.5, f"{name}: {seen['contrast']}"
    assert seen["unnamed"] == [], f"{name}: controls without a name"
    assert not any("no outline" in key for key in seen["keys"]), seen["keys"]
    assert (SHOTS / f"{name}.png").stat().st_size > 20_000


@pytest.mark.parametrize("count", [1, 64])
def test_page_shows_every_worker_light_dark_and_on_a_phone(tmp_path: Path, count: int) -> None:
    names = [f"worker-{number:02}" for number in range(count)]
    with watched_run(tmp_path, names, compute_s=0.02 if count == 1 else 0.3) as watched:
        looks = {
            f"light-{count}": DESK,
            f"dark-{count}": {**DESK, "scheme": "dark"},
            f"phone-{count}": PHONE,
        }
        seen = look(watched, *({"name": name, "workers": count, **one} for name, one in looks.items()))
    for name, what in seen.items():
        check(name, what)
        assert what["names"] == names
        assert what["state"] == "running"
        assert f"{count} of {count} worker" in what["tiers"]
        assert any("joined as" in event for event in what["events"])
        assert "Loss from step 0 to" in what["lossLabel"]
        assert sum(width > 1 for width in what["barWidths"]) >= 2 * count, "bars of the last step"
    assert seen[f"light-{count}"]["background"] != seen[f"dark-{count}"]["background"]
    keys = seen[f"light-{count}"]["keys"]
    assert keys[0] == "Skip to the workers"
    assert {"token", "Table of workers", "Drain worker worker-00"} <= set(keys)


def test_hostile_names_are_text_and_do_not_break_the_page(tmp_path: Path) -> None:
    with watched_run(tmp_path, HOSTILE, run_id="a-" + "long" * 15) as watched:
        looks = {"hostile": DESK, "hostile-phone": PHONE}
        seen = look(watched, *({"name": name, "workers": len(HOSTILE), **one} for name, one in looks.items()))
    for name, what in seen.items():
        check(name, what)
        assert what["names"] == sorted(HOSTILE, key=str.lower)
        assert what["markup"] == 0
        assert not what["hacked"]
        assert any(HOSTILE[0] in event for event in what["events"])


def test_a_worker_is_drained_with_the_keyboard_and_the_others_go_on(tmp_path: Path) -> None:
    with watched_run(tmp_path, ["ant", "bee", "cat"], min_workers=2) as watched:
        wrong = {"name": "wrong", "workers": 3, "press": ["drain bee"], "token": "no", **DESK}
        right = {"name": "drained", "workers": 3, "press": ["drain bee", "drain ant"], "token": TOKEN, **PHONE}
        seen = look(watched, wrong, right)
        assert seen["wrong"]["told"] == ["that is not the run's token"]
        assert seen["drained"]["told"][0] == "worker bee leaves after the step in progress"
        assert "worker ant can't be drained: 1 of the run's workers would be left" in seen["drained"]["told"][1]
        watched.coordinator.wait_for_log("worker bee left: it was drained")
        assert watched.drained == ["bee"]
        _until(lambda: watched.coordinator.read_log().count("2 workers, ") > 3, "steps of the two that are left")
        assert "was given up" not in watched.coordinator.read_log(), "a drain costs no attempt"
    assert seen["drained"]["names"] == ["ant", "cat"]


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        select.select([], [], [], 0.02)
