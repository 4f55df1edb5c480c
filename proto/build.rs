//! Compiles the `.proto` files with protox, so that no `protoc` is needed.

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["master", "data", "record", "raft", "journal"].map(|name| format!("proto/{name}.proto"));
    let descriptors = protox::compile(files, ["proto"])?;
    let directory = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(directory.join("descriptors.bin"), descriptors.encode_to_vec())?;
    let mut config = tonic_prost_build::Config::new();
    // They have one of their own, which shows no credentials.
    config.skip_debug([
        ".cavern.master.v1.Mount",
        ".cavern.master.v1.UpdateMountRequest",
        ".cavern.master.v1.VendedKeys",
        ".cavern.raft.v1.JoinRequest",
        ".cavern.raft.v1.TakeKeyRequest",
    ]);
    let services = tonic_prost_build::configure().bytes(".cavern").codec_path("crate::bounded::BoundedCodec");
    services.compile_fds_with_config(descriptors, config)?;
    Ok(())
}
