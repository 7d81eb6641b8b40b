//! How far copying gives way to its guest on a busy host.
//!
//! Copying needs processors, and where a host has none to spare it takes them from its guests: of the one that is moved,
//! and of its neighbours (Isci et al., *Improving server utilization using fast virtual machine migration*, Fig. 3, 4 and
//! 9). What that costs the guest can be seen from outside: its processors are ready to run and wait. Where they wait for
//! more of the time than they did before, by more than is allowed, copying holds itself back, step by step; where they do
//! not, it takes steps back again.
//!
//! ```text
//! step                  0   1   2   3   4   5            (with 4 threads)
//! niceness              5   7   9  11  11  11            what a thread gets where others want it, too
//! threads at a time     4   4   4   4   2   1            how many processors it is that others want
//! between two looks    ×1  ×1  ×1  ×1  ×2  ×4            what looking itself costs, on both sides of it
//! ```
//!
//! Niceness first: it costs nothing where processors are free. Fewer threads are slower there too, and whoever looks less
//! often knows less. So both come last, and are given back first.

use serde::{Deserialize, Serialize};

use crate::trace::Decider;

/// What the guest's processors did in an interval, all of them together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waited {
    /// For how long they ran, in nanoseconds.
    pub ran_ns: u64,
    /// For how long they could have run, and waited, in nanoseconds.
    pub waited_ns: u64,
}

impl Waited {
    /// A guest that wants less than that tells nothing.
    const LEAST_NS: u64 = 1_000_000;

    /// For how much of the time in which they wanted to run they waited, in thousandths; none if they hardly wanted to.
    pub fn permille(self) -> Option<u64> {
        let wanted_ns = u128::from(self.ran_ns) + u128::from(self.waited_ns);
        let permille = (u128::from(self.waited_ns) * 1000).checked_div(wanted_ns)? as u64;
        (wanted_ns >= u128::from(Self::LEAST_NS)).then_some(permille)
    }
}

/// How copying holds itself back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restraint {
    /// How nice its threads are (`nice(2)`).
    pub nice: u8,
    /// How many of them read and send at the same time.
    pub threads: u16,
    /// How many times as long as usual it is between two looks at what was written.
    pub interval_factor: u32,
}

impl Restraint {
    /// How nice copying is, step by step: a thread beside a guest's processor that is busy gets a quarter of what there is,
    /// a sixth, an eighth, a thirteenth. No less: a migration has to end.
    const NICE: [u8; 4] = [5, 7, 9, 11];
    /// How often the time between two looks doubles. No more: nobody sees between them that the guest may be stopped.
    const DOUBLINGS: u32 = 2;

    /// After so many steps, where it has so many threads.
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

    /// So many steps until nothing is left to hold back.
    fn most_steps(threads: u16) -> u32 {
        Self::nice_steps() + Self::DOUBLINGS.max(threads.checked_ilog2().unwrap_or(0))
    }
}

/// Has copying hold itself back, look by look.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pressure {
    /// How much more than usual the guest may wait, in thousandths.
    allowed_permille: u64,
    usual_permille: u64,
    /// All that copy.
    threads: u16,
    // What was learnt. Not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    steps: u32,
    #[serde(skip)]
    calm_looks: u32,
}

impl Pressure {
    /// So many calm looks in a row give back a step: the next one may be the one that hurts.
    const CALM_LOOKS: u32 = 3;

    /// The guest may wait for so much more of the time than it did before anything was copied, which so many threads do.
    pub fn new(allowed_permille: u64, before: Waited, threads: u16) -> Self {
        let usual_permille = before.permille().unwrap_or(0);
        Self { allowed_permille, usual_permille, threads, steps: 0, calm_looks: 0 }
    }

    /// How copying holds itself back now.
    pub fn restraint(&self) -> Restraint {
        Restraint::after(self.steps, self.threads)
    }
}

impl Decider for Pressure {
    type Observed = Waited;
    /// How copying has to hold itself back from now on.
    type Decision = Restraint;

    const KEPT: usize = 1000;

    fn decide(&mut self, waited: &Waited) -> Restraint {
        let Some(permille) = waited.permille() else { return self.restraint() };
        let more = permille.saturating_sub(self.usual_permille);
        if more > self.allowed_permille {
            self.steps = (self.steps + 1).min(Restraint::most_steps(self.threads));
            self.calm_looks = 0;
        } else if more > self.allowed_permille / 2 {
            self.calm_looks = 0;
        } else {
            self.calm_looks += 1;
            if self.calm_looks >= Self::CALM_LOOKS {
                (self.steps, self.calm_looks) = (self.steps.saturating_sub(1), 0);
            }
        }
        self.restraint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn waited(percent: u64) -> Waited {
        Waited { ran_ns: (100 - percent) * MS, waited_ns: percent * MS }
    }

    /// Niceness, threads at a time, factor.
    fn after<const N: usize>(policy: &mut Pressure, percents: [u64; N]) -> [(u8, u16, u32); N] {
        percents.map(|percent| {
            let Restraint { nice, threads, interval_factor } = policy.decide(&waited(percent));
            (nice, threads, interval_factor)
        })
    }

    const NONE: (u8, u16, u32) = (5, 4, 1);
    const NICER: (u8, u16, u32) = (7, 4, 1);
    const NICEST: (u8, u16, u32) = (11, 4, 1);

    #[test]
    fn copying_gives_way_while_the_guest_waits_for_more_than_is_allowed() {
        let mut policy = Pressure::new(50, Waited::default(), 4);
        assert_eq!(after(&mut policy, [0, 5, 6, 30, 30]), [NONE, NONE, NICER, (9, 4, 1), NICEST]);
        let (half, one) = ((11, 2, 2), (11, 1, 4));
        assert_eq!(after(&mut policy, [30, 30, 30, 30]), [half, one, one, one]);
        // Between a half of what is allowed and all of it is where it is to be.
        assert_eq!(after(&mut policy, [5, 4, 3, 5, 4]), [one; 5]);
        assert_eq!(after(&mut policy, [2, 2, 2, 1, 1, 1]), [one, one, half, half, half, NICEST]);
        let back = [NICEST, NICEST, (9, 4, 1), (9, 4, 1), (9, 4, 1), NICER, NICER, NICER, NONE, NONE];
        assert_eq!(after(&mut policy, [0; 10]), back);
    }

    /// However many threads there are: one of them copies, and looks become no rarer than a quarter of them.
    #[test]
    fn something_is_left_of_everything() {
        for threads in [0, 1, 2, 3, 5, 64, u16::MAX] {
            let mut policy = Pressure::new(50, Waited::default(), threads);
            let mut before = policy.restraint();
            assert_eq!(before, Restraint { nice: 5, threads: threads.max(1), interval_factor: 1 });
            for _ in 0..30 {
                let now = policy.decide(&waited(90));
                assert!(now.nice >= before.nice && now.threads <= before.threads, "{before:?} {now:?}");
                assert!(now.interval_factor >= before.interval_factor, "{before:?} {now:?}");
                before = now;
            }
            assert_eq!(before, Restraint { nice: 11, threads: 1, interval_factor: 4 }, "{threads}");
            // There was no step that held nothing back, and would have to be given back before the others.
            for _ in 0..Pressure::CALM_LOOKS {
                policy.decide(&waited(0));
            }
            assert_ne!(policy.restraint(), before, "{threads}");
        }
    }

    #[test]
    fn one_loud_look_among_calm_ones_begins_them_anew() {
        let mut policy = Pressure::new(50, Waited::default(), 4);
        let expected = [NICER, NICER, NICER, NICER, NICER, NICER, NONE];
        assert_eq!(after(&mut policy, [9, 0, 0, 4, 0, 0, 0]), expected);
    }

    /// Whoever has to wait for others in any case gains nothing.
    #[test]
    fn what_the_guest_waits_for_anyway_does_not_count() {
        let mut policy = Pressure::new(50, waited(40), 4);
        assert_eq!(after(&mut policy, [40, 45, 46, 0, 0, 0]), [NONE, NONE, NICER, NICER, NICER, NONE]);
    }

    #[test]
    fn a_guest_that_hardly_runs_tells_nothing() {
        let little = Waited { ran_ns: 0, waited_ns: MS - 1 };
        assert_eq!((little.permille(), Waited::default().permille()), (None, None));
        assert_eq!(Waited { waited_ns: u64::MAX, ran_ns: u64::MAX }.permille(), Some(500));
        let mut policy = Pressure::new(50, little, 4);
        let nicer = policy.decide(&waited(90));
        assert_eq!(nicer.nice, 7);
        assert_eq!((policy.decide(&little), policy.restraint()), (nicer, nicer));
    }
}
