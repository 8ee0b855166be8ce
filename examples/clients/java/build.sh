#!/usr/bin/env bash
# build.sh PROTO STUBS OUT: makes OUT/worker of the worker and the stubs that it uses, against Debian's jars.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
stubs=$2 out=$(cd "$3" && pwd)

classpath="$out/classes"
for jar in grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub protobuf \
  netty-buffer netty-codec netty-codec-http netty-codec-http2 netty-common netty-handler netty-resolver \
  netty-transport perfmark-api guava geronimo-annotation-1.3-spec; do
  classpath="$classpath:/usr/share/java/$jar.jar"
done
rm -rf "$out/classes"
mkdir "$out/classes"
# The second compiler of the JVM costs a short run twice what it saves.
javac -J-XX:TieredStopAtLevel=1 -J-XX:+UseSerialGC -nowarn -proc:none -implicit:class \
  -d "$out/classes" -cp "$classpath" -sourcepath "$stubs" "$here/Worker.java"

cat > "$out/worker" << END
#!/usr/bin/env bash
exec java -XX:+UseSerialGC -cp '$classpath' Worker "\$@"
END
chmod +x "$out/worker"
