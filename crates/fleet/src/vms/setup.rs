//! Hosts, VMs and their demand.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::power_curve::{BadPowerCurve, PowerCurve};
use crate::trace::{Day, STEPS_PER_DAY};

/// A host.
#[derive(Clone, Debug, PartialEq)]
pub struct HostSpec {
    /// MIPS of one core.
    pub core_mips: f64,
    /// MIPS of all cores.
    pub mips: f64,
    /// Memory, in MB.
    pub memory_mb: f64,
    /// Power.
    pub power: Arc<PowerCurve>,
}

/// A VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VmSpec {
    /// MIPS of its core.
    pub mips: f64,
    /// Memory, in MB.
    pub memory_mb: f64,
}

/// Rule for the memory of the VMs of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryRule {
    /// Only the first placement has to fit: as in CloudSim, whose running VMs ask for no memory.
    Ignored,
    /// The memory of all VMs fits at any time, also of those that arrive.
    Kept,
}

/// The reason why a set-up is impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSetup {
    /// No hosts.
    #[error("at least one host is needed")]
    NoHosts,
    /// A factor that is not positive.
    #[error("the factor of the time that moves take has to be above 0 and finite")]
    MoveFactor,
    /// VMs that no host has room for.
    #[error("VM {vm} fits on no host: add hosts")]
    NoRoom {
        /// Number of the VM, from 1.
        vm: usize,
    },
    /// A power curve of a host type.
    #[error(transparent)]
    Power(#[from] BadPowerCurve),
}

/// MIPS of a core and watts at 0, 10, … 100% of the two types of hosts (`SPECpower_ssj2008`): HP `ProLiant` ML110 G4
/// and G5, with two cores and 4 GB each.
const HOST_TYPES: [(f64, [f64; 11]); 2] = [
    (1860.0, [86.0, 89.4, 92.6, 96.0, 99.5, 102.0, 106.0, 108.0, 112.0, 114.0, 117.0]),
    (2660.0, [93.7, 97.0, 101.0, 105.0, 110.0, 116.0, 121.0, 125.0, 129.0, 133.0, 135.0]),
];
const HOST_CORES: f64 = 2.0;
const HOST_MEMORY_MB: f64 = 4096.0;

/// MIPS and memory of the four types of VMs.
const VM_TYPES: [(f64, f64); 4] = [(2500.0, 870.0), (2000.0, 1740.0), (1000.0, 1740.0), (500.0, 613.0)];

/// Half of the hosts' 1 Gb/s, in MB/s: the other half is for the VMs.
const MOVE_MB_PER_S: f64 = 62.5;

/// Length of a step, in seconds.
pub(crate) const STEP_S: f64 = 300.0;

/// Share of its MIPS that a VM loses while it moves. The destination has to serve the same share of its demand during
/// that time.
pub(crate) const MOVE_LOSS: f64 = 0.1;

/// Hosts, VMs, demand, and the time of moves.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The hosts.
    pub hosts: Vec<HostSpec>,
    /// The VMs.
    pub vms: Vec<VmSpec>,
    /// Rule about memory.
    pub memory: MemoryRule,
    /// Factor of the time that each move takes.
    pub move_factor: f64,
    /// Demand of each step and VM, in MIPS.
    demand: Vec<Vec<f32>>,
}

impl Setup {
    /// Returns the set-up for a day: hosts of alternating types, a quarter of the VMs of each type, in order.
    pub fn new(day: &Day, hosts: usize, memory: MemoryRule, move_factor: f64) -> Result<Self, BadSetup> {
        if hosts == 0 {
            return Err(BadSetup::NoHosts);
        }
        if !(move_factor.is_finite() && move_factor > 0.0) {
            return Err(BadSetup::MoveFactor);
        }
        let types = HOST_TYPES
            .iter()
            .map(|(core_mips, watts)| {
                let power = Arc::new(PowerCurve::new(watts.to_vec())?);
                let (core_mips, mips) = (*core_mips, core_mips * HOST_CORES);
                Ok(HostSpec { core_mips, mips, memory_mb: HOST_MEMORY_MB, power })
            })
            .collect::<Result<Vec<_>, BadPowerCurve>>()?;
        let hosts = (0..hosts).map(|at| types[at % types.len()].clone()).collect();
        let quarter = day.vms.len().div_ceil(VM_TYPES.len());
        let vm = |at: usize| {
            let (mips, memory_mb) = VM_TYPES[at / quarter];
            VmSpec { mips, memory_mb }
        };
        let vms: Vec<VmSpec> = (0..day.vms.len()).map(vm).collect();
        let at_step = |step: usize| {
            let demand =
                |(percent, vm): (&Vec<u8>, &VmSpec)| (f64::from(percent[step]) / 100.0 * vm.mips) as f32;
            day.vms.iter().zip(&vms).map(demand).collect()
        };
        let demand = (0..STEPS_PER_DAY).map(at_step).collect();
        Ok(Self { hosts, vms, memory, move_factor, demand })
    }

    /// Returns the number of steps.
    pub fn steps(&self) -> usize {
        self.demand.len()
    }

    /// Returns the demand of each VM in a step, in MIPS.
    pub fn demand(&self, step: usize) -> &[f32] {
        &self.demand[step]
    }

    /// Returns the time that a move of a VM takes, in seconds.
    pub fn move_s(&self, vm: usize) -> f64 {
        self.vms[vm].memory_mb / MOVE_MB_PER_S * self.move_factor
    }

    /// Returns the memory for which a VM needs room on a host.
    pub(crate) fn room_mb(&self, vm: usize) -> f64 {
        match self.memory {
            MemoryRule::Ignored => 0.0,
            MemoryRule::Kept => self.vms[vm].memory_mb,
        }
    }
}
