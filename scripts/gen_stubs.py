"""Generates stubs of the contract for another language into build/stubs/LANGUAGE.

Usage: `python scripts/gen_stubs.py go`. The templates are proto/buf.gen.LANGUAGE.yaml;
buf runs plugins that this machine has and fetches nothing. Stubs of other languages are never committed.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What each tool is for is its language's template; here is where it comes from.
GO = "apt-get install protoc-gen-go protoc-gen-go-grpc"
PROTOC = "apt-get install protobuf-compiler"
PLUGINS = "apt-get install protobuf-compiler-grpc"
TOOLS = {
    "go": {"protoc-gen-go": GO, "protoc-gen-go-grpc": GO},
    "cpp": {"protoc": PROTOC, "grpc_cpp_plugin": PLUGINS},
    "java": {"protoc": PROTOC, "grpc_java_plugin": "apt-get install protobuf-compiler-grpc-java-plugin"},
    "typescript": {"protoc-gen-es": "npm install @bufbuild/protoc-gen-es"},
    "ts-proto": {"protoc-gen-ts_proto": "npm install ts-proto"},
    "ruby": {"protoc": PROTOC, "grpc_ruby_plugin": PLUGINS},
    "rust": {
        "protoc-gen-prost": "cargo install protoc-gen-prost",
        "protoc-gen-tonic": "cargo install protoc-gen-tonic",
    },
    "csharp": {"protoc": PROTOC},
}
# Where a plugin is not to be had everywhere: what its template adds is made where it is on PATH.
SERVICES = {"csharp": "grpc_csharp_plugin"}
BUILD_MAKES_SERVICES = "A .NET project makes its own, with the package Grpc.Tools; see examples/clients/csharp."


def search_path() -> str:
    """Returns PATH, with this interpreter's and npm's local programs before it."""
    folders = [str(Path(sys.executable).parent), str(ROOT / "node_modules" / ".bin"), os.environ.get("PATH", "")]
    return os.pathsep.join(folders)


def missing_tools(language: str, path: str) -> list[str]:
    """Returns a line for each tool that the language's template needs and the path lacks."""
    tools = {"buf": f"{sys.executable} -m pip install buf-bin", **TOOLS[language]}
    return [f"{name}: {source}" for name, source in tools.items() if shutil.which(name, path=path) is None]


def generate(language: str, path: str) -> Path:
    """Runs buf with the language's template and returns the folder of the stubs.

    Raises:
        subprocess.CalledProcessError: a plugin failed; it has printed why.
    """
    out = ROOT / "build" / "stubs" / language
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    names = [language, f"{language}-services"] if has_services(language, path) else [language]
    for template in (ROOT / "proto" / f"buf.gen.{name}.yaml" for name in names):
        command = [str(shutil.which("buf", path=path)), "generate", "--template", str(template), "--output", str(out)]
        subprocess.run([*command, str(ROOT / "proto")], check=True, env={**os.environ, "PATH": path})
    return out


def has_services(language: str, path: str) -> bool:
    """Tells whether the services have a template of their own, and its plugin is there."""
    return language in SERVICES and shutil.which(SERVICES[language], path=path) is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Generates one language's stubs; returns the exit code."""
    parser = argparse.ArgumentParser(description="Generate stubs of the contract for another language.")
    parser.add_argument("language", nargs="?", choices=sorted(TOOLS), help="language of the stubs")
    language = parser.parse_args(argv).language
    if language is None:
        print(f"Say which language: make stubs LANG={'|'.join(TOOLS)}", file=sys.stderr)
        return 2
    path = search_path()
    if missing := missing_tools(language, path):
        print(f"Stubs for {language} need tools that are not on PATH. Install:", *missing, sep="\n  ", file=sys.stderr)
        return 1
    try:
        out = generate(language, path)
    except subprocess.CalledProcessError:
        print(f"buf could not generate the {language} stubs; its message is above", file=sys.stderr)
        return 1
    if language in SERVICES and not has_services(language, path):
        print(f"Messages only: {SERVICES[language]} is not on PATH. {BUILD_MAKES_SERVICES}", file=sys.stderr)
    print(*sorted(str(file.relative_to(ROOT)) for file in out.rglob("*") if file.is_file()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
