//! Placement and consolidation: which VMs move, and which hosts are woken and put to sleep. The same code runs live and
//! in simulations.
//!
//! A [`Planner`] is fed with the CPU use of all VMs at even intervals ([`Planner::observe`]), and asked for a [`Plan`]
//! for a [`View`] of the fleet. It reads no clock; equal inputs give equal plans. Each move, each host that is woken or
//! put to sleep, and each host that could have been emptied but was not, has its [`Reason`].
//!
//! The rules, in the order in which they apply:
//!
//! 1. *Forecast.* A VM's demand is its smoothed level, plus what its daily pattern adds at that hour, once a day of it
//!    is known ([`forecast`]). A host's *need* is the forecast of all of its VMs, plus *headroom*: a percentile of the
//!    errors that the forecasts of just these VMs had lately, all taken at the same time.
//! 2. *Relief.* A host without processor time left is relieved if the forecast agrees: one sample moves nothing.
//! 3. *Consolidation.* A host that has run for the minimum time is emptied if all of its VMs fit elsewhere with a
//!    margin on top of the need, and if the energy saved exceeds what the moves and the transition cost.
//! 4. *Constraints*, at every step: memory, the number of cores, anti-affinity, pinned VMs, cordoned hosts, limits of
//!    moves and transitions; and the VMs of the fullest host must find room on the others if it fails.

mod consolidate;
pub mod forecast;
mod ledger;
mod model;
mod plan;
mod relief;
mod settings;

pub use model::{Host, PowerState, View, Vm};
pub use plan::{HostChange, Move, Plan, Reason};
pub use settings::{BadSettings, Settings};

use forecast::Forecaster;
use ledger::Ledger;

/// The planner: what it knows about VMs, and when it last moved them.
#[derive(Clone, Debug)]
pub struct Planner {
    settings: Settings,
    forecasters: Vec<Forecaster>,
    /// Number of observations.
    observed: u64,
}

impl Planner {
    /// Returns a planner that knows nothing yet.
    pub fn new(settings: Settings) -> Result<Self, BadSettings> {
        settings.check()?;
        Ok(Self { settings, forecasters: Vec::new(), observed: 0 })
    }

    /// Learns the CPU use of all VMs, by their numbers, in the unit of the hosts' capacities. All samples are of the
    /// same interval; none where a VM was not observed.
    pub fn observe(&mut self, now_s: f64, samples: &[Option<f32>]) {
        self.observed += 1;
        if self.forecasters.len() < samples.len() {
            self.forecasters.resize_with(samples.len(), Forecaster::default);
        }
        for (forecaster, sample) in self.forecasters.iter_mut().zip(samples) {
            match sample {
                Some(used) => forecaster.observe(&self.settings, now_s, self.observed, *used),
                None => forecaster.miss(self.observed),
            }
        }
    }

    /// Returns the moves and transitions that are worth their cost now.
    pub fn plan(&mut self, view: &View<'_>) -> Plan {
        let unknown = Forecaster::default();
        let forecasts = view
            .vms
            .iter()
            .map(|vm| {
                self.forecasters.get(vm.id as usize).unwrap_or(&unknown).forecast(
                    &self.settings,
                    view.now_s,
                    vm,
                )
            })
            .collect();
        let mut ledger = Ledger::new(view, &self.settings, forecasts);
        let mut plan = Plan::default();
        relief::relieve(&mut ledger, &mut plan);
        consolidate::consolidate(&mut ledger, &mut plan);
        ledger.finish(&mut plan);
        for one in &plan.moves {
            if let Some(forecaster) = self.forecasters.get_mut(one.vm as usize) {
                forecaster.moved_at(view.now_s);
            }
        }
        plan
    }
}
