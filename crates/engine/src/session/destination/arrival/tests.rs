use proto::Incarnation;
use proto::message::Verdict;

use super::*;

const EPOCH: Epoch = Epoch(7);
const ON_CONTROL: MessageContext =
    MessageContext { is_on_control: true, has_missing_pages: false, epoch: EPOCH };
const ELSEWHERE: MessageContext = MessageContext { is_on_control: false, ..ON_CONTROL };

fn incarnation() -> Incarnation {
    Incarnation { boot_id: "b".to_owned(), pid: 7, start_time_ticks: 9, generation: Generation(1) }
}

fn prepared() -> DestinationSession {
    DestinationSession::new(DestinationState::Prepared)
}

fn ready() -> DestinationSession {
    DestinationSession::new(DestinationState::Ready { incarnation: incarnation(), run: true })
}

/// Returns messages that bring parts of the VM.
fn parts() -> Vec<Message> {
    let digest = String::new();
    vec![
        Message::QueryTemplates { hashes: vec![] },
        Message::Verify { block: 0, first_chunk: 0, hashes: vec![] },
        Message::Discard { bytes: 1, digest: digest.clone() },
        Message::MissingPages { bytes: 1, digest: digest.clone(), round: 0 },
        Message::Claims { cards: vec![] },
        Message::DeviceState { bytes: 1, state_bytes: 1, digest },
        Message::Frozen { epoch: EPOCH, run: true },
        Message::Resume,
    ]
}

fn admissions(session: &DestinationSession, messages: &[Message], facts: MessageContext) -> Vec<Admission> {
    messages.iter().map(|message| session.admission(message, facts)).collect()
}

#[test]
fn the_vm_arrives_on_the_control_stream_up_to_ready() {
    let parts = parts();
    assert_eq!(admissions(&prepared(), &parts, ON_CONTROL), vec![Admission::Arrival; parts.len()]);
    for (session, facts) in [(prepared(), ELSEWHERE), (ready(), ON_CONTROL), (ready(), ELSEWHERE)] {
        assert_eq!(admissions(&session, &parts, facts), vec![Admission::Unexpected; parts.len()]);
    }
}

#[test]
fn new_connections_bring_missing_pages_after_ready_too() {
    let missing = MessageContext { has_missing_pages: true, ..ON_CONTROL };
    let resume = |session: DestinationSession, facts| session.admission(&Message::Resume, facts);
    assert_eq!(resume(ready(), missing), Admission::Arrival);
    assert_eq!(resume(ready(), MessageContext { is_on_control: false, ..missing }), Admission::Unexpected);
    // Nothing else arrives then.
    let parts = &parts()[..7];
    assert_eq!(admissions(&ready(), parts, missing), vec![Admission::Unexpected; 7]);
}

#[test]
fn another_migration_holds_no_source() {
    let other = Message::Frozen { epoch: Epoch(8), run: true };
    assert_eq!(prepared().admission(&other, ON_CONTROL), Admission::Unexpected);
}

#[test]
fn messages_of_the_handover_are_valid_everywhere() {
    let handover = [
        Message::Go { epoch: EPOCH, incarnation: incarnation(), run: true },
        Message::Abort { epoch: EPOCH, reason: String::new() },
        Message::Inquire { epoch: EPOCH },
        Message::Verdict { epoch: EPOCH, verdict: Verdict::Aborted },
    ];
    for (session, facts) in [(prepared(), ON_CONTROL), (prepared(), ELSEWHERE), (ready(), ELSEWHERE)] {
        assert_eq!(admissions(&session, &handover, facts), [Admission::Handover; 4]);
        let alive = [Message::Ping, Message::Pong];
        assert_eq!(admissions(&session, &alive, facts), [Admission::SignOfLife; 2]);
    }
}

#[test]
fn messages_of_a_destination_are_never_expected() {
    let epoch = EPOCH;
    let others = [
        Message::Resumed,
        Message::Verified { different_chunks: vec![] },
        Message::Discarded { duration_us: 0 },
        Message::PagesComplete,
        Message::Refused { epoch, reason: String::new() },
        Message::Crashed { epoch, reason: String::new() },
        Message::Ask { epoch },
        Message::Ready { epoch, incarnation: incarnation(), digest: String::new(), load_us: 0 },
    ];
    let facts = MessageContext { has_missing_pages: true, ..ON_CONTROL };
    for session in [prepared(), ready()] {
        assert_eq!(admissions(&session, &others, facts), [Admission::Unexpected; 8]);
    }
}

#[test]
fn a_newer_control_stream_replaces_the_older_one() {
    let mut control = ControlGeneration::new();
    assert_eq!(control.connected(3, Some(Generation(1))), None);
    assert!(control.is_connection(3) && control.is_present(Generation(1)));
    // Questions have connections of their own.
    assert_eq!(control.connected(4, None), None);
    assert!(control.is_connection(3) && !control.is_connection(4));
    assert_eq!(control.connected(5, Some(Generation(2))), Some(3));
    assert!(control.is_connection(5) && !control.is_present(Generation(1)));
    assert_eq!((control.generation(), control.connection_id()), (Generation(2), Some(5)));
    // The source tried twice, and only the second connection is in use.
    assert_eq!(control.connected(6, Some(Generation(2))), Some(5));
    assert!(control.is_connection(6));
}

#[test]
fn an_ended_generation_does_not_begin_again() {
    let mut control = ControlGeneration::new();
    control.connected(3, Some(Generation(2)));
    assert_eq!(control.connected(4, Some(Generation(1))), Some(4));
    assert!(control.is_connection(3) && control.is_present(Generation(2)));
    assert!(control.lost(3));
    // Not even while there is no control stream.
    assert_eq!(control.connected(5, Some(Generation(1))), Some(5));
    assert_eq!(control.connection_id(), None);
}

#[test]
fn only_the_end_of_the_control_stream_is_its_loss() {
    let mut control = ControlGeneration::new();
    control.connected(3, Some(Generation(1)));
    assert!(!control.lost(2));
    assert!(control.is_connection(3));
    assert!(control.lost(3));
    assert!(!control.lost(3) && control.is_present(Generation(1)));
}

#[test]
fn lists_of_pages_need_post_copy_and_a_length() {
    use PayloadKind::{Devices, Discard, MissingPages};

    let admit = DestinationSession::admit_payload;
    for kind in [Discard, MissingPages] {
        assert_eq!(admit(kind, 1, true), Ok(()));
        assert_eq!(admit(kind, 1, false), Err(RefusedPayload::NoPostCopy));
        assert_eq!(admit(kind, 0, true), Err(RefusedPayload::NoPostCopy));
    }
    for can_begin_post_copy in [false, true] {
        assert_eq!(admit(Devices, 0, can_begin_post_copy), Ok(()));
        assert_eq!(admit(Devices, DEVICE_STATE_BYTES, can_begin_post_copy), Ok(()));
    }
    for kind in [Discard, MissingPages, Devices] {
        assert_eq!(admit(kind, DEVICE_STATE_BYTES + 1, true), Err(RefusedPayload::TooLarge));
    }
}

#[test]
fn a_host_is_ready_when_nothing_waits_for_nobody() {
    let admit = DestinationSession::admit_frozen;
    for (has_missing_pages, run) in [(false, false), (false, true), (true, true)] {
        assert_eq!(admit(true, has_missing_pages, run), Ok(()));
        assert_eq!(admit(false, has_missing_pages, run), Err(NotReady::NotLoaded));
    }
    assert_eq!(admit(true, true, false), Err(NotReady::MissingForPaused));
}

#[test]
fn post_copy_ends_with_the_last_page_of_a_guest_that_runs() {
    let completing = DestinationState::Completing { incarnation: incarnation() };
    let completing = DestinationSession::new(completing);
    assert!(completing.ends_post_copy(true, false));
    assert!(!completing.ends_post_copy(false, false));
    assert!(!completing.ends_post_copy(true, true));
    assert!(!ready().ends_post_copy(true, false));
}
