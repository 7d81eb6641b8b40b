//! Network cards as an arriving participant: announcements of the guest's new place, frames that wait for it, and its
//! first frames here.
//!
//! QEMU announces the guest by itself only after it runs. So the first announcement is written into QEMU's own tap
//! right before `cont`, by the agent: frames of clients that arrive from then on wait in the tap until the guest reads
//! them, behind those that the source has held. Entries of connection tracking are installed as the source sends them,
//! all of them before it reports that it is held. Nothing of this can fail a migration.

use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use ::memory::ReceiverHandle;
use net::conntrack_installer::{self, ConntrackInstaller};
use net::ethernet::position_of_card;
use net::{Announcer, Claim, Diversion, FirstFrames, FirstFramesWatch, Mac, Merger, MergerHandle};
use proto::MigrationId;
use proto::message::{CardClaims, CardFrames, ClaimedAddress, Message, Proposal};
use tracee::Process;
use tracing::{info, warn};

use super::participant::{
    ArrivalEnvironment, ArrivalPlan, ArrivingParticipant, ArrivingProfile, GuestRan, Incomparable,
    LastMessage, Leftover, OpenBlocks, ReceivedRound,
};
use crate::destination::held_flows::HeldFlows;
use host::redirections::AgreedRedirections;
use host::verification::CompareError;
use host::{ArrivalArtifacts, ArrivalError, ArrivingVm, network_cards};

/// Time after which a guest that nothing has reached is reported.
const FIRST_FRAMES_WAIT: Duration = Duration::from_secs(1);

/// Network cards of a VM that arrives.
pub(super) struct ArrivingNetwork {
    environment: ArrivalEnvironment,
    cards: ArrivingCards,
    /// Installs conntrack entries of the guest; absent where that is impossible, and after a restart of the agent.
    conntrack: Option<ConntrackInstaller>,
    /// True if the guest comes from another network: nothing announces it in this one by addresses of that.
    is_redirected: bool,
    /// Redirection of its connections then.
    redirection: AgreedRedirections,
}

/// Name of the file in the VM's directory that lists conntrack entries while they may have to be removed.
const FLOWS_FILE: &str = "flows";

impl ArrivingNetwork {
    pub(super) fn new(environment: &ArrivalEnvironment) -> Self {
        let environment = environment.clone();
        Self {
            environment,
            cards: ArrivingCards::default(),
            conntrack: None,
            is_redirected: false,
            redirection: AgreedRedirections::default(),
        }
    }

    /// Returns the list of conntrack entries that this agent or one before it has made.
    fn flows_file(&self) -> PathBuf {
        let ArrivalEnvironment { context, migration, .. } = &self.environment;
        ArrivalArtifacts::of(context, migration).directory.join(FLOWS_FILE)
    }
}

impl ArrivingParticipant for ArrivingNetwork {
    fn profile(&self) -> ArrivingProfile {
        ArrivingProfile { name: "network", can_post_copy: false, irreversible: None }
    }

    fn check(&mut self, proposal: &Proposal, plan: &ArrivalPlan) -> Result<(), ArrivalError> {
        self.is_redirected = proposal.redirection.is_some();
        self.redirection = AgreedRedirections::clone(&plan.redirection);
        Ok(())
    }

    fn prepare(&mut self, _: &mut ArrivalArtifacts) -> Result<(), ArrivalError> {
        Ok(())
    }

    /// Finds the cards; frames of the source may arrive from now on.
    fn open(&mut self, vm: &mut ArrivingVm) -> Result<OpenBlocks, ArrivalError> {
        self.cards = ArrivingCards::find(vm, &self.environment.migration);
        self.cards.is_redirected = self.is_redirected;
        match ConntrackInstaller::start(&vm.artifacts.directory.join(FLOWS_FILE)) {
            Ok(conntrack_installer) => {
                self.environment.mailbox.pass_flows_to(conntrack_installer.clone());
                self.conntrack = Some(conntrack_installer);
            }
            Err(error) => info!(%error, "tracked connections cannot be installed on this host"),
        }
        if let Some(input) = self.cards.frames_input() {
            let flows = |installer| HeldFlows::new(installer, self.redirection.clone());
            self.environment.mailbox.pass_frames_to(input, self.conntrack.clone().map(flows));
        }
        let after_round = |_: &ReceivedRound, _: &ReceiverHandle| {};
        Ok(OpenBlocks { writers: Vec::new(), after_round: Box::new(after_round) })
    }

    fn compare(
        &mut self,
        _: &mut ArrivingVm,
        block: usize,
        _: u64,
        _: &[String],
    ) -> Result<Vec<u64>, Incomparable> {
        Err(CompareError::NotThere(format!("block {block} of the network cards")).into())
    }

    /// Learns which addresses the guest has claimed at the source, where it is about to be stopped.
    fn learn(&mut self, message: &Message) {
        if let Message::Claims { cards } = message {
            self.cards.learn(cards);
        }
    }

    fn freeze(&mut self) -> Result<(), ArrivalError> {
        Ok(())
    }

    fn ready(&mut self, _: &mut ArrivingVm) -> Result<(), ArrivalError> {
        Ok(())
    }

    fn before_cont(&mut self) {
        self.cards.announce();
    }

    fn commit(&mut self, vm: &mut ArrivingVm, runs_for: Option<Duration>) {
        if let Some(conntrack) = &self.conntrack {
            conntrack.keep();
        }
        // A guest that stays paused has no first frames, but its place is here.
        let Some(runs_for) = runs_for else {
            self.cards.announce();
            return self.cards.release();
        };
        let now = SystemTime::now();
        self.cards.guest_runs(&vm.process, now.checked_sub(runs_for).unwrap_or(now));
    }

    /// No tap may seem to be in use when QEMU has ended.
    fn abandon(&mut self) {
        self.cards = ArrivingCards::default();
        match self.conntrack.take() {
            Some(conntrack) => conntrack.remove_all(),
            None => conntrack_installer::remove_recorded(&self.flows_file()),
        }
    }

    fn undo(&mut self, _: &ArrivalArtifacts, _: GuestRan) -> Option<Leftover> {
        None
    }

    fn places(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Returns the times of the guest's first frames.
    fn last_message(&mut self) -> Option<LastMessage> {
        let (migration, measuring) = (self.environment.migration.clone(), self.cards.measuring.take());
        Some(Box::new(move || {
            let cards = measuring.and_then(|measuring| measuring.join().ok()).unwrap_or_default();
            info!(%migration, ?cards, "first frames of the guest");
            Message::FirstFrames { epoch: migration.epoch, cards }
        }))
    }

    /// An agent before this one may have died before it had removed the list.
    fn finish(&mut self, _: Option<&ArrivingVm>) {
        conntrack_installer::remove_record(&self.flows_file());
    }
}

/// The cards, and what is done with their frames.
#[derive(Default)]
struct ArrivingCards {
    /// True if nothing announces the guest.
    is_redirected: bool,
    announcer: Option<Announcer>,
    /// Interfaces of the cards, with the cards' addresses.
    interfaces: Vec<(String, Mac)>,
    /// Sockets that keep the first frames, from shortly before the guest runs.
    watch: Option<FirstFramesWatch>,
    /// Merges the source's frames with those that arrive here directly, where the kernel can divert them.
    merger: Option<Merger>,
    announced_at: Option<SystemTime>,
    measuring: Option<JoinHandle<Vec<CardFrames>>>,
}

impl ArrivingCards {
    /// Finds the cards of a QEMU that was just started.
    fn find(vm: &mut ArrivingVm, migration: &MigrationId) -> Self {
        let found = vm.process.try_clone().map_err(|error| crate::chain(&error)).and_then(|process| {
            let qmp = vm.qmp().map_err(|error| crate::chain(&error))?;
            let cards = network_cards::cards(qmp, &process).map_err(|error| crate::chain(&error))?;
            let interfaces =
                network_cards::interfaces(&cards, &process).map_err(|error| crate::chain(&error))?;
            Ok((cards, interfaces))
        });
        match found {
            Ok((cards, interfaces)) => {
                let merger = start_merger(&interfaces, migration);
                // Frames of the time before are old, and the source's QEMU has got them.
                for tap in cards.iter().flat_map(|card| &card.taps) {
                    while let Ok(Some(_)) = tap.take(&mut [0; 64]) {}
                }
                let announcer = (!cards.is_empty()).then(|| Announcer::new(cards));
                Self { announcer, interfaces, merger, ..Self::default() }
            }
            Err(error) => {
                warn!(error, "the taps of the guest are unknown; QEMU alone announces the guest");
                Self::default()
            }
        }
    }

    /// Learns which addresses the guest has claimed at the source, where it is about to be stopped.
    fn learn(&mut self, cards: &[CardClaims]) {
        let Some(announcer) = &mut self.announcer else { return };
        for card in cards {
            let Ok(mac) = card.mac.parse() else { continue };
            let claim = |claimed: &ClaimedAddress| Claim {
                vlan: claimed.vlan.filter(|vlan| (1..=4094).contains(vlan)),
                address: claimed.address,
                is_router: claimed.router,
            };
            announcer.set_claims(mac, &card.addresses.iter().map(claim).collect::<Vec<_>>());
            let place = position_of_card(self.interfaces.iter().map(|(_, mac)| *mac), mac);
            if let Some((_, known)) = place.and_then(|place| self.interfaces.get_mut(place)) {
                *known = mac;
            }
        }
        self.watch();
    }

    /// Begins to keep the guest's first frames.
    fn watch(&mut self) {
        let named = self.interfaces.iter().map(|(interface, mac)| (interface.as_str(), *mac));
        // What comes here directly is seen there, as long as it is diverted.
        let diverted = self.merger.iter().flat_map(Merger::interfaces);
        match FirstFramesWatch::start(named.chain(diverted)) {
            Ok(watch) => self.watch = Some(watch),
            Err(error) => warn!(%error, "the guest's first frames are not measured"),
        }
    }

    /// Returns the way in for the source's frames, if they can be delivered.
    fn frames_input(&self) -> Option<MergerHandle> {
        self.merger.as_ref().map(Merger::handle)
    }

    /// Announces the guest, which runs a moment from now.
    fn announce(&mut self) {
        if let Some(Err(error)) = self.merger.as_ref().map(Merger::announced) {
            warn!(%error, "frames for the guest are not held");
        }
        let Some(announcer) = &self.announcer else { return };
        self.announced_at.get_or_insert_with(SystemTime::now);
        if !self.is_redirected {
            announcer.announce();
        }
    }

    /// Delivers the frames that were kept for the guest, which stays on this host. Returns at once.
    fn release(&mut self) {
        if let Some(merger) = self.merger.take() {
            merger.guest_runs();
        }
    }

    /// Begins to repeat the announcement, and to measure the guest's first frames. The guest runs since `ran`.
    fn guest_runs(&mut self, process: &Process, ran: SystemTime) {
        self.release();
        if let (Some(announcer), Ok(process)) = (self.announcer.take(), process.try_clone())
            && !self.is_redirected
            && let Err(error) = network_cards::repeat_announcement(announcer, process)
        {
            warn!(%error, "the announcement of the guest is not repeated");
        }
        let Some(watch) = self.watch.take() else { return };
        let (since, interfaces) = (self.announced_at.unwrap_or(ran), self.interfaces.clone());
        let measure = move || {
            let frames = watch.measure(since, ran, FIRST_FRAMES_WAIT);
            frames.into_iter().zip(interfaces).map(|(frames, (name, _))| card(&frames, name)).collect()
        };
        match thread::Builder::new().name("first-frames".to_owned()).spawn(measure) {
            Ok(measuring) => self.measuring = Some(measuring),
            Err(error) => warn!(%error, "the guest's first frames are not measured"),
        }
    }
}

/// Begins to discard frames that the network sends to a guest that has not arrived yet.
fn start_merger(interfaces: &[(String, Mac)], migration: &MigrationId) -> Option<Merger> {
    if interfaces.is_empty() {
        return None;
    }
    let named: Vec<_> = interfaces.iter().map(|(interface, mac)| (interface.as_str(), *mac)).collect();
    match Diversion::start(&migration.to_string(), &named).and_then(Merger::start) {
        Ok(merger) => Some(merger),
        Err(error) => {
            info!(%migration, %error, "frames for the guest cannot be held on this host");
            None
        }
    }
}

fn card(frames: &FirstFrames, interface: String) -> CardFrames {
    let us = |duration: Duration| duration.as_micros() as u64;
    CardFrames {
        mac: frames.mac.to_string(),
        interface,
        first_in_us: frames.first_in.map(us),
        first_out_us: frames.first_out.map(us),
    }
}
