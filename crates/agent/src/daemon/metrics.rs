//! Metrics of the agent.

use std::collections::BTreeMap;

use api::metrics::{MetricKind, MetricsText};
use api::progress::Standing;
use store::journal::JournalError;

use super::Daemon;

impl Daemon {
    /// Returns the metrics of this host, in the text format of Prometheus.
    pub(super) fn metrics(&self) -> Result<String, JournalError> {
        let journal = &self.context.journal;
        let config = &self.context.config;
        let mut text = MetricsText::default();
        let labels = [
            ("host", config.host.as_str()),
            ("role", config.role.as_str()),
            ("version", env!("CARGO_PKG_VERSION")),
        ];
        text.process("whimbrel_agent_info", &labels);
        let vms = journal.vms()?;
        let alive = vms.iter().filter(|vm| vm.process(&self.context.boot_id).is_ok()).count();
        text.metric("whimbrel_vms", MetricKind::Gauge, "VMs that the agent has adopted.")
            .sample(&[("qemu", "running")], alive)
            .sample(&[("qemu", "gone")], vms.len() - alive);
        text.metric("whimbrel_cordoned", MetricKind::Gauge, "1 if the host accepts no VMs.")
            .sample(&[], u8::from(journal.is_cordoned()?));
        if config.controller.is_some() {
            text.metric(
                "whimbrel_controller_connected",
                MetricKind::Gauge,
                "1 if the controller is connected.",
            )
            .sample(&[], u8::from(self.controller_link.is_connected()));
        }
        text.metric(
            "whimbrel_migrations_total",
            MetricKind::Counter,
            "Migrations in the journal, by role and state of the handover.",
        );
        for (role, state, count) in journal.migration_counts()? {
            text.sample(&[("role", &role), ("state", &state)], count);
        }
        self.add_open_migrations(&mut text)?;
        Ok(text.finish())
    }

    fn add_open_migrations(&self, text: &mut MetricsText) -> Result<(), JournalError> {
        let open = self.context.journal.open_migrations()?;
        let mut standings = BTreeMap::from([("underway", 0_u32), ("in-doubt", 0)]);
        for record in &open {
            match self.standing_of(record) {
                Standing::InDoubt => *standings.entry("in-doubt").or_default() += 1,
                Standing::Underway => *standings.entry("underway").or_default() += 1,
                Standing::Done | Standing::Failed | Standing::VmEnded => {}
            }
        }
        text.metric("whimbrel_open_migrations", MetricKind::Gauge, "Migrations that have not ended.");
        for (standing, count) in standings {
            text.sample(&[("standing", standing)], count);
        }
        let driven: Vec<_> =
            self.drivers().iter().map(|(id, driven)| (id.to_string(), driven.publisher.now())).collect();
        text.metric("whimbrel_migration_sent_bytes", MetricKind::Gauge, "Bytes that a migration has sent.");
        for (id, progress) in &driven {
            text.sample(&[("migration", id)], progress.sent_bytes);
        }
        text.metric(
            "whimbrel_migration_remaining_bytes",
            MetricKind::Gauge,
            "Bytes left in a migration's round.",
        );
        for (id, progress) in &driven {
            text.sample(&[("migration", id)], progress.remaining_bytes);
        }
        Ok(())
    }
}
