//! Errors of the keeper.

use std::io;

use crate::redirection::next_move::NotOwner;
use crate::redirection::plan::NoPlan;

/// Error of a redirection.
#[derive(Debug, thiserror::Error)]
pub enum RedirectionError {
    /// There is no plan.
    #[error("no redirection is possible")]
    Plan(#[from] NoPlan),
    /// Another host owns the guest.
    #[error(transparent)]
    NotOwner(#[from] NotOwner),
    /// A number belongs to another redirection.
    #[error("number {number} belongs to redirection {migration} on this host: choose a free one")]
    NumberInUse {
        /// The number.
        number: u32,
        /// Name of the other redirection's migration.
        migration: String,
    },
    /// A redirection is not what the caller takes it for.
    #[error("redirection {migration} has changed in the meantime: try again")]
    Changed {
        /// Name of the migration.
        migration: String,
    },
    /// The host's features cannot be read.
    #[error("it is not known what the kernel can do")]
    Features(#[source] io::Error),
    /// The kernel refused an object.
    #[error("the kernel does not make {object}")]
    Kernel {
        /// Description of the object.
        object: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// Records cannot be read or written.
    #[error("records of redirections in {directory}")]
    Records {
        /// Directory of the records.
        directory: String,
        /// The error.
        source: io::Error,
    },
    /// Objects are left in the kernel.
    #[error("{count} objects of redirection {migration} remain in the kernel, the first of them {object}")]
    Leftover {
        /// Name of the migration.
        migration: String,
        /// Number of objects.
        count: usize,
        /// One of them.
        object: String,
        /// The kernel's error for it.
        source: io::Error,
    },
}
