//! Bandwidth of moves under way: links and budgets are shared anew when a move begins, ends, or uses less than its share.

use std::collections::BTreeMap;

use super::action::{EvacuationAction, MoveOrder};
use super::concurrency::wanted_rate;
use super::shares::{ShareRequest, shares};
use super::state::{Evacuation, MoveRecord};
use super::surroundings::{ActiveMove, Capacities, fastest_link};

/// Use of a share, in hundredths, below which something else than the share holds a move up.
const LEFT_PERCENT: u64 = 80;
/// Change of a rate below which an agent is not bothered, in hundredths of the rate.
const LEAST_CHANGE_PERCENT: u64 = 5;

impl Evacuation {
    /// Returns a move's use of links. One that leaves a part of its share is not held up by it: it could use twice as
    /// much soon, and the rest is others'.
    pub(super) fn active_move(&self, number: u32, record: &MoveRecord) -> ActiveMove {
        let limits = &self.request.limits;
        let wanted = wanted_rate(record.link_bytes_per_s, limits);
        let granted = self.volatile.rates.get(&number).copied().flatten().unwrap_or(wanted).min(wanted);
        let measured = self.volatile.progress.get(&number).and_then(|known| known.last);
        let least = wanted.saturating_mul(u64::from(limits.least_link_percent)) / 100;
        let demand = match measured.map(|progress| progress.bytes_per_s) {
            Some(rate) if is_below(rate, granted, LEFT_PERCENT) => {
                rate.saturating_mul(2).max(least).min(wanted)
            }
            _ => wanted,
        };
        let planned = &record.planned;
        ActiveMove {
            from: planned.from.clone(),
            to: planned.to.clone(),
            priority: record.priority,
            demand,
            is_own: true,
        }
    }

    pub(super) fn active_moves(&self) -> impl Iterator<Item = (u32, ActiveMove)> {
        let active = self.unsettled().filter(|(_, record)| record.is_active());
        active.map(|(number, record)| (number, self.active_move(number, record)))
    }

    /// Returns the actions that give moves their rates: slower ones first, so that no link is overcommitted in between,
    /// then new moves, then faster ones.
    pub(super) fn apply_rates(
        &mut self,
        rates: &BTreeMap<u32, Option<u64>>,
        is_connected: impl Fn(&str) -> bool,
    ) -> Vec<EvacuationAction> {
        let (mut slower, mut faster) = (Vec::new(), Vec::new());
        let orders = std::mem::take(&mut self.volatile.orders);
        for (number, rate) in rates {
            let Some(record) = self.moves.get(number) else { continue };
            let before = self.volatile.rates.get(number).copied();
            let is_known = before.is_some_and(|before| is_about(before, *rate));
            // An agent that has not answered yet may not know the command.
            let from = &record.planned.from;
            let is_ready = is_connected(from) && self.volatile.fresh.contains(from);
            if orders.contains(number) || is_known || !is_ready {
                continue;
            }
            let action = EvacuationAction::SetBandwidth {
                command: self.command(*number),
                from: record.planned.from.clone(),
                bytes_per_s: *rate,
            };
            let old = before.flatten().unwrap_or(u64::MAX);
            let list = if rate.unwrap_or(u64::MAX) < old { &mut slower } else { &mut faster };
            list.push(action);
            self.volatile.rates.insert(*number, *rate);
        }
        for number in orders {
            let Some(record) = self.moves.get(&number).filter(|record| record.is_active()) else { continue };
            if !is_connected(&record.planned.from) {
                continue;
            }
            let bytes_per_s = rates.get(&number).copied().flatten();
            let planned = &record.planned;
            let order = MoveOrder {
                command: self.command(number),
                vm: planned.vm.clone(),
                from: planned.from.clone(),
                to: planned.to.clone(),
                bytes_per_s,
            };
            slower.push(EvacuationAction::StartMove { order });
            self.volatile.rates.insert(number, bytes_per_s);
        }
        slower.extend(faster);
        slower
    }
}

fn is_below(rate: u64, of: u64, percent: u64) -> bool {
    u128::from(rate) * 100 < u128::from(of) * u128::from(percent)
}

/// Returns true if a rate is about as high as another one.
fn is_about(one: Option<u64>, other: Option<u64>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => one.abs_diff(other) <= one / 100 * LEAST_CHANGE_PERCENT,
        (None, None) => true,
        _ => false,
    }
}

/// Budget of an evacuation in bytes per second, if it has one, and its moves with their numbers.
pub(super) type BudgetedMoves = (Option<u64>, Vec<(u32, ActiveMove)>);

/// Returns the rate of each move of some evacuations, by their places in the list; none for a move that has its links
/// for itself. Each comes with its budget, if it has one.
pub(super) fn rates(
    evacuations: &[BudgetedMoves],
    hosts: &Capacities<'_>,
) -> Vec<BTreeMap<u32, Option<u64>>> {
    let moves = evacuations.iter().enumerate().flat_map(|(place, (budget, moves))| {
        moves.iter().map(move |(number, one)| (place, *number, one, *budget))
    });
    let moves: Vec<(usize, u32, &ActiveMove, Option<u64>)> = moves.collect();
    let given = share_links(moves.iter().map(|(place, _, one, budget)| (*one, *place, *budget)), hosts);
    let mut found = vec![BTreeMap::new(); evacuations.len()];
    for ((place, number, one, budget), rate) in moves.iter().zip(given) {
        let has_neighbours = moves.iter().any(|(other_place, other_number, other, _)| {
            let is_other = (other_place, other_number) != (place, number);
            is_other && [&other.from, &other.to].into_iter().any(|host| *host == one.from || *host == one.to)
        });
        let is_limited = budget.is_some() || has_neighbours;
        found[*place].insert(*number, is_limited.then_some(rate.max(1)));
    }
    found
}

/// Returns the shares of moves in links and budgets, in bytes per second. Each move comes with the number of its
/// evacuation and the budget of that.
pub(super) fn share_links<'m>(
    moves: impl Iterator<Item = (&'m ActiveMove, usize, Option<u64>)>,
    hosts: &Capacities<'_>,
) -> Vec<u64> {
    let (mut requests, mut capacities) = (Vec::new(), Vec::new());
    let mut places: BTreeMap<(Option<&str>, usize), usize> = BTreeMap::new();
    for (one, evacuation, budget) in moves {
        let of_hosts = [&one.from, &one.to].map(|host| ((Some(host.as_str()), 0), fastest_link(hosts, host)));
        let of_budget = budget.map(|rate| ((None, evacuation), rate));
        let mut resources = Vec::new();
        for (key, capacity) in of_hosts.into_iter().chain(of_budget) {
            let place = *places.entry(key).or_insert(capacities.len());
            if place == capacities.len() {
                capacities.push(capacity);
            }
            resources.push(place);
        }
        requests.push(ShareRequest { priority: one.priority, demand: one.demand, resources });
    }
    shares(&requests, &capacities)
}
