//! Who has locked something by way of this mount, as far as this host decides about that.

use std::sync::Arc;

use super::descriptions::Descriptions;
use super::local::LocalFlocks;

/// Who has locked something.
#[derive(Default)]
pub struct HandleLocks {
    pub(super) objects: LocalFlocks,
    pub(super) descriptions: Arc<Descriptions>,
}
