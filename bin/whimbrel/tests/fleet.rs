//! `whimbrel fleet plan` and `whimbrel fleet matrix`, with the inventory of the manual.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests, beside the tests themselves")]

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/fleet.example.json");

fn run(words: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_whimbrel"));
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that refuses its options reads nothing.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn plan(words: &[&str]) -> (i32, Value) {
    let output = run(&[&["--json", "fleet", "plan", "--inventory", EXAMPLE], words].concat(), "");
    let text = String::from_utf8(output.stdout).unwrap();
    (
        output.status.code().unwrap(),
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")),
    )
}

fn moves(plan: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let one = |one: &Value| format!("{} {}>{}", text(&one["vm"]), text(&one["from"]), text(&one["to"]));
    plan["moves"].as_array().unwrap().iter().map(one).collect()
}

#[test]
fn a_host_of_the_manual_is_emptied() {
    let (code, found) = plan(&["--drain", "alpha", "--deadline", "600"]);
    assert_eq!(code, 0, "{found}");
    // The label keeps web1 away from beta.
    assert_eq!(moves(&found), ["db alpha>beta", "web1 alpha>gamma", "app alpha>beta"]);
    assert_eq!(found["deadline"]["is_safe"], true);
    let output = run(&["fleet", "plan", "--inventory", EXAMPLE, "--drain", "alpha"], "");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("its host is to be emptied") && text.contains("3 moves in "), "{text}");
}

#[test]
fn a_refusal_is_1_and_has_a_way_out() {
    let (code, refused) = plan(&["--drain", "alpha", "--deadline", "5"]);
    assert_eq!((code, refused["kind"].as_str()), (1, Some("refused")), "{refused}");
    assert!(refused["advice"].as_str().unwrap().starts_with("allow "), "{refused}");
    let (code, refused) = plan(&["--drain", "beta"]);
    assert_eq!(code, 1);
    assert_eq!(refused["error"], "VM sums has to leave host beta: the VM is pinned");
    let (code, found) = plan(&["--drain", "beta", "--partial"]);
    assert_eq!((code, moves(&found)), (0, vec!["web2 beta>gamma".to_owned()]), "{found}");
}

#[test]
fn wrong_input_is_2() {
    let (code, refused) = plan(&["--drain", "delta"]);
    assert_eq!((code, refused["kind"].as_str()), (2, Some("bad-request")), "{refused}");
    assert_eq!(run(&["fleet", "plan", "--inventory", EXAMPLE], "").status.code(), Some(2), "no goal");
    let words = ["fleet", "plan", "--inventory", "-", "--balance"];
    let output = run(&words, r#"{"hosts": [], "host_platforms": {}, "vmz": []}"#);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("vmz") && text.contains("planning.md"), "{text}");
    assert_eq!(run(&words, r#"{"hosts": [], "host_platforms": {}}"#).status.code(), Some(0));
}

#[test]
fn the_matrix_answers_what_if() {
    let matrix = |words: &[&str]| {
        let output = run(&[&["fleet", "matrix", "--inventory", EXAMPLE], words].concat(), "");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let found = matrix(&["--vm", "db"]);
    assert!(found.starts_with("db on alpha\n  beta: yes\n  gamma: yes\n"), "{found}");
    assert!(found.contains("highest CPU model of all hosts: -cpu Haswell,+aes,enforce\n"), "{found}");
    assert!(found.ends_with("  without gamma it would be Icelake-Server\n"), "{found}");
    let found = matrix(&["--what-if", "gamma:qemu=7.2", "--what-if", "gamma:cpu=2021", "--vm", "db"]);
    assert!(found.contains("gamma: no: QEMU is 7.2, and 8.2.2 runs the VM; install"), "{found}");
    assert!(found.contains("-cpu Icelake-Server,enforce"), "{found}");
    let output = run(&["fleet", "matrix", "--inventory", EXAMPLE, "--what-if", "delta:qemu=7.2"], "");
    assert_eq!(output.status.code(), Some(2));
}
