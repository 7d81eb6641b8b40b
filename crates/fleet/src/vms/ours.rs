//! The planner of this crate as a policy of the simulation.

use std::sync::Arc;

use super::setup::{STEP_S, Setup};
use super::simulation::{Policy, Snapshot};
use crate::planner::{BadSettings, Host, Plan, Planner, PowerState, Settings, View, Vm};

/// The planner, with what it is shown of the fleet.
#[derive(Debug)]
pub struct Ours {
    planner: Planner,
    hosts: Vec<Host>,
    /// Plan of the last step.
    pub last: Plan,
}

impl Ours {
    /// Returns the policy for a set-up.
    pub fn new(setup: &Setup, settings: Settings) -> Result<Self, BadSettings> {
        let host = |(at, spec): (usize, &super::HostSpec)| Host {
            id: at as u32,
            cpu: spec.mips,
            core: spec.core_mips,
            memory_mb: spec.memory_mb,
            power: Arc::clone(&spec.power),
            state: PowerState::Sleeping,
            // Hosts that are on at the start may be switched off.
            on_since_s: f64::NEG_INFINITY,
            is_cordoned: false,
            reserved_mb: 0.0,
        };
        let hosts = setup.hosts.iter().enumerate().map(host).collect();
        Ok(Self { planner: Planner::new(settings)?, hosts, last: Plan::default() })
    }

    fn look(&mut self, snapshot: &Snapshot<'_>, now_s: f64) -> Vec<Vm> {
        let setup = snapshot.setup;
        let vm = |(at, host): (usize, &u32)| Vm {
            id: at as u32,
            host: *host,
            cpu: setup.vms[at].mips,
            core: setup.vms[at].mips,
            memory_mb: setup.room_mb(at),
            move_s: setup.move_s(at),
            apart: None,
            is_pinned: false,
            is_moving: snapshot.is_moving[at],
        };
        let vms: Vec<Vm> = snapshot.host_of.iter().enumerate().map(vm).collect();
        for (host, memory_mb) in self.hosts.iter_mut().zip(snapshot.memory_mb) {
            host.reserved_mb = *memory_mb;
        }
        let mut is_on = vec![false; self.hosts.len()];
        for vm in &vms {
            is_on[vm.host as usize] = true;
            self.hosts[vm.host as usize].reserved_mb -= vm.memory_mb;
        }
        for (host, is_on) in self.hosts.iter_mut().zip(is_on) {
            if is_on && host.state == PowerState::Sleeping && snapshot.step > 0 {
                host.on_since_s = now_s - STEP_S;
            }
            host.state = if is_on { PowerState::On } else { PowerState::Sleeping };
        }
        vms
    }
}

impl Policy for Ours {
    fn decide(&mut self, snapshot: &Snapshot<'_>) -> Vec<(usize, usize)> {
        let now_s = snapshot.step as f64 * STEP_S;
        let vms = self.look(snapshot, now_s);
        let samples: Vec<Option<f32>> = snapshot.demand.iter().copied().map(Some).collect();
        self.planner.observe(now_s, &samples);
        self.last = self.planner.plan(&View { now_s, hosts: &self.hosts, vms: &vms });
        self.last.moves.iter().map(|one| (one.vm as usize, one.to as usize)).collect()
    }
}
