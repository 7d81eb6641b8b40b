//! The handover as a stateright model: possible events in a world, and properties that always hold.

use engine::handover::destination::{DestinationEvent, DestinationState};
use engine::handover::recover::OperatorDecision;
use engine::handover::registry::RegistryAnswer;
use engine::handover::source::{SourceEvent, SourceState};
use stateright::{Model, Property};

use crate::heal;
use crate::mutation::Rules;
use crate::overrides;
use crate::world::{Budget, Life, Packet, Qemu, Side, World};

pub(crate) struct Handover {
    pub(crate) rules: Rules,
    pub(crate) budget: Budget,
    pub(crate) registry: bool,
}

/// Interruption of an agent while it performs the effects of one event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Interruption {
    /// The agent is killed after this many effects.
    Death(usize),
    /// The journal does not accept an entry.
    JournalFailure,
}

/// Interruption of an action, if there is one.
pub(crate) type Cut = Option<Interruption>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Act {
    Begin(Cut),
    Stop(Cut),
    SendAll,
    Deliver(Packet, bool, Cut),
    Lose(Packet),
    Repeat(Side, Cut),
    SourceCont(Cut),
    SourceContFails,
    DestinationCont(Cut),
    DestinationContFails(Cut),
    Complete(Cut),
    Crash(Side),
    CrashHost(Side, usize),
    HostGone(Side),
    Restart(Side, Cut),
    KillSourceQemu(Cut),
    KillDestinationQemu(Cut),
    Trouble(Trouble, Cut),
    ForeignCont,
    Decide(Side, OperatorDecision),
    LoseRegister,
    Override(Side, OperatorDecision),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Trouble {
    SourceCancelled,
    SourceLosesPeer,
    SourceGivesUpContact,
    SourceWaitsForRegister,
    DestinationCancelled,
    DestinationLosesPeer,
    DestinationGivesUpContact,
    DestinationWaitsForRegister,
}

const TROUBLES: [Trouble; 8] = [
    Trouble::SourceCancelled,
    Trouble::SourceLosesPeer,
    Trouble::SourceGivesUpContact,
    Trouble::SourceWaitsForRegister,
    Trouble::DestinationCancelled,
    Trouble::DestinationLosesPeer,
    Trouble::DestinationGivesUpContact,
    Trouble::DestinationWaitsForRegister,
];

const SIDES: [Side; 2] = [Side::Source, Side::Destination];

/// No transition has more effects than this.
pub(crate) const MOST_EFFECTS: usize = 6;

impl Model for Handover {
    type State = World;
    type Action = Act;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.budget, self.registry)]
    }

    #[expect(clippy::too_many_lines, reason = "one part for each action")]
    fn actions(&self, world: &World, acts: &mut Vec<Act>) {
        let left = &world.budget;
        let (source, destination) = (&world.source, &world.destination);
        // Every action of an agent may end with its death after some of its effects.
        let mut killable = |act: &dyn Fn(Cut) -> Act| {
            acts.push(act(None));
            if left.agent_crashes > 0 {
                acts.extend((0..MOST_EFFECTS).map(|effects| act(Some(Interruption::Death(effects)))));
            }
            if left.journal_failures > 0 {
                acts.push(act(Some(Interruption::JournalFailure)));
            }
        };
        let (source_up, destination_up) = (source.life == Life::Up, destination.life == Life::Up);
        let at_home =
            matches!(source.state(), SourceState::Idle | SourceState::Aborted | SourceState::Returned);
        if source_up && at_home && world.source_runs() && left.attempts > 0 {
            killable(&Act::Begin);
        }
        if source_up && world.streams && matches!(source.state(), SourceState::Prepared { .. }) {
            killable(&Act::Stop);
        }
        for packet in &world.net {
            killable(&|cut| Act::Deliver(*packet, false, cut));
        }
        if source_up {
            killable(&|cut| Act::Repeat(Side::Source, cut));
        }
        if destination_up {
            killable(&|cut| Act::Repeat(Side::Destination, cut));
        }
        if world.source_cont && !world.held {
            killable(&Act::SourceCont);
        }
        if world.destination_cont {
            killable(&Act::DestinationCont);
        }
        if world.destination_cont && left.cont_failures > 0 {
            killable(&Act::DestinationContFails);
        }
        if destination_up && world.can_complete() {
            killable(&Act::Complete);
        }
        for (side, life) in [(Side::Source, source.life), (Side::Destination, destination.life)] {
            if life == Life::Down {
                killable(&|cut| Act::Restart(side, cut));
            }
        }
        if left.qemu_deaths > 0 && world.source_qemu != Qemu::Gone {
            killable(&Act::KillSourceQemu);
        }
        if left.qemu_deaths > 0 && world.destination_qemu != Qemu::Gone {
            killable(&Act::KillDestinationQemu);
        }
        if left.troubles > 0 {
            for trouble in TROUBLES {
                killable(&|cut| Act::Trouble(trouble, cut));
            }
        }
        if world.streams && matches!(source.state(), SourceState::Stopped { .. }) {
            acts.push(Act::SendAll);
        }
        for packet in &world.net {
            acts.push(Act::Lose(*packet));
            if left.duplicates > 0 {
                acts.push(Act::Deliver(*packet, true, None));
            }
        }
        if world.source_cont && !world.held && left.cont_failures > 0 {
            acts.push(Act::SourceContFails);
        }
        for side in SIDES {
            let (life, entries) = match side {
                Side::Source => (source.life, source.journal.len()),
                Side::Destination => (destination.life, destination.journal.len()),
            };
            if life == Life::Up && left.agent_crashes > 0 {
                acts.push(Act::Crash(side));
            }
            if life != Life::Gone && left.host_crashes > 0 {
                acts.extend((1..=entries).map(|keep| Act::CrashHost(side, keep)));
            }
            if life != Life::Gone && left.hosts_gone > 0 {
                acts.push(Act::HostGone(side));
            }
        }
        if left.decisions > 0 {
            acts.push(Act::Decide(Side::Source, OperatorDecision::RunHere { force: false }));
        }
        if left.registers_lost > 0 {
            acts.push(Act::LoseRegister);
        }
        if left.overrides > 0 {
            acts.extend(
                overrides::overrides(world).into_iter().map(|(side, word)| Act::Override(side, word)),
            );
        }
        if left.foreign_conts > 0 && world.source_qemu == Qemu::Paused {
            acts.push(Act::ForeignCont);
        }
    }

    fn next_state(&self, last: &World, act: Act) -> Option<World> {
        let mut world = last.clone();
        let cut = self.perform(&mut world, act);
        if cut == Some(Interruption::JournalFailure) {
            // A migration whose first entry fails is refused to the user or to the source, and nothing begins.
            let is_first = matches!(act, Act::Begin(_) | Act::Deliver(Packet::Propose(_), ..));
            let has_failed = world.budget.journal_failures < last.budget.journal_failures;
            return (has_failed && !is_first).then_some(world);
        }
        if cut.is_some() {
            // Killed after more effects than there were: the same as not killed.
            let died = |before: Life, after: Life| before == Life::Up && after == Life::Down;
            let restarted = matches!(act, Act::Restart(..));
            let source = died(last.source.life, world.source.life)
                || (restarted && last.source.life == Life::Down && world.source.life == Life::Down);
            let destination = died(last.destination.life, world.destination.life)
                || (restarted && last.destination.life == Life::Down && world.destination.life == Life::Down);
            let killed = match act {
                Act::Restart(Side::Source, _) => source,
                Act::Restart(Side::Destination, _) => destination,
                _ => source || destination,
            };
            if !killed {
                return None;
            }
            world.budget.agent_crashes -= 1;
        }
        (world != *last).then_some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::<Self>::always(TWO_RUNNING, |_, world| {
                !(world.source_runs() && world.destination_runs())
            }),
            Property::<Self>::always(TWO_HISTORIES, |_, world| !world.two_histories()),
            Property::<Self>::always(ALONE, |_, world| !world.ghost.decided_alone),
            Property::<Self>::always(DISCARDED, |_, world| !world.ghost.ran_discarded),
            Property::<Self>::always(THREW_AWAY, |_, world| !world.ghost.threw_away),
            Property::<Self>::always(LOST_PAGES, |_, world| !world.lost_pages()),
            Property::<Self>::always(KNOWS, |_, world| !world.doubts_what_it_knows()),
            Property::<Self>::always(STILL_WAITS, |_, world| !world.ghost.still_waits),
            // After an operator's decision the two hosts may contradict one another: the connection is closed then.
            Property::<Self>::always(LEGAL, |_, world| world.ghost.word || world.ghost.illegal.is_none()),
        ];
        if self.budget.decisions + self.budget.overrides == 0 {
            all.push(Property::<Self>::always(ONE_RUNS, |model, world| heal::one_runs(&model.rules, world)));
            all.push(Property::<Self>::always(LAST_COPY, |model, world| {
                heal::last_copy(&model.rules, world)
            }));
        }
        all.push(Property::<Self>::sometimes("a VM moves", |_, world| {
            world.destination_runs()
                && matches!(world.source.state(), SourceState::Done { .. })
                && matches!(world.destination.state(), DestinationState::Active { .. })
        }));
        all.push(Property::<Self>::sometimes("a VM stays", |_, world| {
            world.source_runs() && world.ghost.source.ran_on && *world.source.state() == SourceState::Aborted
        }));
        if self.budget.qemu_deaths + self.budget.cont_failures > 0 {
            all.push(Property::<Self>::sometimes("a VM returns", |_, world| {
                world.source_runs() && *world.source.state() == SourceState::Returned
            }));
        }
        all
    }
}

pub(crate) const TWO_RUNNING: &str = "never two running";
pub(crate) const TWO_HISTORIES: &str = "never two histories";
pub(crate) const ALONE: &str = "no host in doubt decides alone";
pub(crate) const THREW_AWAY: &str = "a copy that has run is never discarded";
pub(crate) const DISCARDED: &str = "a discarded copy is never run";
pub(crate) const LOST_PAGES: &str = "what a guest that runs elsewhere still needs is not discarded";
pub(crate) const KNOWS: &str = "a host that knows that its guest has run reports no doubt";
pub(crate) const STILL_WAITS: &str = "an operator's decision without the registry ends the waiting for it";
pub(crate) const LEGAL: &str = "no event is illegal";
pub(crate) const ONE_RUNS: &str = "when links heal and agents restart, one is running";
pub(crate) const LAST_COPY: &str = "a last copy that is whole is run";

impl Handover {
    /// Performs an action, and charges it to the budget. Returns the point at which an agent was to be killed.
    #[expect(clippy::too_many_lines, reason = "one arm for each action")]
    fn perform(&self, world: &mut World, act: Act) -> Cut {
        let rules = &self.rules;
        match act {
            Act::Begin(cut) => {
                world.budget.attempts -= 1;
                world.begin(rules, cut);
                cut
            }
            Act::Stop(cut) => {
                world.feed_source(rules, &SourceEvent::Stop { run: world.source_runs() }, cut);
                cut
            }
            Act::SendAll => {
                world.send_all(rules);
                None
            }
            Act::Deliver(packet, doubled, cut) => {
                if doubled {
                    world.budget.duplicates -= 1;
                } else {
                    world.net.retain(|other| *other != packet);
                }
                world.deliver(rules, packet, cut);
                cut
            }
            Act::Lose(packet) => {
                world.lose(packet);
                None
            }
            Act::Repeat(Side::Source, cut) => {
                world.repeat_source(rules, cut);
                cut
            }
            Act::Repeat(Side::Destination, cut) => {
                world.repeat_destination(rules, cut);
                cut
            }
            Act::SourceCont(cut) => {
                world.source_cont_done(rules, cut);
                cut
            }
            Act::SourceContFails => {
                world.budget.cont_failures -= 1;
                world.source_cont = false;
                world.feed_source(rules, &SourceEvent::ContinueFailed, None);
                None
            }
            Act::DestinationCont(cut) => {
                world.destination_cont_done(rules, cut);
                cut
            }
            Act::DestinationContFails(cut) => {
                world.budget.cont_failures -= 1;
                world.destination_cont = false;
                world.ghost.destination.cont_failed = true;
                world.feed_destination(rules, &DestinationEvent::ContFailed, cut);
                cut
            }
            Act::Complete(cut) => {
                world.complete(rules, cut);
                cut
            }
            Act::Crash(side) => {
                world.budget.agent_crashes -= 1;
                world.crash(side);
                None
            }
            Act::CrashHost(side, keep) => {
                world.budget.host_crashes -= 1;
                world.crash_host(side, keep);
                None
            }
            Act::HostGone(side) => {
                world.budget.hosts_gone -= 1;
                world.crash_host(side, 1);
                match side {
                    Side::Source => world.source.life = Life::Gone,
                    Side::Destination => world.destination.life = Life::Gone,
                }
                None
            }
            Act::Restart(side, cut) => {
                world.restart(rules, side, cut);
                cut
            }
            Act::KillSourceQemu(cut) => {
                world.budget.qemu_deaths -= 1;
                world.kill_source_qemu(rules, cut);
                cut
            }
            Act::KillDestinationQemu(cut) => {
                world.budget.qemu_deaths -= 1;
                world.kill_destination_qemu();
                world.feed_destination_if(rules, &DestinationEvent::QemuDied, cut);
                cut
            }
            Act::Trouble(trouble, cut) => {
                world.budget.troubles -= 1;
                trouble.happen(rules, world, cut);
                cut
            }
            Act::ForeignCont => {
                world.budget.foreign_conts -= 1;
                if !world.held {
                    world.source_qemu = Qemu::Running;
                    world.ghost.source.ran_on = true;
                }
                None
            }
            Act::LoseRegister => {
                world.budget.registers_lost -= 1;
                world.registry_lost = true;
                None
            }
            Act::Override(side, word) => {
                world.budget.overrides -= 1;
                overrides::apply_override(rules, world, side, word);
                None
            }
            Act::Decide(side, decision) => {
                world.budget.decisions -= 1;
                let undecided = match side {
                    Side::Source => {
                        matches!(
                            world.source.state(),
                            SourceState::Committed { .. } | SourceState::QemuLost { .. }
                        )
                    }
                    Side::Destination => matches!(world.destination.state(), DestinationState::Ready { .. }),
                };
                if undecided {
                    world.decide(rules, side, decision);
                }
                None
            }
        }
    }
}

impl Trouble {
    fn happen(self, rules: &Rules, world: &mut World, cut: Cut) {
        let unknown = RegistryAnswer::Unknown;
        match self {
            Self::SourceCancelled => world.feed_source_if(rules, &SourceEvent::Cancel, cut),
            Self::SourceLosesPeer => {
                world.streams = false;
                world.feed_source_if(rules, &SourceEvent::PeerLost, cut);
            }
            Self::SourceGivesUpContact => world.feed_source_if(rules, &SourceEvent::ContactLostForGood, cut),
            Self::SourceWaitsForRegister => {
                if matches!(world.source.state(), SourceState::Reclaiming { .. }) {
                    world.feed_source(rules, &SourceEvent::RegistryAnswered(unknown), cut);
                }
            }
            Self::DestinationCancelled => world.feed_destination_if(rules, &DestinationEvent::Cancel, cut),
            Self::DestinationLosesPeer => {
                world.streams = false;
                world.feed_destination_if(rules, &DestinationEvent::PeerLost, cut);
            }
            Self::DestinationGivesUpContact => {
                world.feed_destination_if(rules, &DestinationEvent::ContactLostForGood, cut);
            }
            Self::DestinationWaitsForRegister => {
                if matches!(
                    world.destination.state(),
                    DestinationState::Acquiring { .. }
                        | DestinationState::Refusing
                        | DestinationState::QemuLost
                        | DestinationState::Starting { again: true, .. }
                ) && world.registry.is_some()
                {
                    world.feed_destination(rules, &DestinationEvent::RegistryAnswered(unknown), cut);
                }
            }
        }
    }
}
