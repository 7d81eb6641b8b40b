//! `whimbrel-lab up` and `down`, as users call them. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may fail")]

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use whimbrel_lab::{CommandOutput, entries, until};

/// The program under test.
const LAB: &str = env!("CARGO_BIN_EXE_whimbrel-lab");

/// Returns the program whose agents run in the laboratory.
fn whimbrel() -> PathBuf {
    Path::new(LAB).with_file_name("whimbrel")
}

/// A prefix of this test's own; laboratories with this prefix are taken down in the end.
struct Prefix(String);

impl Prefix {
    fn new(name: &str) -> Self {
        Self(format!("wl{}-{name}", std::process::id()))
    }

    fn command(&self, word: &str) -> Command {
        let mut command = Command::new(LAB);
        command.args(["--json", word, "--prefix", &self.0]).stdin(Stdio::null());
        command
    }

    #[track_caller]
    fn up(&self) -> Value {
        CommandOutput::by(&mut self.command("up")).ok().json()
    }

    #[track_caller]
    fn down(&self) {
        assert_eq!(CommandOutput::by(&mut self.command("down")).ok().json()["up"], false);
    }

    /// Returns the names of its namespaces, without the prefix.
    fn namespaces(&self) -> Vec<String> {
        let names = entries(Path::new("/run/netns"));
        let wanted = ["a", "b", "client", "router", "witness"];
        let own = |host: &&str| names.contains(&format!("{}-{host}", self.0));
        wanted.into_iter().filter(own).map(str::to_owned).collect()
    }

    fn directory(&self) -> PathBuf {
        Path::new("/var/tmp/whimbrel-lab").join(&self.0)
    }

    #[track_caller]
    fn is_up(&self) {
        assert_eq!(self.namespaces(), ["a", "b", "client", "router", "witness"]);
    }

    #[track_caller]
    fn is_gone(&self) {
        assert!(self.namespaces().is_empty() && !self.directory().exists(), "{}", self.0);
    }
}

impl Drop for Prefix {
    fn drop(&mut self) {
        let _ = self.command("down").output();
    }
}

fn host<'a>(up: &'a Value, name: &str) -> &'a Value {
    up["hosts"].as_array().unwrap().iter().find(|host| host["name"] == name).unwrap()
}

/// Starts the agent of a host with the command in the output of `whimbrel-lab up`. The laboratory ends it.
fn agent(host: &Value) -> u32 {
    let text = |key: &str| host[key].as_str().unwrap().to_owned();
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &text("namespace")]).arg(whimbrel());
    command.args(["agent", "--config", &text("config")]);
    let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let pid = child.id();
    reap(child);
    until("the agent answers", || info(host).code == 0);
    pid
}

fn info(host: &Value) -> CommandOutput {
    CommandOutput::by(Command::new(whimbrel()).args([
        "--json",
        "--socket",
        host["socket"].as_str().unwrap(),
        "info",
    ]))
}

/// Reaps a child, so that an ended one is gone.
fn reap(mut child: std::process::Child) {
    std::thread::spawn(move || child.wait());
}

fn is_running(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Two side by side, with the same addresses and the second one's prefix beginning as the first one's: each is
/// complete, and taking one down does nothing to the other.
#[test]
fn two_side_by_side() {
    let (first, second) = (Prefix::new("x"), Prefix::new("x-a"));
    let ups = [first.up(), second.up()];
    let agents = ups.each_ref().map(|up| [host(up, "a"), host(up, "witness")].map(agent));
    for up in &ups {
        assert_eq!(info(host(up, "a")).ok().json()["host"], "a");
        assert_eq!(info(host(up, "witness")).ok().json()["role"], "witness");
    }
    first.down();
    first.is_gone();
    until("its agents have ended", || agents[0].iter().all(|pid| !is_running(*pid)));
    second.is_up();
    assert_eq!(info(host(&ups[1], "a")).ok().json()["pid"], agents[1][0]);
    second.down();
    second.is_gone();
    until("its agents have ended", || agents[1].iter().all(|pid| !is_running(*pid)));
}

/// A laboratory requested twice exists once, or not at all.
#[test]
fn twice() {
    let lab = Prefix::new("twice");
    lab.down();
    let before = lab.up();
    let old = agent(host(&before, "a"));
    assert_eq!(lab.up(), before);
    lab.is_up();
    until("what ran in the first one has ended", || !is_running(old));
    let new = agent(host(&before, "a"));
    lab.down();
    lab.down();
    lab.is_gone();
    until("what ran in the second one has ended", || !is_running(new));
}

/// Killed while it is made, at several points: the next command makes it anew, or takes it down.
#[test]
fn killed_while_it_is_made() {
    let lab = Prefix::new("kill");
    for (made, next) in [(1, "down"), (2, "up"), (5, "down"), (5, "up")] {
        // A group of its own, so that its children are killed with it.
        let mut making = lab.command("up").stdout(Stdio::null()).process_group(0).spawn().unwrap();
        until("it has begun", || lab.namespaces().len() >= made);
        let group = format!("-{}", making.id());
        assert!(Command::new("kill").args(["-KILL", "--", &group]).status().unwrap().success());
        making.wait().unwrap();
        if next == "up" {
            let up = lab.up();
            lab.is_up();
            agent(host(&up, "b"));
        }
        lab.down();
        lab.is_gone();
    }
}

/// A prefix is a name; one that leads to another directory is refused. Here only prefixes that lead into the test's own
/// laboratory: the others are for a test that touches nothing.
#[test]
fn bad_prefixes() {
    let lab = Prefix::new("good");
    lab.up();
    let mark = lab.directory().join("mark");
    fs::write(&mark, "").unwrap();
    let (inside, around) = (format!("{}/a", lab.0), format!("{0}/../{0}", lab.0));
    for prefix in [&inside, &around] {
        for word in ["up", "down"] {
            let result = CommandOutput::by(Command::new(LAB).args(["--json", word, "--prefix", prefix]));
            assert_eq!(result.code, 2, "{prefix:?}: {result:?}");
            assert!(result.stdout.contains("letters, digits and dashes"), "{result:?}");
        }
    }
    lab.is_up();
    assert!(mark.exists() && lab.directory().join("a/agent.toml").exists());
}

/// The bench migrates a small guest once by each contender, and its results can be read again.
#[test]
fn a_case_is_measured_beside_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let (results, page) = (directory.path().join("r/results.json"), directory.path().join("page.md"));
    let marks = ["<!-- made from the results: begin -->", "<!-- made from the results: end -->"];
    fs::write(&page, format!("before\n{}\n{}\nafter\n", marks[0], marks[1])).unwrap();
    let prefix = Prefix::new("bench");
    let bench = |contenders: &[&str]| {
        let mut command = prefix.command("bench");
        command.args(["--installed-qemu", "--memory", "160", "--fill", "32", "--turns", "1"]);
        command.arg("--results").arg(&results).arg("--page").arg(&page).arg("--plots").arg(directory.path());
        for contender in contenders {
            command.args(["--contender", contender]);
        }
        CommandOutput::by(&mut command)
    };
    let result = bench(&["no-migration", "whimbrel-2", "qemu", "post-copy"]).ok().json();
    let runs = result["cases"][0]["runs"].as_array().unwrap().clone();
    assert_eq!(runs.len(), 4, "{result:#}");
    for run in &runs {
        let (by, measured) = (run["contender"].as_str().unwrap(), &run["measured"]);
        assert_eq!(measured.is_null(), by == "no-migration", "{run:#}");
        assert!(run["disturbance"]["longest_stall_ms"].as_f64().unwrap() > 0.0, "{run:#}");
        if by != "no-migration" {
            let sent = measured["sent_bytes"].as_u64().unwrap();
            assert!(sent > 32 << 20 && sent < 160 << 20, "{run:#}");
            assert!(by != "whimbrel-2" || measured["agents_cpu_ms"].as_f64().unwrap() > 0.0, "{run:#}");
        }
    }
    let written: Value = serde_json::from_str(&fs::read_to_string(&results).unwrap()).unwrap();
    assert_eq!(written, result);
    let page = fs::read_to_string(&page).unwrap();
    assert!(
        page.starts_with("before") && page.ends_with("after\n") && page.contains("What was to be reached")
    );
    prefix.is_gone();
    // Nothing is begun after an error.
    let refused = bench(&["no-migration", "xbz"]);
    assert!(refused.stderr.contains("choose from no-migration"), "{refused:?}");
}

/// A point of a grid, with all values unusual, is measured once and kept.
#[test]
fn a_point_that_was_measured_is_not_measured_again() {
    let directory = tempfile::tempdir().unwrap();
    let (results, page) = (directory.path().join("sweep.json"), directory.path().join("page.md"));
    fs::write(&page, "<!-- made from the sweep: begin -->\n<!-- made from the sweep: end -->\n").unwrap();
    let prefix = Prefix::new("sweep");
    let sweep = |rates: &str| {
        let mut command = prefix.command("sweep");
        command.args(["--memory", "160", "--wss", "32", "--rate", rates, "--turns", "1"]);
        command.args(["--link", "1Gbit", "--buffer", "1", "--mtu", "8000", "--cap", "slow-start"]);
        command.args(["--contender", "whimbrel-pattern", "--contender", "qemu"]);
        command.arg("--results").arg(&results).arg("--page").arg(&page).arg("--plots").arg(directory.path());
        CommandOutput::by(&mut command).ok()
    };
    let first = sweep("8").json();
    let name = "grid-w32-r8-l1000-b1-m8000-slow";
    assert_eq!(first["cases"][0]["case"]["name"], name);
    let runs = first["cases"][0]["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2, "{first:#}");
    for run in runs {
        assert!(run["measured"]["sent_bytes"].as_u64().unwrap() > 32 << 20, "{run:#}");
    }
    let first_pass = runs.iter().find_map(|run| run["measured"]["first_round_bytes_per_s"].as_f64()).unwrap();
    assert!(
        first_pass < f64::from(48 << 20),
        "it begins at 32 MiB/s, and the link carries 119: {first_pass}"
    );
    assert!(fs::read_to_string(&page).unwrap().contains(name));

    let second_sweep = sweep("8");
    assert!(second_sweep.stderr.contains("1 of 1 points were measured before"), "{second_sweep:?}");
    assert_eq!(second_sweep.json(), first);
    let more = sweep("8,0").json();
    assert_eq!(more["cases"].as_array().unwrap().len(), 2);
    assert_eq!(more["cases"][0], first["cases"][0], "what was known stays as it was");
    prefix.is_gone();
}
