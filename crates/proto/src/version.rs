//! Agreement of two agents on a version of the protocol.

use std::fmt;

/// Range of versions that a program supports, from the oldest to the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Oldest version.
    pub oldest: u16,
    /// Newest version.
    pub newest: u16,
}

impl Versions {
    /// Versions that this program supports.
    pub const OURS: Self = Self { oldest: crate::OLDEST_VERSION, newest: crate::NEWEST_VERSION };

    /// Returns the newest version that both support, if there is one.
    pub fn agree(self, other: Self) -> Option<u16> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest && newest >= other.oldest).then_some(newest)
    }

    /// Returns true if the range contains `version`.
    pub fn contains(self, version: u16) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.oldest == self.newest {
            write!(f, "version {}", self.newest)
        } else {
            write!(f, "versions {} to {}", self.oldest, self.newest)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_newest_common_version_is_chosen(a: u8, b: u8, c: u8, d: u8) {
            let ours = Versions { oldest: a.into(), newest: b.into() };
            let theirs = Versions { oldest: c.into(), newest: d.into() };
            let common = (0..=u16::from(u8::MAX)).filter(|v| ours.contains(*v) && theirs.contains(*v)).max();
            prop_assert_eq!(ours.agree(theirs), common);
            prop_assert_eq!(theirs.agree(ours), common);
        }
    }
}
