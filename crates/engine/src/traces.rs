//! The traces of all policies of a migration.

use std::fmt::{self, Debug};

use serde::{Deserialize, Serialize};

use crate::compression::CompressionPolicy;
use crate::discards::DiscardPolicy;
use crate::disks_first::DisksFirstPolicy;
use crate::pre_copy;
use crate::pressure::RestraintPolicy;
use crate::push::PushPolicy;
use crate::references::ReferencePolicy;
use crate::throttle::WriteThrottle;
use crate::throttle::processors::CpuThrottlePolicy;
use crate::trace::{Decider, Trace};

/// Observations and decisions of all policies of a migration, enough to replay all decisions. A report contains them,
/// among other data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traces {
    /// Decisions on the stop. A new trace begins where the guest has released its page cache.
    #[serde(rename = "traces", skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<pre_copy::StopTrace>,
    /// Traces of the other policies that have decided something.
    #[serde(rename = "other_traces", skip_serializing_if = "OtherTraces::is_empty")]
    pub others: OtherTraces,
}

/// Traces of all policies but the one that decides on the stop.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OtherTraces {
    /// The moment at which memory begins after rounds of disks alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<Trace<DisksFirstPolicy>>,
    /// Limit on the guest's write rate to its disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writes: Option<Trace<WriteThrottle>>,
    /// Limit on the processor time of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_throttle: Option<Trace<CpuThrottlePolicy>>,
    /// Restraint of copying.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pressure: Option<Trace<RestraintPolicy>>,
    /// Choice of the compression.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<Trace<CompressionPolicy>>,
    /// Use of page references.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub references: Option<Trace<ReferencePolicy>>,
    /// Post-copy: discards before the stop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub discards: Option<Trace<DiscardPolicy>>,
    /// Post-copy: size and rate of the parts that are pushed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub push: Option<Trace<PushPolicy>>,
}

impl OtherTraces {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Traces {
    /// Replays all traces.
    #[must_use]
    pub fn replay(&self) -> Self {
        let OtherTraces { disks, writes, cpu_throttle, pressure, compression, references, discards, push } =
            &self.others;
        Self {
            stop: self.stop.iter().map(Trace::replay).collect(),
            others: OtherTraces {
                disks: disks.as_ref().map(Trace::replay),
                writes: writes.as_ref().map(Trace::replay),
                cpu_throttle: cpu_throttle.as_ref().map(Trace::replay),
                pressure: pressure.as_ref().map(Trace::replay),
                compression: compression.as_ref().map(Trace::replay),
                references: references.as_ref().map(Trace::replay),
                discards: discards.as_ref().map(Trace::replay),
                push: push.as_ref().map(Trace::replay),
            },
        }
    }

    /// Replays all traces and returns the results; policies without decisions are absent.
    pub fn compare(&self) -> Vec<Replayed> {
        let OtherTraces { disks, writes, cpu_throttle, pressure, compression, references, discards, push } =
            &self.others;
        let others = [
            disks.as_ref().map(|trace| compare("disks", trace)),
            writes.as_ref().map(|trace| compare("writes", trace)),
            cpu_throttle.as_ref().map(|trace| compare("cpu_throttle", trace)),
            pressure.as_ref().map(|trace| compare("pressure", trace)),
            compression.as_ref().map(|trace| compare("compression", trace)),
            references.as_ref().map(|trace| compare("references", trace)),
            discards.as_ref().map(|trace| compare("discards", trace)),
            push.as_ref().map(|trace| compare("push", trace)),
        ];
        self.stop.iter().map(compare_stop).chain(others.into_iter().flatten()).collect()
    }
}

/// Result of replaying a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// Name of the policy.
    pub policy: String,
    /// Number of decisions in the trace.
    pub decisions: usize,
    /// Number of decisions after these, which were not kept.
    pub left_out: u64,
    /// Decisions that have changed.
    pub differences: Vec<Difference>,
}

/// A decision that has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Number of the decision, from 1 on.
    pub decision: usize,
    /// Decision in the trace.
    pub then: String,
    /// Decision of the replay.
    pub now: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "decision {}: was {}, now {}", self.decision, self.then, self.now)
    }
}

fn compare_stop(trace: &pre_copy::StopTrace) -> Replayed {
    let replayed_trace = trace.replay();
    // An entry that only changes the rule for later ones has no decision.
    let decisions =
        trace.decisions().zip(replayed_trace.decisions()).filter(|(then, now)| (*then).or(**now).is_some());
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
