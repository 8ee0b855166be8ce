#!/usr/bin/env bash
# build.sh PROTO STUBS OUT: makes OUT/worker. STUBS is not used: the generator is one of the packages that come here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
proto=$(cd "$1" && pwd) out=$(cd "$3" && pwd)

cp "$here/package.json" "$here/tsconfig.json" "$here/worker.ts" "$out"
cd "$out"
npm install --no-audit --no-fund --loglevel=error --prefer-offline
export PATH="$out/node_modules/.bin:$PATH"
rm -rf gen
buf generate --template "$proto/buf.gen.typescript.yaml" --output gen "$proto"
tsc

cat > worker << END
#!/usr/bin/env bash
exec node '$out/build/worker.js' "\$@"
END
chmod +x worker
