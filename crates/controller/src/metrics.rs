//! Metrics of the controller.

use api::metrics::{MetricKind, MetricsText};
use engine::evacuation::EvacuationOutcome;

use crate::coordinator::Coordinator;
use crate::fleet::HostEntry;
use crate::views;

/// Returns the metrics of the controller and its fleet, in the text format of Prometheus.
pub(crate) fn metrics(coordinator: &Coordinator) -> String {
    let mut text = MetricsText::default();
    let labels = [("controller", coordinator.config.name.as_str()), ("version", env!("CARGO_PKG_VERSION"))];
    text.process("whimbrel_controller_info", &labels);
    let info = views::info(coordinator);
    text.metric("whimbrel_controller_term", MetricKind::Gauge, "Term of the controller.")
        .sample(&[], info.term);
    text.metric("whimbrel_fleet_events_total", MetricKind::Counter, "Events of the fleet.")
        .sample(&[], coordinator.last_event);
    text.metric("whimbrel_fleet_migrations", MetricKind::Gauge, "Migrations that have not ended.")
        .sample(&[("standing", "underway")], info.migrations)
        .sample(&[("standing", "in-doubt")], info.in_doubt);
    add_hosts(coordinator, &mut text);
    add_evacuations(coordinator, &mut text);
    text.finish()
}

/// Name of a metric of hosts, its description, and its value.
type HostGauge = (&'static str, &'static str, fn(&HostEntry) -> u64);

fn add_hosts(coordinator: &Coordinator, text: &mut MetricsText) {
    let gauges: [HostGauge; 7] = [
        ("whimbrel_host_connected", "1 if the agent of the host is connected.", |entry| {
            entry.connected.into()
        }),
        ("whimbrel_host_cordoned", "1 if the host accepts no VMs.", |entry| views::is_cordoned(entry).into()),
        ("whimbrel_host_empty", "1 if nothing remains on the host; 0 also if that is not known.", |entry| {
            entry.contents.as_ref().is_some_and(engine::evacuation::HostContents::is_empty).into()
        }),
        ("whimbrel_host_vms", "VMs that the host owns and runs.", |entry| entry.vms.len() as u64),
        ("whimbrel_host_memory_bytes", "Memory of the host.", |entry| {
            entry.facts.as_ref().map_or(0, |facts| facts.memory_bytes)
        }),
        ("whimbrel_host_available_bytes", "Memory that new programs could have.", |entry| {
            entry.load.available_bytes
        }),
        ("whimbrel_host_busy_millicores", "Processors in use, in thousandths of one.", |entry| {
            entry.load.busy_milli
        }),
    ];
    for (name, help, value) in gauges {
        text.metric(name, MetricKind::Gauge, help);
        for (host, entry) in coordinator.fleet.hosts() {
            text.sample(&[("host", host.as_str())], value(entry));
        }
    }
}

fn add_evacuations(coordinator: &Coordinator, text: &mut MetricsText) {
    let outcomes = ["running", "done", "refused", "incomplete", "cancelled"];
    let name = |outcome: Option<&EvacuationOutcome>| match outcome {
        None => "running",
        Some(EvacuationOutcome::Done { .. }) => "done",
        Some(EvacuationOutcome::Refused { .. }) => "refused",
        Some(EvacuationOutcome::Incomplete { .. }) => "incomplete",
        Some(EvacuationOutcome::Cancelled { .. }) => "cancelled",
    };
    text.metric("whimbrel_evacuations", MetricKind::Gauge, "Evacuations that are known, by outcome.");
    for outcome in outcomes {
        let count = coordinator.evacuations.iter().filter(|one| name(one.outcome()) == outcome).count();
        text.sample(&[("outcome", outcome)], count);
    }
    text.metric("whimbrel_evacuation_moved_vms", MetricKind::Gauge, "VMs that an evacuation has moved.");
    for one in coordinator.evacuations.iter() {
        let status = one.status(coordinator.now_ns());
        text.sample(&[("evacuation", &one.id().0)], status.moved);
    }
}
