//! The store alone, until SIGINT or SIGTERM: `serve ROOT [ADDRESS [ADMIN_ADDRESS]]`. For measuring it, and for trying
//! clients on it.

use cavern_dev_s3::{DevS3Config, DevS3Error};

#[tokio::main]
async fn main() -> Result<(), DevS3Error> {
    let mut arguments = std::env::args().skip(1);
    let mut config = DevS3Config::new(arguments.next().unwrap_or_else(|| "s3-root".to_owned()));
    config.listen = arguments.next().unwrap_or_else(|| "127.0.0.1:9000".to_owned());
    config.admin_listen = arguments.next();
    config.request_log = std::env::var_os("REQUEST_LOG").map(Into::into);
    cavern_dev_s3::run(config, cavern_conf::process::shutdown_on_signals()).await
}
