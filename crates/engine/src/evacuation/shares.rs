//! Shares of links and budgets: equal ones for moves of equal priority, and most of it for those of higher priority.

use std::collections::BTreeMap;

/// Share of a resource that moves of lower priority have together, in hundredths: higher ones are slowed by no more.
const LOWER_PERCENT: u64 = 10;

/// Move that asks for a share.
#[derive(Clone, Debug)]
pub(super) struct ShareRequest {
    pub(super) priority: i32,
    /// Rate that it can use, in bytes per second.
    pub(super) demand: u64,
    /// Resources that it needs, by their places in the list of capacities: the links of both hosts, and the budget.
    pub(super) resources: Vec<usize>,
}

/// Returns the rate of each move, in bytes per second. No resource gives more than its capacity.
///
/// Moves of the highest priority choose first. Where moves of lower priority need the same resource, a tenth of it is
/// kept for them, so that they end as well. Within a priority, shares grow equally until a resource is used up or the
/// demand is met (max-min fairness). Capacity that was kept in vain is given out in the end.
pub(super) fn shares(requests: &[ShareRequest], capacities: &[u64]) -> Vec<u64> {
    let mut classes: BTreeMap<i32, Vec<usize>> = BTreeMap::new();
    for (at, request) in requests.iter().enumerate() {
        classes.entry(request.priority).or_default().push(at);
    }
    let mut filling = Filling { requests, left: capacities.to_vec(), rates: vec![0; requests.len()] };
    for (priority, class) in classes.iter().rev() {
        let is_kept = |resource: usize| {
            let mut lower = classes.range(..priority).flat_map(|(_, lower)| lower);
            lower.any(|at| requests[*at].resources.contains(&resource))
        };
        let kept: Vec<u64> = (0..capacities.len())
            .map(|resource| if is_kept(resource) { filling.left[resource] * LOWER_PERCENT / 100 } else { 0 })
            .collect();
        filling.fill(class, &kept);
    }
    let nothing = vec![0; capacities.len()];
    for class in classes.values().rev() {
        filling.fill(class, &nothing);
    }
    filling.rates
}

/// Shares while they grow.
struct Filling<'a> {
    requests: &'a [ShareRequest],
    /// Capacity that no move has.
    left: Vec<u64>,
    rates: Vec<u64>,
}

impl Filling<'_> {
    /// Lets the shares of a class grow equally, and leaves `kept` of each resource alone.
    fn fill(&mut self, class: &[usize], kept: &[u64]) {
        let mut growing: Vec<usize> = class.to_vec();
        loop {
            growing.retain(|at| {
                let request = &self.requests[*at];
                let has_room = |resource: &usize| self.left[*resource] > kept[*resource];
                self.rates[*at] < request.demand && request.resources.iter().all(has_room)
            });
            if growing.is_empty() {
                return;
            }
            let mut users: BTreeMap<usize, u64> = BTreeMap::new();
            for resource in growing.iter().flat_map(|at| &self.requests[*at].resources) {
                *users.entry(*resource).or_default() += 1;
            }
            let of_resources = users.iter().map(|(resource, users)| {
                let free = self.left[*resource] - kept[*resource];
                free / users
            });
            let of_demands = growing.iter().map(|at| self.requests[*at].demand - self.rates[*at]);
            let step = of_resources.chain(of_demands).min().unwrap_or(0);
            for at in &growing {
                // What cannot be divided goes to the first ones, one byte each.
                let step = step.max(1);
                let request = &self.requests[*at];
                if request.resources.iter().all(|resource| self.left[*resource] >= kept[*resource] + step) {
                    self.rates[*at] += step;
                    for resource in &request.resources {
                        self.left[*resource] -= step;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(priority: i32, demand: u64, resources: &[usize]) -> ShareRequest {
        ShareRequest { priority, demand, resources: resources.to_vec() }
    }

    #[test]
    fn equal_priorities_get_equal_shares() {
        let requests = vec![request(0, 1000, &[0, 1]), request(0, 1000, &[0, 2]), request(0, 1000, &[0, 2])];
        assert_eq!(shares(&requests, &[900, 1000, 1000]), [300, 300, 300]);
        // One that can use less leaves the rest to the others.
        let requests = vec![request(0, 100, &[0]), request(0, 1000, &[0]), request(0, 1000, &[0])];
        assert_eq!(shares(&requests, &[900]), [100, 400, 400]);
        // A narrow link elsewhere does the same.
        let requests = vec![request(0, 1000, &[0, 1]), request(0, 1000, &[0])];
        assert_eq!(shares(&requests, &[900, 50]), [50, 850]);
    }

    #[test]
    fn a_high_priority_is_slowed_by_a_tenth_at_most() {
        let low = request(0, 1000, &[0]);
        let requests = vec![low.clone(), request(1, 1000, &[0]), low.clone()];
        assert_eq!(shares(&requests, &[1000]), [50, 900, 50]);
        // Alone it has everything, and so have others what it cannot use.
        assert_eq!(shares(&[request(1, 2000, &[0])], &[1000]), [1000]);
        assert_eq!(shares(&[low, request(1, 300, &[0])], &[1000]), [700, 300]);
        // Three priorities: each leaves a tenth to those below it.
        let requests = vec![request(0, 1000, &[0]), request(1, 1000, &[0]), request(2, 1000, &[0])];
        assert_eq!(shares(&requests, &[1000]), [10, 90, 900]);
    }

    #[test]
    fn capacity_that_was_kept_in_vain_is_given_out() {
        // The low one is held up by another link.
        let requests = vec![request(1, 1000, &[0]), request(0, 1000, &[0, 1])];
        assert_eq!(shares(&requests, &[1000, 20]), [980, 20]);
    }

    proptest! {
        #[test]
        fn no_capacity_is_exceeded_and_none_is_wasted(
            capacities in prop::collection::vec(1..2000_u64, 4),
            parts in prop::collection::vec((0..3_i32, 1..2000_u64, 0..4_usize, 0..4_usize), 1..12),
        ) {
            let requests: Vec<ShareRequest> = parts.into_iter().map(|(priority, demand, one, other)| {
                let resources = if one == other { vec![one] } else { vec![one, other] };
                ShareRequest { priority, demand, resources }
            }).collect();
            let rates = shares(&requests, &capacities);
            let used = |resource: usize| -> u64 {
                let users = requests.iter().zip(&rates).filter(|(one, _)| one.resources.contains(&resource));
                users.map(|(_, rate)| rate).sum()
            };
            for (resource, capacity) in capacities.iter().enumerate() {
                prop_assert!(used(resource) <= *capacity);
            }
            for (one, rate) in requests.iter().zip(&rates) {
                prop_assert!(*rate <= one.demand);
                let is_held_up = one.resources.iter().any(|resource| used(*resource) == capacities[*resource]);
                prop_assert!(*rate == one.demand || is_held_up, "{requests:?} {rates:?}");
            }
        }
    }
}
