//! Runs one role of a handover: accepts an event, asks the engine, performs the effects in their order.
//!
//! This is the agent's half of the contract in [`engine::handover`]. The new state holds once its journal effect is
//! done; a driver whose effect fails performs none of the following ones.

use std::fmt;
use std::time::Instant;

use engine::handover::{FaultPoint, Illegal, Role, Step};
use tracing::{debug, info};

use host::fault::Faults;

/// One role of a handover, with the means to perform the engine's effects.
pub(crate) trait StateMachine {
    /// The role's state, as the journal keeps it.
    type State: Clone + fmt::Debug;
    /// Inputs of the state machine.
    type Event: fmt::Debug;
    /// Actions that a transition demands.
    type Effect: fmt::Debug;
    /// Error of an effect that failed, or of an event that was not accepted.
    type Error: From<Illegal>;

    /// The role: source or destination.
    const ROLE: Role;

    /// Returns the names of a state and an event, for the transition's name.
    fn names(state: &Self::State, event: &Self::Event) -> (&'static str, &'static str);

    /// Calls the engine's transition function.
    fn decide(&self, event: &Self::Event) -> Result<Step<Self::State, Self::Effect>, Illegal>;

    /// Returns the name of an effect, for the names of fault points.
    fn effect_name(effect: &Self::Effect) -> &'static str;

    /// Returns true if an effect writes the new state into the journal.
    fn is_journal(effect: &Self::Effect) -> bool;

    /// Performs an effect. An error stops the transition where it is.
    fn perform(&mut self, effect: &Self::Effect) -> Result<(), Self::Error>;

    /// Returns the present state.
    fn state(&self) -> &Self::State;

    /// Replaces the present state.
    fn enter(&mut self, state: Self::State);

    /// Returns the registry of fault points.
    fn faults(&self) -> &Faults;

    /// Handles an event. One that the engine calls illegal changes nothing and is an error: its cause is a peer that
    /// violates the protocol, whose connection the driver then ends, or a bug in this program.
    fn feed(&mut self, event: &Self::Event) -> Result<(), Self::Error> {
        let (state, name) = Self::names(self.state(), event);
        let transition = match self.decide(event)? {
            Step::Ignored(why) => {
                debug!(role = %Self::ROLE, state, event = name, ?why, "ignored");
                return Ok(());
            }
            Step::Transition(transition) => transition,
        };
        let label = transition.name(Self::ROLE, state, name);
        if name == "repeat" || transition.effects.is_empty() {
            debug!(transition = %label, "handover");
        } else {
            info!(transition = %label, "handover");
        }
        let effects = &transition.effects;
        let names: Vec<_> = effects.iter().map(Self::effect_name).collect();
        let faults = self.faults().clone();
        let reach = |done: usize| {
            faults.reach(|| {
                let after = done.checked_sub(1).and_then(|last| names.get(last)).copied();
                let point = FaultPoint { transition: label.clone(), done, after, last: done == names.len() };
                point.to_string()
            });
        };
        for (done, effect) in effects.iter().enumerate() {
            reach(done);
            let began = Instant::now();
            self.perform(effect)?;
            debug!(effect = names[done], duration_us = began.elapsed().as_micros() as u64, "done");
            if Self::is_journal(effect) {
                self.enter(transition.to.clone());
            }
        }
        if !effects.is_empty() {
            reach(effects.len());
        }
        self.enter(transition.to);
        Ok(())
    }
}
