//! Decisions of a migration, repeated from its report.

use std::path::PathBuf;

use engine::pre_copy::Decision;
use engine::traces::Traces;
use serde_json::Value;

/// Asserts that every decision follows from the inputs in the report. Where `WHIMBREL_RECORD_TRACES` names a directory,
/// the traces are kept there, by the test's name and the VM's migration.
#[track_caller]
pub fn assert_replayed(report: &Value) -> Traces {
    let traces: Traces = serde_json::from_value(report.clone()).unwrap();
    let replayed = traces.compare();
    assert!(!replayed.is_empty(), "no traces: {report:#}");
    assert!(replayed.iter().all(|one| one.differences.is_empty()), "{replayed:#?}\n{report:#}");
    assert_eq!(traces.replay(), traces);
    if let Some(directory) = std::env::var_os("WHIMBREL_RECORD_TRACES") {
        let test = std::thread::current().name().unwrap_or_default().replace(':', "-");
        let file = PathBuf::from(directory).join(format!("{test}-{}.json", report["epoch"]));
        std::fs::write(file, serde_json::to_string(&traces).unwrap()).unwrap();
    }
    traces
}

/// Returns the decisions about the stop, in order.
pub fn decisions(traces: &Traces) -> Vec<Decision> {
    traces.stop.iter().flat_map(|trace| trace.decisions().copied().flatten().collect::<Vec<_>>()).collect()
}
