//! Checks the dependencies between crates: only those that are listed here are allowed.
//!
//! The program that users get is checked as a whole: the crates that `cargo build -p whimbrel` links are listed in
//! `arrows/linked.txt`. Where one is added on purpose, `BLESS=1` writes the list anew, and its difference shows what
//! came along.

#![allow(clippy::expect_used, clippy::panic, reason = "a test may fail")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use cargo_metadata::{DependencyKind, MetadataCommand};

/// Each crate of the workspace with the crates of the workspace that it may use. From the bottom up.
const ALLOWED: &[(&str, &[&str])] = &[
    ("whimbrel-proto", &[]),
    ("whimbrel-tracee", &[]),
    ("whimbrel-qemu", &[]),
    ("whimbrel-block", &[]),
    ("whimbrel-guest", &[]),
    ("whimbrel-fleet", &[]),
    ("whimbrel-net", &["whimbrel-tracee"]),
    ("whimbrel-dns", &["whimbrel-proto"]),
    ("whimbrel-engine", &["whimbrel-proto"]),
    ("whimbrel-link", &["whimbrel-proto", "whimbrel-tracee"]),
    ("whimbrel-memory", &["whimbrel-proto", "whimbrel-link", "whimbrel-tracee"]),
    ("whimbrel-api", &["whimbrel-proto", "whimbrel-engine"]),
    (
        "whimbrel-store",
        &["whimbrel-proto", "whimbrel-engine", "whimbrel-link", "whimbrel-tracee", "whimbrel-api"],
    ),
    (
        "whimbrel-host",
        &[
            "whimbrel-proto",
            "whimbrel-engine",
            "whimbrel-tracee",
            "whimbrel-qemu",
            "whimbrel-link",
            "whimbrel-memory",
            "whimbrel-block",
            "whimbrel-net",
            "whimbrel-dns",
            "whimbrel-api",
            "whimbrel-store",
        ],
    ),
    (
        "whimbrel-migrate",
        &[
            "whimbrel-proto",
            "whimbrel-engine",
            "whimbrel-tracee",
            "whimbrel-qemu",
            "whimbrel-link",
            "whimbrel-memory",
            "whimbrel-block",
            "whimbrel-net",
            "whimbrel-dns",
            "whimbrel-guest",
            "whimbrel-api",
            "whimbrel-store",
            "whimbrel-host",
        ],
    ),
    (
        "whimbrel-agent",
        &[
            "whimbrel-proto",
            "whimbrel-engine",
            "whimbrel-tracee",
            "whimbrel-qemu",
            "whimbrel-link",
            "whimbrel-api",
            "whimbrel-store",
            "whimbrel-host",
            "whimbrel-migrate",
        ],
    ),
    (
        "whimbrel-controller",
        &["whimbrel-proto", "whimbrel-engine", "whimbrel-link", "whimbrel-api", "whimbrel-store"],
    ),
    ("whimbrel-guest-load", &[]),
    ("whimbrel-nas", &[]),
    // What only tests and benchmarks need is not linked into the program that users install.
    (
        "whimbrel",
        &[
            "whimbrel-agent",
            "whimbrel-api",
            "whimbrel-controller",
            "whimbrel-engine",
            "whimbrel-fleet",
            "whimbrel-host",
            "whimbrel-tracee",
        ],
    ),
    ("whimbrel-lab", &["whimbrel-api", "whimbrel-fleet", "whimbrel-guest-load"]),
    (
        "whimbrel-examples",
        &["whimbrel-proto", "whimbrel-engine", "whimbrel-link", "whimbrel-memory", "whimbrel-tracee"],
    ),
];

/// The only crates that may open connections to peers, serve HTTP, or hold a database.
const KEPT_IN: &[(&str, &[&str])] = &[
    ("rustls", &["whimbrel-link"]),
    ("axum", &["whimbrel-api"]),
    ("rusqlite", &["whimbrel-store"]),
    ("tokio", &["whimbrel-api", "whimbrel"]),
    ("linux-raw-sys", &["whimbrel-tracee"]),
];

fn normal_dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let metadata = MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo metadata");
    metadata
        .packages
        .iter()
        .map(|package| {
            let dependencies = package
                .dependencies
                .iter()
                .filter(|dependency| dependency.kind == DependencyKind::Normal)
                .map(|dependency| dependency.name.clone())
                .collect();
            (package.name.to_string(), dependencies)
        })
        .collect()
}

#[test]
fn crates_use_only_what_is_below_them() {
    let allowed: BTreeMap<_, BTreeSet<_>> =
        ALLOWED.iter().map(|(name, below)| (*name, below.iter().copied().collect())).collect();
    for (name, dependencies) in normal_dependencies() {
        let below =
            allowed.get(name.as_str()).unwrap_or_else(|| panic!("{name} is not in the list of crates"));
        for dependency in dependencies.iter().filter(|dependency| allowed.contains_key(dependency.as_str())) {
            assert!(below.contains(dependency.as_str()), "{name} must not depend on {dependency}");
        }
    }
}

#[test]
fn the_world_is_reached_through_few_crates() {
    for (name, dependencies) in normal_dependencies() {
        for (library, users) in KEPT_IN {
            assert!(
                !dependencies.contains(*library) || users.contains(&name.as_str()),
                "{name} must not use {library}: that is for {users:?}"
            );
        }
    }
}

/// Features that only builds for tests and benchmarks have.
const NOT_FOR_USERS: [&str; 2] = ["comparison", "testing"];

/// Returns what a build of the program for users links: names of crates, and their features.
fn linked() -> BTreeMap<String, String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--package", "whimbrel", "--edges", "normal,no-proc-macro"])
        .args(["--target", "x86_64-unknown-linux-gnu", "--prefix", "none", "--no-dedupe"])
        .args(["--format", "{p}\t{f}"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .output()
        .expect("cargo tree");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).expect("text");
    let crates = lines.lines().map(|line| {
        let (package, features) = line.split_once('\t').expect("a package and its features");
        let name = package.split(' ').next().expect("a name");
        (name.to_owned(), features.to_owned())
    });
    crates.collect()
}

#[test]
fn users_get_nothing_that_only_tests_use() {
    let linked = linked();
    for (name, features) in linked.iter().filter(|(name, _)| name.starts_with("whimbrel")) {
        let wrong = features.split(',').find(|feature| NOT_FOR_USERS.contains(feature));
        assert_eq!(wrong, None, "{name} has a feature of tests");
    }
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/arrows/linked.txt");
    if std::env::var_os("BLESS").is_some() {
        let names: Vec<_> = linked.keys().map(String::as_str).collect();
        std::fs::write(&list, names.join("\n") + "\n").expect("write the list");
    }
    let listed = std::fs::read_to_string(&list).expect("the list");
    let listed: BTreeSet<_> = listed.lines().collect();
    let linked: BTreeSet<_> = linked.keys().map(String::as_str).collect();
    let added: Vec<_> = linked.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&linked).collect();
    assert!(
        added.is_empty() && gone.is_empty(),
        "the program links other crates than tests/arrows/linked.txt lists: added {added:?}, gone {gone:?}"
    );
}
