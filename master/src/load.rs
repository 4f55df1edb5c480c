//! Load jobs: walk a subtree, name the blocks of every file, and have the workers that own them fill them.
//!
//! A job is in the log: it goes on after a restart, from the beginning of its walk, where filling what is already filled
//! costs a worker one look into its index. Progress is kept in memory and put into the log every few seconds.

mod job;
mod run;

#[cfg(test)]
pub use run::Filled;
pub use run::{BlockFiller, Loads, PooledWorkers};
