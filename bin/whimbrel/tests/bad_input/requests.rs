//! Requests, VM files and configurations that name nothing or the wrong object.

use std::fs;
use std::process::Command;

use serde_json::json;

use crate::common::{self, Cluster, Guest, Setup, WHIMBREL};
use crate::stranger::result;
use crate::watched::{WatchedGuest, bare, is_qemu};
use crate::{assert_fails, eventually};

#[test]
fn requests_that_name_nothing_or_the_wrong_thing() {
    let cluster = Cluster::with(&Setup::impatient());
    let mut vm = WatchedGuest::new(&cluster, "vm1");
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&["migrate", "vm9", "--to", "b"], 2, &["no VM vm9 on this host", "vm list", "vm adopt"]),
        (&["migrate", "vm9", "--to", "b", "--check"], 2, &["no VM vm9 on this host"]),
        (&["vm", "show", "vm9"], 2, &["no VM vm9 on this host", "vm list"]),
        (&["vm", "forget", "vm9"], 2, &["no VM vm9 on this host", "vm list"]),
        (&["cancel", "vm9"], 2, &["vm9"]),
        (&["recover", "vm9"], 2, &["vm9"]),
        (&["watch", "vm9"], 2, &["vm9"]),
        (&["limit", "vm9", "--bandwidth", "1MiB"], 2, &["vm9"]),
        (&["report", "vm1"], 2, &["vm1"]),
        (&["migrate", "vm1", "--to", "mars"], 2, &["no host mars", "[hosts.mars]"]),
        (&["migrate", "vm1", "--to", "mars", "--check"], 2, &["no host mars", "[hosts.mars]"]),
        (&["migrate", "vm1", "--to", "a"], 2, &["vm1 is on a already", "--to"]),
        (&["migrate", "vm1", "--to", "a", "--check"], 2, &["vm1 is on a already", "--to"]),
        (&["migrate", "vm1", "--to", "b", "--streams", "0"], 2, &["streams", "64"]),
        (&["migrate", "vm1", "--to", "b", "--streams", "65"], 2, &["streams", "64"]),
        (&["migrate", "../vm1", "--to", "b"], 2, &["not a valid name"]),
        (&["vm", "adopt", "--pid", "4194304"], 2, &["process 4194304", "vm1"]),
        (&["vm", "adopt", "nobody"], 2, &["name nobody", "vm1"]),
        (&["vm", "adopt", "--qmp", "/nonexistent/qmp.sock"], 2, &["/nonexistent/qmp.sock", "--pid"]),
        (&["vm", "adopt", "--pid", "1", "--as", "../vm"], 2, &["not a valid name"]),
    ];
    for (words, code, expected) in cases {
        assert_fails(&cluster.a.cli(words), *code, expected);
    }
    // This very test is a process, and no QEMU.
    let pid = std::process::id().to_string();
    assert_fails(&cluster.a.cli(&["vm", "adopt", "--pid", &pid]), 2, &["no QEMU", &pid]);
    let same_pid = vm.guest.pid().to_string();
    assert_fails(
        &cluster.a.cli(&["vm", "adopt", "--pid", &same_pid, "--as", "other"]),
        1,
        &["vm1", "vm forget vm1"],
    );
    vm.assert_unharmed(&cluster, "requests that name nothing");
    vm.assert_counts();
}

#[test]
fn qemus_that_cannot_be_taken_charge_of() {
    let cluster = Cluster::with(&Setup::impatient());
    let a = &cluster.a;

    // No monitor at all.
    let machine = ["-machine", "none", "-nodefaults", "-display", "none", "-S", "-name", "dumb"];
    let dumb = cluster.lab.a.spawn("dumb", &[&["qemu-system-x86_64"], &machine[..]].concat()).unwrap();
    eventually("QEMU starts", || if is_qemu(dumb.pid()) { Ok(()) } else { Err("not yet".into()) });
    let pid = dumb.pid().to_string();
    assert_fails(&a.cli(&["vm", "adopt", "--pid", &pid]), 1, &["dumb", "no QMP monitor", "-qmp unix:"]);
    drop(dumb);

    // Its only monitor is held by another client: before it is adopted, and after.
    let guest = Guest::start(&cluster.lab.a, &cluster.environment, &bare("held")).unwrap();
    let held = guest.monitor().unwrap();
    let (pid, socket) = (guest.pid().to_string(), guest.qmp_socket().display().to_string());
    assert_fails(
        &a.cli(&["vm", "adopt", "--pid", &pid]),
        1,
        &["held (process", "by other clients", "end those clients"],
    );
    assert_fails(&a.cli(&["vm", "adopt", "--qmp", &socket]), 1, &[&socket, "close the program that holds"]);
    assert_eq!(a.cli(&["vm", "list"]).ok().json(), json!([]), "nothing was adopted");
    drop(held);
    drop(guest);

    let mut spec = bare("vm1");
    spec.extra.extend(["-qtest-log".to_owned(), "/dev/null".to_owned()]);
    let vm = WatchedGuest::with(&cluster, "vm1", spec);
    let socket = vm.guest.qmp_socket().display().to_string();
    let held = vm.guest.monitor().unwrap();
    assert_fails(&a.cli(&["migrate", "vm1", "--to", "b"]), 1, &[&socket, "end that client"]);
    assert_eq!(a.vm("vm1").unwrap()["state"], "unreachable");
    drop(held);
    vm.assert_unharmed(&cluster, "a held monitor");

    // Another one of the same name.
    let twin = Guest::start(&cluster.lab.a, &cluster.environment, &bare("twin")).unwrap();
    let pid = twin.pid().to_string();
    assert_fails(&a.cli(&["vm", "adopt", "--pid", &pid, "--as", "vm1"]), 1, &["vm1", "already", "--as"]);
    a.cli(&["vm", "adopt", "--pid", &pid, "--as", "twin"]).ok();
    let taken = cluster.b.cli(&["vm", "adopt", "--pid", &pid, "--as", "vm1"]).ok();
    assert_eq!(taken.json()["vm"], "vm1");
    assert_fails(
        &a.cli(&["migrate", "vm1", "--to", "b", "--allow-option", "qtest-log"]),
        1,
        &["already has a VM named vm1", "another name"],
    );
    cluster.b.cli(&["vm", "forget", "vm1"]).ok();
    a.cli(&["vm", "forget", "twin"]).ok();
    drop(twin);
    vm.assert_unharmed(&cluster, "a name that is taken");

    // An unknown option: refused, unless it is allowed by name.
    let unknown = ["migrate", "vm1", "--to", "b"];
    assert_fails(&a.cli(&unknown), 1, &["-qtest-log", "allow it by name"]);
    let check = a.cli(&[&unknown[..], &["--check"]].concat());
    assert_fails(&check, 1, &["option-unknown", "-qtest-log"]);
    assert_eq!(check.json()["possible"], false);
    vm.assert_unharmed(&cluster, "an unknown option");
    let check = a.cli(&[&unknown[..], &["--check", "--allow-option", "-qtest-log"]].concat()).ok();
    assert_eq!(check.json()["possible"], true);
    vm.assert_unharmed(&cluster, "pre-flight alone");
    cluster.migrate("vm1", "a", "b", &["--allow-option", "qtest-log"]);
}

#[test]
fn vm_files_with_errors_name_file_line_and_key() {
    let cluster = Cluster::with(&Setup::impatient());
    let file = cluster.lab.a.directory().join("vm.toml");
    let path = file.display().to_string();
    let run = |text: &str| {
        fs::write(&file, text).unwrap();
        cluster.a.cli(&["vm", "run", &path])
    };
    let cases = [
        ("name = \"web\"\nargs = [\n", 2, "args"),
        ("name = \"web\"\n\nargs = 3\n", 3, "args"),
        ("name = \"web\"\nargs = []\nmemory = 3\n", 3, "memory"),
        ("\nname = \"../web\"\nargs = []\n", 2, "name"),
        ("name = \"web\"\nargs = [\"-daemonize\"]\n", 2, "args"),
        ("name = \"web\"\nargs = [\"-incoming\", \"defer\"]\n", 2, "args"),
        ("name = \"web\"\n", 1, "args"),
    ];
    for (text, line, key) in cases {
        let result = run(text);
        assert_fails(&result, 2, &[&format!("{path}:{line}: "), key]);
    }
    assert_fails(
        &cluster.a.cli(&["vm", "run", "/nonexistent/vm.toml"]),
        2,
        &["cannot read /nonexistent/vm.toml"],
    );
    // QEMU itself reports the error in its arguments.
    let result = run("name = \"web\"\nargs = [\"-frobnicate\"]\n");
    assert_fails(&result, 1, &["-frobnicate", "args"]);
    let result = run("name = \"web\"\nqemu = \"/nonexistent/qemu\"\nargs = []\n");
    assert_fails(&result, 1, &["/nonexistent/qemu"]);
    assert_eq!(cluster.a.cli(&["vm", "list"]).ok().json(), json!([]));
    let left = common::entries(&cluster.a.directory.join("run/vms"));
    assert!(left.is_empty(), "{left:?} is left");
}

#[test]
fn configurations_with_errors_name_file_line_and_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.toml");
    let begin = "host = \"a\"\nlisten = \"127.0.0.1:0\"\nstate_dir = \"state\"\nrun_dir = \"run\"\n";
    let start = |text: &str| {
        fs::write(&path, text).unwrap();
        result(Command::new(WHIMBREL).arg("agent").arg("--config").arg(&path))
    };
    let cases = [
        ("[tls]\nplain = 3\n", 6, "tls.plain", "boolean"),
        ("[tls]\nplan = true\n", 6, "tls.plan", "plain"),
        ("[tls]\nca = \"ca.pem\"\n", 5, "tls", "certificate"),
        ("tls.plain = true\n[hosts.b]\naddress = \"nowhere\"\n", 7, "hosts.b.address", "HOST:PORT"),
        ("tls.plain = true\n[hosts.\"../b\"]\naddress = \"b:1\"\n", 6, "hosts", "name"),
        ("tls.plain = true\n[registry]\nhost = \"w\"\n", 7, "registry.host", "[hosts.w]"),
        ("tls.plain = true\n[migration]\nstreams = 65\n", 7, "migration.streams", "64"),
        ("tls.plain = true\n[timeouts]\nretry_ms = -1\n", 7, "timeouts.retry_ms", "u64"),
    ];
    for (text, line, key, advice) in cases {
        let place = format!("agent.toml, line {line}, key `{key}");
        assert_fails(&start(&format!("{begin}{text}")), 2, &[&place, advice]);
    }
    assert_fails(&start(&format!("{begin}[tls]\nplain = maybe\n")), 2, &["agent.toml, line 6: ", "quoted"]);
    let missing = "[tls]\nca = \"ca.pem\"\ncertificate = \"a.pem\"\nkey = \"a.key\"\n";
    assert_fails(&start(&format!("{begin}{missing}")), 2, &["[tls]", "ca.pem"]);
}
