//! How far copying gives way to its guest on a busy host.
//!
//! Copying needs processors, and where a host has none to spare it takes them from its guests: of the one that is moved,
//! and of its neighbours (Isci et al., *Improving server utilization using fast virtual machine migration*, Fig. 3, 4 and
//! 9). What that costs the guest can be seen from outside: its processors are ready to run and wait. Where they wait for
//! more of the time than they did before, by more than is allowed, copying gets a smaller share, step by step; where they
//! do not, it gets more again.

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

/// Gives copying a share of the processors, look by look.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pressure {
    /// How much more than usual the guest may wait, in thousandths.
    allowed_permille: u64,
    usual_permille: u64,
    // What was learnt. Not part of a trace, which begins with a policy that has seen nothing.
    #[serde(skip)]
    step: usize,
    #[serde(skip)]
    calm_looks: u32,
}

impl Pressure {
    /// How nice copying is (`nice(2)`), step by step: a thread beside a guest's processor that is busy gets a quarter of
    /// what there is, a sixth, an eighth, a thirteenth. No less: a migration has to end.
    pub const NICE: [u8; 4] = [5, 7, 9, 11];
    /// So many calm looks in a row give back a step: the next one may be the one that hurts.
    const CALM_LOOKS: u32 = 3;

    /// The guest may wait for so much more of the time than it did before anything was copied.
    pub fn new(allowed_permille: u64, before: Waited) -> Self {
        let usual_permille = before.permille().unwrap_or(0);
        Self { allowed_permille, usual_permille, step: 0, calm_looks: 0 }
    }

    /// How nice copying is now.
    pub fn nice(&self) -> u8 {
        Self::NICE[self.step]
    }
}

impl Decider for Pressure {
    type Observed = Waited;
    /// How nice copying has to be from now on.
    type Decision = u8;

    const KEPT: usize = 1000;

    fn decide(&mut self, waited: &Waited) -> u8 {
        let Some(permille) = waited.permille() else { return self.nice() };
        let more = permille.saturating_sub(self.usual_permille);
        if more > self.allowed_permille {
            self.step = (self.step + 1).min(Self::NICE.len() - 1);
            self.calm_looks = 0;
        } else if more > self.allowed_permille / 2 {
            self.calm_looks = 0;
        } else {
            self.calm_looks += 1;
            if self.calm_looks >= Self::CALM_LOOKS {
                (self.step, self.calm_looks) = (self.step.saturating_sub(1), 0);
            }
        }
        self.nice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn waited(percent: u64) -> Waited {
        Waited { ran_ns: (100 - percent) * MS, waited_ns: percent * MS }
    }

    fn after(policy: &mut Pressure, percents: &[u64]) -> Vec<u8> {
        percents.iter().map(|percent| policy.decide(&waited(*percent))).collect()
    }

    #[test]
    fn copying_gives_way_while_the_guest_waits_for_more_than_is_allowed() {
        let mut policy = Pressure::new(50, Waited::default());
        assert_eq!(after(&mut policy, &[0, 5, 6, 30, 30, 30]), [5, 5, 7, 9, 11, 11]);
        // Between a half of what is allowed and all of it is where it is to be.
        assert_eq!(after(&mut policy, &[5, 4, 3, 5, 4]), [11, 11, 11, 11, 11]);
        assert_eq!(after(&mut policy, &[2, 2, 2, 1, 1, 1, 0, 0, 0, 0]), [11, 11, 9, 9, 9, 7, 7, 7, 5, 5]);
    }

    #[test]
    fn one_loud_look_among_calm_ones_begins_them_anew() {
        let mut policy = Pressure::new(50, Waited::default());
        assert_eq!(after(&mut policy, &[9, 0, 0, 4, 0, 0, 0]), [7, 7, 7, 7, 7, 7, 5]);
    }

    /// Whoever has to wait for others in any case gains nothing.
    #[test]
    fn what_the_guest_waits_for_anyway_does_not_count() {
        let mut policy = Pressure::new(50, waited(40));
        assert_eq!(after(&mut policy, &[40, 45, 46, 0, 0, 0]), [5, 5, 7, 7, 7, 5]);
    }

    #[test]
    fn a_guest_that_hardly_runs_tells_nothing() {
        let little = Waited { ran_ns: 0, waited_ns: MS - 1 };
        assert_eq!((little.permille(), Waited::default().permille()), (None, None));
        assert_eq!(Waited { waited_ns: u64::MAX, ran_ns: u64::MAX }.permille(), Some(500));
        let mut policy = Pressure::new(50, little);
        assert_eq!((policy.decide(&waited(90)), policy.decide(&little), policy.nice()), (7, 7, 7));
    }
}
