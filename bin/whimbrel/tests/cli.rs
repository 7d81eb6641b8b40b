//! The command line against a control that has no VMs: outputs and exit codes. And the agent itself, as far as it works
//! without VMs.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests, beside the tests themselves")]

#[path = "../../../crates/api/tests/fake/mod.rs"]
mod fake;
#[path = "cli/forecasts.rs"]
mod forecasts;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use ::api;
use api::{Control, Server, serve};
use serde_json::Value;

use fake::Fake;

const WHIMBREL: &str = env!("CARGO_BIN_EXE_whimbrel");

struct World {
    fake: Arc<Fake>,
    server: Option<Server>,
    folder: tempfile::TempDir,
}

/// Output and exit code of the program.
#[derive(Debug)]
struct CommandOutput {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let fake = Fake::new();
        let server = serve(&folder.path().join("agent.sock"), Arc::clone(&fake) as Arc<dyn Control>).unwrap();
        Self { fake, server: Some(server), folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("agent.sock")
    }

    fn command(&self, words: &[&str]) -> Command {
        command(&self.socket(), words)
    }

    fn run(&self, words: &[&str]) -> CommandOutput {
        run(self.command(words))
    }

    /// Runs it with `--json`: it prints one JSON document in all cases.
    fn json(&self, words: &[&str]) -> (i32, Value) {
        let result = self.run(&[&["--json"], words].concat());
        let value = serde_json::from_str(&result.stdout);
        (result.code.unwrap(), value.unwrap_or_else(|error| panic!("{words:?}: {error}: {result:?}")))
    }
}

fn command(socket: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(WHIMBREL);
    command.arg("--socket").arg(socket).args(words).stdin(Stdio::null());
    command
}

fn run(mut command: Command) -> CommandOutput {
    let output = command.output().unwrap();
    CommandOutput {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn signal(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

#[track_caller]
fn expect(result: &CommandOutput, code: i32, stdout: &[&str], stderr: &[&str]) {
    assert_eq!(result.code, Some(code), "{result:?}");
    for (text, words) in [(&result.stdout, stdout), (&result.stderr, stderr)] {
        for word in words {
            assert!(text.contains(word), "{word:?} is missing in {result:#?}");
        }
    }
}

#[test]
fn help_names_the_exit_codes_and_hides_the_injector() {
    let world = World::new();
    let help = world.run(&["--help"]);
    expect(&help, 0, &["migrate", "recover", "Exit codes", "3  in doubt"], &[]);
    assert!(!help.stdout.contains("injector") && !help.stdout.contains("guard"));
    expect(&world.run(&["--version"]), 0, &["whimbrel"], &[]);
    for words in
        [&["--help"][..], &["-h"], &["migrate", "--help"], &["migrate", "-h"], &["recover", "--help"]]
    {
        let help = world.run(words);
        let wide: Vec<_> = help.stdout.lines().filter(|line| line.chars().count() > 100).collect();
        assert!(wide.is_empty(), "{words:?}: {wide:#?}");
    }
    expect(&world.run(&["migrate", "--help"]), 0, &["--max-downtime", "--on-limit", "--allow-option"], &[]);
}

#[test]
fn usage_errors_are_2() {
    let world = World::new();
    let cases: &[(&[&str], &str)] = &[
        (&["migrate", "web"], "--to"),
        (&["migrate", "we b", "--to", "beta"], "not a valid name"),
        (&["migrate", "web", "--to", "beta", "--bandwidth", "fast"], "10Gbit"),
        (&["migrate", "web", "--to", "beta", "--on-limit", "hope"], "abort"),
        (&["limit", "web"], "--bandwidth"),
        (&["forecast", "web"], "--to"),
        (&["recover", "web", "--run-here", "--discard-copy"], "cannot be used with"),
        (&["recover", "web", "--without-registry"], "--run-here"),
        (&["recover", "web", "--overrule-registry"], "--run-here"),
        (&["recover", "web", "--discard-copy", "--overrule-registry"], "cannot be used with"),
        (&["vm", "adopt"], "--pid"),
        (&["fly"], "fly"),
    ];
    for (words, word) in cases {
        expect(&world.run(words), 2, &[], &[word]);
    }
    assert!(world.fake.asked().is_empty());
}

#[test]
fn without_an_agent_it_says_how_to_start_one() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    let result = run(command(&socket, &["vm", "list"]));
    expect(&result, 1, &[], &["no agent answers", "whimbrel agent --config", "--socket"]);
    let result = run(command(&socket, &["--json", "vm", "list"]));
    let problem: Value = serde_json::from_str(&result.stdout).unwrap();
    assert_eq!((result.code, &problem["kind"]), (Some(1), &Value::from("unavailable")));
}

#[test]
fn what_migrations_have_in_the_kernel_is_listed() {
    let world = World::new();
    let shown = world.run(&["net", "show"]);
    expect(&shown, 0, &["MIGRATION", "netdev whimbrel-web1#3", "tap0", "7 s", "in use"], &[]);
    expect(&shown, 0, &["web1#2", "2 h", "whimbrel4", "left over", "whimbrel4: restart the agent"], &[]);
    let (code, state) = world.json(&["net", "show"]);
    assert_eq!((code, &state["items"][1]["standing"]), (0, &"left-over".into()));
}

#[test]
fn images_that_were_left_are_listed_and_removed() {
    let world = World::new();
    expect(
        &world.run(&["images", "list"]),
        0,
        &["web1#3", "beta", "5.0 GiB", "/srv/web1.qcow2", "can be removed"],
        &[],
    );
    expect(
        &world.run(&["images", "remove", "web1", "3"]),
        0,
        &["/srv/web1.qcow2 is removed", "5.0 GiB"],
        &[],
    );
    expect(&world.run(&["images", "remove", "web1", "4"]), 2, &[], &["no image"]);
    expect(&world.run(&["images", "remove", "web1", "--ended"]), 0, &["/srv/web1.qcow2 is removed"], &[]);
    expect(&world.run(&["images", "remove", "web1", "4", "--ended"]), 2, &[], &["cannot be used with"]);
    assert_eq!(world.json(&["images", "list"]).1[0]["path"], "/srv/web1.qcow2");
}

#[test]
fn vms_are_listed_shown_adopted_run_and_forgotten() {
    let world = World::new();
    expect(&world.run(&["vm", "list"]), 0, &["VM ", "web", "running", "4711", "512.0 MiB", "10.0.2"], &[]);
    let shown = world.run(&["vm", "show", "web"]);
    let words = [
        "anonymous",
        "/run/web.qmp",
        "pc-i440fx-7.2, kvm",
        "2, Skylake-Client",
        "ifname=web",
        "disk0: /srv/web.qcow2, qcow2, past the page cache",
        "over /srv/base.qcow2",
    ];
    expect(&shown, 0, &words, &[]);
    assert!(!shown.stdout.contains("cd0") && !shown.stdout.contains("nodefaults"), "{shown:?}");
    assert_eq!(world.json(&["vm", "show", "web"]).1["description"]["options"][0]["name"], "nodefaults");
    expect(&world.run(&["vm", "adopt", "--pid", "1"]), 1, &[], &["no QEMU", "give the process id"]);
    expect(
        &world.run(&["vm", "adopt", "--pid", "7", "--as", "mail"]),
        0,
        &["mail", "warning", "Restart=no"],
        &[],
    );
    expect(&world.run(&["vm", "adopt", "q", "--allow-option", "-sandbox"]), 0, &["adopted"], &[]);
    let asked = world.fake.asked();
    assert!(asked[2].contains(r#""qemu_name":"q""#) && asked[2].contains("-sandbox"), "{asked:?}");

    let file = world.folder.path().join("vm.toml");
    expect(&world.run(&["vm", "run", file.to_str().unwrap()]), 2, &[], &["cannot read", "vm.toml"]);
    std::fs::write(&file, "bad = 1").unwrap();
    expect(&world.run(&["vm", "run", file.to_str().unwrap()]), 2, &[], &["line 1", "vm.example.toml"]);
    std::fs::write(&file, "name = 'fresh'").unwrap();
    expect(&world.run(&["vm", "run", "--paused", file.to_str().unwrap()]), 0, &["fresh"], &[]);
    assert!(world.fake.asked().last().unwrap().contains(r#""paused":true"#));

    expect(&world.run(&["vm", "forget", "db"]), 0, &["db is forgotten"], &[]);
    expect(&world.run(&["vm", "forget", "db"]), 2, &[], &["no VM db", "vm list"]);
    expect(&world.run(&["info"]), 0, &["alpha", "PAGEMAP_SCAN: there"], &[]);
}

#[test]
fn a_migration_that_succeeds_ends_with_its_report() {
    let world = World::new();
    let words =
        ["migrate", "web", "--to", "beta", "--max-downtime", "20", "--bandwidth", "1Gbit", "--verify"];
    let result = world.run(&words);
    expect(
        &result,
        0,
        &["web#7 from alpha to beta: moved", "9.4 ms", "131072"],
        &["web#7: over, downtime 9.4 ms"],
    );
    let asked = world.fake.asked().pop().unwrap();
    for part in [r#""max_downtime_ms":20"#, r#""bandwidth_bytes_per_s":125000000"#, r#""verify":true"#] {
        assert!(asked.contains(part), "{part} is missing in {asked}");
    }
    let (code, report) = world.json(&["migrate", "web", "--to", "beta"]);
    assert_eq!(
        (code, &report["schema"], &report["outcome"]),
        (0, &"whimbrel.report/2".into(), &"moved".into())
    );
    expect(&world.run(&["report", "web"]), 0, &["web#8"], &[]);
    expect(&world.run(&["report", "web", "7"]), 0, &["web#7"], &[]);
    expect(&world.run(&["report", "web", "3"]), 2, &[], &["no migration web#3"]);
    expect(&world.run(&["migrations"]), 0, &["MIGRATION", "web#8", "web#7", "done"], &[]);
}

#[test]
fn a_migration_that_fails_leaves_1_and_one_in_doubt_3() {
    let world = World::new();
    let failed = world.run(&["migrate", "web", "--to", "broken"]);
    expect(
        &failed,
        1,
        &["unharmed", "the destination's disk is full"],
        &["over, the destination's disk is full"],
    );
    let doubtful = world.run(&["migrate", "web", "--to", "limbo"]);
    expect(&doubtful, 3, &["in doubt"], &["whimbrel recover web", "beta does not answer"]);
    assert_eq!(world.json(&["watch", "web"]).0, 3);
    assert_eq!(world.json(&["migrate", "db", "--to", "broken"]).0, 1);
}

#[test]
fn what_preflight_finds_is_shown_with_advice() {
    let world = World::new();
    expect(
        &world.run(&["migrate", "web", "--to", "tiny"]),
        1,
        &[],
        &["pre-flight says no", "10 MiB left", "free some"],
    );
    expect(
        &world.run(&["migrate", "web", "--to", "tiny", "--check"]),
        1,
        &["cannot be migrated", "blocker", "free some"],
        &[],
    );
    expect(
        &world.run(&["migrate", "web", "--to", "beta", "--check"]),
        0,
        &["can be migrated", "memfd", "info"],
        &[],
    );
    expect(&world.run(&["migrate", "web", "--to", "mars"]), 2, &[], &["no host mars", "[hosts]"]);
    expect(&world.run(&["migrate", "who", "--to", "beta"]), 2, &[], &["no VM who"]);
    assert_eq!(world.json(&["migrate", "web", "--to", "tiny", "--check"]).1["possible"], false);
    assert_eq!(world.json(&["migrate", "web", "--to", "tiny"]).1["findings"][0]["code"], "no-memory");
    assert!(world.json(&["migrations"]).1.as_array().unwrap().is_empty());
}

#[test]
fn a_detached_migration_is_limited_and_cancelled() {
    let world = World::new();
    expect(
        &world.run(&["migrate", "web", "--to", "far", "--detach"]),
        0,
        &["under way", "whimbrel watch web"],
        &[],
    );
    expect(&world.run(&["limit", "web", "--bandwidth", "500k"]), 0, &["488.3 KiB/s"], &[]);
    expect(&world.run(&["limit", "web", "--bandwidth", "none"]), 0, &["none"], &[]);
    expect(&world.run(&["cancel", "web"]), 0, &["stays at its source"], &[]);
    expect(&world.run(&["cancel", "web"]), 0, &["had already ended"], &[]);
    expect(&world.run(&["watch", "web"]), 1, &["cancelled"], &[]);
    world.run(&["migrate", "web", "--to", "beta"]);
    expect(&world.run(&["cancel", "web"]), 1, &["was already migrated"], &[]);
    expect(&world.run(&["cancel", "db"]), 2, &[], &["no migration of db"]);
    world.run(&["migrate", "web", "--to", "limbo"]);
    assert_eq!(world.json(&["cancel", "web"]).0, 3);
}

#[test]
fn a_decision_is_described_before_it_is_carried_out() {
    let world = World::new();
    world.run(&["migrate", "web", "--to", "limbo"]);
    let asked = world.run(&["recover", "web"]);
    expect(&asked, 3, &["Known:", "committed to beta", "--run-here", "--discard-copy"], &[]);
    let described = world.run(&["recover", "web", "--run-here"]);
    expect(&described, 3, &["Risk:", "same disks", "Nothing was done", "--accept-risk"], &[]);
    let done = world.run(&["recover", "web", "--run-here", "--accept-risk"]);
    expect(&done, 0, &["the guest runs here again"], &[]);
    let asked = world.fake.asked();
    assert!(
        asked[1].contains(r#""action":"ask""#) && asked[2].contains(r#""accept_risk":false"#),
        "{asked:?}"
    );
    assert!(asked[3].contains(r#""action":"run-here","accept_risk":true"#), "{asked:?}");

    let world = World::new();
    world.run(&["migrate", "web", "--to", "limbo"]);
    let forced = world.run(&["recover", "web", "--run-here", "--overrule-registry"]);
    let override_options = "--run-here --overrule-registry --accept-risk";
    expect(&forced, 3, &["Nothing was done", override_options], &[]);
    let without = world.run(&["recover", "web", "--discard-copy", "--without-registry"]);
    expect(&without, 3, &["--discard-copy --without-registry --accept-risk"], &[]);
    let asked = world.fake.asked();
    assert!(asked[1].contains(r#""registry":"overridden""#), "{asked:?}");
    assert!(asked[2].contains(r#""registry":"none""#), "{asked:?}");
}

#[test]
fn ctrl_c_leaves_the_migration_alone() {
    let world = World::new();
    let mut child = world
        .command(&["migrate", "web", "--to", "far"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("round 2, 16.0 MiB left, 1.0 GiB/s"), "{line}");
    signal(&child, "-INT");
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(rest.contains("continues") && rest.contains("whimbrel cancel web"), "{rest}");
    assert_eq!(world.json(&["migrations"]).1[0]["standing"], "underway");
    assert!(world.fake.asked().iter().all(|asked| !asked.starts_with("cancel")));
    world.fake.finish("web");
    expect(&world.run(&["watch", "web"]), 0, &["moved"], &[]);
}

#[test]
fn an_agent_that_goes_away_leaves_its_watcher_in_doubt() {
    let mut world = World::new();
    let mut child = world
        .command(&["migrate", "web", "--to", "far"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    stderr.read_line(&mut text).unwrap();
    world.server.take().unwrap().stop();
    stderr.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3), "{text}");
    assert!(text.contains("resumes the migration when it is restarted"), "{text}");
}

/// Returns a configuration that needs nothing of the host.
fn config(folder: &Path, more: &str) -> PathBuf {
    let path = folder.join("agent.toml");
    let text = format!(
        "host = \"alpha\"\nrole = \"witness\"\nlisten = \"127.0.0.1:0\"\nstate_dir = \"state\"\nrun_dir = \"run\"\n\
         tls.plain = true\n{more}"
    );
    std::fs::write(&path, text).unwrap();
    path
}

fn agent_command(config: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(WHIMBREL);
    command.args(words).arg("agent").arg("--config").arg(config).stdin(Stdio::null());
    command
}

#[test]
fn a_configuration_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let good = config(folder.path(), "");
    let check = |words: &[&str]| {
        let mut command = agent_command(&good, words);
        command.arg("--check-config");
        run(command)
    };
    expect(&check(&[]), 0, &["valid; host alpha, witness"], &[]);
    assert_eq!(serde_json::from_str::<Value>(&check(&["--json"]).stdout).unwrap()["good"], true);
    assert!(!folder.path().join("state").exists(), "nothing was started");

    let bad = config(folder.path(), "[migration]\nmax_downtme_ms = 3\n");
    let result = run(agent_command(&bad, &[]));
    expect(&result, 2, &[], &["agent.toml, line 8, key `migration.max_downtme_ms`", "max_downtime_ms"]);
    expect(&run(agent_command(Path::new("/nonexistent/a.toml"), &[])), 2, &[], &["cannot read", "--config"]);
}

/// A faulty certificate is a faulty configuration: a check finds it, and nothing is begun with it.
#[test]
fn unusable_certificates_are_found_before_anything_begins() {
    let folder = tempfile::tempdir().unwrap();
    let pki = |name: &str| lab::Pki::new(&folder.path().join(name)).unwrap();
    let (ours, theirs) = (pki("ours"), pki("theirs"));
    let [alpha, beta] = ["alpha", "beta"].map(|name| ours.issue(name, &[]).unwrap());
    let stranger = theirs.issue("alpha", &[]).unwrap();
    let text = folder.path().join("text.pem");
    std::fs::write(&text, "no certificate\n").unwrap();
    let missing = folder.path().join("missing.pem");
    let cases = [
        (&alpha.ca, &alpha.certificate, &missing, "missing.pem"),
        (&alpha.ca, &text, &alpha.key, "no certificate in"),
        (&text, &alpha.certificate, &alpha.key, "text.pem"),
        (&alpha.ca, &alpha.certificate, &text, "no private key in"),
        (&alpha.ca, &alpha.certificate, &beta.key, "cannot be used with the key"),
        (&alpha.ca, &beta.certificate, &beta.key, "beta"),
        (&stranger.ca, &alpha.certificate, &alpha.key, "not signed by the authority"),
    ];
    let path = folder.path().join("agent.toml");
    let begin = "host = \"alpha\"\nrole = \"witness\"\nlisten = \"127.0.0.1:0\"\nstate_dir = \"state\"\nrun_dir = \"run\"";
    for (ca, certificate, key, word) in cases {
        let tls = format!("{begin}\n[tls]\nca = {ca:?}\ncertificate = {certificate:?}\nkey = {key:?}\n");
        std::fs::write(&path, tls).unwrap();
        for check in [&[][..], &["--check-config"]] {
            let mut command = agent_command(&path, &[]);
            command.args(check);
            expect(&run(command), 2, &[], &["error: ", word]);
        }
        let problem: Value = serde_json::from_str(&run(agent_command(&path, &["--json"])).stdout).unwrap();
        assert_eq!(problem["kind"], "bad-request", "{problem}");
        assert!(!folder.path().join("state").exists(), "nothing was begun");
    }
    let good = format!(
        "{begin}\n[tls]\nca = {:?}\ncertificate = {:?}\nkey = {:?}\n",
        alpha.ca, alpha.certificate, alpha.key
    );
    std::fs::write(&path, good).unwrap();
    let mut check = agent_command(&path, &[]);
    check.arg("--check-config");
    expect(&run(check), 0, &["valid; host alpha"], &[]);
}

#[test]
fn an_agent_starts_answers_and_ends_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), "");
    let mut child =
        agent_command(&config, &[]).env("RUST_LOG", "info").stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(log.by_ref().any(|line| line.contains("ready")), "the agent did not start");
    let socket = folder.path().join("run/agent.sock");
    expect(&run(command(&socket, &["info"])), 0, &["witness alpha"], &[]);
    expect(&run(command(&socket, &["vm", "list"])), 0, &["no VMs"], &[]);

    // A second one fails with the reason; the first does not notice.
    let second = run(agent_command(&config, &[]));
    expect(&second, 1, &[], &["another agent", &format!("pid {}", child.id()), "state_dir"]);
    expect(&run(command(&socket, &["info"])), 0, &["witness alpha"], &[]);

    signal(&child, "-TERM");
    assert!(log.any(|line| line.contains("exiting")));
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!socket.exists());
    expect(&run(command(&socket, &["info"])), 1, &[], &["no agent answers"]);
}
