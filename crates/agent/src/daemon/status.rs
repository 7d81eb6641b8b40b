//! Status of migrations, for users.

use proto::MigrationId;

use super::Daemon;
use super::drive::internal;
use api::progress::Standing;
use api::report::rfc3339;
use api::{MigrationStatus, Role};
use api::{Problem, ProblemKind};
use store::journal::{MigrationRecord, State};

impl Daemon {
    /// Returns the journal's record of a migration.
    pub(super) fn record(&self, id: &MigrationId) -> Result<MigrationRecord, Problem> {
        self.context.journal.migration(id).map_err(|error| internal(&error))?.ok_or_else(|| {
            Problem::new(
                ProblemKind::NotFound,
                format!("no migration {id} on this host"),
                "`whimbrel migrations` lists the migrations of this host",
            )
        })
    }

    /// Returns the standing of a migration: that of its driver, or that which follows from the journal.
    pub(super) fn standing_of(&self, record: &MigrationRecord) -> Standing {
        let driven = self.drivers().get(record.id()).map(|driven| driven.publisher.now().standing);
        match (driven, record.state.standing()) {
            // A running driver settles a state that would be in doubt without it, or reports the doubt.
            (Some(standing), _) if record.open => standing,
            (_, Standing::Failed) if record.details["vm_ended"] == true => Standing::VmEnded,
            (_, standing) => standing,
        }
    }

    pub(super) fn status(&self, id: &MigrationId) -> Result<MigrationStatus, Problem> {
        Ok(self.status_of(&self.record(id)?))
    }

    pub(super) fn status_of(&self, record: &MigrationRecord) -> MigrationStatus {
        let id = record.id();
        let progress = self.drivers().get(id).map(|driven| driven.publisher.now());
        let standing = self.standing_of(record);
        let message = progress
            .as_ref()
            .and_then(|progress| progress.message.clone())
            .or_else(|| record.message.clone());
        let advice = (standing == Standing::InDoubt).then(|| {
            format!("repair the link or start the other agent; otherwise see `whimbrel recover {}`", id.vm)
        });
        let terms = &record.terms;
        MigrationStatus {
            id: id.clone(),
            role: match record.state {
                State::Source(_) => Role::Source,
                State::Destination(_) => Role::Destination,
            },
            from: terms.source.clone(),
            to: terms.destination.clone(),
            state: record.state.name().to_owned(),
            standing,
            message,
            advice,
            created: rfc3339(record.created_unix_ms),
            updated: rfc3339(record.updated_unix_ms),
            progress,
        }
    }
}
