//! A guest moves to another network, behind a router, and back: its open connections go on, new ones reach it by its new
//! address, and nothing is left on either host. Needs root.

#![allow(clippy::unwrap_used, clippy::panic, reason = "all of this is tests")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Child;
use std::thread;

use common::draw::{Generator, seed};
use common::two_networks::{SERVICE, SOON, answering_guest};
use common::{Agent, Cluster, DEADLINE, Setup, until};
use lab::lab::VM_BRIDGE;
use lab::two_networks::{NEW_ADDRESS as NEW, NEW_GATEWAY, THIRD_ADDRESS, connect_third, separate};
use lab::{Host, Net, vm_address};
use serde_json::{Value, json};

const VM: &str = "vm1";
/// More than a path holds at once, in segments of the largest size.
const PAYLOAD: usize = 300_000;
fn cluster() -> Cluster {
    cluster_with(Setup::default())
}

fn cluster_with(usual: Setup) -> Cluster {
    let extra = usual.extra.clone() + SOON;
    let cluster = Cluster::with(&Setup { fault_harness: true, extra, ..usual });
    separate(&cluster.lab).unwrap();
    cluster
}

/// A connection of the client with the guest's service.
struct Conversation(TcpStream);

impl Conversation {
    /// Connects by one of the guest's addresses, as soon as it serves.
    fn with(cluster: &Cluster, address: Ipv4Addr) -> Self {
        let to = SocketAddr::from((address, SERVICE));
        let connect = || TcpStream::connect_timeout(&to, DEADLINE);
        let connected = std::cell::OnceCell::new();
        until("the guest serves", || {
            let attempt = cluster.lab.client.within(connect).unwrap();
            attempt.is_ok_and(|stream| connected.set(stream).is_ok())
        });
        let stream = connected.into_inner().unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        Self(stream)
    }

    /// Sends much to and fro at once.
    #[track_caller]
    fn exchange(&self) {
        let (mut to, mut from) = (&self.0, &self.0);
        let sent: Vec<_> = (0..PAYLOAD).map(|number| (number % 251) as u8).collect();
        let mut answer = vec![0; PAYLOAD];
        thread::scope(|scope| {
            let sending = scope.spawn(|| to.write_all(&sent));
            from.read_exact(&mut answer).unwrap();
            sending.join().unwrap().unwrap();
        });
        assert!(answer == sent);
    }
}

/// Settings of devices and of the whole kernel.
const SETTINGS: &str = "grep -rs . /proc/sys/net/ipv4/conf /proc/sys/net/ipv4/neigh /proc/sys/net/ipv6/conf \
                        /proc/sys/net/ipv6/neigh | grep -v -e mtu -e stable_secret | sort";

/// Returns all that a host's kernel knows of networks, but for counters, for what it learns by itself, and for states of
/// links that settle.
fn network_of(host: &Host) -> String {
    let mut all = common::networks::links(host);
    for words in [
        &["bridge", "vlan"][..],
        &["ip", "route", "show", "table", "all"],
        &["ip", "-6", "route", "show", "table", "all"],
        &["ip", "-4", "rule"],
        &["ip", "-6", "rule"],
        &["ip", "neigh", "show", "proxy"],
        &["ip", "neigh", "show", "nud", "permanent"],
        &["nft", "list", "ruleset"],
        &["sh", "-c", SETTINGS],
    ] {
        all.push(host.run(words).unwrap());
    }
    all.join("\n")
}

fn networks(cluster: &Cluster) -> [String; 2] {
    [&cluster.lab.a, &cluster.lab.b].map(network_of)
}

/// Returns what `whimbrel net show` lists.
fn shown(agent: &Agent) -> Value {
    let state = agent.cli(&["net", "show"]).ok().json();
    assert_eq!(state["unread"], Value::Null, "{state:#}");
    state
}

fn redirections(agent: &Agent) -> Vec<Value> {
    shown(agent)["redirections"].as_array().cloned().unwrap_or_default()
}

/// Asserts that both hosts become as before, and that no agent lists anything.
#[track_caller]
fn assert_as_before(cluster: &Cluster, before: &[String; 2]) {
    until("the networks are as before", || networks(cluster) == *before);
    for agent in [&cluster.a, &cluster.b] {
        assert_eq!((redirections(agent), &shown(agent)["items"]), (Vec::new(), &json!([])), "{}", agent.name);
    }
}

/// Asserts that both agents list the redirection, and take nothing of it for a remainder.
#[track_caller]
fn assert_listed(cluster: &Cluster, at: &str, left: &str) {
    for agent in [&cluster.a, &cluster.b] {
        let listed = redirections(agent);
        assert_eq!(listed.len(), 1, "{listed:#?}");
        let (is_at, has_left) = (&listed[0]["at"], &listed[0]["left"]);
        assert_eq!((is_at, has_left, &listed[0]["stage"]), (&json!(at), &json!([left]), &json!("active")));
        let items = shown(agent)["items"].as_array().unwrap().clone();
        let of_redirection = |item: &&Value| item["standing"] == "in-use";
        until("nothing else is left", || {
            let items = shown(agent)["items"].as_array().unwrap().clone();
            items.iter().all(|item| item["standing"] == "in-use")
        });
        assert!(items.iter().filter(of_redirection).count() > 5, "{items:#?}");
    }
    let text = cluster.a.text(&["net", "show"]).stdout;
    assert!(text.contains("VXLAN") && text.contains("active"), "{text}");
}

fn codes(findings: &Value) -> Vec<&str> {
    findings.as_array().into_iter().flatten().filter_map(|finding| finding["code"].as_str()).collect()
}

#[test]
fn connections_go_on_in_another_network_and_back() {
    let cluster = cluster();
    let _guest = answering_guest(&cluster, VM);
    let old = Conversation::with(&cluster, vm_address(1));
    old.exchange();
    let before = networks(&cluster);

    // An address that another machine has, and one of no network there, are refused before the guest is touched.
    for (address, code) in
        [(NEW_GATEWAY, "address-in-use"), (Ipv4Addr::new(10, 99, 0, 1), "address-outside-subnet")]
    {
        let new = format!("{}={address}", vm_address(1));
        let check = cluster.a.cli(&["migrate", VM, "--to", "b", "--check", "--new-address", &new]);
        assert_ne!(check.code, 0, "{check:?}");
        let report = check.json();
        assert!(codes(&report["destination_findings"]).contains(&code), "{report:#}");
    }
    assert_as_before(&cluster, &before);

    let report = cluster.migrate(VM, "a", "b", &["--new-address", &format!("{}={NEW}", vm_address(1))]);
    let redirection = &report["redirection"];
    assert_eq!((&redirection["tunnel"], &redirection["mtu"]), (&json!("VXLAN"), &json!(1450)), "{report:#}");
    assert!(redirection["prepare_us"].is_u64() && redirection["switch_us"].is_u64(), "{redirection}");
    old.exchange();
    let new = Conversation::with(&cluster, NEW);
    new.exchange();
    Conversation::with(&cluster, vm_address(1)).exchange();
    assert_listed(&cluster, "b", "a");
    // The guest's frames take the wire: the new network does not see its card.
    let seen = cluster.lab.b.run(&["bridge", "fdb", "show", "br", VM_BRIDGE]).unwrap();
    assert!(!seen.contains(&Net::new(1).mac), "{seen}");
    cluster.assert_guest_whole("b", VM);

    let report = cluster.migrate(VM, "b", "a", &[]);
    assert_eq!(report["redirection"]["addresses"][0]["new"], json!(vm_address(1)), "{report:#}");
    let again = Conversation::with(&cluster, vm_address(1));
    for conversation in [&old, &new, &again] {
        conversation.exchange();
    }
    Conversation::with(&cluster, NEW).exchange();
    assert_listed(&cluster, "a", "b");
    cluster.assert_guest_whole("a", VM);

    drop((old, new));
    // Connections that the guest has closed are over for the kernel a while later: a user need not wait.
    for agent in [&cluster.a, &cluster.b] {
        let released = agent.cli(&["net", "release", VM]);
        // The other host may have seen that before.
        assert!(released.code == 0 || redirections(agent).is_empty(), "{released:?}");
    }
    assert_as_before(&cluster, &before);
    again.exchange();
    Conversation::with(&cluster, vm_address(1)).exchange();
}

/// Returns hosts in three networks.
fn three_networks(usual: Setup) -> Cluster {
    let cluster = cluster_with(Setup { third: true, ..usual });
    connect_third(&cluster.lab).unwrap();
    cluster.agent("c").host.tap(&Net::new(1).tap).unwrap();
    cluster
}

/// Waits until each host has one redirection, to the third host; that of the first host leads there, too.
#[track_caller]
fn assert_all_lead_to_third(cluster: &Cluster) {
    for agent in ["a", "b", "c"].map(|name| cluster.agent(name)) {
        until("there is one redirection, to the third host", || {
            let listed = redirections(agent);
            listed.len() == 1 && listed[0]["at"] == "c" && listed[0]["stage"] == "active"
        });
        assert_eq!(redirections(agent)[0]["left"], json!(["a", "b"]), "{}", agent.name);
    }
}

#[test]
fn connections_of_all_networks_go_on_in_a_third_one() {
    let cluster = three_networks(Setup::default());
    let third = cluster.agent("c");
    let _guest = answering_guest(&cluster, VM);
    let old = Conversation::with(&cluster, vm_address(1));
    old.exchange();

    cluster.migrate(VM, "a", "b", &["--new-address", &format!("{}={NEW}", vm_address(1))]);
    let new = Conversation::with(&cluster, NEW);
    new.exchange();
    let onward = format!("{}={THIRD_ADDRESS}", vm_address(1));
    let check = cluster.b.cli(&["migrate", VM, "--to", "c", "--check", "--new-address", &onward]).ok().json();
    let found = codes(&check["destination_findings"]);
    assert!(found.contains(&"connections-redirected"), "{check:#}");
    assert!(!found.contains(&"connections-end"), "{check:#}");
    cluster.migrate(VM, "b", "c", &["--new-address", &onward]);
    let newest = Conversation::with(&cluster, THIRD_ADDRESS);
    for conversation in [&old, &new, &newest] {
        conversation.exchange();
    }
    for address in [vm_address(1), NEW, THIRD_ADDRESS] {
        Conversation::with(&cluster, address).exchange();
    }
    cluster.assert_guest_whole("c", VM);
    assert_all_lead_to_third(&cluster);

    drop((old, new));
    for agent in [third, &cluster.a, &cluster.b] {
        let released = agent.cli(&["net", "release", VM, "--all"]);
        assert!(released.code == 0 || redirections(agent).is_empty(), "{released:?}");
    }
    for agent in [third, &cluster.a, &cluster.b] {
        until("nothing is left", || shown(agent)["items"] == json!([]) && redirections(agent).is_empty());
    }
}

/// The first host's agent is dead when it is to hear that the guest runs in the third network.
#[test]
fn a_host_left_before_finds_out_where_the_guest_is() {
    let mut cluster = three_networks(Setup::impatient());
    let _guest = answering_guest(&cluster, VM);
    let old = Conversation::with(&cluster, vm_address(1));
    cluster.migrate(VM, "a", "b", &["--new-address", &format!("{}={NEW}", vm_address(1))]);
    old.exchange();

    let faults = cluster.faults.as_ref().unwrap();
    faults.want("source/redirection/commit");
    let onward = format!("{}={THIRD_ADDRESS}", vm_address(1));
    let words = ["migrate", VM, "--to", "c", "--verify", "--on-limit", "stop", "--new-address", &onward];
    let mut migration = cluster.b.begin(&words);
    let held = faults.held(DEADLINE).unwrap();
    let listed = redirections(&cluster.a);
    assert!(listed.iter().any(|one| one["stage"] == "prepared" && one["at"] == "c"), "{listed:#?}");
    cluster.a.kill();
    held.release();
    assert!(migration.wait().unwrap().success());
    cluster.a.start();
    assert_all_lead_to_third(&cluster);
    old.exchange();
    cluster.assert_guest_whole("c", VM);

    drop(old);
    for name in ["c", "a", "b"] {
        let agent = cluster.agent(name);
        let released = agent.cli(&["net", "release", VM, "--all"]);
        assert!(released.code == 0 || redirections(agent).is_empty(), "{released:?}");
    }
    for name in ["a", "b", "c"] {
        let left = common::entries(&cluster.agent(name).directory.join("state/redirections"));
        assert!(left.is_empty(), "{left:?} at {name}");
    }
}

/// Begins to migrate the guest, and kills the destination's QEMU when both hosts have made their ends of the tunnel.
fn abort(cluster: &Cluster, new: &str) {
    let faults = cluster.faults.as_ref().unwrap();
    faults.want("source/redirection/ready");
    let words = ["migrate", VM, "--to", "b", "--on-limit", "stop", "--new-address", new];
    let mut migration: Child = cluster.a.begin(&words);
    let held = faults.held(DEADLINE).unwrap();
    for agent in [&cluster.a, &cluster.b] {
        until(
            "both hosts have made their ends",
            || matches!(&redirections(agent)[..], [one] if one["stage"] == "prepared"),
        );
    }
    for pid in cluster.lab.b.processes().unwrap() {
        let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        if program.to_string_lossy().contains("qemu-system") {
            lab::kill_pid(pid).unwrap();
        }
    }
    held.release();
    assert!(!migration.wait().unwrap().success());
    cluster.a.wait_settled();
    cluster.b.wait_settled();
}

#[test]
fn an_abort_leaves_nothing_and_a_move_its_new_address() {
    let cluster = cluster();
    let _guest = answering_guest(&cluster, VM);
    let old = Conversation::with(&cluster, vm_address(1));
    old.exchange();
    let before = networks(&cluster);
    let new_address = format!("{}={NEW}", vm_address(1));
    abort(&cluster, &new_address);
    assert_as_before(&cluster, &before);
    old.exchange();

    // They go on before QEMU at the source has ended, which may have pages to send for long.
    let faults = cluster.faults.as_ref().unwrap();
    faults.want("source/redirection/running");
    let words = ["migrate", VM, "--to", "b", "--on-limit", "stop", "--new-address", &new_address];
    let mut migration = cluster.a.begin(&words);
    let held = faults.held(DEADLINE).unwrap();
    old.exchange();
    held.release();
    assert!(migration.wait().unwrap().success());
    cluster.a.wait_settled();
    // Without old connections the first host has nothing more to do, and the guest keeps its new address.
    drop(old);
    assert_eq!(cluster.a.cli(&["net", "release", VM]).code, 0);
    until("the first host's part is gone", || redirections(&cluster.a).is_empty());
    until("the second host translates alone", || redirections(&cluster.b)[0]["tunnel"].is_null());
    // Frames that are late are held for a moment longer.
    until("the first host is as before", || network_of(&cluster.lab.a) == before[0]);
    let new = Conversation::with(&cluster, NEW);
    new.exchange();

    let back = format!("{0}={0}", vm_address(1));
    cluster.migrate(VM, "b", "a", &["--new-address", &back]);
    new.exchange();
    Conversation::with(&cluster, vm_address(1)).exchange();
    cluster.assert_guest_whole("a", VM);
    drop(new);
    assert_eq!(cluster.b.cli(&["net", "release", VM]).code, 0);
    assert_as_before(&cluster, &before);
}

/// Steps of the redirection's participants that every move to another network passes once both hosts have agreed.
const STEPS: [(&str, &[&str]); 2] = [
    ("source", &["check", "before-stop", "freeze", "ready", "commit", "running", "finish"]),
    ("destination", &["open", "freeze", "ready", "before-cont", "commit", "finish"]),
];

/// Returns a sample of the fault points, each with the role of the host whose agent dies there; all of them with
/// `WHIMBREL_SOAK`.
fn deaths() -> Vec<(String, &'static str)> {
    let points = STEPS.iter().flat_map(|(role, steps)| steps.iter().map(move |step| (role, step)));
    let points = points.map(|(role, step)| format!("{role}/redirection/{step}"));
    let mut all: Vec<_> =
        points.flat_map(|point| [(point.clone(), "source"), (point, "destination")]).collect();
    if std::env::var_os("WHIMBREL_SOAK").is_some() {
        return all;
    }
    let seed = seed(31);
    eprintln!("drawn with WHIMBREL_SEED={seed}");
    let mut draw = Generator(seed);
    // A redirection that was switched, and is not confirmed, is always among them.
    let confirmed = ("destination/redirection/before-cont".to_owned(), "destination");
    std::iter::once(confirmed).chain((0..4).map(|_| all.swap_remove(draw.below(all.len())))).collect()
}

/// Moves the guest to the other network, lets an agent die at a point, and waits until the next one has done its work.
/// Returns the host where the guest is.
fn move_with_death(cluster: &mut Cluster, at: &'static str, (point, role): &(String, &str)) -> &'static str {
    let (to, new) = if at == "a" { ("b", NEW) } else { ("a", vm_address(1)) };
    let address = format!("{}={new}", vm_address(1));
    let faults = cluster.faults.as_ref().unwrap();
    faults.want(point);
    let words = ["migrate", VM, "--to", to, "--on-limit", "stop", "--new-address", &address];
    let mut migration: Child = cluster.agent(at).begin(&words);
    let held = faults.held(DEADLINE).unwrap_or_else(|| panic!("{point} is not reached"));
    let dead = if *role == "source" { at } else { to };
    cluster.agent_mut(dead).kill();
    held.release();
    cluster.agent_mut(dead).start();
    let _ = migration.wait();
    let idle = |name: &&&str| {
        let vms = cluster.agent(name).cli(&["vm", "list"]).ok().json();
        vms.as_array().unwrap().iter().any(|vm| vm["vm"] == VM && vm["migration"].is_null())
    };
    let here = std::cell::Cell::new(at);
    until("one host has the VM", || {
        let hosts: Vec<_> = ["a", "b"].iter().filter(idle).copied().collect();
        hosts.first().is_some_and(|host| {
            here.set(host);
            hosts.len() == 1
        })
    });
    here.get()
}

#[test]
fn no_death_of_an_agent_loses_or_leaves_a_redirection() {
    let mut cluster = cluster_with(Setup::impatient());
    let _guest = answering_guest(&cluster, VM);
    let old = Conversation::with(&cluster, vm_address(1));
    old.exchange();
    let before = networks(&cluster);
    let mut at = "a";
    for death in deaths() {
        let from = at;
        at = move_with_death(&mut cluster, at, &death);
        eprintln!("{death:?}: from {from}, now at {at}");
        until("what was prepared is confirmed, or gone", || {
            let both = [&cluster.a, &cluster.b].map(redirections).concat();
            both.iter().all(|listed| listed["stage"] == "active") && (at == "a" || both.len() == 2)
        });
        old.exchange();
        Conversation::with(&cluster, vm_address(1)).exchange();
    }
    if at == "b" {
        cluster.migrate(VM, "b", "a", &["--new-address", &format!("{0}={0}", vm_address(1))]);
        old.exchange();
    }
    cluster.assert_guest_whole("a", VM);
    drop(old);
    for agent in [&cluster.a, &cluster.b] {
        let released = agent.cli(&["net", "release", VM]);
        assert!(released.code == 0 || redirections(agent).is_empty(), "{released:?}");
    }
    assert_as_before(&cluster, &before);
    for agent in [&cluster.a, &cluster.b] {
        let left = common::entries(&agent.directory.join("state/redirections"));
        assert!(left.is_empty(), "{left:?} at {}", agent.name);
    }
}
