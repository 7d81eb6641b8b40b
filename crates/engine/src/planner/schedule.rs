//! Order of moves: which begin when, so that memory fits at every step and no link, host or budget is overcommitted.
//!
//! A move uses memory on both of its hosts until it has ended. It begins once its next host has room and both hosts
//! have a share of their links and processors for it. Where moves wait for each other's room, one of them steps aside
//! to a third host.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::cost::{MoveCost, cost};
use super::index::Fleet;
use super::obstacle::{Obstacle, link_bytes_per_s};
use super::occupancy::Occupancy;
use super::plan::MoveReason;
use super::refusal::Refusal;
use super::request::MoveLimits;
use crate::forecast::Estimate;

/// Most moves that are tried again when one has ended and the budget of all is the limit.
const MOST_RETRIES: usize = 64;
/// Most VMs that a refusal names.
const MOST_NAMES: usize = 8;

/// End of the intervals of forecasts that counts as the duration of moves.
pub(super) type DurationBound = fn(&Estimate) -> u64;

/// A move that a goal wants.
#[derive(Clone, Debug)]
pub(super) struct WantedMove {
    pub(super) vm: u32,
    pub(super) to: u32,
    pub(super) why: MoveReason,
}

/// A move with its times.
#[derive(Clone, Debug)]
pub(super) struct ScheduledMove {
    pub(super) vm: u32,
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) begins_ns: u64,
    pub(super) ends_ns: u64,
    pub(super) bytes_per_s: u64,
    pub(super) cost: MoveCost,
    pub(super) waits_for: Vec<u32>,
    pub(super) why: MoveReason,
}

/// Progress of a wanted move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Waits,
    Begun,
}

/// Use of a host by moves.
#[derive(Clone, Debug, Default)]
struct HostMoves {
    active: u32,
    bytes_per_s: u64,
    /// Rate of its fastest link.
    most_bytes_per_s: u64,
    /// Wanted moves that it takes part in, in their order; begun ones are removed when they are found.
    wanted: Vec<u32>,
    /// Moves away from it that have ended.
    exits: Vec<u32>,
}

/// The fleet while moves are under way.
pub(super) struct Scheduler<'a> {
    fleet: &'a Fleet<'a>,
    limits: MoveLimits,
    closed: &'a [Option<Obstacle>],
    duration: DurationBound,
    wanted: Vec<WantedMove>,
    progress: Vec<Progress>,
    hosts: Vec<HostMoves>,
    occupancy: Occupancy<'a>,
    /// Use of hosts if no VM ever left: where a VM fits beside that, its move waits for no other.
    without_exits: Occupancy<'a>,
    host_of: BTreeMap<u32, u32>,
    /// The last move of each VM, and true while it is under way.
    last_move: BTreeMap<u32, (u32, bool)>,
    ends: BinaryHeap<Reverse<(u64, u32)>>,
    bytes_per_s: u64,
    now_ns: u64,
    moves: Vec<ScheduledMove>,
}

/// Puts moves in order. `closed` has what keeps each host from accepting VMs that step aside; `occupancy` is the use of
/// hosts before all moves.
pub(super) fn schedule(
    fleet: &Fleet<'_>,
    limits: MoveLimits,
    closed: &[Option<Obstacle>],
    wanted: Vec<WantedMove>,
    occupancy: &Occupancy<'_>,
    duration: DurationBound,
) -> Result<Vec<ScheduledMove>, Refusal> {
    Scheduler::new(fleet, limits, closed, wanted, occupancy.clone(), duration).run()
}

impl<'a> Scheduler<'a> {
    fn new(
        fleet: &'a Fleet<'a>,
        limits: MoveLimits,
        closed: &'a [Option<Obstacle>],
        mut wanted: Vec<WantedMove>,
        occupancy: Occupancy<'a>,
        duration: DurationBound,
    ) -> Self {
        // The longest first: the last ones are short then. Leaders precede those that follow them.
        wanted.sort_by_cached_key(|one| {
            let unit = fleet.units.of[one.vm as usize];
            let members = &fleet.units.members[unit as usize];
            let size = |vm: &u32| fleet.vm(*vm).memory_mib + fleet.vm(*vm).disk_mib;
            let priority = members.iter().map(|vm| fleet.vm(*vm).rules.priority).max();
            let place = members.iter().position(|vm| *vm == one.vm);
            (Reverse(priority), Reverse(members.iter().map(size).sum::<u64>()), unit, place)
        });
        let most_bytes_per_s = |host: u32| {
            let rates = fleet.host(host).links.iter().map(|link| link.bytes_per_s);
            rates.max().unwrap_or(0)
        };
        let of_host = |host| HostMoves { most_bytes_per_s: most_bytes_per_s(host), ..HostMoves::default() };
        let mut hosts: Vec<HostMoves> = (0..fleet.host_count()).map(of_host).collect();
        let mut host_of = BTreeMap::new();
        for (at, one) in wanted.iter().enumerate() {
            let from = fleet.home[one.vm as usize];
            host_of.insert(one.vm, from);
            hosts[from as usize].wanted.push(at as u32);
            hosts[one.to as usize].wanted.push(at as u32);
        }
        Self {
            fleet,
            limits,
            closed,
            duration,
            progress: vec![Progress::Waits; wanted.len()],
            wanted,
            hosts,
            without_exits: occupancy.clone(),
            occupancy,
            host_of,
            last_move: BTreeMap::new(),
            ends: BinaryHeap::new(),
            bytes_per_s: 0,
            now_ns: 0,
            moves: Vec::new(),
        }
    }

    fn run(mut self) -> Result<Vec<ScheduledMove>, Refusal> {
        self.begin_all();
        loop {
            while let Some(Reverse((ends_ns, at))) = self.ends.pop() {
                self.now_ns = ends_ns;
                self.end(at);
            }
            if self.progress.iter().all(|progress| *progress == Progress::Begun) {
                return Ok(self.moves);
            }
            if !self.begin_all() {
                self.step_aside()?;
            }
        }
    }

    /// Begins all moves that can begin; returns false if there are none.
    fn begin_all(&mut self) -> bool {
        let before = self.moves.len();
        for at in 0..self.wanted.len() as u32 {
            self.begin_wanted(at);
        }
        self.moves.len() > before
    }

    fn begin_wanted(&mut self, at: u32) {
        if self.progress[at as usize] == Progress::Begun {
            return;
        }
        let WantedMove { vm, to, .. } = self.wanted[at as usize];
        let Some(bytes_per_s) = self.possible_rate(vm, to) else { return };
        let why = self.wanted[at as usize].why.clone();
        self.progress[at as usize] = Progress::Begun;
        self.begin(vm, to, bytes_per_s, why);
    }

    /// Returns the rate at which a move can begin now; none if it cannot.
    fn possible_rate(&self, vm: u32, to: u32) -> Option<u64> {
        let from = self.host_of[&vm];
        let is_under_way = |vm: &u32| self.last_move.get(vm).is_some_and(|(_, is_under_way)| *is_under_way);
        if is_under_way(&vm) || self.waits_for_leader(vm) || self.occupancy.shortage(vm, to).is_some() {
            return None;
        }
        for host in [from, to] {
            let active = self.hosts[host as usize].active;
            let needs_milli = self.limits.copy_milli.saturating_mul(u64::from(active) + 1);
            // One move goes on, however busy the processors are.
            if active >= self.limits.per_host || (active > 0 && self.occupancy.idle_milli(host) < needs_milli)
            {
                return None;
            }
        }
        let link = link_bytes_per_s(self.fleet.host(from), self.fleet.host(to))?;
        let link = link.min(self.limits.bytes_per_s.unwrap_or(u64::MAX));
        let wanted = link.min(self.limits.copy_bytes_per_s);
        let free = |host: u32| {
            let of_host = &self.hosts[host as usize];
            of_host.most_bytes_per_s.saturating_sub(of_host.bytes_per_s)
        };
        let of_all = self.limits.bytes_per_s.map_or(u64::MAX, |most| most.saturating_sub(self.bytes_per_s));
        let rate = wanted.min(free(from)).min(free(to)).min(of_all);
        let least = u128::from(wanted) * u128::from(self.limits.least_link_percent) / 100;
        (rate > 0 && u128::from(rate) >= least).then_some(rate)
    }

    /// Returns true if a VM goes with one that has not arrived yet.
    fn waits_for_leader(&self, vm: u32) -> bool {
        let leaders = self.fleet.units.leaders.get(&vm);
        leaders.into_iter().flatten().any(|leader| {
            let is_wanted = self.host_of.contains_key(leader);
            let has_arrived = self.last_move.get(leader).is_some_and(|(at, is_under_way)| {
                let why = &self.moves[*at as usize].why;
                !is_under_way && !matches!(why, MoveReason::StepsAside { .. })
            });
            is_wanted && !has_arrived
        })
    }

    fn begin(&mut self, vm: u32, to: u32, bytes_per_s: u64, why: MoveReason) {
        let at = self.moves.len() as u32;
        let from = self.host_of[&vm];
        let mut waits_for = Vec::new();
        if self.without_exits.shortage(vm, to).is_some() {
            waits_for.clone_from(&self.hosts[to as usize].exits);
        }
        waits_for.extend(self.last_move.get(&vm).map(|(before, _)| *before));
        let leaders = self.fleet.units.leaders.get(&vm).into_iter().flatten();
        waits_for.extend(leaders.filter_map(|leader| self.last_move.get(leader)).map(|(before, _)| *before));
        waits_for.sort_unstable();
        waits_for.dedup();
        let cost = cost(self.fleet.vm(vm), bytes_per_s);
        let ends_ns = self.now_ns.saturating_add((self.duration)(&cost.total_ns));
        self.occupancy.add(vm, to);
        self.without_exits.add(vm, to);
        for host in [from, to] {
            self.hosts[host as usize].active += 1;
            self.hosts[host as usize].bytes_per_s += bytes_per_s;
        }
        self.bytes_per_s += bytes_per_s;
        self.last_move.insert(vm, (at, true));
        self.ends.push(Reverse((ends_ns, at)));
        let begins_ns = self.now_ns;
        self.moves.push(ScheduledMove {
            vm,
            from,
            to,
            begins_ns,
            ends_ns,
            bytes_per_s,
            cost,
            waits_for,
            why,
        });
    }

    /// Ends a move, and begins those that waited for what it used.
    fn end(&mut self, at: u32) {
        let ScheduledMove { vm, from, to, bytes_per_s, .. } = self.moves[at as usize];
        self.occupancy.remove(vm, from);
        for host in [from, to] {
            self.hosts[host as usize].active -= 1;
            self.hosts[host as usize].bytes_per_s -= bytes_per_s;
        }
        self.bytes_per_s -= bytes_per_s;
        self.hosts[from as usize].exits.push(at);
        self.host_of.insert(vm, to);
        self.last_move.insert(vm, (at, false));
        self.begin_at(from);
        self.begin_at(to);
        if self.limits.bytes_per_s.is_some() {
            let waiting = (0..self.wanted.len() as u32)
                .filter(|at| self.progress[*at as usize] == Progress::Waits)
                .take(MOST_RETRIES);
            for at in waiting.collect::<Vec<_>>() {
                self.begin_wanted(at);
            }
        }
    }

    /// Begins the moves of a host that can begin.
    fn begin_at(&mut self, host: u32) {
        let mut wanted = std::mem::take(&mut self.hosts[host as usize].wanted);
        wanted.retain(|at| self.progress[*at as usize] == Progress::Waits);
        for at in &wanted {
            if self.hosts[host as usize].active >= self.limits.per_host {
                break;
            }
            self.begin_wanted(*at);
        }
        self.hosts[host as usize].wanted = wanted;
    }

    /// Moves a VM to a third host for a while, the smallest that can, if no move is in progress and none can begin.
    fn step_aside(&mut self) -> Result<(), Refusal> {
        let waits = |at: &u32| self.progress[*at as usize] == Progress::Waits;
        let mut waiting: Vec<u32> = (0..self.wanted.len() as u32).filter(waits).collect();
        waiting.sort_unstable_by_key(|at| (self.fleet.vm(self.wanted[*at as usize].vm).memory_mib, *at));
        for at in &waiting {
            let WantedMove { vm, to, .. } = self.wanted[*at as usize];
            // A VM steps aside once.
            if self.last_move.contains_key(&vm) || self.waits_for_leader(vm) {
                continue;
            }
            let mut third: Vec<(u64, u32)> = (0..self.fleet.host_count())
                .filter(|host| self.can_step_aside(vm, *host, to))
                .map(|host| (self.occupancy.load_with_vm(host, vm), host))
                .collect();
            third.sort_unstable();
            let possible =
                third.into_iter().find_map(|(_, host)| Some((host, self.possible_rate(vm, host)?)));
            if let Some((host, bytes_per_s)) = possible {
                let then_to = self.fleet.host(to).name.clone();
                self.hosts[host as usize].wanted.push(*at);
                self.begin(vm, host, bytes_per_s, MoveReason::StepsAside { then_to });
                return Ok(());
            }
        }
        let name = |at: &u32| self.fleet.vm(self.wanted[*at as usize].vm).name.clone();
        Err(Refusal::NoOrder { vms: waiting.iter().take(MOST_NAMES).map(name).collect() })
    }

    fn can_step_aside(&self, vm: u32, third: u32, to: u32) -> bool {
        let from = self.host_of[&vm];
        third != from
            && third != to
            && self.closed[third as usize].is_none()
            && self.fleet.is_allowed(vm, third)
            && self.occupancy.shortage(vm, third).is_none()
            && self.fleet.lasting_obstacles(vm, from, third).is_empty()
            && self.fleet.lasting_obstacles(vm, third, to).is_empty()
    }
}
