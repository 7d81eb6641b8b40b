//! The report of a migration: one JSON document, the same for machines and for the text that people read.
//!
//! Every duration is measured by one clock, that of the side named beside it; clocks of two hosts are never subtracted
//! from one another. Where a part of the downtime spans both hosts, the source's duration is reduced by the duration
//! that the destination reported, see [`Downtime::from_measured`].

mod connections;
mod explain;
mod failure_kind;
mod forecast;
mod numbers;
mod reductions;
mod round;
mod text;

use engine::pressure::Restraint;
use proto::message::{CardFrames, Finding, RamBlock};
use proto::{HostId, MigrationId};
use serde::{Deserialize, Serialize};

use crate::names::NameChanges;
use crate::options::MigrationSettings;

pub use connections::{RedirectedConnections, TrackedConnections};
pub use engine::traces::{Replayed, Traces};
pub use explain::explain;
pub use failure_kind::FailureKind;
pub use forecast::ReportedForecast;
pub use numbers::{bytes, milliseconds, rate, seconds, to_the_second};
pub use reductions::{Compression, Deltas, FreePageHintStats, LevelChoice};
pub use round::Round;
pub use text::render;

/// Name and version of the document. Fields may be added under the same version; none is removed or changes its
/// meaning.
pub const SCHEMA: &str = "whimbrel.report/2";

/// Result of a migration, as known at its source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// Id of the migration.
    #[serde(flatten)]
    pub migration: MigrationId,
    /// The host that the VM left.
    pub source: Side,
    /// The host to which the VM was to be moved.
    pub destination: Side,
    /// Time of the request, by the source's calendar, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Time of the request as text (RFC 3339, UTC).
    pub started: String,
    /// Time of the end, by the source's calendar, in milliseconds since 1970; absent until then.
    pub ended_unix_ms: Option<u64>,
    /// Time of the end as text (RFC 3339, UTC).
    pub ended: Option<String>,
    /// From the request to the exit of the source's QEMU, by the source's steady clock, in microseconds.
    pub total_us: u64,
    /// Outcome of the migration.
    pub outcome: Outcome,
    /// Reason for the outcome, where there is one.
    pub reason: Option<String>,
    /// Kind of the failure; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<FailureKind>,
    /// QEMU's run state before the migration (`running`, `paused`).
    pub run_state_before: String,
    /// QEMU's run state afterwards, on the side that has the VM; absent while that is not known.
    pub run_state_after: Option<String>,
    /// Options of the migration, those of the request and those of the configuration.
    pub settings: MigrationSettings,
    /// The VM's RAM blocks.
    pub ram_blocks: Vec<RamBlock>,
    /// Disks that were copied, with their images at the destination.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// Statistics of compression; absent if it was disabled. Without a link that limits the rate nothing is compressed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// Statistics of pages that were sent again as deltas; absent if none were marked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deltas: Option<Deltas>,
    /// Statistics of free page hints; absent if no program in the guest was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_page_hints: Option<FreePageHintStats>,
    /// Time for which the guest's vCPUs waited for processors of the host during the migration; absent if the kernel
    /// does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
    /// Rounds of pre-copy and the last one, in order.
    pub rounds: Vec<Round>,
    /// Inputs and decisions of all policies (`traces`, `other_traces`).
    #[serde(flatten)]
    pub traces: Traces,
    /// Forecast beside the outcome; absent if the VM's writes had not been measured before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<ReportedForecast>,
    /// Parts of the downtime; absent if the guest was never stopped.
    pub downtime: Option<Downtime>,
    /// Statistics of post-copy; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy: Option<PostCopy>,
    /// First frames of the guest's network cards at the destination; none if they were not measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub network: Vec<CardFrames>,
    /// Tracked connections of the guest, which firewalls and NAT of the hosts know; absent if there were none, or if
    /// they were not copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<TrackedConnections>,
    /// Redirection of the guest's connections; absent unless it moved to another network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redirection: Option<RedirectedConnections>,
    /// Changes of the VM's names in DNS; absent if none change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<NameChanges>,
    /// Bytes on the wire from source to destination, all connections.
    pub sent_bytes: u64,
    /// Bytes on the wire from destination to source, all connections.
    pub received_bytes: u64,
    /// Number of times that connections were made anew.
    pub reconnections: u32,
    /// Result of `--verify`; absent if it was not requested or not reached.
    pub verification: Option<Verification>,
    /// Findings of the pre-flight checks of both sides.
    pub findings: Vec<Finding>,
    /// Events, in order.
    pub events: Vec<Event>,
}

/// Share of its runnable time for which the guest's vCPUs waited, in thousandths; absent if they were hardly runnable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Share before anything was copied.
    pub before_permille: Option<u64>,
    /// Share during the copy.
    pub permille: Option<u64>,
    /// Share in the worst round.
    pub most_permille: Option<u64>,
    /// Highest niceness (`nice(2)`) of the copying threads.
    pub nicest: u8,
    /// Smallest number of threads that copied at the same time.
    #[serde(default)]
    pub fewest_threads: Option<u16>,
    /// Largest interval between two dirty scans, as a multiple of the usual one.
    #[serde(default)]
    pub longest_interval_factor: Option<u32>,
}

impl Waiting {
    /// Records a restraint of the copying threads.
    pub fn reached(&mut self, restraint: Restraint) {
        let Restraint { nice, threads, interval_factor } = restraint;
        self.nicest = self.nicest.max(nice);
        self.fewest_threads = Some(self.fewest_threads.map_or(threads, |fewest| fewest.min(threads)));
        self.longest_interval_factor = self.longest_interval_factor.max(Some(interval_factor));
    }
}

/// Pages that arrived after the guest was started at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostCopy {
    /// Number of remaining pages when the guest was stopped; 0 if only another agent knew it.
    pub remaining_pages: u64,
    /// Pages that were sent on a page request, as often as they were sent for that reason.
    pub requested_pages: u64,
    /// Pages that were pushed in the background.
    pub pushed_pages: u64,
    /// Time from the list of missing pages until all of them were present, in microseconds, by the source's clock.
    pub duration_us: u64,
}

/// One of the two hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// Name of the host.
    pub host: HostId,
    /// Version of its QEMU; absent if it is not known.
    pub qemu_version: Option<String>,
    /// Kind of RAM that the VM has there (`anonymous`, `memfd`, `file`, …); absent if it is not known.
    pub ram_kind: Option<String>,
    /// CPU time that its agent used during this migration, in microseconds, including concurrent migrations; for the
    /// destination until it reports RUNNING. Absent if it is not known, for example if the agent was restarted in
    /// between.
    pub agent_cpu_us: Option<u64>,
}

/// Outcome of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Not over yet.
    Underway,
    /// The VM is at its destination.
    Moved,
    /// The migration ended before COMMITTED; the VM is at its source.
    Aborted,
    /// A user cancelled it; the VM is at its source.
    Cancelled,
    /// The VM ended at its source, before it was moved: its guest shut down, or its QEMU ended otherwise.
    VmEnded,
    /// The destination refused after COMMITTED; the VM is at its source again.
    Returned,
    /// It is not known which side has the VM.
    InDoubt,
}

/// A disk that was copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Name of the disk at the source.
    pub name: String,
    /// Length as the guest sees it, in bytes.
    pub bytes: u64,
    /// Path of its image at the destination.
    pub path: String,
    /// The image's format.
    pub format: String,
}

/// Duration of the stop and its parts. The parts add up to the total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Downtime {
    /// Time from before `stop` was sent until RUNNING had arrived, by the source's clock, in microseconds. Longer than
    /// the interruption of the guest by the time that RUNNING needed on the network.
    pub total_us: u64,
    /// QEMU's `stop`, in microseconds.
    pub stop_us: u64,
    /// The last round, in microseconds.
    pub last_pages_us: u64,
    /// The part of the last round that two dirty scans needed, in microseconds.
    #[serde(default)]
    pub last_scans_us: u64,
    /// Comparing all of memory, if it was requested, in microseconds.
    pub verify_us: u64,
    /// Transfer of the device state to the destination, in microseconds; saving it runs beside the last round.
    pub device_state_us: u64,
    /// Loading the device state, by the destination's clock, in microseconds.
    pub load_us: u64,
    /// Journal entries, the ownership registry, and the transfer of GO and RUNNING, in microseconds.
    pub handover_us: u64,
    /// QEMU's `cont`, by the destination's clock, in microseconds.
    pub continue_us: u64,
    /// The part of the total from QEMU's event STOP at the source to its event RESUME at the destination, in
    /// microseconds: comparable to the downtime that QEMU's own migration reports. Absent if QEMU did not send both
    /// events.
    #[serde(default)]
    pub events_us: Option<u64>,
}

/// Durations around the stop, each by the clock of its side, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// Source: from before `stop` until RUNNING had arrived.
    pub total_us: u64,
    /// Source: QEMU's `stop`.
    pub stop_us: u64,
    /// Source: from the scan until the last page was acknowledged.
    pub last_pages_us: u64,
    /// Source: both scans of the stopped guest.
    #[serde(default)]
    pub last_scans_us: u64,
    /// Source: saving the device state, beside the last pages.
    #[serde(default)]
    pub save_us: u64,
    /// Source: comparing memory; zero if it was not requested.
    pub verify_us: u64,
    /// Source: from sending the device state until READY had arrived.
    pub save_to_ready_us: u64,
    /// Destination: loading, as READY reports.
    pub load_us: u64,
    /// Destination: `cont`, as RUNNING reports.
    pub continue_us: u64,
    /// Source: from before `stop` until QEMU's event STOP.
    #[serde(default)]
    pub stop_event_us: Option<u64>,
    /// Destination: from QEMU's event RESUME until `cont` returned, as RUNNING reports.
    #[serde(default)]
    pub resumed_us: Option<u64>,
}

impl Downtime {
    /// Splits the downtime. Only durations are subtracted from one another; the handover's part is the rest that no
    /// measurement explains. If rounding makes the parts longer than the total, the total is raised.
    pub fn from_measured(measured: Measured) -> Self {
        let Measured {
            total_us,
            stop_us,
            last_pages_us,
            last_scans_us,
            verify_us,
            save_to_ready_us,
            load_us,
            continue_us,
            stop_event_us,
            resumed_us,
            save_us: _,
        } = measured;
        let load_us = load_us.min(save_to_ready_us);
        let explained = [stop_us, last_pages_us, verify_us, save_to_ready_us, continue_us]
            .into_iter()
            .fold(0, u64::saturating_add);
        Self {
            total_us: total_us.max(explained),
            stop_us,
            last_pages_us,
            last_scans_us,
            verify_us,
            device_state_us: save_to_ready_us - load_us,
            load_us,
            handover_us: total_us.saturating_sub(explained),
            continue_us,
            events_us: stop_event_us
                .zip(resumed_us)
                .map(|(before, after)| total_us.saturating_sub(before.saturating_add(after))),
        }
    }
}

/// Result of the comparison of both sides' memory and copied disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// Bytes that were compared.
    pub compared_bytes: u64,
    /// Chunks of 2 MiB that were compared.
    pub chunks: u64,
    /// Chunks that differed. Any value but zero ended the migration.
    pub different_chunks: u64,
    /// Pages among them that count as zeros at the source, because the guest does not use them: their content was not
    /// compared.
    #[serde(default)]
    pub left_out_pages: u64,
    /// Duration of the comparison, by the source's clock, in microseconds.
    pub duration_us: u64,
}

/// An event of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Time since the migration was requested, by the source's clock, in microseconds.
    pub at_us: u64,
    /// Kind of event, a stable word (`stopped`, `ready`, `committed`, `reconnected`, …).
    pub what: String,
    /// Details; may be empty.
    pub detail: String,
}

impl Report {
    /// Creates the report of a migration that begins now.
    pub fn begin(
        migration: MigrationId,
        source: HostId,
        destination: HostId,
        settings: MigrationSettings,
    ) -> Self {
        let side = |host| Side { host, qemu_version: None, ram_kind: None, agent_cpu_us: None };
        let started_unix_ms = unix_ms_now();
        Self {
            schema: SCHEMA.to_owned(),
            migration,
            source: side(source),
            destination: side(destination),
            started_unix_ms,
            started: rfc3339(started_unix_ms),
            ended_unix_ms: None,
            ended: None,
            total_us: 0,
            outcome: Outcome::Underway,
            reason: None,
            failure: None,
            run_state_before: String::new(),
            run_state_after: None,
            settings,
            ram_blocks: Vec::new(),
            disks: Vec::new(),
            compression: None,
            deltas: None,
            free_page_hints: None,
            post_copy: None,
            network: Vec::new(),
            connections: None,
            redirection: None,
            names: None,
            waiting: None,
            rounds: Vec::new(),
            traces: Traces::default(),
            forecast: None,
            downtime: None,
            sent_bytes: 0,
            received_bytes: 0,
            reconnections: 0,
            verification: None,
            findings: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Sets the time of the request, which was before the report was begun: all times count from then on.
    pub fn requested_at(&mut self, unix_ms: u64) {
        self.started_unix_ms = unix_ms;
        self.started = rfc3339(unix_ms);
    }

    /// Records an event.
    pub fn event(&mut self, at_us: u64, what: &str, detail: impl Into<String>) {
        self.events.push(Event { at_us, what: what.to_owned(), detail: detail.into() });
    }

    /// Records the end, by the calendar.
    pub fn end(&mut self, outcome: Outcome, reason: Option<String>, total_us: u64) {
        let now = unix_ms_now();
        self.outcome = outcome;
        self.reason = reason;
        self.total_us = total_us;
        self.ended_unix_ms = Some(now);
        self.ended = Some(rfc3339(now));
    }
}

/// Returns the calendar time, in milliseconds since 1970; to be read by humans, never for measuring.
pub fn unix_ms_now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Formats a time: RFC 3339, UTC, milliseconds.
pub fn rfc3339(unix_ms: u64) -> String {
    let latest_ms = 253_402_300_799_999; // the end of the year 9999, where the format ends
    let since = std::time::Duration::from_millis(unix_ms.min(latest_ms));
    humantime::format_rfc3339_millis(std::time::UNIX_EPOCH + since).to_string()
}
