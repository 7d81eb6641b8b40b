//! Outlook of an evacuation: the time until its last move has ended, by the same rules by which moves begin and share
//! links.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::bandwidth::share_links;
use super::concurrency::{MoveCandidate, obstacle_to_begin, wanted_rate};
use super::report::{DeadlineJudgement, DeadlineStanding};
use super::state::{Evacuation, MoveRecord, MoveState, VmStanding};
use super::surroundings::{ActiveMove, Capacities, FleetView, OthersView, Surroundings, link_between};
use crate::forecast::Estimate;
use crate::planner::PlannedMove;

const SECOND_NS: u64 = 1_000_000_000;
/// Bounds of the factor by which moves have taken longer than forecast, in hundredths.
const PACE_PERCENT: std::ops::RangeInclusive<u64> = 50..=400;
/// Share of its forecast that a move takes at least, once it has taken all of it, in hundredths.
const OVERDUE_PERCENT: u64 = 5;

/// End of the intervals of forecasts that a simulation takes.
type Bound = fn(&Estimate) -> u64;

/// Move that is simulated.
#[derive(Clone, Debug)]
struct SimulatedMove {
    vm: String,
    use_of_links: ActiveMove,
    link_bytes_per_s: u64,
    /// Work that is left, in bytes at the rate that the move gets, for the lower end, the expected value and the upper
    /// end of its forecast.
    work: [u64; 3],
    /// Moves that have to have ended; none if one of them has no end that could be forecast.
    waits_for: Option<Vec<usize>>,
    /// Time from now before which it does not begin.
    pause_ns: u64,
    has_begun: bool,
}

/// Expected end of all moves.
#[derive(Clone, Debug)]
struct SimulatedEnd {
    ends_ns: u64,
    /// The last move; none if there is none.
    last: Option<usize>,
}

impl Evacuation {
    /// Returns the time that the rest needs, with the reason; none if that cannot be forecast.
    pub(super) fn needs(&self, around: &Surroundings<'_>) -> Option<(Estimate, String)> {
        let view = FleetView::new(self, around, OthersView::AsTheyAre, false);
        let queued = self.queue.iter().filter(|queued| queued.number.is_none()).map(|queued| &queued.planned);
        let ordered = self.unsettled().map(|(_, record)| &record.planned);
        let of_others = around.others.iter().flat_map(|reservations| &reservations.moves);
        let mut hosts: BTreeSet<&str> = of_others.flat_map(|one| [one.from.as_str(), &one.to]).collect();
        hosts.extend(queued.chain(ordered).flat_map(|one| [one.from.as_str(), &one.to]));
        let capacities = view.capacities(&hosts);
        let moves = self.simulated_moves(&capacities, around.now_ns);
        let background = around.others.iter().flat_map(|reservations| &reservations.moves);
        let background: Vec<ActiveMove> = background.filter_map(|one| one.active.clone()).collect();
        let simulate = |bound: usize| self.simulate(moves.clone(), bound, &background, &capacities);
        let (low, expected, high) = (simulate(0)?, simulate(1)?, simulate(2)?);
        let estimate = Estimate {
            expected: expected.ends_ns,
            low: low.ends_ns.min(expected.ends_ns),
            high: high.ends_ns.max(expected.ends_ns),
        };
        let because = match expected.last {
            Some(last) => self.explain_last(&moves[last]),
            None => self.explain_rest(),
        };
        Some((estimate, because))
    }

    /// Returns the outlook for the deadline; none without a deadline.
    pub(super) fn deadline_standing(&self, around: &Surroundings<'_>) -> Option<DeadlineStanding> {
        let has_ns = self.request.deadline_ns?.saturating_sub(around.now_ns);
        let blocked = |because: String| DeadlineStanding {
            judgement: DeadlineJudgement::Blocked,
            has_ns,
            needs_ns: Estimate::default(),
            late_by_ns: 0,
            because,
        };
        if let Some(id) = self.waits_for.first() {
            return Some(blocked(format!("evacuation {id} goes first")));
        }
        let blocking = self.vms.iter().find_map(|(vm, record)| match &record.standing {
            VmStanding::Blocked { why } => Some(format!("VM {vm} cannot be moved: {why}")),
            _ => None,
        });
        let in_doubt = self.unsettled().find(|(_, record)| record.is_in_doubt());
        let in_doubt = in_doubt.map(|(_, record)| format!("VM {} is in doubt", record.planned.vm));
        if let Some(because) = blocking.or(in_doubt) {
            return Some(blocked(because));
        }
        let Some((needs_ns, because)) = self.needs(around) else {
            return Some(blocked("moves wait for something whose end cannot be forecast".to_owned()));
        };
        let over_ns = around.now_ns.saturating_sub(self.request.deadline_ns.unwrap_or(u64::MAX));
        let late_by_ns = needs_ns.expected.saturating_add(over_ns).saturating_sub(has_ns);
        let judgement = if late_by_ns > 0 {
            DeadlineJudgement::Late
        } else if needs_ns.high > has_ns {
            DeadlineJudgement::AtRisk
        } else {
            DeadlineJudgement::Safe
        };
        Some(DeadlineStanding { judgement, has_ns, needs_ns, late_by_ns, because })
    }

    fn simulated_moves(&self, hosts: &Capacities<'_>, now_ns: u64) -> Vec<SimulatedMove> {
        let mut places: BTreeMap<u32, usize> = BTreeMap::new();
        let mut moves = Vec::new();
        for (number, record) in self.unsettled().filter(|(_, record)| record.is_active()) {
            places.insert(number, moves.len());
            moves.push(SimulatedMove {
                vm: record.planned.vm.clone(),
                use_of_links: self.active_move(number, record),
                link_bytes_per_s: record.link_bytes_per_s,
                work: self.work_left(number, record, now_ns),
                waits_for: Some(Vec::new()),
                pause_ns: 0,
                has_begun: true,
            });
        }
        let begun = moves.len();
        let waiting = self.queue.iter().enumerate().filter(|(_, queued)| queued.number.is_none());
        let positions: BTreeMap<usize, usize> =
            waiting.clone().enumerate().map(|(place, (at, _))| (at, begun + place)).collect();
        let pace_percent = self.pace_percent();
        for (_, queued) in waiting {
            let planned = &queued.planned;
            let waits_for = planned.waits_for.iter().map(|before| {
                let before = *before as usize;
                let number = self.queue.get(before).and_then(|queued| queued.number);
                match number {
                    None => positions.get(&before).map(|place| Some(*place)),
                    Some(number) => match self.moves.get(&number) {
                        Some(record) if record.is_settled() => Some(None),
                        _ => places.get(&number).map(|place| Some(*place)),
                    },
                }
            });
            let waits_for: Option<Vec<Option<usize>>> = waits_for.collect();
            let link = link_between(hosts, &planned.from, &planned.to);
            let pause_until_ns = self.vms.get(&planned.vm).map_or(0, |record| record.pause_until_ns);
            moves.push(SimulatedMove {
                vm: planned.vm.clone(),
                use_of_links: ActiveMove {
                    from: planned.from.clone(),
                    to: planned.to.clone(),
                    priority: queued.priority,
                    demand: wanted_rate(link, &self.request.limits),
                    is_own: true,
                },
                link_bytes_per_s: link,
                work: whole_work(planned).map(|work| per_cent(work, pace_percent)),
                waits_for: waits_for.map(|list| list.into_iter().flatten().collect()),
                pause_ns: pause_until_ns.saturating_sub(now_ns),
                has_begun: false,
            });
        }
        moves
    }

    /// Returns the work that is left of a move under way: by its progress if that is known, by its time otherwise.
    fn work_left(&self, number: u32, record: &MoveRecord, now_ns: u64) -> [u64; 3] {
        let planned = &record.planned;
        let total = planned.total_ns;
        let progress = self.volatile.progress.get(&number).and_then(|known| known.last);
        if let Some(progress) = progress.filter(|progress| progress.bytes_per_s > 0) {
            let demand = self.active_move(number, record).demand;
            let rate = self.volatile.rates.get(&number).copied().flatten().unwrap_or(demand).min(demand);
            // At its present rate it needs what it needs at the measured one.
            let expected = times(progress.bytes_left, rate, progress.bytes_per_s);
            let bound = |bound: u64| times(expected, bound, total.expected);
            return [bound(total.low), expected, bound(total.high)];
        }
        let elapsed_ns = now_ns.saturating_sub(record.ordered_ns);
        [total.low, total.expected, total.high].map(|bound| {
            let left_ns = bound.saturating_sub(elapsed_ns).max(per_cent(bound, OVERDUE_PERCENT));
            times(left_ns, planned.bytes_per_s, SECOND_NS)
        })
    }

    /// Returns how long the moves took that have ended, in hundredths of their forecasts.
    fn pace_percent(&self) -> u64 {
        let moved = self.moves.values().filter(|record| record.has_moved());
        let (mut took_ns, mut expected_ns) = (0_u64, 0_u64);
        for record in moved {
            if let MoveState::Ended { at_ns, .. } = record.state {
                took_ns = took_ns.saturating_add(at_ns.saturating_sub(record.ordered_ns));
                expected_ns = expected_ns.saturating_add(record.planned.total_ns.expected);
            }
        }
        if expected_ns == 0 {
            return 100;
        }
        times(took_ns, 100, expected_ns).clamp(*PACE_PERCENT.start(), *PACE_PERCENT.end())
    }

    /// Simulates the moves until the last one has ended; returns none if some cannot begin.
    fn simulate(
        &self,
        mut moves: Vec<SimulatedMove>,
        bound: usize,
        background: &[ActiveMove],
        hosts: &Capacities<'_>,
    ) -> Option<SimulatedEnd> {
        let limits = &self.request.limits;
        let mut end = SimulatedEnd { ends_ns: 0, last: None };
        let mut has_ended = vec![false; moves.len()];
        let mut now_ns = 0_u64;
        loop {
            let mut active: Vec<usize> =
                (0..moves.len()).filter(|at| moves[*at].has_begun && !has_ended[*at]).collect();
            let mut users: Vec<ActiveMove> =
                active.iter().map(|at| moves[*at].use_of_links.clone()).collect();
            users.extend_from_slice(background);
            for (at, one) in moves.iter_mut().enumerate() {
                let is_free = one.waits_for.as_ref()?.iter().all(|before| has_ended[*before]);
                if one.has_begun || one.pause_ns > now_ns || !is_free {
                    continue;
                }
                let candidate = MoveCandidate {
                    from: &one.use_of_links.from,
                    to: &one.use_of_links.to,
                    priority: one.use_of_links.priority,
                    link_bytes_per_s: one.link_bytes_per_s,
                };
                if obstacle_to_begin(candidate, &users, hosts, limits).is_none() {
                    users.push(one.use_of_links.clone());
                    active.push(at);
                    one.has_begun = true;
                }
            }
            let pauses = moves.iter().filter(|one| !one.has_begun && one.pause_ns > now_ns);
            let next_pause_ns = pauses.map(|one| one.pause_ns - now_ns).min();
            if active.is_empty() && next_pause_ns.is_none() {
                return has_ended.iter().all(|has_ended| *has_ended).then_some(end);
            }
            let users = active.iter().map(|at| (&moves[*at].use_of_links, 0, limits.bytes_per_s));
            let rates = share_links(users.chain(background.iter().map(|one| (one, 1, None))), hosts);
            let lasts_ns = |at: usize, rate: u64| times(moves[at].work[bound], SECOND_NS, rate.max(1)).max(1);
            let ends = active.iter().zip(&rates).map(|(at, rate)| lasts_ns(*at, *rate));
            let step_ns = ends.chain(next_pause_ns).min()?;
            now_ns = now_ns.saturating_add(step_ns);
            for (at, rate) in active.iter().zip(&rates) {
                if lasts_ns(*at, *rate) <= step_ns {
                    has_ended[*at] = true;
                    end = SimulatedEnd { ends_ns: now_ns, last: Some(*at) };
                }
            }
            for (at, rate) in active.iter().zip(&rates).filter(|(at, _)| !has_ended[**at]) {
                let done = times(step_ns, *rate, SECOND_NS);
                moves[*at].work[bound] = moves[*at].work[bound].saturating_sub(done);
            }
        }
    }

    /// Explains what is waited for once no move is left.
    fn explain_rest(&self) -> String {
        let hosts = self.request.goal.emptied().iter();
        let mut remains = hosts.filter_map(|host| {
            let remaining = self.volatile.contents.get(host)?.what_remains();
            Some(format!("no move is left; on host {host} remains {}", remaining.first()?))
        });
        remains.next().unwrap_or_else(|| "no move is left".to_owned())
    }

    /// Explains why the last move ends when it does.
    fn explain_last(&self, last: &SimulatedMove) -> String {
        let (vm, host) = (&last.vm, &last.use_of_links.to);
        let mut text = match self.unsettled_of(vm) {
            Some((number, _)) if last.has_begun => {
                let progress = self.volatile.progress.get(&number).and_then(|known| known.last);
                match progress {
                    Some(progress) => format!(
                        "the last move is that of VM {vm} to host {host}: {} MB are left, at {} MB/s",
                        progress.bytes_left / 1_000_000,
                        progress.bytes_per_s / 1_000_000
                    ),
                    None => format!("the last move is that of VM {vm} to host {host}, which is under way"),
                }
            }
            _ if last.pause_ns > 0 => {
                format!(
                    "the last move is that of VM {vm} to host {host}, which pauses after a failed attempt"
                )
            }
            _ => format!("the last move is that of VM {vm} to host {host}, which has not begun"),
        };
        let pace_percent = self.pace_percent();
        if pace_percent >= 120 {
            let (whole, tenth) = (pace_percent / 100, pace_percent / 10 % 10);
            // A string takes all that is written.
            let _ = write!(text, "; moves take {whole}.{tenth} times as long as forecast");
        }
        text
    }
}

/// Returns the work of a move for the lower end, the expected value and the upper end of its forecast, in bytes at the
/// rate for which it was planned.
fn whole_work(planned: &PlannedMove) -> [u64; 3] {
    let bounds: [Bound; 3] =
        [|estimate| estimate.low, |estimate| estimate.expected, |estimate| estimate.high];
    bounds.map(|bound| times(bound(&planned.total_ns), planned.bytes_per_s, SECOND_NS))
}

fn per_cent(value: u64, percent: u64) -> u64 {
    times(value, percent, 100)
}

fn times(value: u64, by: u64, of: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(by) / u128::from(of.max(1))).unwrap_or(u64::MAX)
}
