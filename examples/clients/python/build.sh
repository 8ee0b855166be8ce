#!/usr/bin/env bash
# build.sh PROTO STUBS OUT: makes OUT/worker. The Python stubs lie beside the .proto files.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
proto=$(cd "$1" && pwd)

cat > "$3/worker" << END
#!/usr/bin/env bash
PYTHONPATH='$proto' exec '${PYTHON:-python3}' '$here/worker.py' "\$@"
END
chmod +x "$3/worker"
