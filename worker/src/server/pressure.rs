//! Writers are slowed down before disks are full.
//!
//! Blocks of fs-mode files make way only when the bucket has them, and the master drops those long before a disk is
//! full. What fills it beyond that is what the bucket lacks: it is not reached, or is written to more slowly than the
//! worker. So room is given ever more slowly, and whoever writes finds out by waiting, not by an error.

use std::time::Duration;

/// Share of the disks from which on writers are slowed down.
const FROM: f64 = 0.85;
/// Before a reservation when the disks are full. A stream reserves some megabytes at a time.
const MOST: Duration = Duration::from_millis(500);

/// The pause before room is made, where so much of the capacity is taken by blocks of fs-mode files.
pub(super) fn pause(data: u64, capacity: u64) -> Duration {
    if capacity == 0 {
        return Duration::ZERO;
    }
    let excess = ((data as f64 / capacity as f64 - FROM) / (1.0 - FROM)).clamp(0.0, 1.0);
    MOST.mul_f64(excess * excess)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fuller_the_slower() {
        let pauses = [50, 85, 90, 95, 100].map(|data| pause(data, 100));
        assert_eq!(pauses[..2], [Duration::ZERO; 2]);
        assert!(pauses.windows(2).all(|pair| pair[0] <= pair[1]), "{pauses:?}");
        assert!(pauses[2] > Duration::ZERO && pauses[2] < MOST / 5);
        assert_eq!((pauses[4], pause(0, 0), pause(1, 0)), (MOST, Duration::ZERO, Duration::ZERO));
    }
}
