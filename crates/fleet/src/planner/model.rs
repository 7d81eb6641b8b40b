//! The fleet, as the planner sees it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::power_curve::PowerCurve;

/// Power state of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PowerState {
    /// Runs VMs.
    On,
    /// Is being emptied, and accepts no VM.
    Draining,
    /// Off or in a low-power state.
    Sleeping,
    /// Is being switched on.
    Waking,
    /// Does not answer, or did not come back.
    Failed,
}

/// A host.
#[derive(Clone, Debug)]
pub struct Host {
    /// Number of the host: its place in [`View::hosts`].
    pub id: u32,
    /// CPU capacity, in any unit that is the same for all hosts and VMs.
    pub cpu: f64,
    /// Capacity of one core, in the same unit.
    pub core: f64,
    /// Memory, in MB.
    pub memory_mb: f64,
    /// Power.
    pub power: Arc<PowerCurve>,
    /// Power state.
    pub state: PowerState,
    /// Time at which it was switched on, in seconds.
    pub on_since_s: f64,
    /// Accepts no further VMs.
    pub is_cordoned: bool,
    /// Memory in use beside the VMs of the view, in MB: of VMs that are arriving or leaving.
    pub reserved_mb: f64,
}

/// A VM.
#[derive(Clone, Copy, Debug)]
pub struct Vm {
    /// Number of the VM: that of its samples.
    pub id: u32,
    /// The host on which it runs, or to which it moves.
    pub host: u32,
    /// Most CPU that it can use.
    pub cpu: f64,
    /// Most CPU that a core of it can use.
    pub core: f64,
    /// Memory, in MB.
    pub memory_mb: f64,
    /// Forecast of the time that a move takes, in seconds.
    pub move_s: f64,
    /// VMs of a group run on different hosts.
    pub apart: Option<u32>,
    /// Stays on its host.
    pub is_pinned: bool,
    /// Moves already.
    pub is_moving: bool,
}

/// The fleet at a moment.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The moment, in seconds of the clock by which samples are taken.
    pub now_s: f64,
    /// All hosts.
    pub hosts: &'a [Host],
    /// All VMs.
    pub vms: &'a [Vm],
}
