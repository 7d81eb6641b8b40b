//! Runs one side of a handover: takes an event, asks the engine, does the effects in their order.
//!
//! This is the agent's half of the contract in [`engine::handover`]. The new state holds once its journal effect is
//! done; a driver whose effect fails does none of the following ones.

use std::fmt;
use std::time::Instant;

use engine::handover::table::FaultPoint;
use engine::handover::{Illegal, Role, Step};
use tracing::{debug, info};

use crate::fault::Faults;

/// One side of a handover, with the means to do what the engine wants done.
pub(crate) trait Machine {
    /// Its state, as the journal keeps it.
    type State: Clone + fmt::Debug;
    /// What happens to it.
    type Event: fmt::Debug;
    /// What it has to do.
    type Effect: fmt::Debug;
    /// Why an effect could not be done, or an event not taken.
    type Error: From<Illegal>;

    /// Which side this is.
    const ROLE: Role;

    /// Names of a state and an event, for the transition's name.
    fn names(state: &Self::State, event: &Self::Event) -> (&'static str, &'static str);

    /// The engine's transition function.
    fn decide(&self, event: &Self::Event) -> Result<Step<Self::State, Self::Effect>, Illegal>;

    /// Name of an effect, for the names of fault points.
    fn effect_name(effect: &Self::Effect) -> &'static str;

    /// Whether an effect writes the new state into the journal.
    fn is_journal(effect: &Self::Effect) -> bool;

    /// Does an effect. An error stops the transition where it is.
    fn perform(&mut self, effect: &Self::Effect) -> Result<(), Self::Error>;

    /// The state that holds at present.
    fn state(&self) -> &Self::State;

    /// Another state holds from now on.
    fn enter(&mut self, state: Self::State);

    /// Where fault points are told to.
    fn faults(&self) -> &Faults;

    /// Takes an event. One that the engine calls illegal changes nothing and is an error: it comes from a peer that
    /// does not keep to the protocol, whose connection the driver then ends, or from a mistake here.
    fn feed(&mut self, event: &Self::Event) -> Result<(), Self::Error> {
        let (state, name) = Self::names(self.state(), event);
        let transition = match self.decide(event)? {
            Step::Ignored(why) => {
                debug!(role = %Self::ROLE, state, event = name, ?why, "ignored");
                return Ok(());
            }
            Step::Moved(transition) => transition,
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
