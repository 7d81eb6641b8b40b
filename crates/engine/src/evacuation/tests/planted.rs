//! Planted errors: each is put between the evacuations and the world, and has to be seen by the simulation's checks.

use std::collections::{BTreeMap, BTreeSet};

use super::fleet::contents;
use super::simulation::{Faults, run};
use crate::evacuation::*;

/// An error that is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Planted {
    Nothing,
    /// The controller acts, dies, and has not stored what it did.
    ActsBeforeItStores,
    /// A repeated order has another id.
    NewIdOnRepetition,
    /// A restored evacuation has forgotten the moves that had not ended.
    ForgetsMoves,
    /// A lost connection counts as the end of moves.
    AssumesTheEnd,
    /// A VM in doubt counts as one that has stayed.
    DropsDoubt,
    /// The contents of hosts are not looked at.
    SeesNothingLeft,
    /// A command that was cancelled counts as ended before the agent has answered.
    EndsBeforeTheAnswer,
}

impl Planted {
    pub(super) fn change_action(
        self,
        action: EvacuationAction,
        sent: &BTreeMap<String, BTreeSet<CommandId>>,
    ) -> EvacuationAction {
        match action {
            EvacuationAction::StartMove { mut order } if self == Self::NewIdOnRepetition => {
                let is_repeated = sent.get(&order.vm).is_some_and(|ids| ids.contains(&order.command));
                if is_repeated {
                    order.command.number += 1000;
                }
                EvacuationAction::StartMove { order }
            }
            other => other,
        }
    }

    pub(super) fn change_stored(self, text: &str) -> Evacuation {
        let mut value: serde_json::Value = serde_json::from_str(text).unwrap();
        if self == Self::ForgetsMoves {
            let is_settled = |one: &serde_json::Value| one["state"]["state"] == "ended";
            value["moves"].as_object_mut().unwrap().retain(|_, one| is_settled(one));
            for (_, record) in value["vms"].as_object_mut().unwrap() {
                if record["standing"]["standing"] == "moving" {
                    record["standing"] = serde_json::json!({ "standing": "waiting" });
                }
            }
            value["queue"] = serde_json::json!([]);
        }
        serde_json::from_value(value).unwrap()
    }

    pub(super) fn change_event(self, event: EvacuationEvent) -> EvacuationEvent {
        match event {
            EvacuationEvent::MoveEnded { command, end: MoveEnd::InDoubt { reason } }
                if self == Self::DropsDoubt =>
            {
                let end = MoveEnd::Failed { kind: MoveFailure::Other, reason };
                EvacuationEvent::MoveEnded { command, end }
            }
            EvacuationEvent::Facts { mut facts } if self == Self::SeesNothingLeft => {
                facts.contents = contents(&facts.host, &[]);
                EvacuationEvent::Facts { facts }
            }
            EvacuationEvent::MoveProgressed { command, .. } if self == Self::EndsBeforeTheAnswer => {
                EvacuationEvent::MoveEnded { command, end: MoveEnd::Cancelled }
            }
            other => other,
        }
    }

    /// Returns events that are invented when a connection is lost.
    pub(super) fn at_loss(self, host: &str, evacuations: &Evacuations) -> Vec<EvacuationEvent> {
        if self != Self::AssumesTheEnd {
            return Vec::new();
        }
        let moves = evacuations.iter().flat_map(|one| one.status(0).moves);
        let lost = moves.filter(|one| one.from == host).filter_map(|one| one.command);
        lost.map(|command| EvacuationEvent::MoveEnded { command, end: MoveEnd::Cancelled }).collect()
    }
}

/// Returns the first violation that an error leads to.
fn first_violation(planted: Planted) -> Option<String> {
    (0..400).find_map(|seed| run(seed, Faults::All, planted).violations.into_iter().next())
}

#[test]
fn each_planted_error_is_seen() {
    for planted in [
        Planted::ActsBeforeItStores,
        Planted::NewIdOnRepetition,
        Planted::ForgetsMoves,
        Planted::AssumesTheEnd,
        Planted::DropsDoubt,
        Planted::SeesNothingLeft,
        Planted::EndsBeforeTheAnswer,
    ] {
        let found = first_violation(planted);
        assert!(found.is_some(), "{planted:?} was not seen");
    }
}
