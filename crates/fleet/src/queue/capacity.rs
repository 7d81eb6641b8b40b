//! The number of servers in each second, and the energy that they need.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::workload::Workload;
use crate::power_curve::PowerCurve;

/// The bank of servers and how its demand is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bank {
    /// Number of servers.
    pub servers: u32,
    /// Seconds over which demand is averaged, before each decision.
    pub window_s: u32,
    /// Power of a server that is on.
    pub power: PowerCurve,
    /// Power of a server between the decision to switch it on and its first request, as a share of its peak power.
    pub waking_share: f64,
    /// Watts of a server that is off.
    pub off_watts: f64,
}

/// The reason why a bank is impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadBank {
    /// No servers or too many.
    #[error("a bank has 1 to 255 servers")]
    Servers,
    /// A window without a second.
    #[error("demand is averaged over at least 1 s")]
    Window,
    /// A share outside of 0 to 1.
    #[error("the power of a waking server is a share from 0 to 1 of its peak power")]
    WakingShare,
    /// Watts that are not at most those of an idle server.
    #[error("a server that is off needs at least 0 W, and not more than an idle one")]
    OffWatts,
}

impl Bank {
    /// Returns an error if the bank is impossible.
    pub fn check(&self) -> Result<(), BadBank> {
        if !(1..=255).contains(&self.servers) {
            return Err(BadBank::Servers);
        }
        if self.window_s == 0 {
            return Err(BadBank::Window);
        }
        if !(0.0..=1.0).contains(&self.waking_share) {
            return Err(BadBank::WakingShare);
        }
        if !(0.0..=self.power.idle()).contains(&self.off_watts) {
            return Err(BadBank::OffWatts);
        }
        Ok(())
    }
}

/// Parameters of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// Capacity reserved above average demand, in percent of it.
    pub headroom_percent: u32,
    /// Shortest time for which a server stays on, in seconds.
    pub min_run_s: u32,
}

/// Energy of a bank, in joules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Energy {
    /// Energy of servers that serve.
    pub serving_j: f64,
    /// Energy of servers that are being switched on.
    pub waking_j: f64,
    /// Energy of servers that are off.
    pub off_j: f64,
}

impl Energy {
    /// Returns the sum, in joules.
    pub fn total_j(&self) -> f64 {
        self.serving_j + self.waking_j + self.off_j
    }
}

/// Number of servers in each second, with its consequences that follow without simulating single requests.
#[derive(Clone, Debug)]
pub struct Capacity {
    servers: Vec<u8>,
    /// The energy that the bank needs. A second's utilisation is the work that its requests bring, and work that waits,
    /// shared evenly by the servers that serve.
    pub energy: Energy,
    /// Number of times that a server was switched on.
    pub starts: u64,
    /// Sum of the serving servers over all seconds.
    pub server_s: u64,
    /// Requests that are late even in a fluid queue: without chance, with work as a liquid.
    pub fluid_late: u64,
}

impl Capacity {
    /// Follows the demand of a workload with the policy's two parameters.
    ///
    /// Each second, demand is the mean of the last `bank.window_s` seconds. As many servers are on as serve it with the
    /// headroom on top, rounded up, at least one. Servers that are switched on serve after `latency_s`. Only servers
    /// that were on for the minimum time are switched off. The bank begins with all servers on, of which each may be
    /// switched off.
    ///
    /// During a gap nothing is known and nothing is decided; the servers stay as they are, and so they do for the first
    /// window after it. No energy is counted in it.
    pub fn follow(workload: &Workload, bank: &Bank, pair: Pair, latency_s: u32, limit_s: f64) -> Self {
        let mut fleet = Fleet::new(bank);
        let mut capacity = Self::empty(workload);
        let mut meter = QueueMeter::new(workload, bank, limit_s);
        let window = bank.window_s as usize;
        let factor = workload.service_s / window as f64 * (1.0 + f64::from(pair.headroom_percent) / 100.0);
        for segment in workload.segments() {
            let mut sum = 0_u64;
            for second in segment.clone() {
                fleet.wake(second as i64);
                if second - segment.start >= window {
                    let needed = (sum as f64 * factor).ceil() as usize;
                    let target = needed.clamp(1, bank.servers as usize);
                    fleet.follow(target, second as i64, pair.min_run_s, latency_s);
                    sum -= u64::from(workload.counts[second - window]);
                }
                sum += u64::from(workload.counts[second]);
                meter.measure(second, fleet.serving.len(), fleet.waking.len(), &mut capacity);
            }
        }
        capacity.starts = fleet.starts;
        capacity
    }

    /// Returns the capacity of a bank in which a number of servers is always on, and the others are always off.
    pub fn constant(workload: &Workload, bank: &Bank, servers: usize, limit_s: f64) -> Self {
        let mut capacity = Self::empty(workload);
        let mut meter = QueueMeter::new(workload, bank, limit_s);
        for second in workload.segments().into_iter().flatten() {
            meter.measure(second, servers, 0, &mut capacity);
        }
        capacity
    }

    /// Returns the number of servers that serve in a second.
    #[inline]
    pub fn servers(&self, second: usize) -> usize {
        usize::from(self.servers[second])
    }

    fn empty(workload: &Workload) -> Self {
        let servers = vec![0; workload.counts.len()];
        Self { servers, energy: Energy::default(), starts: 0, server_s: 0, fluid_late: 0 }
    }
}

/// Servers that are on, by the second in which they were switched on.
struct Fleet {
    serving: VecDeque<i64>,
    /// The second in which a server begins to serve, and that in which it was switched on.
    waking: VecDeque<(i64, i64)>,
    starts: u64,
}

impl Fleet {
    fn new(bank: &Bank) -> Self {
        let serving = vec![i64::MIN / 2; bank.servers as usize].into();
        Self { serving, waking: VecDeque::new(), starts: 0 }
    }

    fn wake(&mut self, now: i64) {
        while let Some((_, since)) = self.waking.pop_front_if(|(ready, _)| *ready <= now) {
            self.serving.push_back(since);
        }
    }

    fn follow(&mut self, target: usize, now: i64, min_run_s: u32, latency_s: u32) {
        for _ in self.serving.len() + self.waking.len()..target {
            self.waking.push_back((now + i64::from(latency_s), now));
            self.starts += 1;
        }
        self.wake(now);
        // The server that was switched on first leaves first, so that all age alike.
        while self.serving.len() > target
            && self.serving.pop_front_if(|since| now - *since >= i64::from(min_run_s)).is_some()
        {}
    }
}

/// Meter of energy, and of the fluid queue.
struct QueueMeter<'a> {
    workload: &'a Workload,
    bank: &'a Bank,
    limit_s: f64,
    /// Work that waits, in seconds of one server.
    backlog_s: f64,
    /// Watts of a server at 1,024 utilisations: a table is as exact as the model, and a second is measured quickly.
    watts: Vec<f64>,
}

impl<'a> QueueMeter<'a> {
    const STEPS: usize = 1024;

    fn new(workload: &'a Workload, bank: &'a Bank, limit_s: f64) -> Self {
        let watts = (0..=Self::STEPS).map(|at| bank.power.watts(at as f64 / Self::STEPS as f64)).collect();
        Self { workload, bank, limit_s, backlog_s: 0.0, watts }
    }

    fn measure(&mut self, second: usize, serving: usize, waking: usize, capacity: &mut Capacity) {
        let requests = self.workload.counts[second];
        self.backlog_s += f64::from(requests) * self.workload.service_s;
        if self.backlog_s > self.limit_s * serving as f64 {
            capacity.fluid_late += u64::from(requests);
        }
        let work_s = self.backlog_s.min(serving as f64);
        self.backlog_s -= work_s;
        let step = (work_s / serving as f64 * Self::STEPS as f64).round() as usize;
        let off = self.bank.servers as usize - serving - waking;
        capacity.energy.serving_j += self.watts[step.min(Self::STEPS)] * serving as f64;
        capacity.energy.waking_j += self.bank.power.peak() * self.bank.waking_share * waking as f64;
        capacity.energy.off_j += self.bank.off_watts * off as f64;
        capacity.server_s += serving as u64;
        capacity.servers[second] = serving as u8;
    }
}
