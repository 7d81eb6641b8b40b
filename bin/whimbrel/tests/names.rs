//! Names of a VM that moves to another network follow it, at a real server of DNS (BIND 9). Needs root and `named`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::fmt::Display;
use std::fs::{self, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;

use common::two_networks::{SOON, answering_guest};
use common::{Agent, Cluster, Setup, until};
use lab::two_networks::{NEW_ADDRESS as NEW, separate};
use lab::{Daemon, Host};
use serde_json::Value;

const VM: &str = "vm1";
/// The guest's own address.
const OLD: &str = "10.92.0.1";
const SECRET: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const OTHER_SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
/// TTL while a VM moves, in seconds.
const LOWERED_TTL_S: u32 = 1;

/// Hosts, a guest, and a server of DNS on the host of the witness, with a name of the guest.
struct Names {
    cluster: Cluster,
    server: Option<Daemon>,
    _guest: lab::Guest,
}

impl Names {
    /// Starts all of them. The name has this TTL; more lines are for the table `[dns]` of both agents.
    fn start(ttl_s: u32, secret: &str, more: &str) -> Self {
        let usual = Setup::default();
        let extra = usual.extra.clone() + SOON;
        let mut cluster = Cluster::with(&Setup { extra, ..usual });
        separate(&cluster.lab).unwrap();
        let host = &cluster.lab.witness;
        let directory = host.directory().display();
        let config = format!(
            "key \"whimbrel\" {{ algorithm hmac-sha256; secret \"{SECRET}\"; }};\n\
             options {{ directory \"{directory}\"; pid-file none; session-keyfile none; listen-on-v6 {{ none; }}; \
             listen-on {{ {}; }}; recursion no; dnssec-validation no; }};\n\
             controls {{ }};\n\
             zone \"example.org\" {{ type primary; file \"example.org\"; allow-update {{ key whimbrel; }}; }};\n",
            host.control_address().unwrap()
        );
        fs::write(host.directory().join("named.conf"), config).unwrap();
        let zone = format!(
            "$TTL {ttl_s}\n@ SOA ns.example.org. admin.example.org. 1 3600 600 86400 60\n@ NS ns.example.org.\n\
             ns A {}\nweb A {OLD}\n",
            host.address()
        );
        fs::write(host.directory().join("example.org"), zone).unwrap();
        let server = Some(lab::name_server(host).unwrap());
        let dns = format!(
            "[dns]\n{more}\n[[dns.zones]]\nzone = \"example.org\"\nservers = [\"{}\"]\nkey_name = \"whimbrel\"\n\
             key_file = \"dns.key\"\nlowered_ttl_s = {LOWERED_TTL_S}\n[dns.vms.{VM}]\nnames = [\"web.example.org\"]\n",
            host.address()
        );
        for name in ["a", "b"] {
            let agent = cluster.agent_mut(name);
            agent.kill();
            let key = agent.directory.join("dns.key");
            fs::write(&key, secret).unwrap();
            fs::set_permissions(&key, Permissions::from_mode(0o600)).unwrap();
            let mut config = OpenOptions::new().append(true).open(agent.config()).unwrap();
            config.write_all(dns.as_bytes()).unwrap();
            agent.start();
        }
        let guest = answering_guest(&cluster, VM);
        Self { cluster, server, _guest: guest }
    }

    /// Returns the records of the guest's name at the server, with their TTL, by another program.
    fn records(&self) -> Vec<String> {
        records(&self.cluster.lab.witness)
    }

    #[track_caller]
    fn wait_for(&self, what: &str, address: impl Display, ttl_s: u32) {
        let expected = [format!("web.example.org. {ttl_s} A {address}")];
        until(what, || self.records() == expected);
    }
}

fn records(server: &Host) -> Vec<String> {
    let at = format!("@{}", server.address());
    let words = ["dig", &at, "+noall", "+answer", "+norecurse", "+tries=1", "web.example.org", "A"];
    let Ok(answer) = server.run(&words) else { return Vec::new() };
    let lines = answer.lines().filter(|line| !line.starts_with(';') && !line.is_empty());
    lines
        .map(|line| line.split_whitespace().filter(|word| *word != "IN").collect::<Vec<_>>().join(" "))
        .collect()
}

/// Returns the goals of the names that an agent still has to change.
fn open_goals(agent: &Agent) -> Vec<String> {
    let state = agent.cli(&["net", "show"]).ok().json();
    let names = state["names"].as_array().cloned().unwrap_or_default();
    names.iter().map(|open| open["changes"]["goal"].as_str().unwrap().to_owned()).collect()
}

fn codes(findings: &Value) -> Vec<&str> {
    findings.as_array().unwrap().iter().map(|finding| finding["code"].as_str().unwrap()).collect()
}

fn there() -> String {
    format!("{OLD}={NEW}")
}

#[test]
fn a_name_follows_its_vm_and_gets_its_ttl_back() {
    let names = Names::start(4, SECRET, "");
    let cluster = &names.cluster;
    let slowly = ["migrate", VM, "--to", "b", "--verify", "--on-limit", "stop", "--bandwidth", "1M"];
    let new_address = ["--new-address", &there()];
    let check = cluster.a.cli(&[&slowly[..], &new_address, &["--check"]].concat()).ok().json();
    assert!(codes(&check["source_findings"]).contains(&"dns-ready"), "{check:#}");
    names.wait_for("a check changes nothing", OLD, 4);

    let migration = cluster.a.begin(&[&slowly[..], &new_address].concat());
    names.wait_for("the TTL is lowered", OLD, LOWERED_TTL_S);
    assert_eq!(open_goals(&cluster.a), ["lowered"]);
    cluster.a.cli(&["cancel", VM]).ok();
    drop(migration.wait_with_output().unwrap());
    names.wait_for("what was found is given back", OLD, 4);
    until("nothing is open", || open_goals(&cluster.a).is_empty());
    let report = cluster.a.cli(&["report", VM]).ok().json();
    assert_eq!(
        (&report["names"]["goal"], &report["names"]["reached"]),
        (&"undone".into(), &true.into()),
        "{report:#}"
    );

    cluster.migrate(VM, "a", "b", &new_address);
    // Nothing uses the old address, once no resolver gives it any longer.
    names.wait_for("the TTL is given back", NEW, 4);
    until("nothing is open", || open_goals(&cluster.a).is_empty());
    let report = cluster.a.cli(&["report", VM]).ok().json();
    let record = &report["names"]["records"][0];
    assert_eq!((&record["standing"], &record["ttl_s"]), (&"made".into(), &4.into()), "{report:#}");
    assert!(!codes(&report["findings"]).contains(&"names-not-changed"), "{report:#}");
    let text = cluster.a.text(&["report", VM]).ok().stdout;
    let line = format!("  name        web.example.org A {OLD} → {NEW}: changed (TTL 4 s, serial ");
    assert!(text.contains(&line), "{text}");
    cluster.assert_guest_whole("b", VM);
}

#[test]
fn a_vm_that_comes_back_takes_its_names_along() {
    let names = Names::start(300, SECRET, "");
    let cluster = &names.cluster;
    cluster.migrate(VM, "a", "b", &["--new-address", &there()]);
    names.wait_for("the name has the new address", NEW, LOWERED_TTL_S);
    assert_eq!(open_goals(&cluster.a), ["switched"], "resolvers may still give the old address");
    cluster.migrate(VM, "b", "a", &["--new-address", &format!("{OLD}={OLD}")]);
    names.wait_for("the name has its first address again", OLD, LOWERED_TTL_S);
    let open = [&cluster.a, &cluster.b].map(open_goals);
    assert_eq!(open, [vec![], vec!["switched".to_owned()]], "one agent changes the name");
    let state = cluster.b.cli(&["net", "show"]).ok().json();
    let until_s = state["names"][0]["changes"]["old_until_unix_s"].as_u64().unwrap();
    let now_s = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    assert!(until_s > now_s + 60, "the first host has given the TTL back before: {state:#}");
}

#[test]
fn a_vm_moves_without_servers_and_its_names_later() {
    let mut names = Names::start(300, SECRET, "check = \"warn\"");
    names.server.take().unwrap().kill().unwrap();
    let cluster = &names.cluster;
    let report = cluster.migrate(VM, "a", "b", &["--new-address", &there()]);
    assert!(codes(&report["findings"]).contains(&"dns-unreachable"), "{report:#}");
    until("the report warns", || {
        let report = cluster.a.cli(&["report", VM]).ok().json();
        codes(&report["findings"]).contains(&"names-not-changed")
    });
    // Another agent makes up for it.
    names.cluster.a.kill();
    names.cluster.a.start();
    assert_eq!(open_goals(&names.cluster.a), ["switched"]);
    names.server = Some(lab::name_server(&names.cluster.lab.witness).unwrap());
    names.wait_for("the name has the new address", NEW, LOWERED_TTL_S);
    until("the report warns no more", || {
        let report = names.cluster.a.cli(&["report", VM]).ok().json();
        let names = &report["names"];
        names["reached"] == true && !codes(&report["findings"]).contains(&"names-not-changed")
    });
}

#[test]
fn a_key_that_the_server_refuses_is_found_before() {
    let names = Names::start(300, OTHER_SECRET, "");
    let cluster = &names.cluster;
    let words = ["migrate", VM, "--to", "b", "--new-address", &there()];
    let check = cluster.a.cli(&[&words[..], &["--check"]].concat());
    assert_ne!(check.code, 0, "{check:?}");
    assert!(codes(&check.json()["source_findings"]).contains(&"dns-key-refused"), "{check:?}");
    let refused = cluster.a.cli(&words);
    assert_ne!(refused.code, 0, "{refused:?}");
    assert!(refused.stdout.contains("dns-key-refused"), "{refused:?}");
    names.wait_for("nothing has changed", OLD, 300);
    assert_eq!(open_goals(&cluster.a), Vec::<String>::new());
}
