//! `whimbrel fleet plan`.

use std::io::Read as _;
use std::path::Path;

use engine::planner::{
    Hysteresis, Inventory, MoveLimits, Placement, PlacementPlan, PlanGoal, PlanRequest, PlannedMove, plan,
};
use fleet::trace::open;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::cli::PlanOptions;
use crate::Code;
use crate::failure::Failure;
use crate::output::{Output, Text, table};

/// Settings of plans.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct PlanSettings {
    limits: MoveLimits,
    hysteresis: Hysteresis,
}

/// Plans, and shows the plan.
pub(crate) fn show(options: &PlanOptions, output: &Output) -> Result<Code, Failure> {
    let inventory: Inventory = read(&options.inventory)?;
    let settings: PlanSettings = options.settings.as_deref().map(read).transpose()?.unwrap_or_default();
    let request = PlanRequest {
        goal: goal(options),
        deadline_s: options.deadline,
        partial: options.partial,
        limits: settings.limits,
        hysteresis: settings.hysteresis,
    };
    output.show(&plan(&inventory, &request)?, render);
    Ok(Code::Done)
}

/// Reads a JSON file, which xz may have compressed.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let unreadable = |source| Failure::File { path: path.to_owned(), source };
    let mut text = String::new();
    open::open(path).and_then(|mut file| file.read_to_string(&mut text)).map_err(unreadable)?;
    serde_json::from_slice(text.as_bytes())
        .map_err(|source| Failure::Inventory { path: path.to_owned(), source })
}

fn goal(options: &PlanOptions) -> PlanGoal {
    if options.balance {
        PlanGoal::Balance
    } else if options.spread {
        PlanGoal::Spread
    } else if options.drain.is_empty() {
        let placement = |(vm, host): &(String, String)| Placement { vm: vm.clone(), host: host.clone() };
        PlanGoal::Place { placements: options.place.iter().map(placement).collect() }
    } else {
        PlanGoal::Drain { hosts: options.drain.clone(), to: options.to.clone() }
    }
}

/// Returns nanoseconds as seconds.
fn seconds(ns: u64) -> String {
    format!("{}.{}", ns / 1_000_000_000, ns / 100_000_000 % 10)
}

fn render(plan: &PlacementPlan) -> String {
    let mut text = Text::default();
    if plan.moves.is_empty() {
        text.line(format_args!("no VM has to be moved"));
    } else {
        text.append(&table(
            ["", "BEGINS", "VM", "FROM", "TO", "TAKES", "DOWNTIME", "WAITS FOR", "THEN", "WHY"],
            plan.moves.iter().enumerate().map(|(at, one)| row(at, one)),
        ));
        text.line(format_args!(
            "{} moves in {} s ({} to {}), {} MB on the wire, {} ms of downtime together; the highest load of a host \
             changes from {}% to {}%",
            plan.moves.len(),
            seconds(plan.duration_ns.expected),
            seconds(plan.duration_ns.low),
            seconds(plan.duration_ns.high),
            plan.bytes / 1_000_000,
            plan.downtime_ns / 1_000_000,
            plan.highest_load_before_percent,
            plan.highest_load_after_percent
        ));
    }
    if let Some(deadline) = plan.deadline {
        let how = if deadline.is_safe { "will be kept" } else { "is expected to be kept, but not for sure" };
        text.line(format_args!("the deadline in {} s {how}", deadline.has_ns / 1_000_000_000));
    }
    for stay in &plan.stays {
        text.line(format_args!("{} stays on {}: {}", stay.vm, stay.host, stay.why));
    }
    text.finish()
}

fn row(at: usize, one: &PlannedMove) -> [String; 10] {
    let waits_for = one.waits_for.iter().map(|before| (before + 1).to_string()).collect::<Vec<_>>();
    [
        (at + 1).to_string(),
        format!("{} s", seconds(one.begins_ns)),
        one.vm.clone(),
        one.from.clone(),
        one.to.clone(),
        format!("{} s", seconds(one.total_ns.expected)),
        format!("{} ms", one.downtime_ns / 1_000_000),
        if waits_for.is_empty() { "-".to_owned() } else { waits_for.join(", ") },
        format!("{}%", one.target_load_percent),
        one.why.to_string(),
    ]
}
