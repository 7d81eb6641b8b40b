use super::*;
use crate::redirection::testing::{a_move, first, without};

fn hosts(redirection: &Redirection) -> Vec<&str> {
    redirection.legs.iter().map(|leg| leg.host.as_str()).collect()
}

#[test]
fn a_guest_that_moves_on_has_no_chain_of_tunnels() {
    let first = first();
    assert_eq!((hosts(&first), first.place.host.as_str()), (vec!["host1"], "host2"));
    let on = next_redirection(Some(&first), a_move(4, 2, 3, &[1, 2])).unwrap();
    assert_eq!(on.dropped, Vec::<String>::new());
    let second = on.redirection.unwrap();
    assert_eq!((hosts(&second), second.place.host.as_str()), (vec!["host1", "host2"], "host3"));
    // Both lead to the third host; the second one still translates.
    assert!(second.legs.iter().all(|leg| leg.tunnel.new_endpoint == second.legs[0].tunnel.new_endpoint));
    assert_eq!(second.legs[1].attachment, first.place.attachment);
    assert!(second.legs[0].attachment.is_home() && !second.legs[1].attachment.is_home());
    let third = next_redirection(Some(&second), a_move(5, 3, 4, &[1, 2, 3])).unwrap().redirection.unwrap();
    assert_eq!(hosts(&third), ["host1", "host2", "host3"]);
}

#[test]
fn a_guest_that_returns_is_reached_directly_there() {
    let first = first();
    let back = next_redirection(Some(&first), a_move(4, 2, 1, &[2])).unwrap().redirection.unwrap();
    assert_eq!((hosts(&back), back.place.host.as_str()), (vec!["host2"], "host1"));
    assert_eq!(back.place.attachment, first.legs[0].attachment);
    assert_eq!((back.home(), back.usual_leg()), (None, None), "unknown connections need no tunnel");
    let second = next_redirection(Some(&first), a_move(4, 2, 3, &[1, 2])).unwrap().redirection.unwrap();
    let third = next_redirection(Some(&second), a_move(5, 3, 2, &[1, 3])).unwrap().redirection.unwrap();
    assert_eq!((hosts(&third), third.usual_leg()), (vec!["host1", "host3"], third.legs.first()));
}

#[test]
fn a_host_that_has_gone_loses_its_connections_only() {
    let first = first();
    let on = next_redirection(Some(&first), a_move(4, 2, 3, &[2])).unwrap();
    assert_eq!(on.dropped, ["host1"]);
    assert_eq!(hosts(&on.redirection.unwrap()), ["host2"]);
    let on = next_redirection(Some(&first), a_move(4, 2, 3, &[])).unwrap();
    assert_eq!((on.redirection, on.dropped.len()), (None, 2));
    let both = next_redirection(Some(&first), a_move(4, 2, 3, &[1, 2])).unwrap().redirection.unwrap();
    let other = without(&both, "host1");
    assert_eq!(other.legs[0].mark, both.legs[1].mark, "its connections keep their mark");
}

#[test]
fn only_the_owner_changes_a_redirection() {
    let first = first();
    assert_eq!(may_change(&first, "web#3", 3), Ok(()), "the same migration");
    assert_eq!(may_change(&first, "web#4", 4), Ok(()));
    for (migration, epoch) in [("web#2", 2), ("other#3", 3)] {
        let refused = NotOwner { recorded: 3, requested: epoch };
        assert_eq!(may_change(&first, migration, epoch), Err(refused));
        let next = NetworkMove { migration: migration.to_owned(), ..a_move(epoch, 2, 3, &[1, 2]) };
        assert_eq!(next_redirection(Some(&first), next), Err(refused));
    }
}

#[test]
fn the_new_address_stays_when_old_connections_end() {
    let first = first();
    let home = first.legs[0].attachment.lan.clone();
    assert_eq!(first.home_lan.as_ref(), Some(&home));
    let without_legs = without_legs(&first).unwrap();
    assert_eq!((without_legs.legs.len(), without_legs.home_lan.as_ref()), (0, Some(&home)));
    let on = next_redirection(Some(&without_legs), a_move(4, 2, 3, &[2])).unwrap().redirection.unwrap();
    assert_eq!((hosts(&on), on.home_lan.as_ref()), (vec!["host2"], Some(&home)));
    let back = next_redirection(Some(&first), a_move(4, 2, 1, &[2])).unwrap().redirection.unwrap();
    assert_eq!(super::without_legs(&back), None, "it is at home");
}
