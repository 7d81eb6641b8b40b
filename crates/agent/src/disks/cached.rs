//! What is in the host's page cache of images whose guest has left.
//!
//! A disk that the guest uses through the page cache is read so, too, and all of it passes through. While the guest runs,
//! nobody can tell what of it the guest would miss. Once it has left, nobody misses any of it.

use std::fs::File;
use std::path::PathBuf;
use std::thread;

use rustix::fs::{Advice, fadvise};
use tracing::info;

/// Gives back what the cache holds of images, in a thread of its own: of a large one that takes a while. Who uses them
/// nevertheless reads them again; nothing that is not on the disk yet is lost.
pub(crate) fn forget_cached(images: Vec<PathBuf>) {
    let forget = move || {
        for image in images {
            let forgotten = File::open(&image).and_then(|file| Ok(fadvise(file, 0, None, Advice::DontNeed)?));
            // It may have been known to QEMU alone.
            if let Err(error) = forgotten {
                info!(image = %image.display(), %error, "it stays in the page cache");
            }
        }
    };
    // Without a thread the cache is used for something else later.
    let _ = thread::Builder::new().name("forget-cached".to_owned()).spawn(forget);
}
