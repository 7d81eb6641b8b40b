//! Decisions of a migration, repeated by the program: a report in, the comparison out.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Returns the program's output, without an agent.
fn result(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_whimbrel")).args(words).output().unwrap()
}

#[track_caller]
fn expect(result: &Output, code: i32, stdout: &[&str], stderr: &[&str]) {
    assert_eq!(result.status.code(), Some(code), "{result:?}");
    for (text, words) in [(&result.stdout, stdout), (&result.stderr, stderr)] {
        let text = String::from_utf8_lossy(text);
        assert!(words.iter().all(|word| text.contains(word)), "{words:?} are not all in\n{text}");
    }
}

/// From an actual migration.
#[test]
fn decisions_are_made_again_from_a_report() {
    let folder = tempfile::tempdir().unwrap();
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/engine/tests/traces/hybrid.json");
    let text = std::fs::read_to_string(traces).unwrap();
    let replayed = |text: &str, words: &[&str]| {
        let file = folder.path().join("report.json");
        std::fs::write(&file, text).unwrap();
        result(&[words, &["replay", file.to_str().unwrap()]].concat())
    };
    expect(&replayed(&text, &[]), 0, &["stop (hybrid): ", "push: ", " decisions are the same"], &[]);

    let mut other: Value = serde_json::from_str(&text).unwrap();
    let push = &mut other["other_traces"]["push"];
    push["left_out"] = 7.into();
    push["entries"][1]["decision"]["pages"] = 1.into();
    let as_text = replayed(&other.to_string(), &[]);
    expect(
        &as_text,
        1,
        &["push: ", "; 7 more were not recorded", "  decision 2: was NextPart { pages: 1,", ", now "],
        &[],
    );
    let as_json = replayed(&other.to_string(), &["--json"]);
    let policies: Value = serde_json::from_slice(&as_json.stdout).unwrap();
    let push = policies.as_array().unwrap().iter().find(|one| one["policy"] == "push").unwrap();
    assert_eq!(
        (as_json.status.code(), &push["differences"][0]["decision"], &push["left_out"]),
        (Some(1), &2.into(), &7.into())
    );

    expect(&replayed(r#"{ "schema": "whimbrel.report/2" }"#, &[]), 2, &[], &["has no traces"]);
    let later = replayed(r#"{ "schema": "whimbrel.report/3", "traces": 1 }"#, &[]);
    expect(&later, 2, &[], &["has schema \"whimbrel.report/3\"", "replay it with the version that wrote it"]);
    expect(&replayed("text", &[]), 2, &[], &["contains no report"]);
    expect(&result(&["replay", "/no/such/file"]), 2, &[], &["cannot read /no/such/file"]);
}
