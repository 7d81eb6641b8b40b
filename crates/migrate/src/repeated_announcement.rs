//! Announcements of a VM's address by the device that stands in for it in a network, repeated as those of the VM itself.

use std::thread;

use net::announcement::PAUSES;
use net::redirection::{RedirectionKeeper, RedirectionRecord};
use tracing::warn;

/// Repeats the announcement of a redirection that has just become active. Returns at once.
pub(crate) fn of_redirection(keeper: RedirectionKeeper, record: RedirectionRecord) {
    let repeat = move || {
        for pause in PAUSES {
            thread::sleep(pause);
            keeper.announce(&record);
        }
    };
    if let Err(error) = thread::Builder::new().name("announce".to_owned()).spawn(repeat) {
        warn!(%error, "the announcement of the VM's address is not repeated");
    }
}
