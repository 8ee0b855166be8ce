#!/usr/bin/env bash
# build.sh PROTO STUBS OUT: compiles the stubs and the worker into OUT/worker.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
stubs=$2 out=$3

# -ffp-contract=off: a fused multiply-add rounds once where two operations round twice.
flags=(-std=c++20 -Wall -ffp-contract=off -I "$stubs")
read -ra libraries <<< "$(pkg-config --cflags --libs grpc++ protobuf libcrypto)"
objects=()
# Unoptimized, they take half the time to compile. coordinator.proto needs these; peer.proto and its service are for workers that reduce among themselves.
for source in coordinator.grpc.pb coordinator.pb tensor.pb worker.pb errors.pb; do
  objects+=("$out/$source.o")
  if ! [ "$out/$source.o" -nt "$stubs/ayni/v1/$source.cc" ]; then
    g++ "${flags[@]}" -O0 -c "$stubs/ayni/v1/$source.cc" -o "$out/$source.o"
  fi
done
g++ "${flags[@]}" -O1 "$here/worker.cc" "${objects[@]}" -o "$out/worker" "${libraries[@]}"
