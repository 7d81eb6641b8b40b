//! The present activity of a migration, for watchers.
//!
//! The driver publishes a whole [`Progress`] whenever something changed; watchers see the latest one and may miss those
//! between. A watcher can never hold up the driver: the channel keeps one value and no queue.

use engine::forecast::{Estimate, MigrationEnd, MigrationForecast};
use proto::MigrationId;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// Present activity of the driver. Not a state of the handover, which is in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Description of the VM, pre-flight checks, start of QEMU at the destination.
    #[default]
    Preparing,
    /// Rounds of pre-copy; the guest runs at the source.
    PreCopy,
    /// The guest is stopped; the last pages are sent.
    LastRound,
    /// Both sides' memory is compared.
    Verifying,
    /// Device state is saved, sent and loaded.
    DeviceState,
    /// READY was received or is awaited; the owner of the VM is being settled.
    Handover,
    /// The guest runs at the destination; its remaining pages are sent there.
    PostCopy,
    /// Connections were lost and are made anew; the guest runs where it ran.
    Reconnecting,
    /// The agent waits for the peer, the ownership registry or an operator: it cannot decide by itself.
    InDoubt,
    /// Incomplete steps are undone.
    Undoing,
    /// Over, see [`Progress::standing`].
    Ended,
}

/// Outcome of a migration so far, in the few words that matter to users.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// The migration goes on by itself.
    #[default]
    Underway,
    /// The VM is at its destination.
    Done,
    /// The VM is at its source, unharmed.
    Failed,
    /// The VM ended at its source, before it was moved: its guest shut down, or its QEMU ended otherwise.
    VmEnded,
    /// It is not known which side has the VM, or it is known and the peer cannot be informed. Neither side guesses.
    InDoubt,
}

impl Standing {
    /// True if nothing more will happen without a request.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::VmEnded)
    }
}

/// Progress of a part of the VM that users see by itself, like a disk that is copied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartProgress {
    /// Kind of the part, in a word: `disk`.
    pub kind: String,
    /// Name of the part in the description.
    pub name: String,
    /// Length of the part, in bytes.
    pub bytes: u64,
    /// Bytes of the part that had to be sent when this round began.
    pub round_bytes: u64,
    /// The part of `round_bytes` that is still to be sent, in bytes.
    pub remaining_bytes: u64,
}

/// Expected end of a migration that is under way. Times count from the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedEnd {
    /// Expected total time, in microseconds.
    pub total_us: u64,
    /// Lower end of its 80% interval, in microseconds.
    pub low_us: u64,
    /// Upper end of its 80% interval, in microseconds.
    pub high_us: u64,
    /// True if the VM is expected to arrive; false if the migration is expected to give up, or not to end.
    pub arrives: bool,
}

impl ExpectedEnd {
    /// Returns the expected end by a forecast.
    pub fn of(forecast: &MigrationForecast) -> Self {
        let Estimate { expected, low, high } = forecast.total_ns;
        Self {
            total_us: expected / 1000,
            low_us: low / 1000,
            high_us: high / 1000,
            arrives: matches!(forecast.end, MigrationEnd::StopAndCopy | MigrationEnd::PostCopy),
        }
    }
}

/// A snapshot of a migration. Numbers that are not known yet are zero or absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Progress {
    /// Present activity of the driver.
    pub phase: Phase,
    /// Outcome so far.
    pub standing: Standing,
    /// Current round, from 1 on; 0 before the first.
    pub round: u32,
    /// Number of the pass through memory, from 1 on; 0 before the first.
    #[serde(default)]
    pub pass: u32,
    /// Size of the guest's RAM, in bytes.
    pub ram_bytes: u64,
    /// Bytes of guest memory and disks that had to be sent when this round began.
    pub round_bytes: u64,
    /// The part of `round_bytes` that is still to be sent, in bytes.
    pub remaining_bytes: u64,
    /// Progress of the parts of the VM that users see by themselves, in the order in which they are sent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PartProgress>,
    /// Bytes sent on all streams since the beginning, on the wire.
    pub sent_bytes: u64,
    /// Sending rate, in bytes per second on the wire.
    pub rate_bytes_per_s: u64,
    /// The guest's dirty rate, in bytes per second.
    pub dirty_rate_bytes_per_s: u64,
    /// Missing pages of the guest, which runs at the destination already; absent if none is known to be missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_pages: Option<u64>,
    /// Expected downtime if the guest were stopped now, in microseconds.
    pub expected_downtime_us: Option<u64>,
    /// Expected end of the migration; absent until it can be forecast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_end: Option<ExpectedEnd>,
    /// Measured downtime, once the guest runs again, in microseconds.
    pub downtime_us: Option<u64>,
    /// Time since the migration was requested, in microseconds.
    pub elapsed_us: u64,
    /// Number of times that connections were made anew.
    pub reconnections: u32,
    /// Human-readable message: the reason of a failure, or the event that it waits for.
    pub message: Option<String>,
}

/// One line of the stream that the API sends to watchers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressLine {
    /// Id of the migration.
    #[serde(flatten)]
    pub migration: MigrationId,
    /// Progress of the migration.
    #[serde(flatten)]
    pub progress: Progress,
}

/// The driver's end. A clone publishes to the same value.
#[derive(Clone, Debug)]
pub struct Publisher(watch::Sender<Progress>);

/// A watcher's end.
pub type Watcher = watch::Receiver<Progress>;

impl Publisher {
    /// Creates a channel whose value is a migration that has not begun.
    pub fn new() -> Self {
        Self(watch::Sender::new(Progress::default()))
    }

    /// Changes the published value. Never waits for watchers; needs no tokio runtime.
    pub fn update(&self, change: impl FnOnce(&mut Progress)) {
        self.0.send_modify(change);
    }

    /// Returns the published value.
    pub fn now(&self) -> Progress {
        self.0.borrow().clone()
    }

    /// Returns another watcher. It sees the present value at once, and the end of the channel when all publishers are
    /// gone.
    pub fn watch(&self) -> Watcher {
        self.0.subscribe()
    }
}

impl Default for Publisher {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watcher_sees_the_latest_and_the_end() {
        let publisher = Publisher::new();
        let mut watcher = publisher.watch();
        assert_eq!(watcher.borrow_and_update().phase, Phase::Preparing);
        publisher.update(|p| p.round = 1);
        publisher.update(|p| p.round = 2);
        assert!(watcher.has_changed().is_ok_and(|changed| changed));
        assert_eq!(watcher.borrow_and_update().round, 2);
        drop(publisher);
        assert!(watcher.has_changed().is_err());
    }

    #[test]
    fn a_line_is_flat() {
        let line = ProgressLine {
            migration: MigrationId { vm: proto::VmName::new("web").unwrap(), epoch: proto::Epoch(3) },
            progress: Progress { round: 4, ..Progress::default() },
        };
        let json = serde_json::to_value(&line).unwrap();
        assert_eq!((&json["vm"], &json["epoch"], &json["round"]), (&"web".into(), &3.into(), &4.into()));
        assert_eq!(serde_json::from_value::<ProgressLine>(json).unwrap(), line);
    }
}
