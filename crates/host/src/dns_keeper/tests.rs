use std::io::Read as _;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;

use api::{NameStanding, NamesGoal};
use dns::{AddressChange, VmNames};
use engine::handover::MigrationTerms;
use engine::handover::source::SourceState;
use store::journal::{Durability, State};

use super::*;
use crate::testing::{World, eventually, id, terms, vm};

/// Agent of a host whose only server of DNS is not there.
struct Names {
    world: World,
    config: Config,
    keeper: DnsKeeper,
}

impl Names {
    fn new() -> Self {
        Self::with(TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
    }

    /// Creates an agent with this server.
    fn with(server: SocketAddr) -> Self {
        let world = World::new();
        let directory = world.folder.path();
        let key = directory.join("dns.key");
        fs::write(&key, "AAECAwQFBgcICQoLDA0ODw==").unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        let text = format!(
            "host = \"a\"\nlisten = \"127.0.0.1:1\"\nstate_dir = \"state\"\nrun_dir = \"run\"\ntls.plain = true\n\
             [dns]\nrestore_after_s = 3600\n\
             [[dns.zones]]\nzone = \"example.org\"\nservers = [\"{server}\"]\nkey_name = \"k\"\nkey_file = \"dns.key\"\n",
        );
        let config = Config::parse(&directory.join("agent.toml"), &text).unwrap();
        let keeper = DnsKeeper::load(&config);
        Self { world, config, keeper }
    }

    fn journal(&self) -> &Journal {
        &self.world.context.journal
    }

    fn begin(&self) {
        assert!(self.keeper.begin(&id(1), &relocation(true)).unwrap());
        let nothing = relocation(false);
        assert!(!self.keeper.begin(&id(2), &nothing).unwrap());
    }

    /// Writes the migration's end into the journal.
    fn end(&self, state: &SourceState) {
        let MigrationTerms { migration, source, destination, .. } = terms("a", "b");
        let report = Report::begin(migration, source, destination, api::MigrationSettings::default());
        self.journal().put_report(&report).unwrap();
        self.journal().record_source(&id(1), state, Durability::Process).unwrap();
        self.journal().close(&id(1)).unwrap();
    }

    /// Replaces the agent by the next one.
    fn restart(&mut self) {
        for held in std::mem::take(&mut *self.keeper.lock()).into_values() {
            held.updater.suspend();
        }
        self.keeper = DnsKeeper::load(&self.config);
    }

    /// Looks at the changes until they are as expected.
    #[track_caller]
    fn step_until(&self, what: &str, holds: impl Fn(Option<NameChanges>) -> bool) {
        eventually(what, || {
            self.keeper.tick(self.journal());
            holds(self.keeper.changes(&id(1)))
        });
    }

    fn files(&self) -> Vec<MigrationId> {
        files(&self.config.state_dir.join(DIRECTORY)).into_iter().map(|(id, _)| id).collect()
    }
}

fn relocation(moves: bool) -> Relocation {
    let addresses = vec![AddressChange::new([192, 0, 2, 10].into(), [198, 51, 100, 7].into())];
    let names = VmNames { names: vec!["web.example.org".parse().unwrap()], services: vec![] };
    Relocation::new(&names, None, if moves { addresses } else { vec![] })
}

fn prepared() -> State {
    State::Source(SourceState::Prepared { run: true })
}

#[test]
fn changes_of_a_vm_that_stays_are_undone_by_whichever_agent() {
    let mut names = Names::new();
    names.world.journalled(&terms("a", "b"), prepared());
    names.begin();
    assert_eq!(names.files(), [id(1)]);
    let goal = |names: &Names| names.keeper.open().pop().map(|open| (open.migration, open.changes.goal));
    assert_eq!(goal(&names), Some((id(1), NamesGoal::Lowered)));
    assert!(names.keeper.tick(names.journal()).is_some());
    names.restart();
    names.keeper.tick(names.journal());
    assert_eq!(goal(&names), Some((id(1), NamesGoal::Lowered)), "the migration is under way");
    // Its agent dies before it says so.
    names.end(&SourceState::Aborted);
    names.restart();
    names.step_until("nothing is open", |changes| changes.is_none());
    assert!(names.files().is_empty());
    assert_eq!(names.keeper.tick(names.journal()), None);
}

#[test]
fn names_that_could_not_follow_stay_open_and_in_the_report() {
    let mut names = Names::new();
    names.world.journalled(&terms("a", "b"), prepared());
    names.begin();
    names.keeper.switch(&id(1));
    let has_failed = |changes: Option<NameChanges>| {
        let changes = changes.expect("it is open");
        assert!(!changes.reached);
        changes.goal == NamesGoal::Switched && changes.records[0].standing == NameStanding::Failed
    };
    names.step_until("the server is not reached", has_failed);
    names.end(&SourceState::Done { incarnation: None, run: true });
    names.keeper.tick(names.journal());
    let codes = |report: &Report| report.findings.iter().map(|found| found.code.clone()).collect::<Vec<_>>();
    let report = names.journal().report(&id(1)).unwrap().unwrap();
    assert_eq!(codes(&report), ["names-not-changed"]);
    assert!(report.names.unwrap().records[0].detail.contains("is not reached"));
    names.restart();
    names.step_until("the next agent tries it, too", has_failed);
    let mut report = names.journal().report(&id(1)).unwrap().unwrap();
    report.names = None;
    names.keeper.put_into(&mut report);
    assert!(report.names.is_some());
    // The VM is back: a later migration changes its names.
    let until = names.keeper.begin_to_end_changes(&vm());
    assert_eq!(names.keeper.changes(&id(1)).map(|changes| changes.goal), Some(NamesGoal::Restored));
    names.keeper.end_earlier_changes(&vm(), until);
    assert!(names.files().is_empty() && names.keeper.open().is_empty());
}

#[test]
fn a_migration_does_not_wait_for_a_server_that_is_silent() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let names = Names::with(server.local_addr().unwrap());
    names.begin();
    let (mut first, _) = server.accept().unwrap();
    // It has been asked, and the thread waits for the answer.
    first.read_exact(&mut [0; 2]).unwrap();
    assert!(names.keeper.begin(&id(2), &relocation(true)).unwrap());
    assert_eq!(names.files(), [id(2)]);
    first.set_nonblocking(true).unwrap();
    let is_open = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
    let mut rest = [0; 512];
    let _query = first.read(&mut rest);
    assert!(first.read(&mut rest).is_err_and(is_open), "the first thread still waits");
}

#[test]
fn files_are_known_by_their_names() {
    assert_eq!(migration_of("web@1.json"), Some(id(1)));
    for other in ["web@1.json.new", "web.json", "web@x.json", "@1.json", "web@1"] {
        assert_eq!(migration_of(other), None, "{other}");
    }
}
