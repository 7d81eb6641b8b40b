//! Which version of the protocol two agents speak.

use std::fmt;

/// The versions that a program speaks: all from the oldest to the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
}

impl Versions {
    /// What this program speaks.
    pub const OURS: Self = Self { oldest: crate::OLDEST_VERSION, newest: crate::NEWEST_VERSION };

    /// The newest version that both speak, if there is one.
    pub fn agree(self, other: Self) -> Option<u16> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest && newest >= other.oldest).then_some(newest)
    }

    /// Whether a version is one of these.
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
