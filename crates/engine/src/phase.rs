//! The parts of a migration, in their order. Progress and report name them so; a source's driver runs them as a list.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A part of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Pre-flight on both sides. Nothing is changed.
    Check,
    /// PREPARED is journalled, the destination's QEMU waits, writes are tracked.
    Prepare,
    /// Rounds, while the guest runs.
    PreCopy,
    /// The guest is stopped. The downtime begins.
    Stop,
    /// What is left of memory is sent.
    LastPages,
    /// The state of the devices is saved and sent.
    DeviceState,
    /// The destination loads it, and says READY.
    Load,
    /// COMMITTED, GO, the register where there is one. The point of no return is in here.
    Handover,
    /// `cont` at the destination. The downtime ends.
    Continue,
}

impl Phase {
    /// All of them, in the order in which they are passed.
    pub const ALL: [Self; 9] = [
        Self::Check,
        Self::Prepare,
        Self::PreCopy,
        Self::Stop,
        Self::LastPages,
        Self::DeviceState,
        Self::Load,
        Self::Handover,
        Self::Continue,
    ];

    /// Stable name, as in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Prepare => "prepare",
            Self::PreCopy => "pre-copy",
            Self::Stop => "stop",
            Self::LastPages => "last-pages",
            Self::DeviceState => "device-state",
            Self::Load => "load",
            Self::Handover => "handover",
            Self::Continue => "continue",
        }
    }

    /// The phase after this one; none after the last.
    pub fn next(self) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| *phase > self)
    }

    /// Whether the guest stands still in it, so that its duration is part of the downtime.
    pub fn is_downtime(self) -> bool {
        self >= Self::Stop
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Phase;

    #[test]
    fn the_list_is_the_order() {
        assert!(Phase::ALL.is_sorted());
        let mut walked = vec![Phase::Check];
        while let Some(next) = walked.last().and_then(|phase| phase.next()) {
            walked.push(next);
        }
        assert_eq!(walked, Phase::ALL);
        for phase in Phase::ALL {
            assert_eq!(serde_json::to_value(phase).unwrap(), phase.name());
        }
    }

    #[test]
    fn the_downtime_begins_with_the_stop() {
        assert_eq!(Phase::ALL.into_iter().find(|phase| phase.is_downtime()), Some(Phase::Stop));
    }
}
