use serde::{Deserialize, Serialize};

use super::metrics::Metrics;

/// Name of the baseline that the planner is measured against.
pub const REFERENCE: &str = "LR-MMT";

/// Result of a policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyResult {
    /// Name of the policy.
    pub policy: String,
    /// Its metrics.
    pub metrics: Metrics,
}
