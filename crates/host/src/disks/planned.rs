//! Disks that are to be copied, as the pre-flight check plans them.

use proto::message::CopiedDisk;
use qemu::command::NewImage;

use crate::pool::ImageLocation;

/// A disk that is to be copied.
#[derive(Clone, Debug)]
pub struct PlannedDisk {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Estimated size of its image in the pool, in bytes.
    pub(crate) needed_bytes: u64,
    /// Location of its image.
    pub(crate) location: ImageLocation,
}

impl PlannedDisk {
    /// Returns the disk for the source's acceptance message.
    pub fn copied_disk(&self) -> CopiedDisk {
        CopiedDisk {
            name: self.name.clone(),
            path: self.location.path.display().to_string(),
            format: self.location.format.as_str().to_owned(),
            send_zeros: !self.location.is_blank(),
        }
    }

    /// Returns the image for QEMU's command line.
    pub(crate) fn new_image(&self) -> NewImage {
        NewImage {
            path: self.location.path.clone(),
            format: self.location.format.as_str().to_owned(),
            cut_to_bytes: self.location.is_device().then_some(self.bytes),
            is_device: self.location.is_device(),
        }
    }
}
