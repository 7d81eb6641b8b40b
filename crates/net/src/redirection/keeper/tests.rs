use super::*;
use crate::redirection::model::NewAddressMode;
use crate::redirection::next_move::next_redirection;
use crate::redirection::objects::Sysctl;
use crate::redirection::plan::KernelFeatures;
use crate::redirection::record::{RecordStore, ReservedEnd};
use crate::redirection::testing::{FakeKernel, a_move, first, without};
use crate::redirection::tunnel::{TunnelKind, TunnelPorts};

/// Returns the record of a host whose kernel forwards as a whole.
fn record(redirection: Redirection, host: &str, forwarding: &str) -> RedirectionRecord {
    let kernel_features = KernelFeatures {
        has_v6: true,
        v6_forwarding: forwarding.to_owned(),
        has_egress: true,
        ..KernelFeatures::default()
    };
    let plan = plan(&redirection, host, &kernel_features).unwrap();
    let stage = RecordStage::Active;
    RedirectionRecord {
        host: host.to_owned(),
        stage,
        redirection,
        plan,
        is_incomplete: false,
        since_unix_ms: 5,
    }
}

fn global(plan: &HostPlan) -> Sysctl {
    let sysctl = |object: &KernelObject| match object {
        KernelObject::Sysctl(sysctl) if sysctl.before.is_some() => Some(sysctl.clone()),
        _ => None,
    };
    plan.objects().find_map(sysctl).unwrap()
}

/// Returns the redirection of another guest.
fn of_other() -> Redirection {
    let mut other = first();
    other.migration = "db#9".to_owned();
    other.legs[0].number = 77;
    other
}

#[test]
fn settings_of_the_host_are_restored_by_the_last_redirection() {
    let web = record(first(), "host1", "0");
    let mut db = record(of_other(), "host1", "1");
    assert_eq!(global(&db.plan).before.as_deref(), Some("1"), "what the other one has set");
    adopt_sysctls(&mut db.plan, std::slice::from_ref(&web));
    assert_eq!(global(&db.plan).before.as_deref(), Some("0"));
    let sysctl = KernelObject::Sysctl(global(&db.plan));
    assert!(is_needed(&sysctl, &web, &[web.clone(), db.clone()]));
    assert!(!is_needed(&sysctl, &db, std::slice::from_ref(&db)));
}

#[test]
fn records_and_keys_are_private_and_last_until_removed() {
    use std::os::unix::fs::PermissionsExt as _;

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("redirections");
    let store = RecordStore::new(&path);
    assert_eq!(store.all().unwrap(), []);
    let (web, db) = (record(first(), "host1", "0"), record(of_other(), "host1", "0"));
    for record in [&web, &db] {
        store.put(record).unwrap();
    }
    let end = ReservedEnd { key: [7; 32], ports: vec![7742, 7743] };
    store.put_end("web#3", &end).unwrap();
    assert_eq!(store.ends().unwrap(), ["web#3"]);
    assert!(!format!("{end:?}").contains("7, 7"), "{end:?}");
    assert_eq!(store.all().unwrap(), [db.clone(), web.clone()]);
    assert_eq!(store.end("web#3").unwrap(), end);
    for entry in std::fs::read_dir(&path).unwrap() {
        let mode = entry.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "only for its owner");
    }
    store.remove(&web).unwrap();
    assert_eq!(store.all().unwrap(), [db]);
    assert!(store.end("web#3").is_err(), "keys end with their redirection");
    std::fs::write(path.join("9.json"), "{").unwrap();
    assert!(store.all().unwrap_err().to_string().contains("9.json"));
}

#[test]
fn a_table_that_changes_is_replaced_in_one_step() {
    let two = next_redirection(Some(&first()), a_move(4, 2, 3, &[1, 2]));
    let two = two.unwrap().redirection.unwrap();
    let one = without(&two, "host2");
    assert_eq!(two.addressing, NewAddressMode::Nat);
    let (two, one) = (record(two, "host3", "0"), record(one, "host3", "0"));
    let tables = two.plan.objects().filter(|object| matches!(object, KernelObject::Rules(_)));
    for table in tables {
        assert!(is_replaced(table, &one.plan));
    }
    let gone: Vec<_> = two.plan.objects().filter(|object| !has(&one.plan, object)).collect();
    assert!(gone.iter().any(|object| matches!(object, KernelObject::Device(_))));
    assert!(
        one.plan.objects().all(|object| matches!(object, KernelObject::Rules(_)) || has(&two.plan, object))
    );
}

#[test]
fn keys_without_a_redirection_are_forgotten() {
    let home = Host::new("host1");
    let is_open = |migration: &str| migration == "open#1";
    home.keeper.forget_unused_keys(is_open).unwrap();
    let web = record(first(), "host1", "0");
    home.keeper.store.put(&web).unwrap();
    for (number, migration) in ["web#3", "open#1", "gone#1"].iter().enumerate() {
        assert!(home.keeper.reserve(migration, number as u32, PORTS).unwrap().is_some());
    }
    // An agent has died while it wrote.
    std::fs::write(home.directory.path().join("gone@1.key.new"), [7; 34]).unwrap();
    home.keeper.forget_unused_keys(is_open).unwrap();
    let mut files = home.files();
    files.sort();
    assert_eq!(files, ["301.json", "open@1.key", "web@3.key"]);
}

#[test]
fn no_key_is_left_if_the_kernel_computes_no_public_one() {
    let home = Host::new("host1");
    home.kernel.refuse("key");
    home.keeper.reserve("web#3", 7, PORTS).unwrap_err();
    assert_eq!(home.files(), Vec::<String>::new());
}

const PORTS: TunnelPorts = TunnelPorts { vxlan: 7741, wireguard: [7742, 7744] };

#[test]
fn each_tunnel_of_wireguard_has_a_port_of_its_own() {
    let home = Host::new("host1");
    home.kernel.occupy(7742);
    assert_eq!(home.keeper.free_ports(PORTS).unwrap().wireguard, Some(7743));
    let port = |migration: &str| home.keeper.reserve(migration, 7, PORTS).unwrap().map(|(_, port)| port);
    assert_eq!(port("web#3"), Some(7743));
    assert_eq!(port("db#9"), Some(7744), "the first one is reserved before there is a record");
    assert_eq!((port("mail#1"), home.files().len()), (None, 2));
    home.keeper.forget_key("db#9").unwrap();
    assert_eq!(
        home.keeper.further_ports(PORTS, 9).unwrap(),
        Vec::<u16>::new(),
        "one is for the first tunnel"
    );
    // All tunnels of a migration have one key, and each has another port.
    home.keeper.forget_key("web#3").unwrap();
    assert_eq!(home.keeper.further_ports(PORTS, 9).unwrap(), [7744]);
    let [one, other] = [7, 8].map(|number| home.keeper.reserve("db#9", number, PORTS).unwrap().unwrap());
    assert_eq!((one.0 == other.0, one.1, other.1), (true, 7743, 7744));
    home.keeper.forget_key("db#9").unwrap();
    assert_eq!((port("web#3"), port("db#9")), (Some(7743), Some(7744)));
    // Where another program has the port of VXLAN, there is none; other tunnels of ours share it.
    assert_eq!(home.keeper.free_ports(PORTS).unwrap().vxlan, Some(7741));
    home.redirect(&first());
    assert_eq!(home.keeper.free_ports(PORTS).unwrap().vxlan, Some(7741));
    let other = Host::new("host2");
    other.kernel.occupy(7741);
    assert_eq!(other.keeper.free_ports(PORTS).unwrap().vxlan, None);
}

/// Gives the tunnel of a redirection this kind, with ports and keys that both hosts have reserved.
fn tunnelled(mut redirection: Redirection, kind: TunnelKind, old: &Host, new: &Host) -> Redirection {
    let migration = redirection.migration.clone();
    let tunnel = &mut redirection.legs[0].tunnel;
    tunnel.kind = kind;
    if kind == TunnelKind::WireGuard {
        let reserve = |host: &Host| host.keeper.reserve(&migration, 7, PORTS).unwrap().unwrap();
        let [(old_key, old_port), (new_key, new_port)] = [old, new].map(reserve);
        (tunnel.ports, tunnel.keys) = ([old_port, new_port], Some([old_key, new_key]));
    }
    redirection
}

#[test]
fn a_second_vm_and_a_move_back_get_tunnels_of_each_kind() {
    for kind in TunnelKind::ALL {
        let (home, away) = (Host::new("host1"), Host::new("host2"));
        let hosts = [&home, &away];
        let out = tunnelled(first(), kind, &home, &away);
        let mut second = of_other();
        second.card.0[5] = 9;
        second.place.number = 78;
        let second = tunnelled(second, kind, &home, &away);
        for redirection in [&out, &second] {
            for host in hosts {
                host.redirect(redirection);
            }
        }
        let back = tunnelled(back(), kind, &away, &home);
        let [at_home, at_away] = hosts.map(|host| host.redirect(&back));
        assert!(home.kernel.has("web#4") && home.kernel.has("db#9"), "{kind}");
        for (host, record) in [(&home, at_home), (&away, at_away)] {
            host.keeper.remove(&record).unwrap();
            let second = host.keeper.records().unwrap().pop().unwrap();
            host.keeper.remove(&second).unwrap();
            assert_eq!((host.kernel.shown(), host.files()), (vec![], vec![]), "{kind}");
        }
    }
}

#[test]
fn a_key_outlives_the_redirection_that_replaces_its_own() {
    let (home, away) = (Host::new("host1"), Host::new("host2"));
    home.redirect(&tunnelled(first(), TunnelKind::WireGuard, &home, &away));
    let before = home.kernel.shown();
    let next = home.switch(&tunnelled(back(), TunnelKind::WireGuard, &away, &home));
    assert_ne!(home.kernel.shown(), before);
    home.keeper.remove(&next).unwrap();
    assert_eq!(home.kernel.shown(), before);
    assert_eq!(home.files().len(), 2, "its record and its key: {:?}", home.files());
}

/// A host with a kernel in memory.
struct Host {
    kernel: Arc<FakeKernel>,
    keeper: RedirectionKeeper,
    directory: tempfile::TempDir,
}

impl Host {
    fn new(name: &str) -> Self {
        let (kernel, directory) = (Arc::<FakeKernel>::default(), tempfile::tempdir().unwrap());
        let keeper =
            RedirectionKeeper::with(name, directory.path(), Arc::clone(&kernel) as Arc<dyn HostKernel>);
        Self { kernel, keeper, directory }
    }

    /// Replaces the agent by the next one.
    fn restart(&mut self) {
        let kernel = Arc::clone(&self.kernel) as Arc<dyn HostKernel>;
        self.keeper = RedirectionKeeper::with(&self.keeper.host, self.directory.path(), kernel);
    }

    /// Redirects, as a migration that succeeds.
    fn redirect(&self, redirection: &Redirection) -> RedirectionRecord {
        let mut record = self.keeper.prepare(redirection).unwrap();
        self.keeper.switch(&mut record).unwrap();
        self.keeper.confirm(&mut record).unwrap();
        record
    }

    /// Switches to a redirection whose migration can still be aborted.
    fn switch(&self, redirection: &Redirection) -> RedirectionRecord {
        let mut record = self.keeper.prepare(redirection).unwrap();
        self.keeper.switch(&mut record).unwrap();
        record
    }

    /// Returns the record of a migration.
    fn record(&self, migration: &str) -> RedirectionRecord {
        let mut records = self.keeper.records().unwrap().into_iter();
        records.find(|record| record.redirection.migration == migration).unwrap()
    }

    /// Returns the names of all records and keys.
    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn migrations(&self) -> Vec<(String, RecordStage)> {
        let records = self.keeper.records().unwrap();
        records.into_iter().map(|record| (record.redirection.migration, record.stage)).collect()
    }
}

/// Returns the redirection of the guest that moves back to its home.
fn back() -> Redirection {
    next_redirection(Some(&first()), a_move(4, 2, 1, &[2])).unwrap().redirection.unwrap()
}

#[test]
fn an_abort_after_the_switch_reinstates_the_former_redirection() {
    for is_restarted in [false, true] {
        let mut home = Host::new("host1");
        let former = home.redirect(&first());
        let before = home.kernel.shown();
        assert!(!before.is_empty());
        home.switch(&back());
        assert!(!home.kernel.has("table whimbrel-web#3"), "{:#?}", home.kernel.shown());
        assert!(home.kernel.has("table whimbrel-web#4"), "{:#?}", home.kernel.shown());
        let [policies_before, policies] = [&before, &home.kernel.shown()].map(|shown| {
            shown.iter().filter(|object| object.contains("policy rule")).cloned().collect::<Vec<_>>()
        });
        assert!(
            policies.iter().all(|rule| !policies_before.contains(rule)),
            "no packet takes the former way"
        );
        if is_restarted {
            home.restart();
            home.keeper.resume().unwrap();
            assert!(!home.kernel.has("table whimbrel-web#3"), "the migration decides");
        }
        home.keeper.remove(&home.record("web#4")).unwrap();
        assert_eq!(home.kernel.shown(), before, "{is_restarted}");
        assert_eq!(home.keeper.records().unwrap(), [former]);
    }
}

#[test]
fn an_aborted_move_back_keeps_what_it_could_not_reinstate() {
    let home = Host::new("host1");
    home.redirect(&first());
    let before = home.kernel.shown();
    let next = home.switch(&back());
    home.kernel.refuse("table whimbrel-web#3");
    home.keeper.remove(&next).unwrap();
    let record = home.keeper.records().unwrap().pop().unwrap();
    assert!(record.is_incomplete && record.stage == RecordStage::Active);
    home.keeper.complete(&record).unwrap_err();
    home.kernel.mend();
    home.keeper.complete(&record).unwrap();
    assert_eq!(home.kernel.shown(), before);
    assert!(!home.keeper.records().unwrap()[0].is_incomplete);
}

#[test]
fn a_failed_removal_does_not_hinder_the_former_redirection() {
    let home = Host::new("host1");
    home.redirect(&first());
    let next = home.switch(&back());
    home.kernel.keep("device whimbrel1004020");
    home.keeper.remove(&next).unwrap_err();
    assert!(home.kernel.has("table whimbrel-web#3"), "{:#?}", home.kernel.shown());
    home.kernel.mend();
    home.keeper.remove(&next).unwrap();
    assert_eq!(home.migrations(), [("web#3".to_owned(), RecordStage::Active)]);
}

#[test]
fn a_confirmed_move_back_leaves_nothing_of_the_former_one() {
    let home = Host::new("host1");
    home.redirect(&first());
    let mut next = home.switch(&back());
    assert_eq!(home.migrations().len(), 2, "the former one can be made again");
    assert!(home.kernel.has("device whimbrel1003011"), "devices go later: the guest would wait for that");
    home.keeper.confirm(&mut next).unwrap();
    assert_eq!(home.migrations(), [("web#4".to_owned(), RecordStage::Active)]);
    assert!(!home.kernel.has("web#3"));
    assert!(!home.kernel.has("device whimbrel1003011"));
    home.keeper.remove(&next).unwrap();
    assert_eq!(home.kernel.shown(), Vec::<String>::new());
}

#[test]
fn a_former_redirection_that_stays_does_not_hinder_the_next() {
    let home = Host::new("host1");
    home.redirect(&first());
    let mut next = home.keeper.prepare(&back()).unwrap();
    home.kernel.keep("table whimbrel-web#3");
    home.keeper.switch(&mut next).unwrap_err();
    assert!(!next.is_incomplete, "all of the next one is there");
    assert!(home.kernel.has("table whimbrel-web#4"), "{:#?}", home.kernel.shown());
    home.keeper.confirm(&mut next).unwrap_err();
    let expected = [("web#4".to_owned(), RecordStage::Active), ("web#3".to_owned(), RecordStage::Ending)];
    assert_eq!(home.migrations(), expected);
    home.kernel.mend();
    home.keeper.remove(&home.record("web#3")).unwrap();
    assert_eq!(home.migrations(), expected[..1]);
    assert!(home.kernel.has("table whimbrel-web#4") && !home.kernel.has("table whimbrel-web#3"));
}

#[test]
fn what_could_not_be_made_at_the_switch_is_completed() {
    let away = Host::new("host2");
    let whole = Host::new("host2");
    whole.redirect(&first());
    let mut record = away.keeper.prepare(&first()).unwrap();
    away.kernel.refuse("policy rule 5702");
    away.keeper.switch(&mut record).unwrap_err();
    assert!(away.kernel.has("table whimbrel-web#3"), "all else is there");
    away.keeper.confirm(&mut record).unwrap();
    assert!(away.keeper.records().unwrap()[0].is_incomplete);
    away.keeper.complete(&record).unwrap_err();
    away.kernel.mend();
    // An agent that starts completes it, too.
    away.keeper.resume().unwrap();
    assert!(!away.keeper.records().unwrap()[0].is_incomplete);
    assert_eq!(away.kernel.shown(), whole.kernel.shown());
    away.kernel.start_anew();
    away.kernel.refuse("port whimbrel1");
    let (records, errors) = away.keeper.resume().unwrap();
    assert_eq!((records.len(), errors.len()), (1, 1), "the bridge is not there yet");
    away.kernel.mend();
    away.keeper.complete(&records[0]).unwrap();
    assert_eq!(away.kernel.shown(), whole.kernel.shown());
}

#[test]
fn what_another_thread_has_changed_is_not_changed_back() {
    let away = Host::new("host2");
    let record = away.redirect(&first());
    away.keeper.remove(&record.clone()).unwrap();
    let late = away.keeper.drop_legs(&record.clone());
    assert!(matches!(late, Err(RedirectionError::Changed { .. })), "{late:?}");
    away.keeper.complete(&record).unwrap();
    away.keeper.remove(&record).unwrap();
    assert_eq!((away.kernel.shown(), away.migrations()), (vec![], vec![]));
}

#[test]
fn the_last_of_many_redirections_restores_forwarding() {
    let home = Host::new("host1");
    let redirections: Vec<_> = (0..8)
        .map(|number| {
            let mut redirection = first();
            redirection.migration = format!("vm{number}#3");
            redirection.card.0[5] = number;
            redirection.legs[0].number = 400 + u32::from(number);
            redirection
        })
        .collect();
    std::thread::scope(|scope| {
        for redirection in &redirections {
            let home = &home;
            scope.spawn(move || {
                for _ in 0..10 {
                    let record = home.redirect(redirection);
                    assert!(home.kernel.forwards());
                    home.keeper.remove(&record).unwrap();
                }
            });
        }
    });
    assert!(!home.kernel.forwards());
    assert_eq!(home.kernel.shown(), Vec::<String>::new());
}

#[test]
fn cards_of_one_migration_are_redirected_each_by_itself() {
    let (home, away) = (Host::new("host1"), Host::new("host2"));
    let one = tunnelled(first(), TunnelKind::WireGuard, &home, &away);
    let mut other = first();
    other.card.0[5] = 9;
    (other.place.number, other.legs[0].number) = (98, 99);
    let other = tunnelled(other, TunnelKind::WireGuard, &home, &away);
    assert_eq!(one.legs[0].tunnel.keys, other.legs[0].tunnel.keys, "one key for all");
    assert_ne!(one.legs[0].tunnel.ports, other.legs[0].tunnel.ports);
    for host in [&home, &away] {
        let mut clash = other.clone();
        clash.card.0[5] = 8;
        let records = [&one, &other].map(|redirection| host.redirect(redirection));
        let refused = host.keeper.prepare(&clash);
        assert!(matches!(refused, Err(RedirectionError::NumberInUse { .. })), "{refused:?}");
        assert_eq!(host.migrations().len(), 2);
        let [one, other] = records;
        host.keeper.remove(&one).unwrap();
        assert_eq!((host.migrations().len(), host.files().len()), (1, 2), "the key is needed still");
        host.keeper.remove(&other).unwrap();
        assert_eq!((host.kernel.shown(), host.files()), (vec![], vec![]));
    }
}
