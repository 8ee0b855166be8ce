//! Generates the messages. PROTO is the folder with ayni/v1/*.proto; protoc must be on the PATH.

fn main() -> std::io::Result<()> {
    let folder = std::env::var("PROTO").expect("PROTO must name the folder with ayni/v1/*.proto");
    println!("cargo:rerun-if-env-changed=PROTO");
    println!("cargo:rerun-if-changed={folder}/ayni/v1");
    prost_build::compile_protos(&[format!("{folder}/ayni/v1/coordinator.proto")], &[folder])
}
