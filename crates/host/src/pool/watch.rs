//! Check for free space in a pool while images in it are written.
//!
//! Space that a thin pool provisions to one volume is not available to others, and a full pool stops all VMs in it.
//! Others use it, too: the guests that run in it, snapshots, other programs.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use tracing::warn;

use super::{Pool, Storage};

/// Interval between two checks.
const PAUSE: Duration = Duration::from_millis(500);

/// A thread that checks a pool periodically, until this is dropped.
#[derive(Debug)]
pub struct PoolWatch {
    /// Dropping it stops the thread.
    _stop: Sender<()>,
}

impl PoolWatch {
    /// Watches a pool of which a part must stay free; returns none if no part must. Calls `is_short` once, with the
    /// reason, as soon as no more may be written.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(
        pool: &Pool,
        is_short: impl FnOnce(String) + Send + 'static,
    ) -> std::io::Result<Option<Self>> {
        // In a volume group without a thin pool all space was allocated when the volumes were made.
        let may_run_short = match &pool.storage {
            Storage::Volumes(group) => group.thin_pool.is_some(),
            Storage::Directory { .. } => pool.keep_free_percent > 0,
        };
        if !may_run_short {
            return Ok(None);
        }
        let (stop, stopped) = mpsc::channel();
        let pool = pool.clone();
        let watch = move || {
            let mut is_warned = false;
            while stopped.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                match pool.room() {
                    Ok(room) => {
                        if let Some(reason) = pool.shortage(&room) {
                            return is_short(reason);
                        }
                    }
                    // If the check fails, the write itself fails when space runs out.
                    Err(error) if !is_warned => {
                        warn!(error, "the pool for images cannot be monitored");
                        is_warned = true;
                    }
                    Err(_) => {}
                }
            }
        };
        thread::Builder::new().name("pool".to_owned()).spawn(watch)?;
        Ok(Some(Self { _stop: stop }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::PoolFormat;

    #[test]
    fn a_pool_without_the_room_that_stays_free_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let pool = |keep_free_percent| {
            let path = folder.path().to_owned();
            Pool { storage: Storage::Directory { path, format: PoolFormat::Raw }, keep_free_percent }
        };
        let (reported, reasons) = mpsc::channel();
        let start = |percent| {
            let reported = reported.clone();
            PoolWatch::start(&pool(percent), move |reason| reported.send(reason).unwrap()).unwrap()
        };
        assert!(start(0).is_none(), "nothing is kept free of it");
        // No file system that tests run on is quite empty.
        let _watch = start(100).unwrap();
        let reason = reasons.recv_timeout(crate::testing::PATIENCE).unwrap();
        assert!(reason.starts_with("no space is left in the directory for images"), "{reason}");
    }
}
