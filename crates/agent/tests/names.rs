//! Checks that no two types of a crate share a name, and that no function has one too long to read: a name that means
//! two things has to be read with its path. Checks how doc comments begin.
//!
//! Reads the sources; tests and other programs of a crate do not count for types.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use sources::{sources, without_comments};

/// Returns the types that a text declares. Of aliases only those count that other modules use.
fn types(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let code = without_comments(text);
    let declared = code.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| word.starts_with("pub") || *word == "in");
        let mut keyword = words.next()?;
        // `pub(in crate::a)` is two words.
        if keyword.starts_with("crate::") || keyword.starts_with("super::") {
            keyword = words.next()?;
        }
        let is_type = ["struct", "enum", "trait", "union"].contains(&keyword);
        let name = words.next().filter(|_| is_type || (keyword == "type" && line.starts_with("pub")))?;
        let end = name.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(name.len());
        name.starts_with(char::is_uppercase).then(|| name[..end].to_owned())
    });
    declared.collect()
}

/// Returns the names that several types of a crate have.
fn shared(source: &Path) -> BTreeSet<String> {
    let mut counts = BTreeMap::<String, u32>::new();
    for path in sources(source) {
        let inside = path.strip_prefix(source).unwrap();
        let is_other = |part: &str| ["tests", "tests.rs", "testing.rs", "bin"].contains(&part);
        if inside.iter().any(|part| is_other(&part.to_string_lossy())) {
            continue;
        }
        for name in types(&fs::read_to_string(&path).unwrap()) {
            *counts.entry(name).or_default() += 1;
        }
    }
    counts.into_iter().filter(|(_, count)| *count > 1).map(|(name, _)| name).collect()
}

#[test]
fn no_two_types_of_a_crate_share_a_name() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let crates = fs::read_dir(workspace.join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let others = ["lab", "bin/whimbrel", "bin/whimbrel-guest"].map(|name| workspace.join(name));
    let mut found = BTreeSet::new();
    for path in crates.chain(others) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        found.extend(shared(&path.join("src")).into_iter().map(|shared| (name.clone(), shared)));
    }
    assert!(found.is_empty(), "several types of a crate have these names: {found:?}");
}

#[test]
fn names_of_functions_have_at_most_60_characters() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = ["crates", "bin", "lab", "guest", "examples", "benches"].map(|name| workspace.join(name));
    let mut found = BTreeSet::new();
    for path in folders.iter().flat_map(|folder| sources(folder)) {
        let text = fs::read_to_string(&path).unwrap();
        let names = text.lines().filter_map(|line| line.trim_start().strip_prefix("fn ")?.split('(').next());
        found.extend(names.filter(|name| name.len() > 60).map(str::to_owned));
    }
    assert!(found.is_empty(), "these names are too long: {found:?}");
}

/// Words with which no doc comment begins, because it then describes around its subject: it begins with a noun phrase or
/// a verb.
const EVASIVE: [&str; 13] = [
    "What", "Whatever", "How", "Whether", "Who", "Which", "So many", "So few", "Of", "As", "Where", "Says",
    "Tells",
];

/// Returns the first lines of doc comments that begin with one of these words.
fn evasive(text: &str) -> Vec<&str> {
    let kind = |line: &str| ["///", "//!"].into_iter().find(|kind| line.trim_start().starts_with(*kind));
    let before = std::iter::once("").chain(text.lines());
    let first = text.lines().zip(before).filter(|(line, before)| kind(line) != kind(before));
    let is_evasive = |line: &&str| {
        let comment = line.trim_start().trim_start_matches(['/', '!']).trim_start();
        let begins = |word: &&str| comment.strip_prefix(*word).is_some_and(|rest| rest.starts_with(' '));
        kind(line).is_some() && EVASIVE.iter().any(begins)
    };
    first.map(|(line, _)| line).filter(is_evasive).collect()
}

#[test]
fn doc_comments_begin_with_their_subject() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = ["crates", "bin", "lab", "guest", "examples", "benches"].map(|name| workspace.join(name));
    let mut found = BTreeSet::new();
    for path in folders.iter().flat_map(|folder| sources(folder)) {
        let text = fs::read_to_string(&path).unwrap();
        found.extend(evasive(&text).into_iter().map(|line| format!("{}: {}", path.display(), line.trim())));
    }
    assert!(found.is_empty(), "these do not name their subject: {found:#?}");
}

#[test]
fn only_first_lines_of_doc_comments_are_evasive() {
    let text = [
        "//! How it works.",
        "",
        "/// Number of pages.",
        "/// Of these, some are zeros.",
        "///",
        "/// What else.",
        "fn pages() {",
        "    // What is this?",
        "}",
        "/// Offset.",
        "fn offset() {}",
        "    /// Of the pages.",
        "    field: u64,",
    ];
    let text = text.join("\n");
    assert_eq!(evasive(&text), ["//! How it works.", "    /// Of the pages."]);
}

#[test]
fn types_of_all_kinds_are_found() {
    let text = "
pub struct Pair<A>(A);
pub(crate) enum Kind {
    Struct,
}
pub(in crate::source) trait Walk {
    type Step;
}
// struct Comment;
pub(super) type Steps = Vec<u8>;
type Short = Steps;
fn local() {
    struct Local {
        field: u8,
    }
}
#[cfg(test)]
mod tests {
    struct Fake;
}
";
    assert_eq!(types(text), ["Pair", "Kind", "Walk", "Steps", "Local"]);
}
