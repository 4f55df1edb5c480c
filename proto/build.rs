//! Compiles the `.proto` files with protox, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["proto/master.proto", "proto/data.proto", "proto/record.proto"];
    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure().bytes(".cavern").compile_fds(descriptors)?;
    Ok(())
}
