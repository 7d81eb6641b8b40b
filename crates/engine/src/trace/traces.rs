//! The traces of all that decides in a migration.

use std::fmt::{self, Debug};

use serde::{Deserialize, Serialize};

use super::{Decider, Trace};
use crate::bulk::Ahead;
use crate::compression::Chooser;
use crate::naming::Naming;
use crate::precopy;
use crate::pressure::Pressure;
use crate::push::Push;
use crate::referring::Referring;
use crate::throttle::WriteThrottle;
use crate::throttle::processors::CpuDrain;

/// What all that decides was shown in a migration, and what it decided: enough to decide it all again. As the report has
/// it, among other things.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traces {
    /// When to stop the guest. A new one begins where the guest gave its page cache back.
    #[serde(rename = "traces", skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<precopy::Trace>,
    /// The others, as far as they decided something.
    #[serde(rename = "other_traces", skip_serializing_if = "Others::is_empty")]
    pub others: Others,
}

/// What is decided beside the stop.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Others {
    /// When disks have gone ahead far enough.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<Trace<Ahead>>,
    /// How fast the guest may write to its disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writes: Option<Trace<WriteThrottle>>,
    /// How fast its processors may be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowing: Option<Trace<CpuDrain>>,
    /// How far copying gives way to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pressure: Option<Trace<Pressure>>,
    /// How what is sent is compressed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<Trace<Chooser>>,
    /// Whether memory is referred to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub referring: Option<Trace<Referring>>,
    /// Post-copy: whether pages are named once more before the stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub naming: Option<Trace<Naming>>,
    /// Post-copy: how much is pushed at once, and how fast.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub push: Option<Trace<Push>>,
}

impl Others {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Traces {
    /// Decides everything again.
    #[must_use]
    pub fn replay(&self) -> Self {
        let Others { disks, writes, slowing, pressure, compression, referring, naming, push } = &self.others;
        Self {
            stop: self.stop.iter().map(Trace::replay).collect(),
            others: Others {
                disks: disks.as_ref().map(Trace::replay),
                writes: writes.as_ref().map(Trace::replay),
                slowing: slowing.as_ref().map(Trace::replay),
                pressure: pressure.as_ref().map(Trace::replay),
                compression: compression.as_ref().map(Trace::replay),
                referring: referring.as_ref().map(Trace::replay),
                naming: naming.as_ref().map(Trace::replay),
                push: push.as_ref().map(Trace::replay),
            },
        }
    }

    /// Decides everything again, and tells what came of that; of whoever decided nothing, nothing.
    pub fn compare(&self) -> Vec<Replayed> {
        let Others { disks, writes, slowing, pressure, compression, referring, naming, push } = &self.others;
        let others = [
            disks.as_ref().map(|trace| compare("disks", trace)),
            writes.as_ref().map(|trace| compare("writes", trace)),
            slowing.as_ref().map(|trace| compare("slowing", trace)),
            pressure.as_ref().map(|trace| compare("pressure", trace)),
            compression.as_ref().map(|trace| compare("compression", trace)),
            referring.as_ref().map(|trace| compare("referring", trace)),
            naming.as_ref().map(|trace| compare("naming", trace)),
            push.as_ref().map(|trace| compare("push", trace)),
        ];
        self.stop.iter().map(compare_stop).chain(others.into_iter().flatten()).collect()
    }
}

/// What came of deciding a trace again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// Whose trace.
    pub policy: String,
    /// How many decisions it has.
    pub decisions: usize,
    /// How many came after them, and were not kept.
    pub left_out: u64,
    /// Decisions that are other ones now.
    pub differences: Vec<Difference>,
}

/// A decision that is another one now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Which one, from 1 on.
    pub decision: usize,
    /// What was decided.
    pub then: String,
    /// What is decided now.
    pub now: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "decision {}: was {}, now {}", self.decision, self.then, self.now)
    }
}

fn compare_stop(trace: &precopy::Trace) -> Replayed {
    let again = trace.replay();
    // What only changes the rule for those that follow decides nothing.
    let decisions =
        trace.decisions().zip(again.decisions()).filter(|(then, now)| (*then).or(**now).is_some());
    differences(&format!("stop ({})", trace.policy.name()), trace.left_out, decisions)
}

fn compare<P: Decider>(policy: &str, trace: &Trace<P>) -> Replayed {
    differences(policy, trace.left_out, trace.decisions().zip(trace.replay().decisions()))
}

fn differences<'a, D: Debug + PartialEq + 'a>(
    policy: &str,
    left_out: u64,
    decisions: impl Iterator<Item = (&'a D, &'a D)>,
) -> Replayed {
    let mut replayed =
        Replayed { policy: policy.to_owned(), decisions: 0, left_out, differences: Vec::new() };
    for (then, now) in decisions {
        replayed.decisions += 1;
        if then != now {
            let decision = replayed.decisions;
            replayed.differences.push(Difference {
                decision,
                then: format!("{then:?}"),
                now: format!("{now:?}"),
            });
        }
    }
    replayed
}
