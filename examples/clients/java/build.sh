#!/usr/bin/env bash
# Usage: build.sh PROTO STUBS OUT. Compiles the worker and the stubs against Debian's jars.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
stubs=$2 out=$(cd "$3" && pwd)

classpath="$out/classes"
for jar in grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub protobuf \
  netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-common netty-handler netty-resolver \
  netty-transport perfmark-api guava geronimo-annotation-1.3-spec; do
  classpath="$classpath:/usr/share/java/$jar.jar"
done
mkdir -p "$out/classes"
find "$stubs" -name '*.java' > "$out/sources"
javac -nowarn -proc:none -d "$out/classes" -cp "$classpath" "$here/Worker.java" @"$out/sources"

cat > "$out/worker" <<END
#!/usr/bin/env bash
exec java -cp "$classpath" Worker "\$@"
END
chmod +x "$out/worker"
