#!/usr/bin/env bash
# build.sh PROTO STUBS OUT: makes OUT/worker. There is nothing to compile.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(cd "$3" && pwd)

rm -rf "$out/stubs"
cp -r "$2" "$out/stubs"
ruby -I "$out/stubs" -wc "$here/worker.rb"

cat > "$out/worker" << END
#!/usr/bin/env bash
exec ruby -I '$out/stubs' '$here/worker.rb' "\$@"
END
chmod +x "$out/worker"
