//! The ownership registry of the two sides of a migration.

use proto::HostId;
use proto::message::{Finding, Proposal, Severity};

/// Returns a finding if the hosts do not use the same ownership registry, or none, or if the registry is on one of the
/// two hosts.
pub(super) fn finding(here: Option<&HostId>, from: &HostId, proposal: &Proposal) -> Option<Finding> {
    let what = match (here, &proposal.witness) {
        (Some(_), None) => "this host has an ownership registry, the source has none".to_owned(),
        (None, Some(_)) => "the source has an ownership registry, this host has none".to_owned(),
        (Some(ours), Some(theirs)) if ours != theirs => {
            format!("the source uses the ownership registry at {theirs}, this host the one at {ours}")
        }
        (Some(witness), _) if witness == from => "the ownership registry is on the source".to_owned(),
        // The epoch is read when the migration begins.
        (Some(_), Some(_)) if proposal.registry_epoch.is_none() && !proposal.check_only => {
            "the source names an ownership registry, but not the record that it read there".to_owned()
        }
        (None, None) if proposal.registry_epoch.is_some() => {
            "the source has read an ownership registry, but does not name it".to_owned()
        }
        _ => return None,
    };
    Some(Finding {
        severity: Severity::Blocker,
        code: "registry-unusable".to_owned(),
        what,
        advice: "name the same witness, a third host, under [registry] on both".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use proto::Epoch;

    use super::*;
    use crate::testing::{host, proposal};

    #[test]
    fn both_sides_ask_the_same_registry() {
        let finding_text =
            |here: Option<&str>, theirs: Option<&str>, epoch: Option<u64>, check_only: bool| {
                let proposal = Proposal {
                    witness: theirs.map(host),
                    registry_epoch: epoch.map(Epoch),
                    check_only,
                    ..proposal()
                };
                let found = finding(here.map(host).as_ref(), &host("a"), &proposal);
                found.map(|found| found.what).unwrap_or_default()
            };
        assert_eq!(finding_text(None, None, None, false), "");
        assert_eq!(finding_text(Some("w"), Some("w"), Some(3), false), "");
        assert_eq!(finding_text(Some("w"), Some("w"), None, true), "");
        for check_only in [false, true] {
            let epoch = (!check_only).then_some(3);
            let two = finding_text(Some("w"), Some("v"), epoch, check_only);
            assert!(two.contains("at v") && two.contains("at w"), "{two}");
            assert!(finding_text(Some("w"), None, None, check_only).contains("the source has none"));
            assert!(finding_text(None, Some("w"), epoch, check_only).contains("this host has none"));
            assert!(finding_text(Some("a"), Some("a"), epoch, check_only).contains("on the source"));
        }
        assert!(finding_text(Some("w"), Some("w"), None, false).contains("not the record that it read"));
        assert!(finding_text(None, None, Some(3), false).contains("does not name it"));
    }
}
