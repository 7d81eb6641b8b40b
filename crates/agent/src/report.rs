//! The report of a migration: one JSON document, the same for machines and for the text that people read.
//!
//! Every duration is measured by one clock, that of the side named beside it; clocks of two hosts are never
//! subtracted from one another. Where a part of the downtime spans both hosts, the source's duration is reduced by
//! the duration that the destination reported, see [`Downtime::from_measured`].

mod explain;
mod sparing;
mod text;

use engine::precopy::Pattern;
use engine::pressure::Restraint;
use proto::message::{Finding, RamBlock};
use proto::{HostId, MigrationId};
use serde::{Deserialize, Serialize};

pub use engine::trace::{Replayed, Traces};
pub use explain::explain;
pub use sparing::{Compression, Deltas, PickedWay, Soft};
pub use text::{bytes, milliseconds, rate, render, seconds, to_the_second};

/// Name and version of the document. Fields may be added under the same version; none is taken away or changes its
/// meaning.
pub const SCHEMA: &str = "whimbrel.report/1";

/// What became of a migration, as its source knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Always [`SCHEMA`].
    pub schema: String,
    /// Which migration.
    #[serde(flatten)]
    pub migration: MigrationId,
    /// Where the VM came from.
    pub source: Side,
    /// Where it was to go.
    pub destination: Side,
    /// When it was asked for, by the source's calendar, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The same as text (RFC 3339, UTC).
    pub started: String,
    /// When it ended, by the source's calendar, in milliseconds since 1970; absent while it is not over.
    pub ended_unix_ms: Option<u64>,
    /// The same as text (RFC 3339, UTC).
    pub ended: Option<String>,
    /// From the request to the exit of the source's QEMU, by the source's steady clock, in microseconds.
    pub total_us: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, where there is something to say.
    pub reason: Option<String>,
    /// QEMU's run state before the migration (`running`, `paused`).
    pub run_state_before: String,
    /// QEMU's run state afterwards, on the side that has the VM; absent while that is not known.
    pub run_state_after: Option<String>,
    /// What was asked for.
    pub objective: Objective,
    /// The VM's RAM blocks.
    pub ram_blocks: Vec<RamBlock>,
    /// Disks that were copied, with the images that they have at the destination.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<Disk>,
    /// What compression did; absent where it was told to do nothing. Of a link that nobody waited for it is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// What became of pages that were sent again; absent where none were marked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deltas: Option<Deltas>,
    /// What the guest said of its memory; absent where nobody in it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soft: Option<Soft>,
    /// For how long the guest's processors waited for processors of the host while it was copied; absent where the kernel
    /// does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
    /// Rounds of pre-copy and the last one, in order.
    pub rounds: Vec<Round>,
    /// What all that decides was shown, and what it decided (`traces`, `other_traces`).
    #[serde(flatten)]
    pub traces: Traces,
    /// How long the guest stood still; absent if it was never stopped.
    pub downtime: Option<Downtime>,
    /// What came when the guest ran at the destination already; absent where nothing did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_copy: Option<PostCopy>,
    /// Bytes on the wire from source to destination, all connections.
    pub sent_bytes: u64,
    /// Bytes on the wire from destination to source, all connections.
    pub received_bytes: u64,
    /// How often connections were made anew.
    pub reconnections: u32,
    /// What `--verify` found; absent if it was not asked for or not reached.
    pub verification: Option<Verification>,
    /// What pre-flight found, of both sides.
    pub findings: Vec<Finding>,
    /// What happened, in order.
    pub events: Vec<Event>,
}

/// For how much of the time in which they wanted to run the guest's processors waited, in thousandths; absent where they
/// hardly wanted to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// Before anything was copied.
    pub before_permille: Option<u64>,
    /// While it was.
    pub permille: Option<u64>,
    /// In the worst round.
    pub most_permille: Option<u64>,
    /// How nice (`nice(2)`) copying was at most.
    pub nicest: u8,
    /// How many threads copied at the same time at least.
    #[serde(default)]
    pub fewest_threads: Option<u16>,
    /// How many times as long as usual it was between two looks at what the guest writes, at most.
    #[serde(default)]
    pub longest_interval_factor: Option<u32>,
}

impl Waiting {
    /// Copying held itself back so far.
    pub(crate) fn reached(&mut self, restraint: Restraint) {
        let Restraint { nice, threads, interval_factor } = restraint;
        self.nicest = self.nicest.max(nice);
        self.fewest_threads = Some(self.fewest_threads.map_or(threads, |fewest| fewest.min(threads)));
        self.longest_interval_factor = self.longest_interval_factor.max(Some(interval_factor));
    }
}

/// Pages that came when the guest ran at the destination already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostCopy {
    /// How many were left when it was stopped; 0 if another agent knew.
    pub left_pages: u64,
    /// Those that somebody waited for there, as often as they were sent for that reason.
    pub wanted_pages: u64,
    /// Those that were pushed.
    pub pushed_pages: u64,
    /// From when they were named until all of them were there, in microseconds, by the source's clock.
    pub duration_us: u64,
}

/// One of the two hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// Its name.
    pub host: HostId,
    /// Version of its QEMU; absent if it was not learnt.
    pub qemu_version: Option<String>,
    /// Kind of RAM that the VM has there (`anonymous`, `memfd`, `file`, …); absent if it was not learnt.
    pub ram_kind: Option<String>,
    /// CPU time that its agent used during this migration, in microseconds, for other migrations at the same time too;
    /// the destination's until it says RUNNING. Absent if it was not learnt, as of an agent that was restarted
    /// meanwhile.
    pub agent_cpu_us: Option<u64>,
}

/// How a migration ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Not over yet.
    Underway,
    /// The VM is at its destination.
    Moved,
    /// It ended before COMMITTED; the VM is at its source.
    Aborted,
    /// Somebody cancelled it; the VM is at its source.
    Cancelled,
    /// The VM ended at its source, before it was moved: its guest shut down, or its QEMU ended otherwise.
    Ended,
    /// The destination refused after COMMITTED; the VM is at its source again.
    Returned,
    /// It is not known which side has the VM.
    InDoubt,
}

/// What was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Objective {
    /// When the guest was to be stopped (`pattern`, `target`, `rounds`, `hybrid`, `sla`).
    #[serde(default)]
    pub policy: String,
    /// Longest downtime allowed, in milliseconds.
    pub max_downtime_ms: u64,
    /// How long all of it was allowed to take, in milliseconds; absent if it had time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_total_ms: Option<u64>,
    /// Most rounds of pre-copy.
    pub max_rounds: u32,
    /// What to do when the rounds are used up (`stop`, `abort`).
    pub on_limit: String,
    /// Number of data streams.
    pub streams: u16,
    /// Cap on the sending rate at the beginning, in bytes per second; absent for none.
    pub bandwidth_bytes_per_s: Option<u64>,
}

/// A disk that was copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Its name at the source.
    pub name: String,
    /// Its length as the guest sees it, in bytes.
    pub bytes: u64,
    /// Its image at the destination.
    pub path: String,
    /// The image's format.
    pub format: String,
}

/// One round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Round {
    /// Its number, from 1 on.
    pub round: u32,
    /// The guest was stopped during it.
    pub stopped: bool,
    /// Which way through memory it is a part of, from 1 on; 0 of a round of disks alone, and with the guest stopped.
    #[serde(default)]
    pub pass: u32,
    /// Pages that it had to send; in a part of the first pass those that had their turn. Disks count in pages, too.
    pub dirty_pages: u64,
    /// Those of them that are of disks.
    pub disk_pages: u64,
    /// Pages sent with their bytes.
    pub data_pages: u64,
    /// Pages of zeros that occupy memory.
    pub zero_pages: u64,
    /// Pages that are holes.
    pub hole_pages: u64,
    /// Pages that consist of the same eight bytes, other than zeros.
    #[serde(default)]
    pub filled_pages: u64,
    /// Pages that went as holes, whatever is in them, because the guest does not use them.
    #[serde(default)]
    pub soft_pages: u64,
    /// Pages that the destination had already on a disk or in a template, and that were referred to.
    pub reference_pages: u64,
    /// Pages sent before, of which only what changed was sent.
    pub delta_pages: u64,
    /// Those of both that it did not have after all, or not as was believed: they were sent in the next round.
    pub refused_pages: u64,
    /// Sent on the data streams, in bytes on the wire.
    pub sent_bytes: u64,
    /// From its scan to the last acknowledgement awaited in it, in microseconds.
    pub duration_us: u64,
    /// Finding and clearing the dirty marks, in microseconds.
    pub scan_us: u64,
    /// Waiting for the guest's block I/O in flight, in microseconds.
    pub drain_us: u64,
    /// Sending rate, in bytes per second.
    pub rate_bytes_per_s: u64,
    /// How fast the guest dirtied memory in the round before, in bytes per second.
    pub dirty_rate_bytes_per_s: u64,
    /// Downtime to be expected had the guest been stopped after it, in microseconds.
    pub expected_downtime_us: Option<u64>,
    /// Pages that were dirty and that it left to the next round, so as not to take long.
    #[serde(default)]
    pub left_pages: u64,
    /// Pages that had been sent shortly before, too, once all of memory went.
    #[serde(default)]
    pub resent_pages: u64,
    /// What the policy decided after it (`another-round`, `stop`, `abort`).
    pub decision: String,
    /// How the guest wrote, where that showed that rounds helped no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<Pattern>,
}

/// How long the guest stood still, and why. The parts add up to the total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Downtime {
    /// From before `stop` was sent until RUNNING had arrived, by the source's clock, in microseconds. Longer than what
    /// the guest felt by the way of RUNNING through the network.
    pub total_us: u64,
    /// QEMU's `stop`, in microseconds.
    pub stop_us: u64,
    /// The last round, in microseconds.
    pub last_pages_us: u64,
    /// The part of it in which dirty pages were looked for, twice, in microseconds.
    #[serde(default)]
    pub last_scans_us: u64,
    /// Comparing all of memory, where it was asked for, in microseconds.
    pub verify_us: u64,
    /// Bringing the device state to the other side, in microseconds; saving it runs beside the last round.
    pub device_state_us: u64,
    /// Loading it, by the destination's clock, in microseconds.
    pub load_us: u64,
    /// Journals, register, GO and RUNNING on their way, in microseconds.
    pub handover_us: u64,
    /// QEMU's `cont`, by the destination's clock, in microseconds.
    pub continue_us: u64,
    /// The part of the total from QEMU's event STOP at the source to its event RESUME at the destination, in
    /// microseconds: the downtime of which QEMU's own migration tells. Absent where QEMU did not say either.
    #[serde(default)]
    pub events_us: Option<u64>,
}

/// What the two sides measured around the stop, each by its own clock, in microseconds.
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
    /// Source: comparing memory; zero where it was not asked for.
    pub verify_us: u64,
    /// Source: from sending the device state until READY had arrived.
    pub save_to_ready_us: u64,
    /// Destination: loading, as READY tells.
    pub load_us: u64,
    /// Destination: `cont`, as RUNNING tells.
    pub continue_us: u64,
    /// Source: from before `stop` until QEMU's event STOP.
    #[serde(default)]
    pub stop_event_us: Option<u64>,
    /// Destination: from QEMU's event RESUME until `cont` returned, as RUNNING tells.
    #[serde(default)]
    pub resumed_us: Option<u64>,
}

impl Downtime {
    /// Splits the downtime. Only durations are subtracted from one another; what no measurement explains is the
    /// handover's, and where rounding makes the parts longer than the total, the total gives way.
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

/// What the comparison of both sides' memory and copied disks found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verification {
    /// Compared, in bytes.
    pub compared_bytes: u64,
    /// Compared, in chunks of 2 MiB.
    pub chunks: u64,
    /// Chunks that differed. Anything but zero ended the migration.
    pub different_chunks: u64,
    /// Pages among them that count as zeros at the source, because the guest does not use them: of what was in them this
    /// says nothing.
    #[serde(default)]
    pub left_out_pages: u64,
    /// How long it took, by the source's clock, in microseconds.
    pub duration_us: u64,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Since the migration was asked for, by the source's clock, in microseconds.
    pub at_us: u64,
    /// What: a stable word (`stopped`, `ready`, `committed`, `reconnected`, …).
    pub what: String,
    /// More about it; may be empty.
    pub detail: String,
}

impl Report {
    /// A report of a migration that begins now.
    pub fn begin(migration: MigrationId, source: HostId, destination: HostId, objective: Objective) -> Self {
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
            run_state_before: String::new(),
            run_state_after: None,
            objective,
            ram_blocks: Vec::new(),
            disks: Vec::new(),
            compression: None,
            deltas: None,
            soft: None,
            post_copy: None,
            waiting: None,
            rounds: Vec::new(),
            traces: Traces::default(),
            downtime: None,
            sent_bytes: 0,
            received_bytes: 0,
            reconnections: 0,
            verification: None,
            findings: Vec::new(),
            events: Vec::new(),
        }
    }

    /// The migration was asked for before its report could be begun: all times count from then on.
    pub(crate) fn requested_at(&mut self, unix_ms: u64) {
        self.started_unix_ms = unix_ms;
        self.started = rfc3339(unix_ms);
    }

    /// Notes what happened.
    pub fn event(&mut self, at_us: u64, what: &str, detail: impl Into<String>) {
        self.events.push(Event { at_us, what: what.to_owned(), detail: detail.into() });
    }

    /// Notes the end, by the calendar.
    pub fn end(&mut self, outcome: Outcome, reason: Option<String>, total_us: u64) {
        let now = unix_ms_now();
        self.outcome = outcome;
        self.reason = reason;
        self.total_us = total_us;
        self.ended_unix_ms = Some(now);
        self.ended = Some(rfc3339(now));
    }
}

/// The calendar, in milliseconds since 1970; for people, never for measuring.
pub fn unix_ms_now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// A moment as text: RFC 3339, UTC, milliseconds.
pub fn rfc3339(unix_ms: u64) -> String {
    let latest_ms = 253_402_300_799_999; // the end of the year 9999, where the format ends
    let since = std::time::Duration::from_millis(unix_ms.min(latest_ms));
    humantime::format_rfc3339_millis(std::time::UNIX_EPOCH + since).to_string()
}
