//! CPU throttle: slows a guest's processors down, so that its dirty rate does not exceed the sending rate.
//!
//! A slower guest writes less. QEMU's auto-converge uses the same idea: it takes away a fifth of all processor time,
//! and then a tenth more each time, by making the processors sleep. This policy takes away as little as the measured
//! rates need, of the processor time that the guest really uses, and adapts it up or down with each sample. The caller
//! enforces the limit by letting the guest run and wait in turns of some milliseconds.

use serde::{Deserialize, Serialize};

use super::{AdaptiveCap, CapInput};
use crate::trace::Decider;

/// Sample of a guest after a round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuSample {
    /// Reasons for which the guest may have to be slower.
    #[serde(flatten)]
    pub wish: ThrottleDemand,
    /// Measurements of the guest; absent as long as they are not known.
    pub seen: Option<CpuObservation>,
}

/// Reasons for which a guest's processors may have to be slower.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThrottleDemand {
    /// True if the stop policy has chosen this.
    pub is_chosen: bool,
    /// True if a user has requested this for the case that the downtime would be too long.
    pub is_requested: bool,
    /// Number of passes over all dirty pages.
    pub passes: u32,
    /// Expected downtime, in nanoseconds.
    pub expected_downtime_ns: u64,
    /// Downtime limit, in nanoseconds.
    pub max_downtime_ns: u64,
}

impl ThrottleDemand {
    /// Returns true if the guest is to be slower. In the first pass the number of remaining pages is unknown, so that
    /// no downtime is known to be too long.
    pub fn is_throttle_needed(&self) -> bool {
        let is_too_long = self.passes > 0 && self.expected_downtime_ns > self.max_downtime_ns;
        self.is_chosen || (self.is_requested && is_too_long)
    }
}

/// Measurements of a guest in the last round.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuObservation {
    /// Processor time that each virtual processor used, in microseconds per second: 1,000,000 is all the time.
    pub used_us_per_s: Vec<u64>,
    /// Dirty rate of memory, in bytes of whole pages per second.
    pub dirtied_bytes_per_s: u64,
    /// Sending rate of memory, in bytes of whole pages per second.
    pub sent_bytes_per_s: u64,
}

/// Limits a guest to a processor time at which its dirty rate is half the sending rate: each pass then halves the
/// remaining pages. When the dirty rate is far lower for a while, the limit is raised step by step, and lifted in the
/// end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuThrottlePolicy {
    // Learned state. It is not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    adaptive_cap: AdaptiveCap,
    /// Use of each processor at the highest use of all processors together while they were not limited; higher values
    /// seen since replace it.
    #[serde(skip)]
    usual_use_us_per_s: Vec<u64>,
}

impl CpuThrottlePolicy {
    /// A busy processor keeps at least one part in this many: with less it does not answer any more. The kernel
    /// notices at its next tick that a thread has used up its time, 4 ms late with 250 ticks a second, and has the
    /// thread make up for that. Of a period of 24 ms a sixth is the most that it can be late: one more period is
    /// always enough.
    pub const MIN_SHARE_DIVISOR: u64 = 6;
    /// Least share of one processor, in microseconds per second.
    const MIN_US_PER_S: u64 = 1_000_000_u64.div_ceil(Self::MIN_SHARE_DIVISOR);

    /// Returns the use of all processors together, in microseconds per second, with which none of them stands still
    /// for long, from the usual use of each: a processor that works more than a sixth of the time counts as a sixth.
    fn least(usual_use_us_per_s: &[u64]) -> u64 {
        sum(usual_use_us_per_s.iter().map(|usual| (*usual).min(Self::MIN_US_PER_S)))
    }

    fn update(&mut self, observed: &CpuObservation) {
        let CpuObservation { used_us_per_s: each_used, dirtied_bytes_per_s, sent_bytes_per_s } = observed;
        let used = sum(each_used.iter().copied());
        if self.adaptive_cap.cap.is_none() && used > self.usual() {
            self.usual_use_us_per_s.clone_from(each_used);
        }
        self.usual_use_us_per_s.resize(each_used.len(), 0);
        for (usual, used) in self.usual_use_us_per_s.iter_mut().zip(each_used) {
            *usual = (*usual).max(*used);
        }
        self.adaptive_cap.update(&CapInput {
            used,
            dirtied: *dirtied_bytes_per_s,
            share: sent_bytes_per_s / 2,
            least: Self::least(&self.usual_use_us_per_s).max(Self::MIN_US_PER_S),
            most: self.usual(),
        });
    }

    /// Returns the usual use of all processors together.
    fn usual(&self) -> u64 {
        sum(self.usual_use_us_per_s.iter().copied())
    }

    /// Returns the limit for each processor with which all together use no more than `all_us_per_s`. The limit is the
    /// same for each, because it is unknown which one will work next; processors that usually use less leave the rest
    /// to the others.
    fn limit_for_each(&self, all_us_per_s: u64) -> u64 {
        let mut usual = self.usual_use_us_per_s.clone();
        usual.sort_unstable();
        let (mut left, mut others) = (all_us_per_s, usual.len() as u64);
        for usual in usual {
            if others == 1 || usual.saturating_mul(others) >= left {
                break;
            }
            (left, others) = (left - usual, others - 1);
        }
        (left / others.max(1)).max(Self::MIN_US_PER_S)
    }

    /// Returns the cap in hundredths of the usual use.
    pub fn percent(&self) -> u64 {
        let percent = |cap: u64| (u128::from(cap) * 100).checked_div(self.usual().into());
        self.adaptive_cap.cap.and_then(percent).map_or(100, |percent| percent.min(100) as u64)
    }
}

fn sum(of: impl Iterator<Item = u64>) -> u64 {
    of.fold(0, u64::saturating_add)
}

impl Decider for CpuThrottlePolicy {
    type Observed = CpuSample;
    /// Processor time that each processor may use from now on, in microseconds per second; none if there is no limit.
    type Decision = Option<u64>;

    const MAX_ENTRIES: usize = 1000;

    fn decide(&mut self, look: &CpuSample) -> Option<u64> {
        if let Some(seen) = look.seen.as_ref().filter(|_| look.wish.is_throttle_needed()) {
            self.update(seen);
        }
        self.adaptive_cap.cap.map(|all| self.limit_for_each(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decides about a guest that is to be slower.
    fn decide(policy: &mut CpuThrottlePolicy, seen: CpuObservation) -> Option<u64> {
        policy.decide(&CpuSample {
            wish: ThrottleDemand { is_chosen: true, ..ThrottleDemand::default() },
            seen: Some(seen),
        })
    }

    const MIB: u64 = 1 << 20;

    fn seen(each_used: &[u64], dirtied_bytes_per_s: u64) -> CpuObservation {
        CpuObservation { used_us_per_s: each_used.to_vec(), dirtied_bytes_per_s, sent_bytes_per_s: 100 * MIB }
    }

    /// Simulates a guest whose processors would use `wants_us` each and dirty `dirties` together, on a link that
    /// drains 100 MiB a second. Returns the policy and the limit after `looks` samples.
    fn held_after(looks: u32, wants_us: &[u64], dirties: u64) -> (CpuThrottlePolicy, Option<u64>) {
        let (mut policy, mut cap) = (CpuThrottlePolicy::default(), None::<u64>);
        for _ in 0..looks {
            let used: Vec<_> =
                wants_us.iter().map(|wants| cap.map_or(*wants, |cap| cap.min(*wants))).collect();
            let dirtied = dirties * used.iter().sum::<u64>() / wants_us.iter().sum::<u64>();
            cap = decide(&mut policy, seen(&used, dirtied));
        }
        (policy, cap)
    }

    #[test]
    fn a_guest_gets_what_lets_it_dirty_half_of_what_is_sent() {
        // Two processors that dirty twice as much as is sent: a quarter of that is half of it.
        let (policy, cap) = held_after(1, &[1_000_000; 2], 200 * MIB);
        assert_eq!((cap, policy.percent()), (Some(250_000), 25));
        // And there it stays.
        let (policy, cap) = held_after(40, &[1_000_000; 2], 200 * MIB);
        assert!(
            cap.is_some_and(|cap| (CpuThrottlePolicy::MIN_US_PER_S..=500_000).contains(&cap)),
            "{policy:?}"
        );
    }

    #[test]
    fn a_guest_that_dirties_little_is_not_held() {
        for dirties in [0, 10, 50] {
            let (policy, cap) = held_after(40, &[1_000_000], dirties * MIB);
            assert_eq!((cap, policy.percent()), (None, 100));
        }
        // One that is idle uses nothing, and what it dirties comes from elsewhere: nothing helps, and nothing is
        // divided by zero.
        for idle in [&[][..], &[0], &[0, 0]] {
            let mut policy = CpuThrottlePolicy::default();
            let idle = CpuObservation { sent_bytes_per_s: 0, ..seen(idle, MIB) };
            assert_eq!(
                (decide(&mut policy, idle), policy.percent()),
                (Some(CpuThrottlePolicy::MIN_US_PER_S), 100)
            );
        }
    }

    #[test]
    fn no_processor_that_works_is_held_to_less_than_a_sixth() {
        for processors in [1, 4] {
            let (policy, cap) = held_after(40, &vec![1_000_000; processors], 100_000 * MIB);
            assert_eq!((cap, policy.percent()), (Some(CpuThrottlePolicy::MIN_US_PER_S), 16), "{processors}");
        }
    }

    #[test]
    fn processors_that_hardly_work_keep_no_other_fast() {
        let each = [20_000, 1_000_000, 20_000, 20_000];
        assert_eq!(CpuThrottlePolicy::least(&each), CpuThrottlePolicy::MIN_US_PER_S + 3 * 20_000);
        assert_eq!(CpuThrottlePolicy::least(&[]), 0);
        // Half of their use, and the processors that use less leave the rest to the other.
        let (policy, cap) = held_after(1, &each, 100 * MIB);
        assert_eq!((cap, policy.percent()), (Some(530_000 - 3 * 20_000), 50));
    }

    #[test]
    fn processors_that_work_get_the_same() {
        assert_eq!(held_after(1, &[900_000, 300_000, 600_000], 100 * MIB).1, Some(300_000));
        assert_eq!(held_after(1, &[900_000, 100_000, 800_000], 100 * MIB).1, Some(400_000));
    }

    /// A processor does not stand still because it was idle before; and its use is seen.
    #[test]
    fn a_processor_that_begins_to_work_gets_as_much_as_the_others() {
        let (mut policy, cap) = held_after(1, &[1_000_000, 0], 200 * MIB);
        assert_eq!(cap, Some(250_000));
        assert_eq!(
            decide(&mut policy, seen(&[250_000, 250_000], 100 * MIB)),
            Some(CpuThrottlePolicy::MIN_US_PER_S)
        );
    }

    /// The work moves from one processor to another: the lowest cap lets each have its sixth, and is not the use that
    /// both had once together.
    #[test]
    fn a_program_that_moves_between_processors_keeps_a_sixth() {
        let mut policy = CpuThrottlePolicy::default();
        decide(&mut policy, seen(&[217_000, 152_000], MIB));
        decide(&mut policy, seen(&[51_000, 405_000], 100 * MIB));
        let caps: Vec<_> = (0..4).map(|_| decide(&mut policy, seen(&[26_000, 204_000], 98 * MIB))).collect();
        assert_eq!(caps.last(), Some(&Some(CpuThrottlePolicy::MIN_US_PER_S)), "{caps:?}");
    }

    #[test]
    fn a_guest_that_has_become_calm_is_let_go() {
        let (mut policy, cap) = held_after(1, &[1_000_000], 400 * MIB);
        assert_eq!(cap, Some(CpuThrottlePolicy::MIN_US_PER_S));
        let calm = seen(&[100_000], MIB);
        let caps: Vec<_> = (0..12).map(|_| decide(&mut policy, calm.clone())).collect();
        assert_eq!(caps[1..4], [cap, cap.map(|cap| 2 * cap), cap.map(|cap| 2 * cap)]);
        assert_eq!((caps[7], caps[8], policy.percent()), (cap.map(|cap| 4 * cap), None, 100));
    }

    #[test]
    fn a_guest_is_throttled_if_chosen_or_if_requested_and_needed() {
        let asked = ThrottleDemand {
            is_requested: true,
            passes: 1,
            expected_downtime_ns: 301,
            max_downtime_ns: 300,
            ..ThrottleDemand::default()
        };
        assert!(asked.is_throttle_needed());
        for not in [
            ThrottleDemand { is_requested: false, ..asked },
            ThrottleDemand { passes: 0, ..asked },
            ThrottleDemand { expected_downtime_ns: 300, ..asked },
        ] {
            assert!(!not.is_throttle_needed(), "{not:?}");
            assert!(ThrottleDemand { is_chosen: true, ..not }.is_throttle_needed(), "{not:?}");
        }
    }

    /// The limit stays: only the guest's writes lift it, not a change of the request.
    #[test]
    fn nothing_changes_where_nothing_is_known_or_wished_for() {
        let fast = CpuSample { seen: Some(seen(&[1_000_000], 400 * MIB)), ..CpuSample::default() };
        let mut policy = CpuThrottlePolicy::default();
        assert_eq!(policy.decide(&fast), None);
        let cap = decide(&mut policy, seen(&[1_000_000], 400 * MIB));
        assert!(cap.is_some());
        assert_eq!(policy.decide(&CpuSample::default()), cap);
        assert_eq!(policy.decide(&fast), cap);
    }
}
