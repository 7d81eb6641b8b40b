//! Completeness of the manual: all findings of the pre-flight checks, and all paths of the API. An option of a
//! migration is in as many files as the manual for developers says.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

mod sources;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use qemu::restart_units::RestartTime;
use sources::{sources, without_comments};

/// Source text that precedes a finding's code, without white space.
const BEFORE: [&str; 9] = [
    "Problem::new(",
    ".problem(",
    "blocker(",
    "Severity::Blocker,",
    "Severity::Warning,",
    "Severity::Info,",
    ",Blocker,",
    ",Warning,",
    ",Info,",
];

fn codes_in(text: &str, codes: &mut BTreeSet<String>) {
    let text = text.split("#[cfg(test)]").next().unwrap();
    let text: String = text.split_whitespace().collect();
    for before in BEFORE.iter().chain(&["code:"]) {
        for after in text.split(before).skip(1) {
            let Some(code) = after.strip_prefix('"').and_then(|rest| rest.split('"').next()) else {
                continue;
            };
            let is_code =
                |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
            if !code.is_empty() && code.chars().all(is_code) {
                codes.insert(code.to_owned());
            }
        }
    }
}

fn codes_below(directory: &Path, codes: &mut BTreeSet<String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap();
        if path.is_dir() && name != "tests" {
            codes_below(&path, codes);
        } else if path.extension().is_some_and(|end| end == "rs")
            && name != "tests.rs"
            && name != "testing.rs"
        {
            codes_in(&fs::read_to_string(&path).unwrap(), codes);
        }
    }
}

#[test]
fn every_finding_stands_in_the_manual() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let manual = page("checking.md")
        + &page("hot-guests.md")
        + &page("network.md")
        + &page("dns.md")
        + &page("wan.md");
    let mut codes = BTreeSet::new();
    for name in ["net", "qemu", "dns", "store", "host", "migrate", "agent"] {
        codes_below(&crates.join(name).join("src"), &mut codes);
    }
    codes.extend(
        [RestartTime::AtOnce, RestartTime::AtBoot, RestartTime::Unknown].map(|when| when.code().to_owned()),
    );
    assert!(codes.len() > 75, "the search finds too few: {codes:?}");
    let missing: Vec<_> = codes.iter().filter(|code| !manual.contains(&format!("`{code}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn every_path_of_the_api_stands_in_the_manual() {
    let routes =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../api/src/routes.rs")).unwrap();
    let page = page("api.md");
    let paths: BTreeSet<_> = routes
        .split('"')
        .filter(|text| text.starts_with("/v1/") || text.starts_with("{migration}"))
        .collect();
    assert!(paths.len() > 12, "the search finds too few: {paths:?}");
    let migration = "/v1/migrations/{vm}/{epoch}";
    let missing: Vec<_> =
        paths.iter().filter(|path| !page.contains(&path.replace("{migration}", migration))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn every_path_of_the_controller_stands_in_the_manual() {
    let routes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../api/src/fleet/routes.rs");
    let routes = fs::read_to_string(routes).unwrap();
    let page = page("controller.md");
    let paths: BTreeSet<_> =
        routes.split('"').filter(|text| text.starts_with("/v1/") || *text == "/metrics").collect();
    assert!(paths.len() > 12, "the search finds too few: {paths:?}");
    let missing: Vec<_> = paths.iter().filter(|path| !page.contains(&format!("{path}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Returns the names that a source gives to threads, those that are made from a value up to it.
fn thread_names(text: &str) -> Vec<String> {
    let name = |after: &str| {
        let named = after.trim_start().strip_prefix(".name(")?;
        let literal = named.strip_prefix("format!(").unwrap_or(named).strip_prefix('"')?;
        literal.split(['"', '{']).next().map(str::to_owned)
    };
    text.split("thread::Builder::new()").skip(1).filter_map(name).collect()
}

#[test]
fn every_thread_of_an_agent_stands_in_the_architecture() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let page = fs::read_to_string(docs.join("architecture.md")).unwrap();
    let threads = page.split_once("\n## Threads\n").unwrap().1.split("\n## ").next().unwrap();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let names: BTreeSet<_> = sources(crates)
        .iter()
        .filter(|path| !is_test(path.strip_prefix(crates).unwrap()))
        .flat_map(|path| {
            thread_names(fs::read_to_string(path).unwrap().split("#[cfg(test)]").next().unwrap())
        })
        .collect();
    assert!(names.len() > 40, "the search finds too few: {names:?}");
    let listed: BTreeSet<&str> = threads.split('`').skip(1).step_by(2).collect();
    let is_listed = |name: &&String| {
        listed.iter().any(|word| *word == **name || name.ends_with('-') && word.starts_with(name.as_str()))
    };
    let missing: Vec<_> = names.iter().filter(|name| !is_listed(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

fn is_test(path: &Path) -> bool {
    path.iter().any(|part| part == "tests" || part == "tests.rs" || part == "testing.rs")
}

/// The example of docs/hacking.md.
#[test]
fn an_option_is_in_four_files() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let roots = ["crates", "bin", "docs"].map(|root| workspace.join(root));
    let mut files: Vec<_> = roots[..2].iter().flat_map(|root| sources(root)).collect();
    files.retain(|path| !is_test(path.strip_prefix(&workspace).unwrap()));
    files.push(roots[2].join("agent.example.toml"));
    files.extend(fs::read_dir(roots[2].join("operations")).unwrap().map(|entry| entry.unwrap().path()));
    let names = |path: &&PathBuf| {
        let text = fs::read_to_string(path).unwrap();
        without_comments(&text).replace('-', "_").contains("hybrid_passes")
    };
    let found: BTreeSet<_> =
        files.iter().filter(names).map(|path| path.strip_prefix(&workspace).unwrap()).collect();
    let listed: BTreeSet<_> = [
        "crates/api/src/options.rs",
        "crates/migrate/src/source/payload.rs",
        "docs/agent.example.toml",
        "docs/operations/migrating.md",
    ]
    .map(Path::new)
    .into();
    assert_eq!(found, listed);
}

fn page(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations").join(name))
        .unwrap()
}
