//! Evacuations as text.

use api::fleet::{EvacuationInfo, EvacuationPlan, EvacuationStatus};
use api::report::{bytes, rate};
use engine::evacuation::{EvacuationGoal, EvacuationPhase, MoveExplanation, MoveStanding};

use crate::output::{Text, table};

/// Formats a plan.
pub(super) fn plan(plan: &EvacuationPlan) -> String {
    let mut text = Text::default();
    if plan.moves.is_empty() {
        text.line(format_args!("no VM has to be moved"));
    } else {
        let begins = |one: &MoveExplanation| {
            let planned = plan.plan.moves.iter().find(|planned| planned.vm == one.vm && planned.to == one.to);
            planned.map_or_else(String::new, |planned| format!("{} s", planned.begins_ns / 1_000_000_000))
        };
        text.append(&table(
            ["BEGINS", "VM", "FROM", "TO", "TAKES", "DOWNTIME", "SENDS", "WHY"],
            plan.moves.iter().map(|one| {
                [
                    begins(one),
                    one.vm.clone(),
                    one.from.clone(),
                    one.to.clone(),
                    format!("{} s", one.total_ns.expected.div_ceil(1_000_000_000)),
                    format!("{} ms", one.downtime_ns / 1_000_000),
                    bytes(one.bytes),
                    one.why.to_string(),
                ]
            }),
        ));
        let duration = plan.plan.duration_ns;
        let seconds = |ns: u64| ns.div_ceil(1_000_000_000);
        text.line(format_args!(
            "{} moves in {} s ({} to {}), {} on the wire",
            plan.moves.len(),
            seconds(duration.expected),
            duration.low / 1_000_000_000,
            seconds(duration.high),
            bytes(plan.plan.bytes)
        ));
    }
    for stay in &plan.plan.stays {
        text.line(format_args!("{} stays on {}: {}", stay.vm, stay.host, stay.why));
    }
    if let Some(deadline) = &plan.deadline {
        text.line(format_args!("{deadline}"));
    }
    if !plan.waits_for.is_empty() {
        let ids: Vec<_> = plan.waits_for.iter().map(ToString::to_string).collect();
        text.line(format_args!("it would wait for evacuation {}, which needs the room", ids.join(", ")));
    }
    text.finish()
}

/// Formats a list of evacuations.
pub(super) fn list(all: &[EvacuationInfo]) -> String {
    if all.is_empty() {
        return "no evacuations; `whimbrel evacuate HOST` begins one\n".to_owned();
    }
    table(
        ["ID", "GOAL", "STATE", "MOVED", "SINCE"],
        all.iter().map(|one| {
            [
                one.id.clone(),
                goal(&one.request.goal),
                state(&one.status),
                one.status.moved.to_string(),
                one.created.clone(),
            ]
        }),
    )
}

/// Formats an evacuation with its moves.
pub(super) fn one(one: &EvacuationInfo) -> String {
    let mut text = Text::default();
    text.line(format_args!("evacuation {}: {}", one.id, goal(&one.request.goal)));
    text.line(format_args!("  {}; {} VMs have moved", state(&one.status), one.status.moved));
    if let Some(deadline) = &one.status.deadline {
        text.line(format_args!("  {deadline}"));
    }
    for explained in &one.status.moves {
        let MoveExplanation { vm, from, to, why, .. } = explained;
        text.line(format_args!("  {vm} from {from} to {to}: {}; {why}", standing(&explained.standing)));
    }
    if one.status.outcome.is_some() {
        return text.finish();
    }
    for blocked in &one.status.blocked {
        text.line(format_args!(
            "  {} on {} is blocked: {}; {}",
            blocked.vm,
            blocked.host,
            blocked.why,
            blocked.why.advice()
        ));
    }
    for host in &one.status.hosts {
        match &host.remaining {
            None => text.line(format_args!("  what remains on {} is not known", host.host)),
            Some(remaining) => {
                for item in remaining {
                    text.line(format_args!("  on {} remains {item}; {}", host.host, item.advice()));
                }
            }
        }
    }
    text.finish()
}

fn goal(goal: &EvacuationGoal) -> String {
    match goal {
        EvacuationGoal::Empty { hosts, .. } => format!("empty {}", hosts.join(", ")),
        EvacuationGoal::Return { host, .. } => format!("return to {host}"),
    }
}

fn state(status: &EvacuationStatus) -> String {
    if let Some(outcome) = &status.outcome {
        return outcome.to_string();
    }
    let phase = match status.phase {
        EvacuationPhase::AsksFacts => "asks its hosts",
        EvacuationPhase::WaitsForEvacuation => "waits for another evacuation",
        EvacuationPhase::Moves => "moves VMs",
        EvacuationPhase::WaitsForEmpty => "waits until nothing remains",
        EvacuationPhase::Cancels => "cancels its moves",
        EvacuationPhase::Finished => "has ended",
    };
    phase.to_owned()
}

fn standing(standing: &MoveStanding) -> String {
    match standing {
        MoveStanding::Waits { reason } => reason.to_string(),
        MoveStanding::Ordered => "ordered".to_owned(),
        MoveStanding::Underway { bytes_left, bytes_per_s } => {
            let left = bytes_left.map_or_else(String::new, |left| format!(", {} left", bytes(left)));
            let most = bytes_per_s.map_or_else(String::new, |most| format!(", at most {}", rate(most)));
            format!("under way{left}{most}")
        }
        MoveStanding::Cancelling => "being cancelled".to_owned(),
        MoveStanding::InDoubt => "in doubt".to_owned(),
    }
}
