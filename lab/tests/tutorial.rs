//! The tutorial, typed as it stands. Needs root, and the Debian guest.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use whimbrel_lab::CommandOutput;

/// The program that makes the hosts.
const LAB: &str = env!("CARGO_BIN_EXE_whimbrel-lab");

/// Prefix of the laboratory in the tutorial.
const PREFIX: &str = "day1";

/// Takes the laboratory down, also when the test fails in the middle.
struct Laboratory(String);

impl Drop for Laboratory {
    fn drop(&mut self) {
        let _ = Command::new(LAB)
            .args(["down", "--prefix", &self.0])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
    }
}

/// Returns the commands of the page, but for those that build what this test was built from.
fn commands(page: &str) -> String {
    let blocks = page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    blocks.filter(|block| !block.contains("cargo build")).collect()
}

#[test]
fn the_first_day_goes_as_it_is_written() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap();
    let page = fs::read_to_string(root.join("docs/tutorial.md")).unwrap();
    // A laboratory of its own, so that a user's is left alone.
    let laboratory = Laboratory(format!("d{}", std::process::id()));
    let programs = Path::new(LAB).parent().unwrap();
    let script = commands(&page)
        .replace(PREFIX, &laboratory.0)
        .replace("$PWD/target/release", &programs.display().to_string());
    assert!(script.contains("migrate"), "{script}");
    let mut bash = Command::new("bash");
    bash.args(["-euo", "pipefail", "-c", &script]).current_dir(&root);
    let output = CommandOutput::by(&mut bash).ok().stdout;
    for wanted in ["web1#1 from a to b: moved", "web1#2 from b to a: moved", "web1.qcow2", "<h1>Notes</h1>"] {
        assert!(output.contains(wanted), "{wanted}\n{output}");
    }
    // The guest served before it moved, after it moved, and when it was back.
    assert_eq!(output.matches("<h1>Notes</h1>").count(), 3, "{output}");
    assert!(!Path::new("/run/netns").join(format!("{}-a", laboratory.0)).exists());
}
