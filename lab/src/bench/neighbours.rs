//! Migration noise: the performance that a migration costs guests that are not migrated (Koto et al., section 2). Each
//! host has one, which computes as fast as its one processor allows.

use std::time::{Duration, SystemTime};

use super::case::{Case, UNPACED_MIB_PER_S};
use super::guest_clock::GuestClock;
use super::program::{Moments, compute_disturbance};
use super::statistics::{Noise, Noises};
use crate::environment::Environment;
use crate::error::Result;
use crate::guest::Guest;
use crate::host::Host;
use crate::lab::Lab;
use crate::spec::{GuestSpec, Load};

/// Memory that it reads over and over, MiB.
const MEMORY_READ_MIB: u64 = 16;

/// A guest at each host that is not migrated.
#[derive(Debug)]
pub(super) struct Neighbours {
    source: Guest,
    destination: Guest,
}

impl Neighbours {
    /// Boots them, and waits until they compute.
    pub(super) fn start(lab: &Lab, environment: &Environment, case: &Case) -> Result<Self> {
        let start = |host: &Host| -> Result<Guest> {
            let load = Load {
                fill_mib: MEMORY_READ_MIB,
                wss_mib: 0,
                rate_mib_per_s: 0,
                verify_mib_per_s: UNPACED_MIB_PER_S,
                ..Load::default()
            };
            let spec = GuestSpec { qemu: case.qemu, ..GuestSpec::tiny("neighbour", load) };
            let guest = Guest::start(host, environment, &spec)?;
            guest.wait_for_load(MEMORY_READ_MIB)?;
            Ok(guest)
        };
        Ok(Self { source: start(&lab.a)?, destination: start(&lab.b)? })
    }
}

/// Both neighbours during a migration, each by its own clock.
pub(super) struct NeighbourClocks<'a> {
    clocks: [GuestClock<'a>; 2],
    settled: [Duration; 2],
    requested: [Duration; 2],
}

impl<'a> NeighbourClocks<'a> {
    /// Records that the neighbours run undisturbed from now on, for as long as the migrated guest does.
    pub(super) fn settled(neighbours: &'a Neighbours) -> Result<Self> {
        let clocks = [&neighbours.source, &neighbours.destination]
            .map(|guest| GuestClock { serial: guest.serial(), is_reported: true });
        let settled = [clocks[0].now()?, clocks[1].now()?];
        Ok(Self { clocks, settled, requested: settled })
    }

    /// Records the request of the migration.
    pub(super) fn requested(mut self) -> Result<Self> {
        self.requested = [self.clocks[0].now()?, self.clocks[1].now()?];
        Ok(self)
    }

    /// Returns the value of each clock at a moment that has just passed.
    pub(super) fn at(&self, moment: SystemTime) -> Result<[Duration; 2]> {
        Ok([self.clocks[0].at(moment)?, self.clocks[1].at(moment)?])
    }

    /// Returns the noises of a time span, after its end.
    pub(super) fn noises_for(&self, span: Duration) -> Result<Noises> {
        self.noises(self.requested.map(|requested| requested + span))
    }

    /// Returns the noises until a time of each clock.
    pub(super) fn noises(&self, ended: [Duration; 2]) -> Result<Noises> {
        Ok(Noises { source: self.noise(0, ended[0])?, destination: self.noise(1, ended[1])? })
    }

    fn noise(&self, of: usize, ended: Duration) -> Result<Noise> {
        let (settled, requested) = (self.settled[of], self.requested[of]);
        let moments = Moments { settled, requested, resumed: ended, seen_until: ended };
        let judged = compute_disturbance(&self.clocks[of].serial.progress_until(settled, ended)?, moments);
        let span_ms = ended.saturating_sub(requested).as_secs_f64() * 1e3;
        Ok(Noise { span_ms, lost_work_ms: judged.lost_work_ms, longest_stall_ms: judged.longest_stall_ms })
    }
}
