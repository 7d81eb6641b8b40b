//! Check for free space in a pool for the images of disks.

use block::thin::{ThinPool, Usage};
use proto::message::{Finding, Severity};

use super::{Pool, Storage};

/// Free and used space of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PoolSpace {
    usage: Usage,
    /// State of the thin pool, if it is one.
    thin: Option<ThinPool>,
}

impl Pool {
    /// Returns the present usage.
    ///
    /// # Errors
    /// When it cannot be used, with all its causes.
    pub(super) fn room(&self) -> Result<PoolSpace, String> {
        match &self.storage {
            Storage::Directory { path, .. } => {
                let system = rustix::fs::statvfs(path).map_err(|error| error.to_string())?;
                // Without the part that is kept for root.
                let used = system.f_blocks.saturating_sub(system.f_bfree);
                let total_bytes = used.saturating_add(system.f_bavail).saturating_mul(system.f_frsize);
                let usage = Usage { used_bytes: used.saturating_mul(system.f_frsize), total_bytes };
                Ok(PoolSpace { usage, thin: None })
            }
            Storage::Volumes(group) => {
                let of = |error| crate::chain(&error);
                match group.thin().map_err(of)? {
                    Some(thin) => Ok(PoolSpace { usage: thin.data, thin: Some(thin) }),
                    None => Ok(PoolSpace { usage: group.usage().map_err(of)?, thin: None }),
                }
            }
        }
    }

    /// Returns the space that migrations may use, in bytes; 0 if the pool cannot be used.
    pub fn free_space_bytes(&self) -> u64 {
        self.room().map_or(0, |room| room.usage.free_bytes(self.keep_free_percent))
    }

    /// Returns findings for images that need this much space, given the space that arriving VMs will still use.
    pub(crate) fn check_space(&self, needed_bytes: u64, reserved_bytes: u64) -> Vec<Finding> {
        match self.room() {
            Err(error) => vec![Finding::new(
                Severity::Blocker,
                "disk-pool",
                format!("{} cannot be used: {error}", self.display_name()),
                "create it, or name another one under [disks.pool]",
            )],
            Ok(room) => self.compare(&room, needed_bytes, reserved_bytes),
        }
    }

    fn compare(&self, room: &PoolSpace, needed_bytes: u64, reserved_bytes: u64) -> Vec<Finding> {
        let Some(thin) = &room.thin else {
            return self.space_finding(&room.usage, needed_bytes, reserved_bytes).into_iter().collect();
        };
        if let Some(word) = &thin.trouble {
            return vec![Finding::new(
                Severity::Blocker,
                "disk-pool",
                format!("{} cannot be written: the kernel reports {word}", self.display_name()),
                "repair the pool (lvs -o +lv_health_status, lvextend, lvconvert --repair)",
            )];
        }
        let metadata_finding = self.metadata_finding(thin, needed_bytes, reserved_bytes);
        self.space_finding(&room.usage, needed_bytes, reserved_bytes)
            .into_iter()
            .chain(metadata_finding)
            .chain(self.old_data_finding(thin))
            .collect()
    }

    fn space_finding(&self, usage: &Usage, needed_bytes: u64, reserved_bytes: u64) -> Option<Finding> {
        let free_bytes = usage.free_bytes(self.keep_free_percent);
        if needed_bytes.saturating_add(reserved_bytes) <= free_bytes {
            return None;
        }
        let promised = match reserved_bytes >> 20 {
            0 => String::new(),
            mib => format!(", {mib} of them reserved for arriving VMs"),
        };
        let what = format!(
            "the disks need {} MiB in {}, where {} are free{}{promised}",
            needed_bytes >> 20,
            self.display_name(),
            free_bytes >> 20,
            self.kept()
        );
        let advice = match self.keep_free_percent {
            0 => "free space there, or name another one under [disks.pool]",
            _ => "free space there, lower `keep_free_percent`, or name another one under [disks.pool]",
        };
        Some(Finding::new(Severity::Blocker, "disk-space", what, advice))
    }

    /// Returns a finding if a thin pool would run out of metadata: such a pool fails all of its volumes, and is hard to
    /// repair.
    fn metadata_finding(&self, thin: &ThinPool, needed_bytes: u64, reserved_bytes: u64) -> Option<Finding> {
        let metadata_bytes = thin.metadata_needed_bytes(needed_bytes.saturating_add(reserved_bytes));
        let free_bytes = thin.metadata.free_bytes(self.keep_free_percent);
        if metadata_bytes <= free_bytes {
            return None;
        }
        let what = format!(
            "the disks may need {} KiB of metadata in {}, where {} are free{}",
            metadata_bytes >> 10,
            self.display_name(),
            free_bytes >> 10,
            self.kept()
        );
        let advice = "give the pool more metadata (lvextend --poolmetadatasize), or name another one under [disks.pool]";
        Some(Finding::new(Severity::Blocker, "disk-space", what, advice))
    }

    fn old_data_finding(&self, thin: &ThinPool) -> Option<Finding> {
        if thin.zeroes_blocks {
            return None;
        }
        let what = format!(
            "{} does not zero the blocks that it provisions: parts of the disk that the guest never wrote \
             may show old data of another volume",
            self.display_name()
        );
        let advice = "enable zeroing (lvchange --zero y)";
        Some(Finding::new(Severity::Warning, "disk-pool-old-data", what, advice))
    }

    /// Describes the part that stays free, for a sentence about free space.
    fn kept(&self) -> String {
        match self.keep_free_percent {
            0 => String::new(),
            percent => format!(" in addition to the {percent} % that stay free"),
        }
    }

    /// Returns the reason for which nothing more may be written to the pool, if there is one.
    pub(super) fn shortage(&self, room: &PoolSpace) -> Option<String> {
        let is_short = |usage: &Usage| usage.is_below_reserve(self.keep_free_percent);
        let percent = self.keep_free_percent;
        let short = |what: &str, usage: &Usage| {
            format!("{what}{}: {usage} are in use, and {percent} % must stay free", self.display_name())
        };
        let thin = room.thin.as_ref();
        if let Some(word) = thin.and_then(|thin| thin.trouble.as_ref()) {
            return Some(format!("{} cannot be written: the kernel reports {word}", self.display_name()));
        }
        if is_short(&room.usage) {
            return Some(short("no space is left in ", &room.usage));
        }
        let metadata = thin.map(|thin| &thin.metadata).filter(|usage| is_short(usage))?;
        Some(short("no space is left for metadata in ", metadata))
    }
}

#[cfg(test)]
mod tests {
    use block::volume::VolumeGroup;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn pool() -> Pool {
        let group = VolumeGroup { name: "vg0".to_owned(), thin_pool: Some("thin".to_owned()) };
        Pool { storage: Storage::Volumes(group), keep_free_percent: 10 }
    }

    fn room(used_mib: u64, metadata_used_mib: u64) -> PoolSpace {
        let usage = |used, total| Usage { used_bytes: used * MIB, total_bytes: total * MIB };
        let thin = ThinPool {
            data: usage(used_mib, 1000),
            metadata: usage(metadata_used_mib, 10),
            block_bytes: 64 << 10,
            zeroes_blocks: true,
            trouble: None,
        };
        PoolSpace { usage: thin.data, thin: Some(thin) }
    }

    fn codes(room: &PoolSpace, needed_mib: u64, owed_mib: u64) -> Vec<String> {
        let found = pool().compare(room, needed_mib * MIB, owed_mib * MIB);
        found.into_iter().map(|finding| finding.code).collect()
    }

    #[test]
    fn a_margin_is_left_and_promises_are_kept() {
        assert_eq!(codes(&room(500, 1), 400, 0), [""; 0]);
        assert_eq!(codes(&room(500, 1), 401, 0), ["disk-space"]);
        assert_eq!(codes(&room(500, 1), 300, 101), ["disk-space"]);
        let [one] = &pool().compare(&room(500, 1), 300 * MIB, 101 * MIB)[..] else { panic!() };
        assert_eq!(
            one.what,
            "the disks need 300 MiB in the thin pool for images, vg0/thin, where 400 are free in addition \
             to the 10 % that stay free, 101 of them reserved for arriving VMs"
        );
    }

    #[test]
    fn metadata_is_room_too() {
        assert_eq!(codes(&room(0, 8), 500, 0), [""; 0]);
        assert_eq!(codes(&room(0, 9), 1, 0), ["disk-space"]);
    }

    #[test]
    fn a_pool_in_trouble_takes_nothing() {
        let mut sick = room(0, 0);
        sick.thin.as_mut().unwrap().trouble = Some("out_of_data_space".to_owned());
        assert_eq!(codes(&sick, 1, 0), ["disk-pool"]);
        assert!(pool().shortage(&sick).unwrap().contains("out_of_data_space"));
    }

    #[test]
    fn a_pool_that_shows_old_data_is_named() {
        let mut careless = room(0, 0);
        careless.thin.as_mut().unwrap().zeroes_blocks = false;
        assert_eq!(codes(&careless, 1, 0), ["disk-pool-old-data"]);
    }

    #[test]
    fn a_margin_that_is_reached_ends_it() {
        assert_eq!(pool().shortage(&room(900, 9)), None);
        let reason = |room| pool().shortage(&room).unwrap();
        assert!(reason(room(901, 8)).starts_with("no space is left in the thin pool"));
        assert!(reason(room(0, 10)).contains("metadata"));
    }

    #[test]
    fn what_is_kept_for_root_is_no_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let storage = Storage::Directory { path, format: crate::pool::PoolFormat::Same };
        let room = Pool { storage, keep_free_percent: 0 }.room().unwrap();
        let system = rustix::fs::statvfs(folder.path()).unwrap();
        let free_bytes = system.f_bavail * system.f_frsize;
        assert!(room.usage.free_bytes(0).abs_diff(free_bytes) < 1 << 30, "{room:?}");
    }
}
