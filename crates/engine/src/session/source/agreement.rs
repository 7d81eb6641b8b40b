//! Answer to a proposal: whether it is enough for the goals, and what it makes possible.

use proto::Epoch;
use proto::message::{Acceptance, DiskMode, ProposedDisk};

/// Post-copy, as the goals of a migration have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PostCopyRequirement {
    /// It is not used, even if it is possible.
    NotUsed,
    /// It may be used, if it is possible.
    Allowed,
    /// Without it the migration makes no sense.
    Required,
}

/// Result of an acceptance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AcceptedTerms {
    /// True if the remaining pages can be sent after the guest.
    pub can_post_copy: bool,
    /// True if the destination discards pages before the guest is stopped.
    pub can_discard: bool,
}

/// Reason for which an acceptance is not enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmetRequirement<'a> {
    /// The destination does not confirm that it receives a copy of this disk, which a user has requested.
    Disk(&'a str),
    /// Post-copy is impossible.
    PostCopy,
}

/// Decides whether the destination's acceptance is enough.
pub fn check_acceptance<'a>(
    proposed: &'a [ProposedDisk],
    acceptance: &Acceptance,
    goal: PostCopyRequirement,
) -> Result<AcceptedTerms, UnmetRequirement<'a>> {
    let is_copied = |disk: &ProposedDisk| acceptance.copied.iter().any(|copied| copied.name == disk.name);
    let left_out = |disk: &&ProposedDisk| disk.wanted == DiskMode::Copy && !is_copied(disk);
    if let Some(disk) = proposed.iter().find(left_out) {
        return Err(UnmetRequirement::Disk(&disk.name));
    }
    if goal == PostCopyRequirement::Required && !acceptance.post_copy {
        return Err(UnmetRequirement::PostCopy);
    }
    let can_post_copy = acceptance.post_copy && goal != PostCopyRequirement::NotUsed;
    Ok(AcceptedTerms { can_post_copy, can_discard: acceptance.can_discard })
}

/// Maximum distance of an epoch that a destination reports from the source's own.
const MAX_EPOCH_LEAP: u64 = 1 << 32;

/// Returns true if the source's next epoch becomes larger than `largest`, which the destination has reported: a journal
/// that was begun anew assigns epochs that other hosts have already seen. A peer cannot set any number: there must be
/// epochs left.
pub fn is_plausible_epoch(own: Epoch, largest: Epoch) -> bool {
    largest.0 <= own.0.saturating_add(MAX_EPOCH_LEAP)
}

#[cfg(test)]
mod tests {
    use proto::message::CopiedDisk;

    use super::*;

    fn proposed(name: &str, wanted: DiskMode) -> ProposedDisk {
        ProposedDisk { name: name.to_owned(), bytes: 1, allocated_bytes: 1, wanted, drop_snapshots: false }
    }

    fn acceptance(copied: &[&str], post_copy: bool) -> Acceptance {
        let copied = copied.iter().map(|name| CopiedDisk {
            name: (*name).to_owned(),
            path: String::new(),
            format: "raw".to_owned(),
            send_zeros: false,
        });
        Acceptance {
            findings: Vec::new(),
            qemu_start_us: 0,
            ram_kind: String::new(),
            qemu_version: None,
            copied: copied.collect(),
            references: false,
            templates: 0,
            codecs: Vec::new(),
            deltas: false,
            post_copy,
            can_discard: true,
            has_network: false,
            takes_frames: false,
            takes_flows: false,
            redirection: None,
        }
    }

    #[test]
    fn every_disk_that_a_user_wants_copied_is_confirmed() {
        let disks = [
            proposed("auto", DiskMode::Auto),
            proposed("shared", DiskMode::Shared),
            proposed("one", DiskMode::Copy),
            proposed("two", DiskMode::Copy),
        ];
        let check_acceptance = |copied: &[&str]| {
            check_acceptance(&disks, &acceptance(copied, false), PostCopyRequirement::NotUsed).err()
        };
        assert_eq!(check_acceptance(&["one", "two"]), None);
        assert_eq!(check_acceptance(&["auto", "two", "one"]), None);
        assert_eq!(check_acceptance(&["auto", "one"]), Some(UnmetRequirement::Disk("two")));
        assert_eq!(check_acceptance(&[]), Some(UnmetRequirement::Disk("one")));
    }

    #[test]
    fn post_copy_has_to_be_possible_where_it_is_required() {
        use PostCopyRequirement::{Allowed, NotUsed, Required};

        let check_acceptance = |is_possible, goal| {
            let agreed = check_acceptance(&[], &acceptance(&[], is_possible), goal);
            agreed.map(|agreed| agreed.can_post_copy)
        };
        assert_eq!(
            [NotUsed, Allowed, Required].map(|goal| check_acceptance(true, goal)),
            [Ok(false), Ok(true), Ok(true)]
        );
        assert_eq!([NotUsed, Allowed].map(|goal| check_acceptance(false, goal)), [Ok(false), Ok(false)]);
        assert_eq!(check_acceptance(false, Required), Err(UnmetRequirement::PostCopy));
    }

    #[test]
    fn a_peer_does_not_use_up_the_epochs() {
        let own = Epoch(7);
        for (largest, expected) in [(0, true), (8, true), (7 + (1 << 32), true), (8 + (1 << 32), false)] {
            assert_eq!(is_plausible_epoch(own, Epoch(largest)), expected, "{largest}");
        }
        assert!(!is_plausible_epoch(own, Epoch(u64::MAX)));
    }
}
