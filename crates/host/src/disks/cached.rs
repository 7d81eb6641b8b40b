//! Page cache of images whose guest has left.
//!
//! The agent reads a disk that the guest uses through the page cache the same way, so that all of the disk passes
//! through the cache. While the guest runs, it is not known which cached pages the guest still needs. Once the guest
//! has left, it needs none.

use std::fs::File;
use std::path::PathBuf;
use std::thread;

use rustix::fs::{Advice, fadvise};
use tracing::info;

/// Frees the cached pages of images, in a thread of its own, because a large image takes a while. A program that still
/// uses an image reads it again; data that is not on the disk yet is not lost.
pub fn drop_page_cache(images: Vec<PathBuf>) {
    let forget = move || {
        for image in images {
            let forgotten = File::open(&image).and_then(|file| Ok(fadvise(file, 0, None, Advice::DontNeed)?));
            // Only QEMU may know the image by this path.
            if let Err(error) = forgotten {
                info!(image = %image.display(), %error, "the image stays in the page cache");
            }
        }
    };
    // Without a thread the kernel reuses the cache later.
    let _ = thread::Builder::new().name("forget-cached".to_owned()).spawn(forget);
}
