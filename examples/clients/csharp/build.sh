#!/usr/bin/env bash
# build.sh PROTO STUBS OUT: makes OUT/worker. STUBS is not used: Grpc.Tools generates while it builds.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
proto=$(cd "$1" && pwd) out=$(cd "$3" && pwd)

cp "$here/Worker.csproj" "$here/Worker.cs" "$out"
dotnet publish "$out/Worker.csproj" --configuration Release --output "$out/published" "-p:Proto=$proto"
ln -sf "$out/published/worker" "$out/worker"
