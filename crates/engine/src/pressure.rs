//! Restraint of copying for the sake of its guest on a busy host.
//!
//! Copying needs processors. A host without idle ones takes them from its guests: from the one that is moved, and from
//! its neighbours (Isci et al., *Improving server utilization using fast virtual machine migration*, Fig. 3, 4 and 9).
//!
//! The cost for the guest is visible from outside: its processors are ready to run and wait. If they wait for a larger
//! share of the time than before, by more than is allowed, copying restrains itself, step by step; if they do not, it
//! takes steps back again.
//!
//! ```text
//! step                  0   1   2   3   4   5            (with 4 threads)
//! niceness              5   7   9  11  11  11            share of a thread beside busy processors
//! threads at a time     4   4   4   4   2   1            number of processors that copying competes for
//! interval of scans    ×1  ×1  ×1  ×1  ×2  ×4            cost of the scans themselves, at both hosts
//! ```
//!
//! Niceness first: it costs nothing where processors are idle. Fewer threads are slower there too, and rarer scans
//! make the policy less informed. So both come last, and are taken back first.

use serde::{Deserialize, Serialize};

use crate::trace::Decider;

/// Scheduling of the guest's processors in an interval, all of them together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulingTimes {
    /// Time for which they ran, in nanoseconds.
    pub ran_ns: u64,
    /// Time for which they could have run but waited, in nanoseconds.
    pub waited_ns: u64,
}

impl SchedulingTimes {
    /// Least time in which the processors wanted to run, in nanoseconds, that makes a sample meaningful.
    const MIN_WANTED_NS: u64 = 1_000_000;

    /// Returns the share of the time that the processors waited while they wanted to run, in thousandths; none if they
    /// hardly wanted to run.
    pub fn permille(self) -> Option<u64> {
        let wanted_ns = u128::from(self.ran_ns) + u128::from(self.waited_ns);
        let permille = (u128::from(self.waited_ns) * 1000).checked_div(wanted_ns)? as u64;
        (wanted_ns >= u128::from(Self::MIN_WANTED_NS)).then_some(permille)
    }
}

/// Restraint of copying.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restraint {
    /// Niceness of its threads (`nice(2)`).
    pub nice: u8,
    /// Number of its threads that read and send at the same time.
    pub threads: u16,
    /// Factor for the interval between two dirty scans.
    pub interval_factor: u32,
}

impl Restraint {
    /// Niceness at each step: a thread beside a busy processor of a guest gets a quarter of the processor time, a
    /// sixth, an eighth, a thirteenth. No less: a migration has to end.
    const NICE: [u8; 4] = [5, 7, 9, 11];
    /// Number of times that the interval between two dirty scans doubles. No more, because between scans the policy
    /// cannot see that the guest may be stopped.
    const DOUBLINGS: u32 = 2;

    /// Returns the restraint after `steps` steps, of a migration with `threads` threads.
    fn after(steps: u32, threads: u16) -> Self {
        let beyond_nice = steps.saturating_sub(Self::nice_steps());
        Self {
            nice: Self::NICE[steps.min(Self::nice_steps()) as usize],
            threads: threads.checked_shr(beyond_nice).unwrap_or(0).max(1),
            interval_factor: 1 << beyond_nice.min(Self::DOUBLINGS),
        }
    }

    const fn nice_steps() -> u32 {
        Self::NICE.len() as u32 - 1
    }

    /// Returns the number of steps after which no restraint remains to be added.
    fn max_steps(threads: u16) -> u32 {
        Self::nice_steps() + Self::DOUBLINGS.max(threads.checked_ilog2().unwrap_or(0))
    }
}

/// Policy for the restraint of copying.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestraintPolicy {
    /// Permitted increase of the share that the guest waits, in thousandths.
    allowed_permille: u64,
    usual_permille: u64,
    /// Number of all threads that copy.
    threads: u16,
    /// True if copying becomes nicer only, whatever the guest waits.
    #[cfg(feature = "comparison")]
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    niceness_only: bool,
    // Learned state. It is not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    steps: u32,
    #[serde(skip)]
    calm_samples: u32,
}

impl RestraintPolicy {
    /// Number of consecutive calm samples after which a step is taken back: the next step may be the one that hurts.
    const CALM_SAMPLES: u32 = 3;

    /// Creates the policy of a migration with `threads` threads. The share of the time that the guest waits may exceed
    /// that before copying began by `allowed_permille`.
    pub fn new(allowed_permille: u64, before: SchedulingTimes, threads: u16) -> Self {
        let usual_permille = before.permille().unwrap_or(0);
        Self {
            allowed_permille,
            usual_permille,
            threads,
            #[cfg(feature = "comparison")]
            niceness_only: false,
            steps: 0,
            calm_samples: 0,
        }
    }

    /// Leaves the number of threads and the interval between scans alone.
    #[cfg(feature = "comparison")]
    #[must_use]
    pub fn niceness_only(self) -> Self {
        Self { niceness_only: true, ..self }
    }

    fn max_steps(&self) -> u32 {
        #[cfg(feature = "comparison")]
        if self.niceness_only {
            return Restraint::nice_steps();
        }
        Restraint::max_steps(self.threads)
    }

    /// Returns the present restraint.
    pub fn restraint(&self) -> Restraint {
        Restraint::after(self.steps, self.threads)
    }
}

impl Decider for RestraintPolicy {
    type Observed = SchedulingTimes;
    /// Restraint from now on.
    type Decision = Restraint;

    const MAX_ENTRIES: usize = 1000;

    fn decide(&mut self, waited: &SchedulingTimes) -> Restraint {
        let Some(permille) = waited.permille() else { return self.restraint() };
        let more = permille.saturating_sub(self.usual_permille);
        if more > self.allowed_permille {
            self.steps = (self.steps + 1).min(self.max_steps());
            self.calm_samples = 0;
        } else if more > self.allowed_permille / 2 {
            self.calm_samples = 0;
        } else {
            self.calm_samples += 1;
            if self.calm_samples >= Self::CALM_SAMPLES {
                (self.steps, self.calm_samples) = (self.steps.saturating_sub(1), 0);
            }
        }
        self.restraint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn waited(percent: u64) -> SchedulingTimes {
        SchedulingTimes { ran_ns: (100 - percent) * MS, waited_ns: percent * MS }
    }

    /// Niceness, threads at a time, and factor of the interval, for each sample.
    fn after<const N: usize>(policy: &mut RestraintPolicy, percents: [u64; N]) -> [(u8, u16, u32); N] {
        percents.map(|percent| {
            let Restraint { nice, threads, interval_factor } = policy.decide(&waited(percent));
            (nice, threads, interval_factor)
        })
    }

    const NONE: (u8, u16, u32) = (5, 4, 1);
    const NICER: (u8, u16, u32) = (7, 4, 1);
    const NICEST: (u8, u16, u32) = (11, 4, 1);

    #[test]
    fn copying_restrains_itself_while_the_guest_waits_too_long() {
        let mut policy = RestraintPolicy::new(50, SchedulingTimes::default(), 4);
        assert_eq!(after(&mut policy, [0, 5, 6, 30, 30]), [NONE, NONE, NICER, (9, 4, 1), NICEST]);
        let (half, one) = ((11, 2, 2), (11, 1, 4));
        assert_eq!(after(&mut policy, [30, 30, 30, 30]), [half, one, one, one]);
        // Between half and all of the permitted increase nothing changes.
        assert_eq!(after(&mut policy, [5, 4, 3, 5, 4]), [one; 5]);
        assert_eq!(after(&mut policy, [2, 2, 2, 1, 1, 1]), [one, one, half, half, half, NICEST]);
        let back = [NICEST, NICEST, (9, 4, 1), (9, 4, 1), (9, 4, 1), NICER, NICER, NICER, NONE, NONE];
        assert_eq!(after(&mut policy, [0; 10]), back);
    }

    #[test]
    fn niceness_alone_is_one_of_the_ways_to_compare() {
        let mut policy = RestraintPolicy::new(50, SchedulingTimes::default(), 4).niceness_only();
        assert_eq!(after(&mut policy, [30; 5]), [NICER, (9, 4, 1), NICEST, NICEST, NICEST]);
        assert_eq!(after(&mut policy, [0; 3]), [NICEST, NICEST, (9, 4, 1)]);
    }

    /// Holds for any number of threads: one of them copies, and dirty scans become no rarer than a quarter.
    #[test]
    fn restraint_keeps_one_thread_and_a_quarter_of_the_scans() {
        for threads in [0, 1, 2, 3, 5, 64, u16::MAX] {
            let mut policy = RestraintPolicy::new(50, SchedulingTimes::default(), threads);
            let mut before = policy.restraint();
            assert_eq!(before, Restraint { nice: 5, threads: threads.max(1), interval_factor: 1 });
            for _ in 0..30 {
                let now = policy.decide(&waited(90));
                assert!(now.nice >= before.nice && now.threads <= before.threads, "{before:?} {now:?}");
                assert!(now.interval_factor >= before.interval_factor, "{before:?} {now:?}");
                before = now;
            }
            assert_eq!(before, Restraint { nice: 11, threads: 1, interval_factor: 4 }, "{threads}");
            // No step was without effect; such a step would have to be taken back before the others.
            for _ in 0..RestraintPolicy::CALM_SAMPLES {
                policy.decide(&waited(0));
            }
            assert_ne!(policy.restraint(), before, "{threads}");
        }
    }

    #[test]
    fn a_waiting_guest_restarts_the_count_of_calm_samples() {
        let mut policy = RestraintPolicy::new(50, SchedulingTimes::default(), 4);
        let expected = [NICER, NICER, NICER, NICER, NICER, NICER, NONE];
        assert_eq!(after(&mut policy, [9, 0, 0, 4, 0, 0, 0]), expected);
    }

    /// A guest that waits for other reasons gains nothing from restraint.
    #[test]
    fn what_the_guest_waits_for_anyway_does_not_count() {
        let mut policy = RestraintPolicy::new(50, waited(40), 4);
        assert_eq!(after(&mut policy, [40, 45, 46, 0, 0, 0]), [NONE, NONE, NICER, NICER, NICER, NONE]);
    }

    #[test]
    fn a_guest_that_hardly_runs_tells_nothing() {
        let little = SchedulingTimes { ran_ns: 0, waited_ns: MS - 1 };
        assert_eq!((little.permille(), SchedulingTimes::default().permille()), (None, None));
        assert_eq!(SchedulingTimes { waited_ns: u64::MAX, ran_ns: u64::MAX }.permille(), Some(500));
        let mut policy = RestraintPolicy::new(50, little, 4);
        let nicer = policy.decide(&waited(90));
        assert_eq!(nicer.nice, 7);
        assert_eq!((policy.decide(&little), policy.restraint()), (nicer, nicer));
    }
}
