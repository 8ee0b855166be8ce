"""The schema that is exported is whole: a generator needs nothing else."""

import subprocess
import sys
import tomllib

import pytest
from google.protobuf import descriptor_pb2

from ayni import export_protos
from ayni.v1 import coordinator_pb2
from tests.support.coordinator import ROOT, environment


def test_the_command_writes_the_schema_that_the_package_holds(tmp_path):
    command = [sys.executable, "-m", "ayni.export_protos", "--output-dir", str(tmp_path / "new" / "protos")]
    printed = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    sources = sorted((ROOT / "proto" / "ayni" / "v1").glob("*.proto"))
    written = [tmp_path / "new" / "protos" / "ayni" / "v1" / source.name for source in sources]
    assert printed.splitlines() == [str(path) for path in written]
    assert [path.read_bytes() for path in written] == [source.read_bytes() for source in sources]


def test_a_generator_needs_nothing_else(tmp_path):
    files = [str(path) for path in export_protos.export(tmp_path)]
    image = tmp_path / "image"
    # In a process of its own: NIXL's library can't be loaded beside the generator's protobuf.
    generator = [sys.executable, "-m", "grpc_tools.protoc", f"-I{tmp_path}", f"--descriptor_set_out={image}"]
    subprocess.run([*generator, *files], timeout=60, check=True)
    described = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes())
    exported = {file.name: [service.name for service in file.service] for file in described.file}
    assert exported["ayni/v1/coordinator.proto"] == list(coordinator_pb2.DESCRIPTOR.services_by_name)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert export_protos.main(["--output-dir", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_the_wheel_carries_the_schema():
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "v1/*.proto" in package_data["ayni"]


def test_the_output_folder_is_asked_for():
    with pytest.raises(SystemExit):
        export_protos.main([])
