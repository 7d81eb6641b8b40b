use super::*;

const PATIENCE: Duration = Duration::from_secs(20);
const MIB: u64 = 1 << 20;

/// Memory below and above 4 GiB, and a block before it.
fn seen() -> Vec<GuestMapping> {
    let seen =
        |guest_address, bytes, offset_bytes| GuestMapping { guest_address, bytes, block: 1, offset_bytes };
    vec![seen(0, 2 * MIB, 0), seen(4 << 30, 2 * MIB, 2 * MIB)]
}

fn guest(cache: Cache, patience: Duration) -> (Guest, Arc<HintedPages>, BufReader<UnixStream>) {
    let (near, far) = UnixStream::pair().unwrap();
    let hinted = Arc::new(HintedPages::new([MIB, 4 * MIB]));
    let guest = Guest::new(near, seen(), Arc::clone(&hinted), cache, patience).unwrap();
    (guest, hinted, BufReader::new(far))
}

fn receive_question(far: &mut BufReader<UnixStream>) -> Request {
    let mut line = String::new();
    far.read_line(&mut line).unwrap();
    line.trim().parse().unwrap()
}

fn send_text(far: &mut BufReader<UnixStream>, text: &str) {
    far.get_mut().write_all(text.as_bytes()).unwrap();
}

#[test]
fn pages_of_the_guest_are_found_in_the_blocks() {
    let at = |pages: Pages| block_ranges(&seen(), &pages).collect::<Vec<_>>();
    assert_eq!(at(3..5), [(1, 3..5)]);
    assert_eq!(at(510..(4 << 18) + 2), [(1, 510..512), (1, 512..514)]);
    assert_eq!(at(600..700), []);
    assert_eq!(at(0..u64::MAX), [(1, 0..512), (1, 512..1024)]);
    let odd = [GuestMapping { guest_address: 100, bytes: 3 * PAGE_BYTES, block: 0, offset_bytes: 100 }];
    assert_eq!(block_ranges(&odd, &(0..9)).collect::<Vec<_>>(), [(0, 1..3)]);
    let crooked = [GuestMapping { offset_bytes: 50, ..odd[0].clone() }];
    assert_eq!(block_ranges(&crooked, &(0..9)).collect::<Vec<_>>(), []);
}

#[test]
fn hints_of_the_guest_count() {
    let (guest, hinted, mut far) = guest(Cache::Cold, PATIENCE);
    let done = guest.ask(false).unwrap();
    assert_eq!((guest.has_pending_answer(), guest.answers().0), (true, 0));
    let question = receive_question(&mut far);
    assert!(guest.has_pending_answer());
    assert_eq!((question.give_back, question.cache), (false, Cache::Cold));
    let id = question.id;
    send_text(
        &mut far,
        &format!("begin {id} 1\nmemory 0+200\nnote slow today\nfree 1+2 100000+3\ncache 9+1\n"),
    );
    send_text(&mut far, &format!("end {id}\n"));
    // The end of the channel is the signal.
    assert!(done.recv().is_err());
    assert_eq!((hinted.pages(), guest.answers().0, guest.has_pending_answer()), ((5, 1), 1, false));
    assert_eq!(hinted.cache()[1].runs().next(), Some(9..10));
    let answer_statistics = guest.answer_statistics();
    assert_eq!(
        (answer_statistics.answers, answer_statistics.poisoned, answer_statistics.notes),
        (1, false, vec!["in the guest: slow today".to_owned()])
    );
    // A free page stays free as long as no scan finds it written.
    let _done = guest.ask(true).unwrap();
    assert_eq!(hinted.pages(), (5, 0));
    assert!(receive_question(&mut far).give_back);
}

#[test]
fn a_kernel_that_looks_at_free_pages_keeps_them() {
    let (guest, hinted, mut far) = guest(Cache::All, PATIENCE);
    let done = guest.ask(false).unwrap();
    let id = receive_question(&mut far).id;
    send_text(&mut far, &format!("begin {id} 1\npoisoned\nfree 1+2\ncache 9+1\nend {id}\n"));
    assert!(done.recv().is_err());
    assert_eq!((hinted.pages(), guest.answer_statistics().poisoned), ((0, 1), true));
}

/// No hint of a wrong answer counts, not even one before the error, and the guest is not waited for again.
#[test]
fn a_guest_that_answers_wrongly_is_left_alone() {
    for wrong in ["free x\n", "begin 7 1\n", "end 7\n", "\u{7f}\n", "free 2+1\n", &"free 1+1".repeat(600)] {
        let (guest, hinted, mut far) = guest(Cache::None, PATIENCE);
        let done = guest.ask(false).unwrap();
        let id = receive_question(&mut far).id;
        send_text(&mut far, &format!("begin {id} 1\nfree 1+2\n{wrong}"));
        assert!(done.recv().is_err());
        assert_eq!(hinted.pages(), (0, 0), "{wrong}");
        let answer_statistics = guest.answer_statistics();
        assert_eq!((answer_statistics.answers, answer_statistics.notes.len()), (0, 1), "{wrong}");
        assert!(answer_statistics.notes[0].contains("cannot be read"), "{answer_statistics:?}");
        assert!(guest.ask(true).is_none());
    }
}

#[test]
fn another_version_is_reported() {
    let (guest, _hinted, mut far) = guest(Cache::None, PATIENCE);
    let done = guest.ask(false).unwrap();
    let id = receive_question(&mut far).id;
    send_text(&mut far, &format!("begin {id} 2\n"));
    assert!(done.recv().is_err());
    assert!(guest.answer_statistics().notes[0].contains("version 2"));
}

/// Data for an earlier client that is left in the port begins anywhere, and may be an answer to a question like this
/// one.
#[test]
fn answers_to_questions_of_others_do_not_count() {
    let (guest, hinted, mut far) = guest(Cache::None, PATIENCE);
    far.get_mut().write_all(b"\xff\xfe0+1 9+\nbegin 1 1\nfree 1+9\nend 1\n").unwrap();
    let done = guest.ask(false).unwrap();
    let id = receive_question(&mut far).id;
    send_text(&mut far, &format!("begin {id} 1\nfree 3+1\nend {id}\n"));
    assert!(done.recv().is_err());
    assert_eq!((hinted.pages(), guest.answer_statistics().answers), ((1, 0), 1));
}

#[test]
fn a_silent_guest_is_waited_for_once() {
    let (guest, hinted, mut far) = guest(Cache::None, Duration::from_millis(50));
    let done = guest.ask(false).unwrap();
    let id = receive_question(&mut far).id;
    send_text(&mut far, &format!("begin {id} 1\nfree 1+2\n"));
    assert!(done.recv().is_err());
    assert_eq!(hinted.pages(), (0, 0));
    assert_eq!(
        guest.answer_statistics().notes,
        ["the guest is no longer queried: it does not answer in time"]
    );
    assert!(guest.ask(false).is_none());
}

/// An answer that gives back pages needs longer, which does not predict other answers.
#[test]
fn how_long_giving_back_takes_does_not_count() {
    let (guest, _hinted, mut far) = guest(Cache::None, PATIENCE);
    let mut answers = |give_back| {
        let done = guest.ask(give_back).unwrap();
        let id = receive_question(&mut far).id;
        send_text(&mut far, &format!("begin {id} 1\nend {id}\n"));
        assert!(done.recv().is_err());
        guest.answers()
    };
    let (_, took) = answers(false);
    assert_eq!(answers(true), (2, took));
}

/// A question that a later one replaces is not asked, and the answer to an earlier one does not count.
#[test]
fn the_last_question_is_the_one_that_is_asked() {
    let (guest, hinted, mut far) = guest(Cache::None, PATIENCE);
    let first = guest.ask(false).unwrap();
    let id = receive_question(&mut far).id;
    let second = guest.ask(false).unwrap();
    let third = guest.ask(true).unwrap();
    assert!(second.recv().is_err());
    send_text(&mut far, &format!("begin {id} 1\nfree 1+2\nend {id}\n"));
    assert!(first.recv().is_err());
    assert_eq!((hinted.pages(), guest.answers().0), ((0, 0), 0));
    let question = receive_question(&mut far);
    assert!(question.give_back);
    guest.ask(false).unwrap();
    guest.withdraw();
    let id = question.id;
    send_text(&mut far, &format!("begin {id} 1\nend {id}\n"));
    assert!(third.recv().is_err());
    drop(guest);
    let mut line = String::new();
    assert_eq!(far.read_line(&mut line).unwrap(), 0, "{line}");
}
