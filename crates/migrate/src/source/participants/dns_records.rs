//! Names of a VM that moves to another network, as a participant: their records of DNS are changed by the agent's
//! [keeper](host::dns_keeper), in threads of its own. The participant only says what is to be changed, and where the
//! VM is then: no step waits for a server, and none fails because of one.

use ::memory::{PageSet, Reductions, RoundStats, ScanError, ScanStats};
use host::verification::BlockHashes;
use host::{SourceVm, dns_keeper, preflight};
use proto::message::Message;
use qemu::qmp::Qmp;

use super::participant::{Block, Comparison, Environment, Participant, PrepareProgress, Profile, UndoResult};
use crate::source::agreement::Agreed;
use crate::source::failure::Failure;
use crate::source::telemetry::ShownBlock;
use api::report::Report;

/// Names of a VM that leaves.
pub(super) struct DnsRecords {
    environment: Environment,
}

impl DnsRecords {
    pub(super) fn new(environment: &Environment) -> Self {
        Self { environment: environment.clone() }
    }

    /// Puts the present state into the report.
    fn put_into_report(&self) {
        let Environment { context, controls, .. } = &self.environment;
        controls.report(|report| context.dns_keeper.put_into(report));
    }
}

impl Participant for DnsRecords {
    fn profile(&self) -> Profile {
        Profile { name: "names", can_post_copy: false, is_sent_first: false, irreversible: None }
    }

    fn report(&self, _: &Agreed<'_>, _: &mut Report) {}

    fn check(&mut self, _: &Agreed<'_>) -> Result<(), Failure> {
        Ok(())
    }

    /// Begins to lower the TTLs: resolvers forget the old addresses the sooner, the earlier that is.
    fn prepare(&mut self, _: &mut SourceVm, _: &Reductions) -> Result<PrepareProgress, Failure> {
        let Environment { context, terms, controls, .. } = &self.environment;
        let (id, addresses) = (&terms.migration, controls.goals().new_addresses);
        let relocation = preflight::relocation(&context.config, &id.vm, &terms.destination, &addresses);
        match relocation.map(|relocation| context.dns_keeper.begin(id, &relocation)) {
            None | Some(Ok(_)) => self.put_into_report(),
            Some(Err(error)) => {
                let finding = dns_keeper::not_changed(crate::chain(&error));
                controls.report(|report| report.findings.push(finding));
            }
        }
        Ok(PrepareProgress::Done)
    }

    fn blocks(&mut self, _: &SourceVm) -> Result<Vec<Block>, Failure> {
        Ok(Vec::new())
    }

    fn progress(&self) -> Vec<ShownBlock> {
        Vec::new()
    }

    fn before_round(&mut self, _: &mut SourceVm, _: u64) -> Result<u64, Failure> {
        Ok(u64::MAX)
    }

    fn after_round(&mut self, _: &RoundStats) {}

    fn scan(&mut self, _: Option<&mut Qmp>, _: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        Ok(ScanStats::default())
    }

    fn after_scan(&mut self, _: &mut Qmp) -> Result<(), Failure> {
        Ok(())
    }

    fn before_stop(&mut self, _: &mut SourceVm) -> Result<(), Failure> {
        Ok(())
    }

    fn message(&mut self) -> Option<Message> {
        None
    }

    fn freeze(&mut self, _: &mut SourceVm, _: Comparison, _: &mut [PageSet]) -> Result<(), Failure> {
        Ok(())
    }

    fn hash(
        &mut self,
        _: &mut SourceVm,
        _: usize,
        _: &[PageSet],
        _: &mut BlockHashes,
    ) -> Result<(), Failure> {
        Ok(())
    }

    fn ready(&mut self, _: &mut SourceVm) -> Result<(), Failure> {
        Ok(())
    }

    /// The records stay until the guest runs at the destination, which may still refuse it.
    fn commit(&mut self) {}

    fn undo(&mut self, _: Option<&mut SourceVm>) -> UndoResult {
        self.environment.context.dns_keeper.undo(&self.environment.terms.migration);
        self.put_into_report();
        UndoResult::Done
    }

    fn running(&mut self) {}

    /// With post-copy this comes after the last page; the keeper finds in the journal that the guest runs, before that.
    fn finish(&mut self) {
        self.environment.context.dns_keeper.switch(&self.environment.terms.migration);
        self.put_into_report();
    }

    fn expects_message(&self) -> bool {
        false
    }

    fn learn(&mut self, _: &Message) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use api::{MigrationSettings, NamesGoal};
    use engine::handover::MigrationTerms;
    use host::testing::{Qemu, World, terms};

    use super::*;
    use crate::source::{Goals, MigrationControls};

    const DNS: &str = "[[dns.zones]]\nzone = \"example.org\"\nservers = [\"192.0.2.53\"]\nkey_name = \"k\"\n\
                       key_file = \"/nonexistent\"\n[dns.vms.web]\nnames = [\"web.example.org\"]\n";

    #[test]
    fn names_follow_the_vm_without_waiting_for_servers() {
        let world = World::patient(None, DNS);
        let qemu = Qemu::start(world.folder.path());
        let mut vm = SourceVm::find(&world.context, &qemu.record()).unwrap();
        let MigrationTerms { migration, source, destination, .. } = terms("a", "b");
        for (new_addresses, moves) in
            [(vec![], false), (vec!["192.0.2.10=198.51.100.7".parse().unwrap()], true)]
        {
            let restored = Goals::restored(MigrationSettings::default(), &world.context.config);
            let goals = Goals { new_addresses, ..restored };
            let report = Report::begin(
                migration.clone(),
                source.clone(),
                destination.clone(),
                MigrationSettings::default(),
            );
            let controls = Arc::new(MigrationControls::new(goals, report, Instant::now()));
            let mut names = DnsRecords::new(&Environment {
                context: Arc::clone(&world.context),
                terms: terms("a", "b"),
                controls: Arc::clone(&controls),
                is_resumed: false,
            });
            let goal = || world.context.dns_keeper.changes(&migration).map(|changes| changes.goal);
            assert_eq!(names.prepare(&mut vm, &Reductions::default()).unwrap(), PrepareProgress::Done);
            assert_eq!(goal(), moves.then_some(NamesGoal::Lowered));
            names.commit();
            assert_eq!(goal(), moves.then_some(NamesGoal::Lowered), "the destination may refuse the VM");
            names.finish();
            assert_eq!(goal(), moves.then_some(NamesGoal::Switched));
            assert_eq!(names.undo(None), UndoResult::Done);
            assert_eq!(goal(), moves.then_some(NamesGoal::Undone));
            assert_eq!(controls.report(|report| report.names.is_some()), moves);
        }
    }
}
