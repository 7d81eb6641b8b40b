use super::*;

fn host(name: &str, document: Option<&str>) -> HostDocument {
    HostDocument { host: name.to_owned(), document: document.map(str::to_owned) }
}

fn vm(host: &str, vm: &str, document: Option<&str>) -> VmDocument {
    VmDocument { host: host.to_owned(), vm: vm.to_owned(), document: document.map(str::to_owned) }
}

fn evacuation(number: u64, state: Option<&str>) -> StoredEvacuation {
    let (id, options) = (format!("e{number}"), "{}".to_owned());
    StoredEvacuation { id, number, options, state: state.map(str::to_owned) }
}

fn event(text: &str) -> NewEvent {
    let (kind, text) = ("host-connected".to_owned(), text.to_owned());
    NewEvent { unix_ms: 7, kind, host: Some("a".to_owned()), text, ..NewEvent::default() }
}

#[test]
fn records_are_there_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let mut batch = FleetBatch::default();
    batch.put_host(host("a", Some("old")));
    batch.put_host(host("a", Some("new")));
    batch.put_host(host("b", Some("b")));
    batch.put_vm(vm("a", "web", Some("1")));
    batch.put_vm(vm("b", "db", Some("2")));
    batch.put_evacuation(evacuation(1, Some("begun")));
    batch.put_evacuation(evacuation(2, Some("begun")));
    batch.events = vec![event("first"), event("second")];
    {
        let store = FleetStore::open(folder.path()).unwrap();
        assert_eq!(store.load().unwrap(), FleetRecords::default());
        assert_eq!(store.store(&batch).unwrap(), 2);
    }
    let store = FleetStore::open(folder.path()).unwrap();
    let records = store.load().unwrap();
    assert_eq!(records.hosts, [host("a", Some("new")), host("b", Some("b"))]);
    assert_eq!(records.vms, [vm("a", "web", Some("1")), vm("b", "db", Some("2"))]);
    assert_eq!(records.evacuations, [evacuation(1, Some("begun")), evacuation(2, Some("begun"))]);
    assert_eq!(records.last_event, 2);
    let seen = store.events(1, 10).unwrap();
    assert_eq!(seen, [StoredEvent { number: 2, event: event("second") }]);
    assert_eq!(store.events(0, 1).unwrap()[0].number, 1);

    let mut batch = FleetBatch::default();
    batch.put_host(host("b", None));
    batch.put_vm(vm("a", "web", None));
    batch.put_evacuation(evacuation(1, None));
    store.store(&batch).unwrap();
    let records = store.load().unwrap();
    assert_eq!((records.hosts.len(), records.vms.len(), records.evacuations.len()), (1, 0, 1));
}

#[test]
fn numbers_are_never_used_again() {
    let folder = tempfile::tempdir().unwrap();
    {
        let store = FleetStore::open(folder.path()).unwrap();
        assert_eq!(store.next_term(0).unwrap(), 1);
        assert_eq!(store.next_term(9).unwrap(), 10, "agents have seen term 9");
        for wrong in [u64::MAX, i64::MAX as u64] {
            assert!(store.next_term(wrong).is_err());
        }
        assert_eq!(store.next_evacuation().unwrap(), 1);
    }
    let store = FleetStore::open(folder.path()).unwrap();
    assert_eq!(store.next_term(0).unwrap(), 11);
    assert_eq!(store.next_evacuation().unwrap(), 2);
}

#[test]
fn a_command_that_is_sent_again_keeps_its_answer() {
    let folder = tempfile::tempdir().unwrap();
    let store = FleetStore::open(folder.path()).unwrap();
    let (id, host) = ("e1/1".to_owned(), "a".to_owned());
    let answer = |id: &str, host: &str, answer: &str| {
        let (id, host, answer) = (id.to_owned(), host.to_owned(), answer.to_owned());
        StoredAnswer { id, host, answer }
    };
    let answers = vec![
        answer(&id, &host, "done"),
        answer(&id, "b", "of a host that was not asked"),
        answer("c1-7", &host, "of a question"),
    ];
    let command = StoredCommand { id, host, command: "{}".to_owned(), sent_unix_ms: 5 };
    let sent = FleetBatch { commands: vec![command], ..FleetBatch::default() };
    store.store(&sent).unwrap();
    store.store(&FleetBatch { answers, ..FleetBatch::default() }).unwrap();
    store.store(&sent).unwrap();
    let connection = store.connection();
    let count = |sql: &str| connection.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(count("SELECT count(*) FROM commands"), 1);
    assert_eq!(count("SELECT count(*) FROM commands WHERE answer = 'done'"), 1);
}

#[test]
fn old_events_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let store = FleetStore::open(folder.path()).unwrap();
    let many = FleetBatch { events: vec![event("x"); EVENTS_KEPT as usize + 5], ..FleetBatch::default() };
    let last = store.store(&many).unwrap();
    assert_eq!(last, EVENTS_KEPT + 5);
    assert_eq!(store.events(0, 1).unwrap()[0].number, 6);
    let one = FleetBatch { events: vec![event("y")], ..FleetBatch::default() };
    assert_eq!(store.store(&one).unwrap(), last + 1);
    assert_eq!(store.events(0, 1).unwrap()[0].number, 7);
}

#[test]
fn one_controller_uses_a_directory() {
    let folder = tempfile::tempdir().unwrap();
    let first = FleetStore::open(folder.path()).unwrap();
    assert!(matches!(FleetStore::open(folder.path()), Err(FleetStoreError::Locked { .. })));
    drop(first);
    let store = FleetStore::open(folder.path()).unwrap();
    store.connection().pragma_update(None, "user_version", 99).unwrap();
    drop(store);
    let newer = FleetStore::open(folder.path());
    assert!(matches!(newer, Err(FleetStoreError::Newer { found: 99, .. })), "{newer:?}");
}
