#!/usr/bin/env bash
# build.sh PROTO STUBS OUT: generates the messages from PROTO (STUBS stays unused) and compiles OUT/worker, with the
# crates that Debian packages. With the public registry leave out --offline and both --config.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(cd "$3" && pwd)
PROTO=$(cd "$1" && pwd)
export PROTO CARGO_HOME="$out/cargo"

# cargo writes its lock file beside the package.
mkdir -p "$out/package"
cp -rp "$here/Cargo.toml" "$here/build.rs" "$here/src" "$out/package"
cargo build --quiet --offline --manifest-path "$out/package/Cargo.toml" --target-dir "$out/target" \
  --config 'source.crates-io.replace-with="debian"' \
  --config 'source.debian.directory="/usr/share/cargo/registry"'
cp "$out/target/debug/worker" "$out/worker"
