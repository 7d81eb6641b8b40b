//! Moves that may run at the same time: measured links, the budget, processors and the limit of each host decide.

use super::explain::WaitReason;
use super::surroundings::{ActiveMove, Capacities, fastest_link};
use crate::planner::MoveLimits;

/// Move that may begin.
#[derive(Clone, Copy, Debug)]
pub(super) struct MoveCandidate<'a> {
    pub(super) from: &'a str,
    pub(super) to: &'a str,
    pub(super) priority: i32,
    /// Rate of the link between both hosts, in bytes per second.
    pub(super) link_bytes_per_s: u64,
}

/// Returns the rate that a move can use at most, in bytes per second.
pub(super) fn wanted_rate(link_bytes_per_s: u64, limits: &MoveLimits) -> u64 {
    link_bytes_per_s.min(limits.copy_bytes_per_s).min(limits.bytes_per_s.unwrap_or(u64::MAX)).max(1)
}

/// Returns what keeps a move from beginning beside those that are under way; none if nothing does.
///
/// These are the planner's rules, with what moves use in place of what was planned for them: where one leaves a part of
/// its share, another one may begin. A move does not wait for the shares of those with a lower priority.
pub(super) fn obstacle_to_begin(
    candidate: MoveCandidate<'_>,
    active: &[ActiveMove],
    hosts: &Capacities<'_>,
    limits: &MoveLimits,
) -> Option<WaitReason> {
    let wanted = wanted_rate(candidate.link_bytes_per_s, limits);
    let least = u128::from(wanted) * u128::from(limits.least_link_percent) / 100;
    let is_narrow = |capacity: u64, users: &dyn Fn(&&ActiveMove) -> bool| {
        let higher = active.iter().filter(users).filter(|one| one.priority >= candidate.priority);
        let used = higher.map(|one| one.demand).fold(0, u64::saturating_add);
        let free = capacity.saturating_sub(used).min(wanted);
        free == 0 || u128::from(free) < least
    };
    for host in [candidate.from, candidate.to] {
        let idle_milli = hosts.get(host).map_or(0, |capacity| capacity.idle_milli);
        let is_here = |one: &&ActiveMove| one.from == host || one.to == host;
        let count = active.iter().filter(is_here).count() as u64;
        if count >= u64::from(limits.per_host) {
            return Some(WaitReason::Slot { host: host.to_owned() });
        }
        // One move goes on, however busy the processors are.
        if count > 0 && idle_milli < limits.copy_milli.saturating_mul(count + 1) {
            return Some(WaitReason::Processors { host: host.to_owned() });
        }
        if is_narrow(fastest_link(hosts, host), &is_here) {
            return Some(WaitReason::Link { host: Some(host.to_owned()) });
        }
    }
    let budget = limits.bytes_per_s?;
    is_narrow(budget, &|one| one.is_own).then_some(WaitReason::Link { host: None })
}

#[cfg(test)]
mod tests {
    use super::super::surroundings::HostCapacity;
    use super::*;
    use crate::planner::inventory::{HostSpec, LinkSpec};

    fn active(from: &str, to: &str, demand: u64, priority: i32) -> ActiveMove {
        ActiveMove { from: from.to_owned(), to: to.to_owned(), priority, demand, is_own: true }
    }

    fn spec() -> HostSpec {
        let links = vec![LinkSpec { network: "migration".to_owned(), bytes_per_s: 1000 }];
        HostSpec { links, ..HostSpec::default() }
    }

    fn hosts(spec: &HostSpec, idle_milli: u64) -> Capacities<'_> {
        ["a", "b", "c"].map(|name| (name, HostCapacity { spec, idle_milli })).into()
    }

    const CANDIDATE: MoveCandidate<'_> =
        MoveCandidate { from: "a", to: "b", priority: 0, link_bytes_per_s: 1000 };

    #[test]
    fn links_and_budget_are_shared_down_to_a_quarter() {
        let (spec, limits) = (spec(), MoveLimits::default());
        let found = |active: &[ActiveMove], limits: &MoveLimits| {
            obstacle_to_begin(CANDIDATE, active, &hosts(&spec, 8000), limits)
        };
        let link = |host: Option<&str>| Some(WaitReason::Link { host: host.map(str::to_owned) });
        assert_eq!(found(&[], &limits), None);
        assert_eq!(found(&[active("a", "c", 750, 0)], &limits), None);
        assert_eq!(found(&[active("a", "c", 751, 0)], &limits), link(Some("a")));
        assert_eq!(found(&[active("c", "b", 1000, 0)], &limits), link(Some("b")));
        // Lower ones make way; elsewhere they do not matter.
        assert_eq!(found(&[active("a", "c", 1000, -1)], &limits), None);
        assert_eq!(found(&[active("c", "d", 1000, 0)], &limits), None);
        // The budget is that of its own evacuation.
        let narrow = MoveLimits { bytes_per_s: Some(400), ..limits };
        assert_eq!(found(&[active("c", "d", 300, 0)], &narrow), None);
        assert_eq!(found(&[active("c", "d", 301, 0)], &narrow), link(None));
        let other = ActiveMove { is_own: false, ..active("c", "d", 400, 0) };
        assert_eq!(found(&[other], &narrow), None);
    }

    #[test]
    fn each_host_has_a_limit_and_processors_for_its_moves() {
        let limits = MoveLimits { per_host: 2, ..MoveLimits::default() };
        let begun = [active("a", "c", 1, 0), active("c", "a", 1, 0)];
        let spec = spec();
        let found = |active: &[ActiveMove], idle_milli: u64| {
            obstacle_to_begin(CANDIDATE, active, &hosts(&spec, idle_milli), &limits)
        };
        assert_eq!(found(&begun, 8000), Some(WaitReason::Slot { host: "a".to_owned() }));
        assert_eq!(found(&begun[..1], 4000), None);
        assert_eq!(found(&begun[..1], 3999), Some(WaitReason::Processors { host: "a".to_owned() }));
        assert_eq!(found(&[], 0), None);
    }
}
