use super::*;
use crate::redirection::testing::{a_move, first};

fn hosts(redirection: &Redirection) -> Vec<&str> {
    redirection.legs.iter().map(|leg| leg.host.as_str()).collect()
}

#[test]
fn a_guest_that_moves_on_has_no_chain_of_tunnels() {
    let first = first();
    assert_eq!((hosts(&first), first.place.host.as_str()), (vec!["host1"], "host2"));
    assert_eq!(hosts_left(Some(&first), "host2", "host3"), ["host1", "host2"]);
    let on = moved(Some(&first), a_move(4, 2, 3, &[1, 2])).unwrap();
    assert_eq!(on.left, Vec::<String>::new());
    let second = on.redirection.unwrap();
    assert_eq!((hosts(&second), second.place.host.as_str()), (vec!["host1", "host2"], "host3"));
    // Both lead to the third host; the second one still translates.
    assert!(second.legs.iter().all(|leg| leg.tunnel.new_end == second.legs[0].tunnel.new_end));
    assert_eq!(second.legs[1].presence, first.place.presence);
    assert!(second.legs[0].presence.is_home() && !second.legs[1].presence.is_home());
    let third = moved(Some(&second), a_move(5, 3, 4, &[1, 2, 3])).unwrap().redirection.unwrap();
    assert_eq!(hosts(&third), ["host1", "host2", "host3"]);
}

#[test]
fn a_guest_that_returns_is_reached_directly_there() {
    let first = first();
    let back = moved(Some(&first), a_move(4, 2, 1, &[2])).unwrap().redirection.unwrap();
    assert_eq!((hosts(&back), back.place.host.as_str()), (vec!["host2"], "host1"));
    assert_eq!(back.place.presence, first.legs[0].presence);
    assert_eq!((back.home(), back.usual_leg()), (None, None), "unknown connections need no tunnel");
    let second = moved(Some(&first), a_move(4, 2, 3, &[1, 2])).unwrap().redirection.unwrap();
    let third = moved(Some(&second), a_move(5, 3, 2, &[1, 3])).unwrap().redirection.unwrap();
    assert_eq!((hosts(&third), third.usual_leg()), (vec!["host1", "host3"], third.legs.first()));
}

#[test]
fn a_host_that_has_gone_loses_its_connections_only() {
    let first = first();
    let on = moved(Some(&first), a_move(4, 2, 3, &[2])).unwrap();
    assert_eq!(on.left, ["host1"]);
    assert_eq!(hosts(&on.redirection.unwrap()), ["host2"]);
    let on = moved(Some(&first), a_move(4, 2, 3, &[])).unwrap();
    assert_eq!((on.redirection, on.left.len()), (None, 2));
    let both = moved(Some(&first), a_move(4, 2, 3, &[1, 2])).unwrap().redirection.unwrap();
    let one = without(&both, "host2").unwrap();
    assert_eq!((hosts(&one), without(&one, "host1")), (vec!["host1"], None));
    let other = without(&both, "host1").unwrap();
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
        assert_eq!(moved(Some(&first), next), Err(refused));
    }
}

#[test]
fn the_new_address_stays_when_old_connections_end() {
    let first = first();
    let home = first.legs[0].presence.lan.clone();
    assert_eq!(first.home_lan.as_ref(), Some(&home));
    let settled = settled(&first).unwrap();
    assert_eq!((settled.legs.len(), settled.home_lan.as_ref()), (0, Some(&home)));
    let on = moved(Some(&settled), a_move(4, 2, 3, &[2])).unwrap().redirection.unwrap();
    assert_eq!((hosts(&on), on.home_lan.as_ref()), (vec!["host2"], Some(&home)));
    let back = moved(Some(&first), a_move(4, 2, 1, &[2])).unwrap().redirection.unwrap();
    assert_eq!(super::settled(&back), None, "it is at home");
}
