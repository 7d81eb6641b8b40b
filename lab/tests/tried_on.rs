//! The page of what was tried on whole machines is made from its results, and these are not too old.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use whimbrel_lab::not_tried;
use whimbrel_lab::rack::tried::{TriedOn, table};

/// The crates that touch QEMU, memory or disks.
const CRATES: [&str; 6] = ["qemu", "memory", "block", "tracee", "migrate", "host"];
/// Changes of those crates after which a result says too little.
const MOST_CHANGES: u32 = 30;

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("docs")
}

fn results() -> TriedOn {
    serde_json::from_str(&fs::read_to_string(docs().join("tried-on.json")).unwrap()).unwrap()
}

#[test]
fn the_page_has_the_results() {
    let page = fs::read_to_string(docs().join("tried-on.md")).unwrap();
    let table = table(&results());
    assert!(page.contains(table.trim()), "docs/tried-on.md lacks the results: run whimbrel-lab tried-on");
}

#[test]
fn results_are_not_too_old() {
    let git = |words: &[&str]| {
        let output = Command::new("git").arg("-C").arg(docs()).args(words).output().ok()?;
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
    };
    // A release without its history, or a part of it.
    if git(&["rev-parse", "--is-shallow-repository"]).as_deref() != Some("false") {
        return not_tried("the age of the results in docs/tried-on.md: the history is not here");
    }
    let crates = CRATES.map(|name| format!(":/crates/{name}/src"));
    let changes = |commit: &str| {
        let range = format!("{commit}..HEAD");
        let words =
            ["rev-list", "--count", &range, "--"].into_iter().chain(crates.iter().map(String::as_str));
        git(&words.collect::<Vec<_>>()).and_then(|count| count.parse::<u32>().ok())
    };
    for one in results().results {
        let subject = &one.row.subject;
        let Some(changes) = changes(&one.commit) else {
            panic!("{subject}: tried on commit {}, which is not in the history: run make rack", one.commit)
        };
        assert!(changes <= MOST_CHANGES, "{subject}: tried {changes} changes ago: run make rack");
    }
}
