//! Decisions about one change: what the records show, and which update follows. Pure.
//!
//! Each update has all records of the name and type, as they have just been read, as its prerequisite. So it replaces what
//! this agent knows, or nothing. Its records get their TTL together, because the records of one name and type have one
//! (RFC 2181, section 5.2).

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use crate::change::{Goal, OriginalRrset, RdataChange, Rrset, RrsetChange};
use crate::message::{Edit, Prerequisite, Update};
use crate::rdata::Rdata;

/// Next step, which follows from the records of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// They are as they should be.
    Done,
    /// They have to be changed.
    Update(Update),
    /// They are another client's.
    Conflict,
}

/// Reads the records before the first change: returns what is known of them, and which of the VM's records change.
/// There are none if the records are missing and may be. Returns nothing if they are not the source's.
pub(crate) fn read_original(
    change: &RrsetChange,
    observed: &Rrset,
) -> Option<(OriginalRrset, Vec<RdataChange>)> {
    if observed.alias.is_some() {
        return None;
    }
    let is_there = |rdata_change: &&RdataChange| {
        rdata_change.before.as_ref().is_none_or(|before| observed.values.contains(before))
    };
    let rdata_changes: Vec<_> = change.rdata_changes.iter().filter(is_there).cloned().collect();
    let before: BTreeSet<_> =
        rdata_changes.iter().filter_map(|rdata_change| rdata_change.before.clone()).collect();
    if before.is_empty() && !change.before().is_empty() && change.is_optional && observed.values.is_empty() {
        let original = OriginalRrset {
            others: BTreeSet::new(),
            ttl_s: change.new_ttl_s,
            lowered_at_s: None,
            switched_at_s: None,
        };
        return Some((original, Vec::new()));
    }
    let after: BTreeSet<_> =
        rdata_changes.iter().filter_map(|rdata_change| rdata_change.after.clone()).collect();
    // New records come beside no others: those are of a person who does not know of the VM.
    if before.is_empty() && (!change.before().is_empty() || !observed.values.is_empty()) {
        return None;
    }
    // Records of the destination that are there already are none of this agent's.
    if observed.values.iter().any(|value| after.contains(value) && !before.contains(value)) {
        return None;
    }
    let others = observed.values.iter().filter(|value| !before.contains(value)).cloned().collect();
    // What is seen may be low, because an earlier change has not been finished.
    let known_s = change.original_ttl_s.filter(|_| observed.ttl_s <= change.lowered_ttl_s);
    let ttl_s = if observed.values.is_empty() { change.new_ttl_s } else { known_s.unwrap_or(observed.ttl_s) };
    Some((OriginalRrset { others, ttl_s, lowered_at_s: None, switched_at_s: None }, rdata_changes))
}

/// Renews what is known of the records of others, as long as the VM's own show that the name is still its name. Where
/// the VM's records end, the others alone show it later.
pub(crate) fn refresh(change: &RrsetChange, original: &mut OriginalRrset, observed: &Rrset) {
    let (before, after) = (change.before(), change.after());
    if before.is_empty() == after.is_empty() {
        return;
    }
    let ours = if before.is_empty() { after } else { before };
    if ours.is_subset(&observed.values) {
        original.others = observed.values.difference(&ours).cloned().collect();
    }
}

/// Returns what follows from the records of a change whose originals are known.
pub(crate) fn next_step(
    change: &RrsetChange,
    original: &OriginalRrset,
    goal: Goal,
    observed: &Rrset,
) -> Step {
    if observed.alias.is_some() {
        return Step::Conflict;
    }
    let (wanted, replaced) = if goal.is_destination() {
        (change.after(), change.before())
    } else {
        (change.before(), change.after())
    };
    let ttl_s = wanted_ttl(change, original, goal, observed);
    if is_in_place(&wanted, &replaced, original, observed) {
        if observed.values.is_empty() || observed.ttl_s == ttl_s {
            return Step::Done;
        }
        return Step::Update(update(change, observed, vec![], observed.values.clone(), ttl_s));
    }
    if !is_in_place(&replaced, &wanted, original, observed) {
        return Step::Conflict;
    }
    // The records as the server has them: it may compare names with regard to case.
    let is_removed = |value: &&Rdata| replaced.contains(*value) && !wanted.contains(*value);
    let removed = observed.values.iter().filter(is_removed).cloned().collect();
    let kept = observed.values.iter().filter(|value| !is_removed(value)).cloned();
    let records = kept.chain(wanted.iter().cloned()).collect();
    Step::Update(update(change, observed, removed, records, ttl_s))
}

/// Returns true if the VM's records are those of one side, and none of the other's.
fn is_in_place(
    ours: &BTreeSet<Rdata>,
    others: &BTreeSet<Rdata>,
    original: &OriginalRrset,
    observed: &Rrset,
) -> bool {
    if ours.is_empty() {
        // Only the rest shows that the name is still what it was.
        return observed.values == original.others;
    }
    ours.is_subset(&observed.values) && others.difference(ours).all(|other| !observed.values.contains(other))
}

/// Returns the TTL that records get. One that is neither the first nor the low one is another client's, and stays.
fn wanted_ttl(change: &RrsetChange, original: &OriginalRrset, goal: Goal, observed: &Rrset) -> u32 {
    let low_s = original.ttl_s.min(change.lowered_ttl_s);
    if !observed.values.is_empty() && ![original.ttl_s, low_s].contains(&observed.ttl_s) {
        return observed.ttl_s;
    }
    if goal.is_lowered() { low_s } else { original.ttl_s }
}

fn update(
    change: &RrsetChange,
    observed: &Rrset,
    removed: Vec<Rdata>,
    records: BTreeSet<Rdata>,
    ttl_s: u32,
) -> Update {
    let owner = || change.owner.clone();
    let prerequisites = prerequisites(change, observed);
    let removed = removed.into_iter().map(|data| Edit::Remove(owner(), data));
    let added = records.into_iter().map(|data| Edit::Add(owner(), ttl_s, data));
    Update { zone: change.zone.clone(), prerequisites, edits: removed.chain(added).collect() }
}

/// Returns the prerequisites that hold as long as the records are those that were read.
pub(crate) fn prerequisites(change: &RrsetChange, observed: &Rrset) -> Vec<Prerequisite> {
    if observed.values.is_empty() {
        return vec![Prerequisite::RrsetDoesNotExist(change.owner.clone(), change.kind)];
    }
    observed.values.iter().map(|data| Prerequisite::RrsetExists(change.owner.clone(), data.clone())).collect()
}
