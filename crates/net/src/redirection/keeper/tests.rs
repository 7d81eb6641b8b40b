use super::*;
use crate::redirection::objects::SettingObject;
use crate::redirection::parts::GuestAddressing;
use crate::redirection::record::RecordStore;
use crate::redirection::testing::{a_move, first};

/// Returns the record of a host whose kernel forwards as a whole.
fn record(redirection: Redirection, host: &str, forwarding: &str) -> RedirectionRecord {
    let abilities = HostAbilities {
        has_v6: true,
        v6_forwarding: forwarding.to_owned(),
        has_egress: true,
        ..HostAbilities::default()
    };
    let plan = plan(&redirection, host, &abilities).unwrap();
    let stage = RecordStage::Active;
    RedirectionRecord { host: host.to_owned(), stage, redirection, plan, since_unix_ms: 5 }
}

fn global(plan: &HostPlan) -> SettingObject {
    let setting = |object: &KernelObject| match object {
        KernelObject::Setting(setting) if setting.before.is_some() => Some(setting.clone()),
        _ => None,
    };
    plan.objects().find_map(setting).unwrap()
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
    adopt_settings(&mut db.plan, std::slice::from_ref(&web));
    assert_eq!(global(&db.plan).before.as_deref(), Some("0"));
    let setting = KernelObject::Setting(global(&db.plan));
    assert!(is_needed(&setting, &web, &[web.clone(), db.clone()]));
    assert!(!is_needed(&setting, &db, std::slice::from_ref(&db)));
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
    store.put_key(301, &[7; 32]).unwrap();
    assert_eq!(store.all().unwrap(), [db.clone(), web.clone()]);
    assert_eq!(store.key(301).unwrap(), [7; 32]);
    for entry in std::fs::read_dir(&path).unwrap() {
        let mode = entry.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "only for its owner");
    }
    store.remove(&web).unwrap();
    assert_eq!(store.all().unwrap(), [db]);
    assert!(store.key(301).is_err(), "keys end with their redirection");
    std::fs::write(path.join("9.json"), "{").unwrap();
    assert!(store.all().unwrap_err().to_string().contains("9.json"));
}

#[test]
fn a_table_that_changes_is_replaced_in_one_step() {
    let two = super::super::onward::moved(Some(&first()), a_move(4, 2, 3, &[1, 2]));
    let two = two.unwrap().redirection.unwrap();
    let one = super::super::onward::without(&two, "host2").unwrap();
    assert_eq!(two.addressing, GuestAddressing::Translated);
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
    let directory = tempfile::tempdir().unwrap();
    let (keeper, store) =
        (RedirectionKeeper::new("host1", directory.path()), RecordStore::new(directory.path()));
    keeper.forget_unused_keys().unwrap();
    let web = record(first(), "host1", "0");
    store.put(&web).unwrap();
    let used = web.redirection.legs[0].number;
    for number in [used, 77] {
        store.put_key(number, &[7; 32]).unwrap();
    }
    keeper.forget_unused_keys().unwrap();
    assert_eq!(store.keys().unwrap(), [used]);
}
