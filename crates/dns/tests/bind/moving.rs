//! Names follow their VM, and come back.

use dns::{AddressChange, ChangeSet, Goal, Progress, Relocation};
use lab::DEADLINE;
use whimbrel_dns as dns;

use crate::servers::{Servers, ZONES};

/// Records of the VM's names at a server, by another program.
fn names(servers: &Servers, server: std::net::Ipv4Addr) -> Vec<String> {
    let questions = [
        ["web.example.org", "A"],
        ["web.example.org", "AAAA"],
        ["pool.example.org", "A"],
        ["_http._tcp.example.org", "SRV"],
        ["10.2.0.192.in-addr.arpa", "PTR"],
        ["7.100.51.198.in-addr.arpa", "PTR"],
    ];
    questions.iter().flat_map(|question| servers.dig(server, question)).collect()
}

#[track_caller]
fn complete(change_set: &ChangeSet, goal: Goal) {
    let states: Vec<_> =
        change_set.changes.iter().map(|change| format!("{change}: {}", change.state)).collect();
    assert_eq!((change_set.goal, change_set.progress()), (goal, Progress::Complete), "{states:#?}");
}

const SOURCE: [&str; 6] = [
    "web.example.org. {} A 192.0.2.10",
    "web.example.org. {} AAAA 2001:db8::10",
    "pool.example.org. {60} A 192.0.2.10",
    "pool.example.org. {60} A 192.0.2.99",
    "_http._tcp.example.org. {} SRV 0 5 80 web.example.org.",
    "10.2.0.192.in-addr.arpa. {} PTR web.example.org.",
];

const DESTINATION: [&str; 6] = [
    "web.example.org. {} A 198.51.100.7",
    "web.example.org. {} AAAA 2001:db8:1::7",
    "pool.example.org. {60} A 192.0.2.99",
    "pool.example.org. {60} A 198.51.100.7",
    "_http._tcp.example.org. {} SRV 0 5 8080 web.example.org.",
    "7.100.51.198.in-addr.arpa. {} PTR web.example.org.",
];

/// Returns the records with their TTL: the low one, or the one that each had at first.
fn records(records: &[&str], is_lowered: bool) -> Vec<String> {
    let [pool, other] = if is_lowered { ["5", "5"] } else { ["60", "300"] };
    records.iter().map(|line| line.replace("{60}", pool).replace("{}", other)).collect()
}

#[test]
fn a_vm_that_moves_again_soon_keeps_its_ttl() {
    let servers = Servers::start();
    let config = servers.config();
    let first = servers.prepare(&config);
    complete(&first.wait(DEADLINE), Goal::Lowered);
    first.switch();
    complete(&first.wait(DEADLINE), Goal::Switched);
    // It moves back before its names have got their TTL back.
    let moved =
        |before: &str, after: &str| AddressChange::new(before.parse().unwrap(), after.parse().unwrap());
    let addresses = vec![moved("198.51.100.7", "192.0.2.10"), moved("2001:db8:1::7", "2001:db8::10")];
    let mut source = config.vms["web1"].clone();
    let destination = source.clone();
    source.services[0].port = 8080;
    let back = Relocation::new(&source, Some(&destination), addresses);
    let path = servers.record_path().with_extension("next");
    let second = servers.prepare_move(&config, &back, &path, &[first.change_set()]);
    first.abandon().unwrap();
    assert!(!servers.record_path().exists());
    complete(&second.wait(DEADLINE), Goal::Lowered);
    second.switch();
    complete(&second.wait(DEADLINE), Goal::Switched);
    second.restore_ttl();
    complete(&second.wait(DEADLINE), Goal::Restored);
    assert_eq!(names(&servers, servers.first_address()), records(&SOURCE, false));
}

#[test]
fn names_follow_with_a_low_ttl_and_get_it_back() {
    let servers = Servers::start();
    let both = [servers.first_address(), servers.second_address()];
    let content = servers.content(both[0]);
    let serials = ZONES.map(|zone| servers.serial(zone));
    let updater = servers.prepare(&servers.config());
    complete(&updater.wait(DEADLINE), Goal::Lowered);
    for server in both {
        assert_eq!(names(&servers, server), records(&SOURCE, true), "{server}");
    }
    let lowered = updater.change_set();
    // From then on no cache has a record with the TTL that was found.
    let originals = lowered.changes.iter().filter_map(|change| change.original.as_ref());
    let expired_s =
        originals.map(|found| found.lowered_at_s.unwrap() + u64::from(found.ttl_s)).max().unwrap();
    assert_eq!(lowered.stale_until_s(), None);

    updater.switch();
    let switched = updater.wait(DEADLINE);
    complete(&switched, Goal::Switched);
    for server in both {
        assert_eq!(names(&servers, server), records(&DESTINATION, true), "{server}");
    }
    assert!(switched.stale_until_s().unwrap() >= expired_s);
    for (zone, before) in ZONES.into_iter().zip(serials) {
        assert!(servers.serial(zone) > before, "{zone}");
    }

    updater.restore_ttl();
    complete(&updater.wait(DEADLINE), Goal::Restored);
    for server in both {
        assert_eq!(names(&servers, server), records(&DESTINATION, false), "{server}");
    }
    // All else in the zones is as it was.
    let mut expected: Vec<_> = content;
    let (from, to) = (records(&SOURCE, false), records(&DESTINATION, false));
    expected.retain(|line| !from.contains(line));
    expected.extend(to);
    let mut found = servers.content(both[0]);
    expected.sort();
    found.sort();
    assert_eq!(found, expected);

    assert!(servers.record_path().exists());
    complete(&updater.finish().unwrap(), Goal::Restored);
    assert!(!servers.record_path().exists());
}

#[test]
fn a_migration_that_ends_leaves_the_zones_as_they_were() {
    let servers = Servers::start();
    let first = servers.first_address();
    let content = servers.content(first);
    let config = servers.config();
    for goals in [&[][..], &[Goal::Switched], &[Goal::Switched, Goal::Restored]] {
        let mut updater = servers.prepare(&config);
        complete(&updater.wait(DEADLINE), Goal::Lowered);
        for goal in goals {
            if *goal == Goal::Switched {
                updater.switch();
            } else {
                updater.restore_ttl();
            }
            complete(&updater.wait(DEADLINE), *goal);
            // Each time by another agent.
            updater.suspend();
            updater = servers.resume(&config);
        }
        assert_ne!(servers.content(first), content);
        updater.undo();
        complete(&updater.wait(DEADLINE), Goal::Undone);
        assert_eq!(servers.content(first), content, "{goals:?}");
        updater.finish().unwrap();
    }
}

#[test]
fn a_goal_that_comes_at_once_is_reached_without_the_ones_before() {
    let servers = Servers::start();
    let content = servers.content(servers.first_address());
    let updater = servers.prepare(&servers.config());
    updater.switch();
    updater.restore_ttl();
    complete(&updater.wait(DEADLINE), Goal::Restored);
    assert_eq!(names(&servers, servers.first_address()), records(&DESTINATION, false));
    updater.undo();
    complete(&updater.wait(DEADLINE), Goal::Undone);
    assert_eq!(servers.content(servers.first_address()), content);
}
