use std::collections::BTreeSet;
use std::path::Path;

use super::*;

/// Transitions of one name have the same result: this finds a guard that the functions forget to name.
#[test]
fn one_name_one_transition() {
    let mut seen: BTreeMap<String, TransitionRow> = BTreeMap::new();
    for transition in outcomes() {
        let first = seen.entry(transition.name()).or_insert_with(|| transition.clone());
        assert_eq!(*first, transition, "two transitions are called {}", transition.name());
    }
    assert_eq!(seen.len(), transitions().len());
    assert!(seen.len() > 100, "the table is not there");
}

/// The samples cover every state, and the functions name every one of them.
#[test]
fn every_state_is_reached_and_left() {
    let all = transitions();
    for role in [Role::Source, Role::Destination] {
        let names = |pick: fn(&TransitionRow) -> &'static str| -> BTreeSet<&str> {
            all.iter().filter(|t| t.role == role).map(pick).collect()
        };
        let from = names(|t| t.from);
        let mut to = names(|t| t.to);
        to.insert("idle");
        assert_eq!(from, to, "{role}");
    }
}

#[test]
fn fault_points_are_between_all_effects() {
    let points = fault_points();
    let names: BTreeSet<String> = points.iter().map(ToString::to_string).collect();
    assert_eq!(names.len(), points.len(), "every point has a name of its own");
    for t in transitions() {
        let count = points.iter().filter(|p| p.transition == t.name()).count();
        assert_eq!(count, if t.effects.is_empty() { 0 } else { t.effects.len() + 1 }, "{}", t.name());
    }
    println!("{} transitions, {} fault points", transitions().len(), points.len());
}

/// The journal entry is the first effect, so that a restart can find out about all other effects of a transition.
#[test]
fn a_change_of_state_is_journalled_before_anything_else() {
    for t in transitions() {
        let first = t.effects.first().copied().unwrap_or("nothing");
        if t.from == t.to {
            continue;
        }
        assert!(first.starts_with("journal"), "{} begins with {first}", t.name());
    }
}

const BEGIN: &str = "<!-- handover-table -->\n";
const END: &str = "<!-- /handover-table -->";

/// `BLESS=1` writes the table into docs/handover-table.md; without it the page has to be current.
#[test]
#[allow(clippy::disallowed_methods, reason = "a page is read, nothing is decided")]
fn the_page_has_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/handover-table.md");
    let Ok(page) = std::fs::read_to_string(&path) else {
        assert!(std::env::var_os("CI").is_none(), "docs/handover-table.md cannot be read");
        return;
    };
    let (before, rest) =
        page.split_once(BEGIN).expect("docs/handover-table.md has the mark <!-- handover-table -->");
    let (table, after) =
        rest.split_once(END).expect("docs/handover-table.md has the mark <!-- /handover-table -->");
    let fresh = format!("\n{}", table_markdown());
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{fresh}{END}{after}"))
            .expect("docs/handover-table.md is writable");
    } else {
        assert_eq!(
            table, fresh,
            "docs/handover-table.md is out of date: BLESS=1 cargo test -p whimbrel-engine --lib table"
        );
    }
}
