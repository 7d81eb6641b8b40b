//! The table of legal transitions, computed by running the two functions on every state and every kind of event.
//!
//! There is no second list to keep in step: this module holds samples of states, events and terms that distinguish all
//! cases, and a test shows that transitions of one name agree in everything.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use proto::message::{Offer, Ownership, Verdict};
use proto::{Epoch, Generation, HostId, Incarnation, MigrationId, VmName};

use super::destination::{DestinationEffect, DestinationEvent, DestinationState, destination};
use super::fault_point::FaultPoint;
use super::recover::OperatorDecision;
use super::registry::RegistryAnswer;
use super::source::{SourceEffect, SourceEvent, SourceState, source};
use super::terms::{MigrationTerms, QemuAtStart, Role};
use super::transition::{Illegal, Step, Transition};

/// One legal transition.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TransitionRow {
    /// Role of the host.
    pub role: Role,
    /// Name of the state before.
    pub from: &'static str,
    /// Name of the event.
    pub event: &'static str,
    /// Other conditions of the transition.
    pub guards: Vec<&'static str>,
    /// Name of the state after.
    pub to: &'static str,
    /// Names of the effects, in their order.
    pub effects: Vec<&'static str>,
}

impl TransitionRow {
    /// Returns the stable name, such as `source/committed/refused[registry]`.
    pub fn name(&self) -> String {
        let guards =
            if self.guards.is_empty() { String::new() } else { format!("[{}]", self.guards.join(",")) };
        format!("{}/{}/{}{guards}", self.role, self.from, self.event)
    }
}

/// Returns all legal transitions of both roles, in the order of states and events.
pub fn transitions() -> Vec<TransitionRow> {
    let mut all = outcomes();
    all.dedup_by_key(|transition| transition.name());
    all
}

/// Returns all moments at which the tests kill agents: before, between and after the effects of every transition that
/// has any.
pub fn fault_points() -> Vec<FaultPoint> {
    transitions().iter().flat_map(points_of).collect()
}

fn points_of(transition: &TransitionRow) -> Vec<FaultPoint> {
    let count = transition.effects.len();
    let point = |done: usize| FaultPoint {
        transition: transition.name(),
        done,
        after: done.checked_sub(1).map(|last| transition.effects[last]),
        last: done == count,
    };
    if count == 0 { vec![] } else { (0..=count).map(point).collect() }
}

/// Returns the table for `docs/handover-table.md`. Events with the same result in a state share a line.
pub fn table_markdown() -> String {
    let mut lines: Vec<(TransitionRow, Vec<&'static str>)> = Vec::new();
    for transition in transitions() {
        let same = |(line, _): &&mut (TransitionRow, Vec<_>)| {
            *line == TransitionRow { event: line.event, ..transition.clone() }
        };
        match lines.iter_mut().find(same) {
            Some((_, events)) => events.push(transition.event),
            None => lines.push((transition.clone(), vec![transition.event])),
        }
    }
    let mut text = String::new();
    for role in [Role::Source, Role::Destination] {
        let _ = writeln!(text, "| {role} | event | if | next state | effects |\n|---|---|---|---|---|");
        for (t, events) in lines.iter().filter(|(t, _)| t.role == role) {
            let (events, guards) = (events.join(", "), t.guards.join(", "));
            let to = if t.to == t.from { "stays" } else { t.to };
            let effects = if t.effects.is_empty() { "none".to_owned() } else { t.effects.join(", ") };
            let _ = writeln!(text, "| {} | {events} | {guards} | {to} | {effects} |", t.from);
        }
        text.push('\n');
    }
    text
}

/// Returns every sample of every transition, those of one name together and in the order of the table.
fn outcomes() -> Vec<TransitionRow> {
    let mut found = Vec::new();
    for terms in sample_terms() {
        let states = source_states();
        for (s, e, event, step) in ask_all(&states, &source_events(&terms), |s, e| source(&terms, s, e)) {
            let effects = step.effects.iter().map(SourceEffect::name).collect();
            let names = (states[s].name(), event.name(), step.to.name());
            found.push(((Role::Source, s, e), names, step.guards, effects));
        }
        let states = destination_states();
        for (s, e, event, step) in
            ask_all(&states, &destination_events(&terms), |s, e| destination(&terms, s, e))
        {
            let effects = step.effects.iter().map(DestinationEffect::name).collect();
            let names = (states[s].name(), event.name(), step.to.name());
            found.push(((Role::Destination, s, e), names, step.guards, effects));
        }
    }
    // Several samples share a name: the position of the first one counts for all.
    let mut places = BTreeMap::new();
    for ((role, s, e), (from, event, _), _, _) in &found {
        let place: &mut (usize, usize) = places.entry((*role, *from, *event)).or_insert((*s, *e));
        *place = (*place).min((*s, *e));
    }
    let mut all: Vec<_> = found
        .into_iter()
        .map(|((role, ..), (from, event, to), guards, effects)| {
            let place = places.get(&(role, from, event)).copied();
            (role, place, TransitionRow { role, from, event, guards, to, effects })
        })
        .collect();
    all.sort();
    all.into_iter().map(|(_, _, transition)| transition).collect()
}

/// Runs a function on every pair, and returns the transitions.
fn ask_all<'a, S, E, F>(
    states: &[S],
    events: &'a [E],
    step: impl Fn(&S, &E) -> Result<Step<S, F>, Illegal>,
) -> Vec<(usize, usize, &'a E, Transition<S, F>)> {
    let mut moves = Vec::new();
    for (s, state) in states.iter().enumerate() {
        for (e, event) in events.iter().enumerate() {
            if let Ok(Step::Transition(step)) = step(state, event) {
                moves.push((s, e, event, step));
            }
        }
    }
    moves
}

// ---- samples

const EPOCH: Epoch = Epoch(7);
const BASE: Epoch = Epoch(4);

/// Returns terms with a registry and without. (All names pass the check; a test shows that the table is not empty.)
fn sample_terms() -> Vec<MigrationTerms> {
    let names = (VmName::new("vm"), HostId::new("source"), HostId::new("destination"));
    let (Ok(vm), Ok(source), Ok(destination)) = names else { return vec![] };
    let migration = MigrationId { vm, epoch: EPOCH };
    let terms = MigrationTerms { migration, source, destination, registry: None, witness: None };
    vec![MigrationTerms { registry: Some(BASE), ..terms.clone() }, terms]
}

fn incarnation(pid: u32) -> Incarnation {
    Incarnation { boot_id: "boot".to_owned(), pid, start_time_ticks: 1, generation: Generation(1) }
}

fn source_states() -> Vec<SourceState> {
    use SourceState as In;
    let one = || incarnation(1);
    let mut states = vec![In::Idle];
    for run in [true, false] {
        states.extend([
            In::Prepared { run },
            In::Stopped { run },
            In::QemuLost { incarnation: None, run },
            In::QemuLost { incarnation: Some(one()), run },
            In::Committed { incarnation: one(), run, has_run: false },
            In::Committed { incarnation: one(), run, has_run: true },
            In::Reclaiming { incarnation: Some(one()), run, force: false },
            In::Reclaiming { incarnation: Some(one()), run, force: true },
            In::Reclaiming { incarnation: None, run, force: false },
        ]);
    }
    states.extend([In::Aborting, In::Aborted, In::Returning, In::Returned]);
    states.extend([Some(one()), None].map(|incarnation| In::Done { incarnation, run: true }));
    states
}

fn destination_states() -> Vec<DestinationState> {
    use DestinationState as In;
    let one = || incarnation(1);
    vec![
        In::Idle,
        In::Prepared,
        In::Ready { incarnation: one(), run: true },
        In::Ready { incarnation: one(), run: false },
        In::Acquiring { incarnation: one(), run: true },
        In::Acquiring { incarnation: one(), run: false },
        In::Starting { incarnation: one(), again: false },
        In::Starting { incarnation: one(), again: true },
        In::Completing { incarnation: one() },
        In::Active { incarnation: one() },
        In::Refusing,
        In::Refused,
        In::CopyDestroyed,
        In::QemuLost,
        In::Crashed { has_run: true },
        In::Crashed { has_run: false },
    ]
}

const FOUND: [QemuAtStart; 4] =
    [QemuAtStart::Running, QemuAtStart::Paused, QemuAtStart::Gone, QemuAtStart::Rebooted];

const DECISIONS: [OperatorDecision; 5] = [
    OperatorDecision::RunHere { force: false },
    OperatorDecision::RunHere { force: true },
    OperatorDecision::DiscardCopy,
    OperatorDecision::WithoutRegistry { run_here: true },
    OperatorDecision::WithoutRegistry { run_here: false },
];

/// Returns every answer of a registry that a role may distinguish; none if there is no registry.
fn answers(terms: &MigrationTerms) -> Vec<RegistryAnswer> {
    let Some(base) = terms.registry else { return vec![] };
    let owned = |epoch, owner: &HostId, offer| {
        Some(Ownership { epoch, owner: owner.clone(), offer, released: false })
    };
    let offered = |pid, run| Some(Box::new(Offer { epoch: EPOCH, incarnation: incarnation(pid), run }));
    [
        owned(base, &terms.source, None),
        owned(base, &terms.source, offered(1, true)),
        owned(base, &terms.source, offered(1, false)),
        owned(base, &terms.source, offered(2, true)),
        owned(EPOCH, &terms.destination, None),
        owned(EPOCH, &terms.source, None),
        owned(EPOCH.next(), &terms.source, None),
        owned(EPOCH.next(), &terms.destination, None),
        owned(Epoch(5), &terms.source, None),
        owned(base, &terms.destination, None),
        HostId::new("third").ok().and_then(|third| owned(EPOCH.next(), &third, None)),
        None,
    ]
    .map(RegistryAnswer::Record)
    .into_iter()
    .chain([RegistryAnswer::Unreachable, RegistryAnswer::Unknown])
    .collect()
}

fn source_events(terms: &MigrationTerms) -> Vec<SourceEvent> {
    use SourceEvent as On;
    let epoch = EPOCH;
    let mut events = vec![];
    events.extend([true, false].map(|run| On::Begin { run }));
    events.extend([true, false].map(|run| On::Stop { run }));
    events.extend([1, 2].map(|pid| On::Ready { epoch, incarnation: incarnation(pid) }));
    events.extend([
        On::Running { epoch },
        On::Incomplete { epoch },
        On::Refused { epoch },
        On::Crashed { epoch },
        On::Asked { epoch },
    ]);
    events.extend([On::Running { epoch: BASE }, On::Cancel, On::Failed, On::PeerSilent, On::PeerLost]);
    events.extend([On::QemuDied, On::Continued, On::ContinueFailed]);
    events.extend(FOUND.map(On::Restarted));
    events.push(On::ContactLostForGood);
    events.extend(answers(terms).into_iter().map(On::RegistryAnswered));
    events.extend(DECISIONS.map(On::OperatorDecided));
    events.push(On::Repeat);
    events
}

fn destination_events(terms: &MigrationTerms) -> Vec<DestinationEvent> {
    use DestinationEvent as On;
    let epoch = EPOCH;
    let verdict_event = |verdict| On::SourceAnswered { epoch, verdict };
    let mut events = vec![On::Prepare, On::Loaded { incarnation: incarnation(1), run: true }];
    for (pid, run) in [(1, true), (1, false), (2, true)] {
        events.push(On::Go { epoch, incarnation: incarnation(pid), run });
        events.push(verdict_event(Verdict::Committed { incarnation: incarnation(pid), run }));
    }
    events.extend([
        verdict_event(Verdict::Aborted),
        verdict_event(Verdict::Returned),
        verdict_event(Verdict::Undecided),
    ]);
    events.extend([On::AbortReceived { epoch }, On::AbortReceived { epoch: BASE }, On::Asked { epoch }]);
    events.extend([On::Failed, On::Cancel, On::PeerSilent, On::PeerLost, On::ContactLostForGood]);
    events.extend([
        On::QemuDied,
        On::Continued { missing: false },
        On::Continued { missing: true },
        On::Completed,
    ]);
    events.push(On::ContFailed);
    events.extend(FOUND.map(On::Restarted));
    events.extend(answers(terms).into_iter().map(On::RegistryAnswered));
    events.extend(DECISIONS.map(On::OperatorDecided));
    events.push(On::Repeat);
    events
}

#[cfg(test)]
mod tests;
