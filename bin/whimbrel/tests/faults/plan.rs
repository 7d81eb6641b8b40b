//! Cells of the matrix: injuries and their points.

use std::fmt;

/// An injury at a fault point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injury {
    SourceAgent,
    DestinationAgent,
    SourceQemu,
    DestinationQemu,
    CutToDestination,
    CutToSource,
    CutBoth,
    /// The destination's agent hangs; its host works.
    FrozenDestination,
}

pub const INJURIES: [Injury; 8] = [
    Injury::SourceAgent,
    Injury::DestinationAgent,
    Injury::SourceQemu,
    Injury::DestinationQemu,
    Injury::CutToDestination,
    Injury::CutToSource,
    Injury::CutBoth,
    Injury::FrozenDestination,
];

impl Injury {
    /// Returns true if it has an effect only after a while.
    pub fn is_delayed(self) -> bool {
        matches!(self, Self::CutToDestination | Self::CutToSource | Self::CutBoth | Self::FrozenDestination)
    }
}

/// Injuries of one migration: at each of these points in turn, an injury. Each point is reached only because of the
/// injuries before it.
#[derive(Clone, Debug)]
pub struct InjuryPlan(pub Vec<Step>);

#[derive(Clone, Debug)]
pub struct Step {
    pub point: String,
    pub injury: Injury,
}

impl InjuryPlan {
    /// Parses the words of its `Display`.
    pub fn parse(words: &str) -> Self {
        let step = |words: &str| {
            let (injury, point) = words.split_once(" at ").unwrap();
            let injury = INJURIES.into_iter().find(|known| format!("{known:?}") == injury).unwrap();
            Step { point: point.to_owned(), injury }
        };
        Self(words.split(", then ").map(step).collect())
    }

    /// Returns this cell with one more injury.
    pub fn and(&self, point: &str, injury: Injury) -> Self {
        let step = Step { point: point.to_owned(), injury };
        Self(self.0.iter().cloned().chain([step]).collect())
    }
}

impl fmt::Display for InjuryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Step { point, injury }) in self.0.iter().enumerate() {
            write!(f, "{}{injury:?} at {point}", if index == 0 { "" } else { ", then " })?;
        }
        Ok(())
    }
}
