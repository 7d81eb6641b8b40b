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
    let mut lost = |at| contact.take_contact_loss(ms(5), time(at));
    assert_eq!([14, 15, 16, 19, 20].map(&mut lost), [false, true, false, false, true]);
    contact.record(time(22));
    assert_eq!(contact.silence(time(24)), ms(2));
    assert!(!contact.take_contact_loss(ms(5), time(26)));
}
