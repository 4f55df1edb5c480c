//! Looks that end in time, whatever hangs.

use std::time::Duration;

use super::finding::{Check, Finding};

/// For each look at this host.
const PATIENCE: Duration = Duration::from_secs(8);

/// What a look that blocks gives. One that hangs is left behind: this command ends without it.
pub async fn aside<T: Send + 'static>(what: &str, look: impl FnOnce() -> T + Send + 'static) -> Result<T, Finding> {
    let looked = in_time(what, PATIENCE, tokio::task::spawn_blocking(look)).await?;
    looked.map_err(|panicked| unfinished(what, &panicked.to_string()))
}

/// What a look gives, or that it took too long.
pub async fn in_time<T>(what: &str, patience: Duration, look: impl Future<Output = T>) -> Result<T, Finding> {
    let late = |_| unfinished(what, &format!("no answer within {} s", patience.as_secs()));
    tokio::time::timeout(patience, look).await.map_err(late)
}

fn unfinished(what: &str, cause: &str) -> Finding {
    Finding::error(
        Check::Unfinished,
        format!("{what} could not be looked at: {cause}"),
        "processes wait for it as this command did",
        "see what hangs: the lookup of names (`getent hosts`), or a disk, a network file system or a mount (`dmesg`, \
         and `ps` for processes in state D)",
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[tokio::test]
    async fn a_look_that_hangs_or_breaks_is_a_finding() {
        let hung = in_time("the disk", Duration::from_millis(10), std::future::pending::<()>()).await.unwrap_err();
        let broken = aside::<()>("the disk", || panic!("it breaks")).await.unwrap_err();
        for finding in [hung, broken] {
            assert_eq!((finding.level, finding.check), (Level::Error, Check::Unfinished));
            assert!(finding.what.contains("the disk") && !finding.todo.is_empty(), "{finding:?}");
        }
        assert_eq!(aside("the disk", || 7).await, Ok(7));
    }
}
