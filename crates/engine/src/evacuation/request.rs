//! Requests: hosts to be emptied, or VMs to be brought back, with deadline, limits and priorities.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::planner::{MoveLimits, Placement, PlanGoal};

/// Request to empty hosts, or to bring back what left them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvacuationRequest {
    /// Goal.
    pub goal: EvacuationGoal,
    /// Deadline, on the clock of all events; none without one.
    #[serde(default)]
    pub deadline_ns: Option<u64>,
    /// True to begin although the deadline is not expected to be kept.
    #[serde(default)]
    pub accept_late: bool,
    /// True to move what can be moved where some VMs cannot.
    #[serde(default)]
    pub partial: bool,
    /// Priorities of VMs, in place of those of their rules: a VM with a higher one moves earlier, and gets more of
    /// links and budget.
    #[serde(default)]
    pub priorities: BTreeMap<String, i32>,
    /// Limits of moves. [`MoveLimits::bytes_per_s`] is the bandwidth budget of all of them together.
    #[serde(default)]
    pub limits: MoveLimits,
    /// Limits of repetitions and waits.
    #[serde(default)]
    pub retries: RetryLimits,
}

/// Goal of an evacuation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "goal", rename_all = "kebab-case", deny_unknown_fields)]
pub enum EvacuationGoal {
    /// Hosts are emptied: all VMs leave them, and then nothing remains there ([`super::HostContents`]).
    Empty {
        /// The hosts.
        hosts: Vec<String>,
        /// Hosts to which their VMs go; empty for all others.
        #[serde(default)]
        to: Vec<String>,
    },
    /// VMs that left a host come back to it.
    Return {
        /// The host.
        host: String,
        /// The VMs.
        vms: Vec<String>,
    },
}

/// Limits of repetitions and waits: an evacuation ends, whatever fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetryLimits {
    /// Most attempts for one VM.
    pub attempts: u32,
    /// Time before the second attempt, in seconds; it doubles with each further one.
    pub pause_s: u64,
    /// Time without any progress after which the evacuation ends and states what stands in its way, in seconds.
    pub patience_s: u64,
    /// Time between two questions to a host of which something remains, in seconds.
    pub ask_s: u64,
}

impl Default for RetryLimits {
    fn default() -> Self {
        Self { attempts: 4, pause_s: 5, patience_s: 600, ask_s: 5 }
    }
}

impl EvacuationGoal {
    /// Returns the hosts that are to be emptied.
    pub fn emptied(&self) -> &[String] {
        match self {
            Self::Empty { hosts, .. } => hosts,
            Self::Return { .. } => &[],
        }
    }

    /// Returns the goal of the plan.
    pub(super) fn plan_goal(&self) -> PlanGoal {
        match self {
            Self::Empty { hosts, to } => PlanGoal::Drain { hosts: hosts.clone(), to: to.clone() },
            Self::Return { host, vms } => {
                let placement = |vm: &String| Placement { vm: vm.clone(), host: host.clone() };
                PlanGoal::Place { placements: vms.iter().map(placement).collect() }
            }
        }
    }
}
