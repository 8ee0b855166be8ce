"""Which tools stubs for another language ask for, and what is made where one of them is not to be had."""

import re
from pathlib import Path

import pytest
import yaml

from scripts import gen_stubs
from scripts.gen_stubs import ROOT, SERVICES, TOOLS


def program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def plugins(template: str) -> set[str]:
    """The programs that a template runs."""
    entries = yaml.safe_load((ROOT / "proto" / f"buf.gen.{template}.yaml").read_text())["plugins"]
    return {"protoc" if "protoc_builtin" in entry else entry["local"] for entry in entries}


@pytest.mark.parametrize("language", sorted(TOOLS))
def test_tools_that_are_asked_for_are_those_of_the_template(language: str):
    assert plugins(language) == set(TOOLS[language])


@pytest.mark.parametrize("language", sorted(SERVICES))
def test_what_may_be_missing_has_a_template_of_its_own(language: str, tmp_path: Path):
    assert plugins(f"{language}-services") == {SERVICES[language]}
    assert not gen_stubs.has_services(language, str(tmp_path))
    program(tmp_path, SERVICES[language])
    assert gen_stubs.has_services(language, str(tmp_path))


def test_every_template_belongs_to_a_language():
    named = {path.name.removeprefix("buf.gen.").removesuffix(".yaml") for path in (ROOT / "proto").glob("buf.gen.*")}
    assert named == {*TOOLS, *(f"{language}-services" for language in SERVICES)}


def test_languages_are_those_of_the_page_and_of_the_makefile():
    page = (ROOT / "docs" / "clients.md").read_text()
    [named] = re.findall(r"`make stubs LANG=(\S+?)` \(or (.*?)\) writes", page, re.DOTALL)
    assert {named[0], *re.findall(r"`(\S+?)`", named[1])} == set(TOOLS)
    assert f"LANG={'|'.join(TOOLS)}" in (ROOT / "Makefile").read_text()


def test_what_is_missing_is_named_with_where_to_get_it(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(gen_stubs, "search_path", lambda: str(tmp_path))
    program(tmp_path, "buf")
    assert gen_stubs.main(["ts-proto"]) == 1
    assert "protoc-gen-ts_proto: npm install ts-proto" in capsys.readouterr().err
