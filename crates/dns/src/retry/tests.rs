use super::*;
use crate::change::{Goal, Lag, Rrset, RrsetChange};
use crate::config::Server;
use crate::message::ResponseCode;
use crate::rdata::RecordType;

fn server() -> Server {
    "192.0.2.53".to_owned().try_into().unwrap()
}

/// Returns the delays after the first three attempts and after many.
fn delays(states: Vec<ChangeState>) -> Option<[u64; 4]> {
    let change = |state| RrsetChange {
        zone: "example.org".parse().unwrap(),
        owner: "web.example.org".parse().unwrap(),
        kind: RecordType::A,
        rdata_changes: vec![],
        lowered_ttl_s: 5,
        new_ttl_s: 300,
        is_optional: false,
        original_ttl_s: None,
        original: None,
        may_still_apply: false,
        state,
    };
    let change_set = ChangeSet::new(states.into_iter().map(change).collect());
    let after = |attempts| delay(&change_set, attempts).map(|delay| delay.as_millis() as u64);
    Some([after(1)?, after(2)?, after(3)?, after(u32::MAX)?])
}

const QUICK_DELAYS: Option<[u64; 4]> = Some([250, 500, 1000, 30_000]);
const SLOW_DELAYS: Option<[u64; 4]> = Some([5000, 10_000, 20_000, 300_000]);

fn failed(failure: Failure) -> ChangeState {
    ChangeState::Failed { failure }
}

fn reached(reasons: Vec<LagReason>) -> ChangeState {
    let lags = reasons.into_iter().map(|reason| Lag { server: server(), reason }).collect();
    ChangeState::Made { goal: Goal::Lowered, ttl_s: 5, serial: 1, lags }
}

#[test]
fn what_is_complete_is_not_tried_again() {
    assert_eq!(delays(vec![]), None);
    assert_eq!(delays(vec![reached(vec![]), reached(vec![])]), None);
}

#[test]
fn what_passes_by_itself_is_tried_soon() {
    let away = || failed(Failure::Unreachable { server: server(), reason: "gone".to_owned() });
    assert_eq!(delays(vec![away()]), QUICK_DELAYS);
    assert_eq!(delays(vec![failed(Failure::Code { server: server(), code: ResponseCode(2) })]), QUICK_DELAYS);
    assert_eq!(delays(vec![reached(vec![LagReason::Behind { serial: 1 }])]), QUICK_DELAYS);
    assert_eq!(delays(vec![ChangeState::Conflict { found: Rrset::default() }, away()]), QUICK_DELAYS);
    assert_eq!(delays(vec![ChangeState::Pending]), QUICK_DELAYS);
    assert_eq!(delays(vec![failed(Failure::LostAnswer)]), Some([1000; 4]));
}

#[test]
fn what_a_person_has_to_mend_is_tried_seldom() {
    assert_eq!(delays(vec![failed(Failure::Refused { server: server() })]), SLOW_DELAYS);
    assert_eq!(delays(vec![ChangeState::Conflict { found: Rrset::default() }]), SLOW_DELAYS);
    assert_eq!(delays(vec![reached(vec![LagReason::SerialNotIncremented { serial: 1 }])]), SLOW_DELAYS);
    let refused = LagReason::Failed { failure: Failure::Refused { server: server() } };
    assert_eq!(delays(vec![reached(vec![refused]), reached(vec![])]), SLOW_DELAYS);
}
