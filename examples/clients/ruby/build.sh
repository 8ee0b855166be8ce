#!/usr/bin/env bash
# Usage: build.sh PROTO STUBS OUT. There is nothing to compile.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
stubs=$(cd "$2" && pwd) out=$(cd "$3" && pwd)

ruby -I "$stubs" -wc "$here/worker.rb" > /dev/null

cat > "$out/worker" << END
#!/usr/bin/env bash
exec ruby -I '$stubs' '$here/worker.rb' "\$@"
END
chmod +x "$out/worker"
