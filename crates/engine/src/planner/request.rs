//! Requests to the planner: goals and limits.

use serde::{Deserialize, Serialize};

use super::refusal::Refusal;

/// Request for a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// Goal.
    pub goal: PlanGoal,
    /// Time until which all moves have to be over, in seconds from now; none without a deadline.
    #[serde(default)]
    pub deadline_s: Option<u64>,
    /// True to plan what is possible where some VMs cannot be moved.
    #[serde(default)]
    pub partial: bool,
    /// Limits of moves.
    #[serde(default)]
    pub limits: MoveLimits,
    /// Restraint of moves that are not necessary.
    #[serde(default)]
    pub hysteresis: Hysteresis,
}

/// Goal of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "goal", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PlanGoal {
    /// Hosts are emptied.
    Drain {
        /// The hosts.
        hosts: Vec<String>,
        /// Hosts to which their VMs go; empty for all others.
        #[serde(default)]
        to: Vec<String>,
    },
    /// The load of hosts is levelled.
    #[default]
    Balance,
    /// VMs with the same `spread` label are spread over zones.
    Spread,
    /// VMs go to given hosts: back to where they were, for instance.
    Place {
        /// VMs with their hosts.
        placements: Vec<Placement>,
    },
}

/// A VM and its host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// VM.
    pub vm: String,
    /// Host.
    pub host: String,
}

/// Limits of moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MoveLimits {
    /// Most moves of one host at the same time, arriving and leaving.
    pub per_host: u32,
    /// Most moves of a plan that are not necessary: all but those of [`PlanGoal::Drain`] and [`PlanGoal::Place`].
    pub moves: u32,
    /// Rate of all moves together, in bytes per second; none without a limit.
    pub bytes_per_s: Option<u64>,
    /// Rate at which one move copies at most, for lack of processors, in bytes per second.
    pub copy_bytes_per_s: u64,
    /// Share of a link below which no move begins, in hundredths of the link.
    pub least_link_percent: u32,
    /// Processors that a move uses on each of its hosts, in thousandths of one.
    pub copy_milli: u64,
    /// Share of a host's processors that its VMs may use once a VM has come, in hundredths.
    pub most_load_percent: u32,
    /// Time that a target without any load is worth beside one that is full, in seconds: a longer move goes to the
    /// emptier host only if it takes less than that more.
    pub load_worth_s: u64,
    /// True if VMs of hosts that are not emptied may be moved to make room.
    pub make_room: bool,
}

impl Default for MoveLimits {
    /// Two processors copy a gigabyte a second; a move needs a quarter of a link; processors may be nine tenths full.
    fn default() -> Self {
        Self {
            per_host: 8,
            moves: 1000,
            bytes_per_s: None,
            copy_bytes_per_s: 1_000_000_000,
            least_link_percent: 25,
            copy_milli: 2000,
            most_load_percent: 90,
            load_worth_s: 60,
            make_room: true,
        }
    }
}

/// Restraint of moves that level load: without it, VMs would follow each change of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hysteresis {
    /// Threshold: load of a host above the mean from which on it is relieved, in hundredths of its capacity.
    pub threshold_percent: u32,
    /// Hold time: time for which it has to be above the threshold, in seconds.
    pub hold_s: u64,
    /// Margin: least difference that a move makes between the loads of its hosts, in hundredths.
    pub margin_percent: u32,
    /// Time that a VM stays where it came, in seconds.
    pub rest_s: u64,
    /// Time in which a move has to pay: the load that it takes off a host, for this time, has to exceed the time of the
    /// move. In seconds.
    pub payback_s: u64,
}

impl Default for Hysteresis {
    fn default() -> Self {
        Self { threshold_percent: 15, hold_s: 300, margin_percent: 5, rest_s: 1800, payback_s: 3600 }
    }
}

impl PlanRequest {
    /// Returns an error if a setting is out of its range.
    pub(super) fn check(&self) -> Result<(), Refusal> {
        let Self { limits, hysteresis, .. } = self;
        let percents = [
            ("least_link_percent", limits.least_link_percent, 1..=100),
            ("most_load_percent", limits.most_load_percent, 1..=1000),
            ("threshold_percent", hysteresis.threshold_percent, 1..=100),
            ("margin_percent", hysteresis.margin_percent, 1..=100),
        ];
        let wrong = percents.iter().find(|(_, value, range)| !range.contains(value)).map(|(name, ..)| *name);
        let amounts = [
            ("per_host", u64::from(limits.per_host)),
            ("copy_bytes_per_s", limits.copy_bytes_per_s),
            ("bytes_per_s", limits.bytes_per_s.unwrap_or(1)),
        ];
        let zero = amounts.iter().find(|(_, value)| *value == 0).map(|(name, _)| *name);
        match wrong.or(zero) {
            Some(setting) => Err(Refusal::Setting { setting: setting.to_owned() }),
            None => Ok(()),
        }
    }
}
