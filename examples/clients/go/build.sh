#!/usr/bin/env bash
# build.sh PROTO STUBS OUT: compiles the stubs and the worker into OUT/worker, with the modules that Debian packages.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
stubs=$(cd "$2" && pwd) out=$(cd "$3" && pwd)

rm -rf "$out/path/src/ayni"
mkdir -p "$out/path/src/ayni"
cp -r "$stubs/ayni/v1" "$out/path/src/ayni/v1"
cd "$out"
GO111MODULE=off GOFLAGS= GOPATH="$out/path:/usr/share/gocode" GOCACHE="$out/cache" go build -o "$out/worker" "$here/worker.go"
