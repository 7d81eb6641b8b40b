use proptest::prelude::*;

use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn time(ms: u64) -> Time {
    Time::since_origin(Duration::from_millis(ms))
}

#[test]
fn time_does_not_overflow() {
    let latest = Time::since_origin(Duration::MAX);
    assert_eq!(latest.after(ms(1)), latest);
    assert_eq!(time(1).since(time(2)), Duration::ZERO);
    assert_eq!(time(1).after(ms(2)).since(time(2)), ms(1));
}

#[test]
fn contact_is_lost_once_whenever_the_patience_has_passed() {
    let mut contact = Contact::default();
    contact.record(time(10));
    let mut lost = |at| contact.check_lost(ms(5), time(at));
    assert_eq!([14, 15, 16, 19, 20].map(&mut lost), [false, true, false, false, true]);
    contact.record(time(22));
    assert_eq!(contact.silence(time(24)), ms(2));
    assert!(!contact.check_lost(ms(5), time(26)));
}

/// A call of [`Timers`], with numbers for timers and times.
#[derive(Clone, Copy, Debug)]
enum Call {
    Arm(u8, u64),
    Due(u64),
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        3 => (0..4_u8, 0..8_u64).prop_map(|(timer, at)| Call::Arm(timer, at)),
        2 => (0..8_u64).prop_map(Call::Due),
    ]
}

proptest! {
    /// The oracle is a list of all timers.
    #[test]
    fn timers_do_what_a_list_does(calls in prop::collection::vec(call(), 0..64)) {
        let mut timers = Timers::default();
        let mut list: Vec<(u8, u64)> = Vec::new();
        for call in calls {
            match call {
                Call::Arm(timer, at) => {
                    timers.arm(timer, time(at));
                    list.retain(|(other, _)| *other != timer);
                    list.push((timer, at));
                }
                Call::Due(now) => {
                    list.sort_unstable();
                    let due = list.iter().position(|(_, at)| *at <= now).map(|at| list.remove(at).0);
                    prop_assert_eq!(timers.due(time(now)), due);
                }
            }
            prop_assert_eq!(timers.next(), list.iter().map(|(_, at)| time(*at)).min());
            for timer in 0..4 {
                let armed = list.iter().find(|(other, _)| *other == timer);
                prop_assert_eq!(timers.at(timer), armed.map(|(_, at)| time(*at)));
            }
        }
    }
}
