//! Hosts that ask for their own evacuation.

use api::fleet::{EvacuateRequest, ReturnRequest};
use proto::message::{EvacuationStanding, FleetReport, Message};

use crate::played::{Agent, World, host, with_a_moving_vm};

#[test]
fn a_host_to_which_vms_return_is_not_reported_empty() {
    let world = World::new();
    let (mut a, mut b, id, command) = with_a_moving_vm(&world);
    let followed = a.ask_for_evacuation(1);
    assert_eq!((followed.standing, followed.evacuation), (EvacuationStanding::Underway, Some(id.clone())));
    b.vms.insert("web");
    b.changed(vec![Agent::vm("web")]);
    a.let_go("web", &command);
    let ended = a.until_evacuation(|state| state.standing != EvacuationStanding::Underway);
    assert_eq!((ended.standing, ended.evacuation), (EvacuationStanding::Done, Some(id)), "{}", ended.text);
    let returned = world.client().return_vms(&host("a"), &ReturnRequest::default()).unwrap();
    let state = a.ask_for_evacuation(2);
    assert_eq!((state.request, state.standing), (2, EvacuationStanding::Failed), "{}", state.text);
    assert!(state.text.contains(&returned.id), "{}", state.text);
}

#[test]
fn an_evacuation_answers_the_request_that_began_it() {
    let world = World::new();
    let _b = Agent::up(&world, "b", &[]);
    let mut a = Agent::up(&world, "a", &[]);
    let first = a.ask_for_evacuation(1);
    let done = a.until_evacuation(|state| state.standing == EvacuationStanding::Done);
    assert_eq!((done.request, &done.evacuation), (1, &first.evacuation));
    a.reconnect(&world);
    let second = a.ask_for_evacuation(2);
    assert_eq!((second.request, second.standing), (2, EvacuationStanding::Underway), "{}", second.text);
    assert_ne!(second.evacuation, first.evacuation);
    // A request that is repeated begins nothing.
    let again = a.ask_for_evacuation(1);
    assert_eq!((again.standing, &again.evacuation), (EvacuationStanding::Done, &first.evacuation));
    assert_eq!(world.client().evacuations().unwrap().len(), 2);
}

#[test]
fn all_hosts_that_ask_learn_the_end_of_an_evacuation() {
    let world = World::new();
    let _c = Agent::up(&world, "c", &[]);
    let mut a = Agent::up(&world, "a", &[]);
    let mut b = Agent::up(&world, "b", &[]);
    let both = EvacuateRequest { hosts: vec![host("a"), host("b")], ..EvacuateRequest::default() };
    let id = world.client().evacuate(&both).unwrap().id;
    for (agent, request) in [(&mut a, 5), (&mut b, 6)] {
        agent.report(FleetReport::EvacuateHost { request, within_s: None });
        // Commands are not carried out: it goes on.
        let state = loop {
            if let Message::HostEvacuation(state) = agent.next() {
                break state;
            }
        };
        assert_eq!((state.request, state.evacuation.as_ref()), (request, Some(&id)), "{}", state.text);
    }
    world.client().cancel(&id).unwrap();
    for (agent, request) in [(&mut a, 5), (&mut b, 6)] {
        let ended = agent.until_evacuation(|state| state.standing == EvacuationStanding::Failed);
        assert_eq!((ended.request, ended.evacuation.as_ref()), (request, Some(&id)), "{}", ended.text);
    }
}
