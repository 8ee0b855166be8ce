"""Flags, environment, file and defaults make one configuration."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from ayni.endpoints import ClientTls
from ayni.flags import field_texts, read_command_line, read_environment
from ayni.run_config import RunConfig
from ayni.settings import SettingsError, leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    samples: int = 32
    """Samples of one step:
    the global batch, 100 % of it."""
    names: tuple[str, ...] = ()
    """Names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    listen: str
    """Where to listen."""
    lease: timedelta = timedelta(seconds=10)
    """How long a silent worker is believed alive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Service(Base):
    insecure: bool = False
    """Speak in clear."""
    options: dict[str, object] = field(default_factory=dict)
    token_file: Path | None = None
    """File with the token."""
    batch: Batch = field(default_factory=Batch)
    """How a step is cut."""
    tls: ClientTls = field(default_factory=ClientTls)
    """TLS."""


def read(*arguments: str, **environ: str) -> Service:
    return read_command_line(Service, arguments, prog="ayni", environ=environ)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as caught:
        read(*arguments, **environ)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("listen: file:1\nlease: 3s\nbatch:\n  samples: 7\n  names: [a]\n")
    return str(path)


def test_defaults() -> None:
    assert read("--listen", "x:1") == Service(listen="x:1")


def test_every_kind_of_flag() -> None:
    given = read(
        "--listen=x:1", "--lease=500ms", "--insecure", "--options={\"a\": 1}", "--token-file=t", "--batch-samples=4",
        "--batch-names=a,b", "--batch-names=c", "--tls-ca=ca.pem", "--tls-server-name=n",
    )  # fmt: skip
    assert given == Service(
        listen="x:1",
        lease=timedelta(milliseconds=500),
        insecure=True,
        options={"a": 1},
        token_file=Path("t"),
        batch=Batch(samples=4, names=("a", "b", "c")),
        tls=ClientTls(ca=Path("ca.pem"), server_name="n"),
    )


def test_a_flag_wins_over_the_environment_that_over_the_file_and_that_over_the_default(file: str) -> None:
    environ = {"AYNI_BATCH_SAMPLES": "5", "AYNI_LEASE": "4s", "AYNI_TOKEN_FILE": ""}
    given = read("--config", file, "--batch-samples=6", **environ)
    assert given == Service(
        listen="file:1", lease=timedelta(seconds=4), batch=Batch(samples=6, names=("a",)), token_file=None
    )
    assert read(**environ, AYNI_CONFIG=file).batch.samples == 5


def test_a_switch_can_be_switched_off_again() -> None:
    assert read("--listen=x", "--no-insecure", AYNI_INSECURE="true").insecure is False
    assert read("--listen=x", AYNI_INSECURE="1").insecure is True


def test_print_config_shows_each_value_and_where_it_came_from(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--config", file, "--insecure", "--print-config", AYNI_BATCH_SAMPLES="5")
    assert caught.value.code == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {words[0]: (words[2], " ".join(words[4:])) for words in lines}
    assert shown["listen"] == ('"file:1"', file)
    assert shown["insecure"] == ("true", "--insecure")
    assert shown["batch.samples"] == ("5", "AYNI_BATCH_SAMPLES")
    assert shown["token_file"] == ("null", "default")
    assert list(shown) == [leaf.path for leaf in leaves(Service)]


def test_help_is_the_text_under_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--batch-samples N Samples of one step: the global batch, 100 % of it. (default: 32)" in text
    assert "--listen TEXT Where to listen. (required)" in text
    assert "--lease DURATION How long a silent worker is believed alive. (default: 10s)" in text
    assert "--insecure, --no-insecure Speak in clear. (default: false)" in text
    assert "--token-file PATH File with the token. (default: none)" in text
    assert "--options JSON (default: none)" in text


def test_every_value_of_the_run_file_has_a_text() -> None:
    assert [leaf.path for leaf in leaves(RunConfig) if not field_texts(leaf.owner).get(leaf.name)] == []


def test_all_mistakes_are_said_with_their_origin(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(file).write_text("lisen: 1\nbatch: {samples: many}\n")
    said = refused(capsys, "--config", file, "--lease=soon", AYNI_INSECURE="maybe")
    assert said.splitlines() == [
        f"ayni: lisen is not a known name; did you mean listen? [{file}]",
        "ayni: listen is missing; it has no default",
        "ayni: lease must be a duration such as 1.5 (seconds), 500ms, 2s or 5m; found 'soon' (text) [--lease]",
        "ayni: insecure must be true or false; found 'maybe' (text) [AYNI_INSECURE]",
        f"ayni: batch.samples must be a whole number; found 'many' (text) [{file}]",
    ]


def test_other_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ayni: listen is missing; it has no default\n" in refused(capsys)
    assert "unrecognized arguments: --lisen" in refused(capsys, "--lisen=x")
    assert "unrecognized arguments: --batch-sample" in refused(capsys, "--batch-sample=3")
    missing = tmp_path / "none.yaml"
    assert refused(capsys, "--config", str(missing)) == f"ayni: can't read {missing}: No such file or directory\n"
    assert "ayni: tls: certificate is given without key; TLS needs both\n" in refused(
        capsys, "--listen=x", "--tls-certificate=c"
    )


def test_a_file_that_gives_a_section_as_nothing_can_be_completed_by_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("listen: x\nbatch:\n")
    assert read("--config", str(path), "--batch-samples=3").batch.samples == 3


def test_a_program_without_flags_is_configured_by_the_environment_and_its_file(file: str):
    read = read_environment(Service, {"AYNI_CONFIG": file, "AYNI_INSECURE": "true", "AYNI_LISTEN": "elsewhere:1"})
    assert (read.listen, read.insecure, read.batch.samples) == ("elsewhere:1", True, 7)
    with pytest.raises(SettingsError, match="AYNI_LEASE"):
        read_environment(Service, {"AYNI_LISTEN": "a:1", "AYNI_LEASE": "soon"})


def test_the_environment_is_read_without_source_texts(monkeypatch: pytest.MonkeyPatch):
    # Python 3.11 fails when two threads compile at once, and a program's workers may be threads.
    def fail(*_: object) -> None:
        raise AssertionError("compiled")

    field_texts.cache_clear()
    monkeypatch.setattr("ast.parse", fail)
    assert read_environment(Service, {"AYNI_LISTEN": "a:1"}).listen == "a:1"
