//! One master process from its configuration to its orderly end.

use cavern_conf::Config;
use cavern_conf::process::bind_tcp;
use tokio_util::sync::CancellationToken;

use crate::MasterError;

/// Binds the ports, prints the ready line, serves until `stop` is cancelled and drains.
///
/// # Errors
/// Whatever keeps the master from serving: a taken port, a data directory that cannot be used, a broken database.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), MasterError> {
    let _listener = bind_tcp(&config.master.listen, "master.listen").await?;
    stop.cancelled().await;
    Ok(())
}
