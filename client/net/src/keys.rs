//! Keys of buckets whose mounts vend them, as workers and clients get them of the masters.

use cavern_proto::master::VendKeysRequest;
use cavern_ufs::{KeyError, KeyProvider, KeyRight, VendedKeys};
use tonic::Code;

use crate::error::NetError;
use crate::master::{MasterChannel, Stubs};

/// The masters, asked for keys of the mount at `path`: to write only where that is needed.
pub fn key_lender(master: &MasterChannel, mount_id: u32, path: &str, right: KeyRight) -> KeyProvider {
    let (master, to_write) = (master.clone(), right == KeyRight::Write);
    KeyProvider::new(&format!("a master, asked for keys of {path},"), {
        let path = path.to_owned();
        move || {
            let (master, path) = (master.clone(), path.clone());
            async move {
                let ask = |mut stubs: Stubs| async move {
                    stubs.cluster.vend_keys(VendKeysRequest { mount_id, to_write }).await
                };
                let keys = master.try_call("VendKeys", ask).await.map_err(|error| no_keys(&path, &error))?;
                Ok(VendedKeys {
                    access: keys.access_key,
                    secret: keys.secret_key,
                    session_token: keys.session_token,
                    expires_ns: keys.expires_ns,
                })
            }
        }
    })
}

fn no_keys(path: &str, error: &NetError) -> KeyError {
    let reason = format!("the masters give no keys of {path}: {error}");
    match error {
        NetError::Gone(_) => KeyError::Refused(reason),
        NetError::Master { code, .. } if is_refusal(*code) => KeyError::Refused(reason),
        _ => KeyError::Unavailable(reason),
    }
}

/// Whether a master answers so whenever it is asked.
fn is_refusal(code: Code) -> bool {
    matches!(
        code,
        Code::FailedPrecondition
            | Code::InvalidArgument
            | Code::NotFound
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::Unimplemented
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_asked_again() {
        let answered = |code| NetError::Master { code, message: "STS".to_owned() };
        let silent = NetError::MasterDeadline { call: "VendKeys", waited_ms: 5 };
        for (error, passes) in [
            (answered(Code::Unavailable), true),
            (answered(Code::ResourceExhausted), true),
            (silent, true),
            (answered(Code::PermissionDenied), false),
        ] {
            let error = no_keys("/data", &error);
            assert_eq!(matches!(error, KeyError::Unavailable(_)), passes, "{error}");
            assert!(error.to_string().contains("/data"), "{error}");
        }
    }
}
