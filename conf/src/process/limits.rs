use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that a process asks for where it may (as root): block files, connections and RocksDB's tables fit
/// in many times over, and it is the kernel's own ceiling (`fs.nr_open`) by default.
const WANTED: u64 = 1 << 20;

/// Raises the limit of open descriptors as far as this process may, and returns the limit that now holds.
///
/// An ordinary process reaches its hard limit, root 1,048,576 where the kernel allows it. Nothing fails: a process that
/// must do with fewer descriptors has smaller caches.
pub fn raise_descriptor_limit() -> u64 {
    let before = getrlimit(Resource::Nofile);
    let hard = before.maximum.unwrap_or(u64::MAX);
    // Raising the hard limit takes CAP_SYS_RESOURCE and stays below fs.nr_open; where it is refused, the hard limit
    // as it is will do.
    let attempts = [hard.max(WANTED), hard];
    for limit in attempts {
        let raised = Rlimit { current: Some(limit), maximum: Some(limit) };
        if before.current.is_none_or(|current| current >= limit) {
            break;
        }
        if setrlimit(Resource::Nofile, raised).is_ok() {
            break;
        }
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_reaches_the_hard_one() {
        let reached = raise_descriptor_limit();
        let now = getrlimit(Resource::Nofile);
        assert_eq!(now.current, now.maximum);
        assert_eq!(reached, now.current.unwrap_or(u64::MAX));
        assert_eq!(raise_descriptor_limit(), reached, "asking twice changes nothing");
    }
}
