//! Changes of names as users see them.

use api::report::Report;
use api::{NameChanges, NameRecord, NameStanding, NamesGoal};
use dns::{ChangeSet, ChangeState, Goal, Progress, RrsetChange};
use proto::message::{Finding, Severity};

/// Code of the warning about names that could not be changed.
const NOT_CHANGED: &str = "names-not-changed";

/// Describes changes, with the goal that was asked for last.
pub(super) fn changes(change_set: &ChangeSet, goal: Goal) -> NameChanges {
    let is_current = change_set.goal == goal;
    let of_vm = change_set.changes.iter().filter(|change| change.state != ChangeState::NotNeeded);
    NameChanges {
        goal: match goal {
            Goal::Lowered => NamesGoal::Lowered,
            Goal::Switched => NamesGoal::Switched,
            Goal::Restored => NamesGoal::Restored,
            Goal::Undone => NamesGoal::Undone,
        },
        reached: is_current && change_set.progress() == Progress::Complete,
        old_until_unix_s: change_set.stale_until_s(),
        records: of_vm.map(|change| name_record(change, is_current.then_some(goal))).collect(),
    }
}

/// Describes the change of one name and type. The goal is absent if nothing was tried for it.
fn name_record(change: &RrsetChange, goal: Option<Goal>) -> NameRecord {
    let (mut ttl_s, mut serial) = (None, None);
    let standing = match &change.state {
        ChangeState::Pending | ChangeState::NotNeeded => NameStanding::Pending,
        ChangeState::Made { goal: reached, ttl_s: read_ttl_s, serial: read_serial, lags } => {
            (ttl_s, serial) = (Some(*read_ttl_s), Some(*read_serial));
            match lags[..] {
                _ if Some(*reached) != goal => NameStanding::Pending,
                [] => NameStanding::Made,
                _ => NameStanding::Lagging,
            }
        }
        ChangeState::Conflict { .. } | ChangeState::Failed { .. } if goal.is_none() => NameStanding::Pending,
        ChangeState::Conflict { .. } => NameStanding::LeftAlone,
        ChangeState::Failed { .. } => NameStanding::Failed,
    };
    let texts =
        |records: std::collections::BTreeSet<dns::Rdata>| records.iter().map(ToString::to_string).collect();
    NameRecord {
        name: change.owner.to_string(),
        kind: change.kind.to_string(),
        before: texts(change.before()),
        after: texts(change.after()),
        standing,
        ttl_s,
        serial,
        detail: change.state.to_string(),
    }
}

/// Puts changes into a report, with a warning if they could not be made.
pub(super) fn put_into(report: &mut Report, changes: NameChanges) {
    report.findings.retain(|finding| finding.code != NOT_CHANGED);
    report.findings.extend(failure_of(&changes));
    report.names = Some(changes);
}

fn failure_of(changes: &NameChanges) -> Option<Finding> {
    let failed: Vec<_> = changes.failed().collect();
    let first = failed.first()?;
    let what = format!(
        "{} of the VM's names could not be changed, among them {first}: {}",
        failed.len(),
        first.detail
    );
    Some(not_changed(what))
}

/// Returns the warning that names are not changed, for this reason.
pub fn not_changed(what: String) -> Finding {
    let advice = "connections that are open go on, new ones by name do not find the VM at its new place yet. What passes \
                  by itself is tried again; `whimbrel net show` on the host that the VM left has the present state";
    Finding::new(Severity::Warning, NOT_CHANGED, what, advice)
}

#[cfg(test)]
mod tests {
    use engine::handover::MigrationTerms;
    use serde_json::{Value, json};

    use super::*;

    /// Returns changes of one record each, in these states.
    fn set_of(goal: &str, states: &[Value]) -> ChangeSet {
        let change = |state: &Value| {
            json!({
                "zone": "example.org", "owner": "web.example.org", "kind": "A", "lowered_ttl_s": 5, "new_ttl_s": 300,
                "rdata_changes": [{ "before": { "A": "192.0.2.10" }, "after": { "A": "198.51.100.7" } }],
                "is_optional": true, "original": null, "may_still_apply": false, "state": state,
            })
        };
        let changes: Vec<_> = states.iter().map(change).collect();
        serde_json::from_value(json!({ "format": 1, "goal": goal, "changes": changes })).unwrap()
    }

    fn reached(goal: &str) -> Value {
        json!({ "made": { "goal": goal, "ttl_s": 5, "serial": 9, "lags": [] } })
    }

    fn conflict() -> Value {
        json!({ "conflict": { "found": { "values": [{ "A": "192.0.2.66" }], "ttl_s": 300, "alias": null } } })
    }

    fn standings(change_set: &ChangeSet, goal: Goal) -> Vec<NameStanding> {
        changes(change_set, goal).records.iter().map(|change_set| change_set.standing).collect()
    }

    #[test]
    fn states_are_those_of_the_goal_that_was_asked_for_last() {
        use NameStanding::{Failed, LeftAlone, Made, Pending};
        let failed = json!({ "failed": { "failure": "lost-answer" } });
        let states = [
            reached("switched"),
            reached("lowered"),
            conflict(),
            failed,
            json!("pending"),
            json!("not-needed"),
        ];
        let change_set = set_of("switched", &states);
        assert_eq!(standings(&change_set, Goal::Switched), [Made, Pending, LeftAlone, Failed, Pending]);
        assert_eq!(standings(&change_set, Goal::Restored), [Pending; 5]);
        let done = set_of("switched", &states[..1]);
        assert!(changes(&done, Goal::Switched).reached && !changes(&done, Goal::Restored).reached);
        let shown = &changes(&done, Goal::Switched).records[0];
        assert_eq!((shown.ttl_s, shown.serial), (Some(5), Some(9)));
        assert_eq!(shown.to_string(), "web.example.org A 192.0.2.10 → 198.51.100.7");
    }

    #[test]
    fn a_report_warns_as_long_as_names_are_not_changed() {
        let MigrationTerms { migration, source, destination, .. } = crate::testing::terms("a", "b");
        let mut report = Report::begin(migration, source, destination, api::MigrationSettings::default());
        report.findings.push(Finding::new(Severity::Info, "other", "", ""));
        let mut codes = |states: &[Value]| {
            put_into(&mut report, changes(&set_of("switched", states), Goal::Switched));
            report.findings.iter().map(|finding| finding.code.clone()).collect::<Vec<_>>()
        };
        assert_eq!(codes(&[reached("switched"), conflict()]), ["other", NOT_CHANGED]);
        assert_eq!(codes(&[conflict(), conflict()]), ["other", NOT_CHANGED]);
        assert_eq!(codes(&[reached("switched"), json!("pending")]), ["other"]);
        codes(&[conflict(), conflict()]);
        let warning = report.findings.last().unwrap();
        assert!(
            warning.what.starts_with("2 of the VM's names") && warning.what.contains("192.0.2.66"),
            "{warning:?}"
        );
    }
}
