//! Refusals of evacuations as problems of the API.

use api::{Problem, ProblemKind};
use engine::evacuation::EvacuationRefusal;

use crate::coordinator::BeginError;

/// Returns the problem of a request that is refused.
pub(crate) fn refused(refusal: &EvacuationRefusal) -> Problem {
    let kind = match refusal {
        EvacuationRefusal::UnknownEvacuation { .. } => ProblemKind::NotFound,
        EvacuationRefusal::NothingNamed => ProblemKind::BadRequest,
        EvacuationRefusal::Plan { refusal } if refusal.is_bad_input() => ProblemKind::BadRequest,
        EvacuationRefusal::NotConnected { .. } => ProblemKind::Unavailable,
        EvacuationRefusal::Busy { .. } | EvacuationRefusal::WrongState { .. } => ProblemKind::Conflict,
        EvacuationRefusal::Plan { .. }
        | EvacuationRefusal::RoomTaken { .. }
        | EvacuationRefusal::NothingToReturn { .. } => ProblemKind::Refused,
    };
    Problem::new(kind, refusal.to_string(), refusal.advice())
}

/// Returns the problem of an evacuation that cannot begin.
pub(crate) fn cannot_begin(error: &BeginError) -> Problem {
    match error {
        BeginError::Refused(refusal) => refused(refusal),
        BeginError::Store(_) => Problem::caused_by(ProblemKind::Internal, error, "see the controller's log"),
    }
}
