//! Moments at which an agent may die, by name.

use std::fmt;

/// A moment within a transition at which an agent can be killed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FaultPoint {
    /// Name of the transition.
    pub transition: String,
    /// Number of its effects that have been done.
    pub done: usize,
    /// The effect that was done last; none before the first.
    pub after: Option<&'static str>,
    /// True if all have been done.
    pub last: bool,
}

impl fmt::Display for FaultPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.after, self.last) {
            (None, _) => write!(f, "{}:before-effects", self.transition),
            (Some(_), true) => write!(f, "{}:after-effects", self.transition),
            (Some(effect), false) => write!(f, "{}:after-{}-{effect}", self.transition, self.done),
        }
    }
}
