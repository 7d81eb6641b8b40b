//! What a migration is doing right now, for whoever watches.
//!
//! The driver publishes a whole [`Progress`] whenever something changed; watchers see the latest one and may miss
//! those between. A watcher can never hold up the driver: the channel keeps one value and no queue.

use proto::MigrationId;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// What the driver is busy with. Not a state of the handover: that one is in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Describing the VM, pre-flight, the destination starts its QEMU.
    #[default]
    Preparing,
    /// Rounds of pre-copy; the guest runs at the source.
    PreCopy,
    /// The guest is stopped; the last pages go.
    LastRound,
    /// Both sides' memory is compared.
    Verifying,
    /// Device state is saved, sent and loaded.
    DeviceState,
    /// READY has been seen or is awaited; who owns the VM is being settled.
    Handover,
    /// The guest runs at the destination; pages of it that are left go there.
    PostCopy,
    /// Connections were lost and are made anew; the guest runs where it ran.
    Reconnecting,
    /// Nothing can be decided from here until the peer, the register or an operator answers.
    InDoubt,
    /// What was begun is taken back.
    Undoing,
    /// Over, see [`Progress::standing`].
    Ended,
}

/// How a migration stands, in the four words that matter to whoever waits for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// Goes on by itself.
    #[default]
    Underway,
    /// The VM is at its destination.
    Done,
    /// The VM is at its source, unharmed.
    Failed,
    /// The VM ended at its source, before it was moved: its guest shut down, or its QEMU ended otherwise.
    Ended,
    /// It is not known which side has the VM, or it is known and the other side cannot be told. Neither side guesses.
    InDoubt,
}

impl Standing {
    /// Nothing more will happen without somebody asking for it.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Ended)
    }
}

/// How far a disk is that is copied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskProgress {
    /// Its name in the description.
    pub name: String,
    /// Its length, in bytes.
    pub bytes: u64,
    /// What there was to send of it when this round began, in bytes.
    pub round_bytes: u64,
    /// What of that is still to be sent, in bytes.
    pub remaining_bytes: u64,
}

/// A look at a migration. Numbers that are not known yet are zero or absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Progress {
    /// What the driver is busy with.
    pub phase: Phase,
    /// How the migration stands.
    pub standing: Standing,
    /// Current round, from 1 on; 0 before the first.
    pub round: u32,
    /// Which way through memory it is a part of, from 1 on; 0 before the first.
    #[serde(default)]
    pub pass: u32,
    /// Size of the guest's RAM, in bytes.
    pub ram_bytes: u64,
    /// What there was to send when this round began, in bytes of guest memory and disks.
    pub round_bytes: u64,
    /// What of that is still to be sent, in bytes of guest memory and disks.
    pub remaining_bytes: u64,
    /// The same of each disk that is copied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskProgress>,
    /// Sent on all streams since the beginning, in bytes on the wire.
    pub sent_bytes: u64,
    /// Sending rate, in bytes per second on the wire.
    pub rate_bytes_per_s: u64,
    /// How fast the guest dirties memory, in bytes per second.
    pub dirty_rate_bytes_per_s: u64,
    /// Pages that the guest, which runs at the destination already, still lacks; absent where none is known to be missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing_pages: Option<u64>,
    /// Downtime to be expected if the guest were stopped now, in microseconds.
    pub expected_downtime_us: Option<u64>,
    /// Downtime as measured, once it is over, in microseconds.
    pub downtime_us: Option<u64>,
    /// Since the migration was asked for, in microseconds.
    pub elapsed_us: u64,
    /// How often connections were made anew.
    pub reconnections: u32,
    /// What there is to say about it: why it failed, what it waits for.
    pub message: Option<String>,
}

/// One line of the stream that the API gives to watchers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressLine {
    /// Which migration.
    #[serde(flatten)]
    pub migration: MigrationId,
    /// How far it is.
    #[serde(flatten)]
    pub progress: Progress,
}

/// The driver's end. Cloning it gives another hand on the same value.
#[derive(Clone, Debug)]
pub struct Publisher(watch::Sender<Progress>);

/// A watcher's end.
pub type Watcher = watch::Receiver<Progress>;

impl Publisher {
    /// A channel that shows a migration that has not begun.
    pub fn new() -> Self {
        Self(watch::Sender::new(Progress::default()))
    }

    /// Changes what watchers see. Never waits for them; needs no tokio runtime.
    pub fn update(&self, change: impl FnOnce(&mut Progress)) {
        self.0.send_modify(change);
    }

    /// What watchers see now.
    pub fn now(&self) -> Progress {
        self.0.borrow().clone()
    }

    /// Another watcher. It sees the present value at once, and the end of the channel when all publishers are gone.
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
