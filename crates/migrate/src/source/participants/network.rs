//! Network cards as a participant. Which addresses the guest claims is observed while it runs here, so that the
//! destination can announce them. From shortly before the stop on, frames for the guest are held and sent to the
//! destination; if the guest stays, it gets them here, and is announced here again. Its conntrack entries are copied
//! to the destination.

mod arping;
mod conntrack;
mod held_frames;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{PageSet, Reductions, RoundStats, ScanError, ScanStats};
use net::announcer::Card;
use net::{Announcer, Arping, ClaimSnooper, Claims, Diversion, HeldFrame};
use proto::message::{Acceptance, CardClaims, CardFrames, ClaimedAddress, Finding, Message, Severity};
use qemu::qmp::Qmp;
use tracee::Tap;
use tracing::warn;

use self::arping::BridgedCard;
use self::conntrack::ConntrackCopier;
use self::held_frames::{FramesConnection, HoldingConnection};
use super::participant::{Block, Comparison, Environment, Participant, PrepareProgress, Profile, UndoResult};
use crate::source::agreement::{Agreed, RedirectedGuest};
use crate::source::failure::Failure;
use crate::source::telemetry::ShownBlock;
use api::report::{Report, TrackedConnections};
use api::{NetworkCheck, PacketsAtStop};
use host::verification::BlockHashes;
use host::{SourceVm, network_cards};

/// Longest wait until QEMU has read the frames that reached it before the diversion.
const RING_PATIENCE: Duration = Duration::from_millis(20);
/// Pause between two looks at QEMU's queues.
const RING_PAUSE: Duration = Duration::from_micros(100);
/// Most bytes of frames that are sent at once, but for the last frame.
const PIECE_BYTES: usize = proto::limits::BLOB_BYTES / 2;

/// Network cards of a VM that leaves.
pub(super) struct Network {
    environment: Environment,
    /// True if the destination announces the guest's addresses, and has not reported its first frames.
    expects_first_frames: bool,
    takes_frames: bool,
    takes_flows: bool,
    /// True if the destination may have announced the guest there.
    may_be_announced: bool,
    /// Interfaces behind the cards.
    interfaces: Vec<network_cards::Interface>,
    /// Cards that can be asked once the guest is at the destination.
    bridged: Vec<BridgedCard>,
    /// Asks the guest at the destination, until its first frames are reported.
    arping: Option<Arping>,
    /// Redirection of the guest's connections, if it moves to another network.
    redirected: Option<RedirectedGuest>,
    /// Copies conntrack entries; absent where that is impossible, and where no card has a tap.
    conntrack: Option<ConntrackCopier>,
    /// Observes the claims; absent where that is impossible, and where no card has a tap.
    snooper: Option<Arc<ClaimSnooper>>,
    /// Connection for held frames, or the reason why there is none; absent if no frames are to be held.
    connection: Option<Result<FramesConnection, String>>,
    /// Holds frames; absent before the stop, and where that is impossible.
    holder: Option<HoldingConnection>,
}

impl Network {
    pub(super) fn new(environment: &Environment) -> Self {
        Self {
            environment: environment.clone(),
            expects_first_frames: false,
            takes_frames: false,
            takes_flows: false,
            // An agent before this one may have left the guest to the destination.
            may_be_announced: environment.is_resumed,
            interfaces: Vec::new(),
            bridged: Vec::new(),
            arping: None,
            redirected: None,
            conntrack: None,
            snooper: None,
            connection: None,
            holder: None,
        }
    }

    /// Begins to copy the conntrack entries of the cards. Without this, firewalls that know only their own
    /// connections cut those of the guest.
    fn copy_conntrack(&mut self) {
        let started = if self.takes_flows {
            let redirected = self.redirected.clone();
            ConntrackCopier::start(&self.environment, self.snooper.clone(), &self.interfaces, redirected)
        } else {
            Err("the destination cannot install tracked connections".to_owned())
        };
        match started {
            Ok(copier) => self.conntrack = Some(copier),
            Err(reason) => self.environment.controls.note("connections-not-carried", reason),
        }
    }

    /// Reports the connections that were carried, and those that were not.
    fn report_conntrack(&mut self) {
        // What goes on through this host is still tracked and translated here.
        let stay = self.redirected.is_some();
        let end = |copier: ConntrackCopier| if stay { copier.copied() } else { copier.remove_here() };
        let Some(copied) = self.conntrack.take().map(end) else { return };
        if copied == TrackedConnections::default() {
            return;
        }
        let host = self.environment.terms.destination.as_str();
        self.environment.controls.report(|report| {
            report.findings.extend(cut_off(&copied, host));
            report.connections = Some(copied);
        });
    }

    /// Diverts the frames for the guest, and waits until QEMU has read those before: it reads more while it stops, and
    /// would not pass them on.
    fn hold(&self, connection: FramesConnection, vm: &SourceVm) -> Result<HoldingConnection, String> {
        if connection.is_lost() {
            return Err("the connection for them was lost".to_owned());
        }
        let named: Vec<_> =
            self.interfaces.iter().map(|(interface, mac)| (interface.as_str(), *mac)).collect();
        let cards = self.cards(vm)?;
        let name = self.environment.terms.migration.to_string();
        let diversion = Diversion::start(&name, &named).map_err(|error| crate::chain(&error))?;
        let held = connection.hold(diversion).map_err(|error| crate::chain(&error))?;
        wait_until_read(&cards);
        Ok(held)
    }

    /// Returns the cards that were found at the start. QEMU, which may need long for an answer, is not asked.
    fn cards(&self, vm: &SourceVm) -> Result<Vec<Card>, String> {
        let card = |(_, mac): &network_cards::Interface| Card { mac: *mac, taps: Vec::new() };
        let mut cards: Vec<_> = self.interfaces.iter().map(card).collect();
        for (_, tap) in Tap::of_process(&vm.process).map_err(|error| crate::chain(&error))? {
            let place = self.interfaces.iter().position(|(interface, _)| interface == tap.interface());
            if let Some(card) = place.and_then(|place| cards.get_mut(place)) {
                card.taps.push(tap);
            }
        }
        cards.retain(|card| !card.taps.is_empty());
        Ok(cards)
    }

    /// Announces the guest, whose frames go to the destination if it was announced there, with the addresses that it
    /// claimed here.
    fn announce(&self, vm: &mut SourceVm) -> Result<(), String> {
        let cards = if self.interfaces.is_empty() { find_cards(vm)?.0 } else { self.cards(vm)? };
        if cards.is_empty() {
            return Ok(());
        }
        let mut announcer = Announcer::new(cards);
        for claims in self.snooper.iter().flat_map(|snooper| snooper.claims()) {
            announcer.set_claims(claims.mac(), &claims.all());
        }
        let frames = announcer.announce();
        self.environment.controls.note("announced-here", frames.to_string());
        let process = vm.process.try_clone().map_err(|error| crate::chain(&error))?;
        network_cards::repeat_announcement(announcer, process).map_err(|error| crate::chain(&error))
    }
}

impl Participant for Network {
    fn profile(&self) -> Profile {
        Profile { name: "network", can_post_copy: false, is_sent_first: false, irreversible: None }
    }

    fn report(&self, _: &Agreed<'_>, _: &mut Report) {}

    fn check(&mut self, agreed: &Agreed<'_>) -> Result<(), Failure> {
        let Acceptance { has_network, takes_frames, takes_flows, .. } = *agreed.acceptance;
        (self.expects_first_frames, self.takes_frames) = (has_network, takes_frames);
        self.takes_flows = takes_flows;
        self.redirected = agreed.redirection.cloned();
        Ok(())
    }

    /// Without this only switches are informed of the guest's new place, which is no reason not to migrate.
    fn prepare(&mut self, vm: &mut SourceVm, _: &Reductions) -> Result<PrepareProgress, Failure> {
        // The duplicates of the taps end here: a tap must not seem to be in use when its QEMU has ended.
        let found = find_cards(vm).map(|(_, interfaces)| self.interfaces = interfaces);
        if self.interfaces.is_empty() {
            if let Err(reason) = found {
                self.environment.controls.note("addresses-not-observed", reason);
            }
            return Ok(PrepareProgress::Done);
        }
        let settings = self.environment.controls.goals().settings;
        if self.expects_first_frames && settings.network_check != NetworkCheck::Off {
            self.bridged = arping::bridged(&self.interfaces);
        }
        let named = self.interfaces.iter().map(|(interface, mac)| (interface.as_str(), *mac));
        match ClaimSnooper::start(named) {
            Ok(snooper) => self.snooper = Some(Arc::new(snooper)),
            Err(error) => {
                self.environment.controls.note("addresses-not-observed", crate::chain(&error));
            }
        }
        if self.takes_frames && settings.packets_at_stop == PacketsAtStop::Hold {
            self.connection = Some(FramesConnection::open(&self.environment));
        }
        self.copy_conntrack();
        Ok(PrepareProgress::Done)
    }

    fn blocks(&mut self, _: &SourceVm) -> Result<Vec<Block>, Failure> {
        Ok(Vec::new())
    }

    fn progress(&self) -> Vec<ShownBlock> {
        Vec::new()
    }

    fn before_round(&mut self, _: &mut SourceVm, _: u64) -> Result<u64, Failure> {
        // If that fails, the next round tries it again.
        if matches!(&self.connection, Some(Ok(connection)) if connection.is_lost())
            && let Ok(connection) = FramesConnection::open(&self.environment)
        {
            self.connection = Some(Ok(connection));
        }
        Ok(u64::MAX)
    }

    fn after_round(&mut self, _: &RoundStats) {}

    fn scan(&mut self, _: Option<&mut Qmp>, _: &mut [PageSet]) -> Result<ScanStats, ScanError> {
        Ok(ScanStats::default())
    }

    fn after_scan(&mut self, _: &mut Qmp) -> Result<(), Failure> {
        Ok(())
    }

    /// Without this, frames that arrive while the guest is stopped are lost, as with other hypervisors.
    fn before_stop(&mut self, vm: &mut SourceVm) -> Result<(), Failure> {
        let Some(connection) = self.connection.take() else { return Ok(()) };
        match connection.and_then(|connection| self.hold(connection, vm)) {
            Ok(held) => self.holder = Some(held),
            Err(reason) => self.environment.controls.note("frames-not-held", reason),
        }
        Ok(())
    }

    /// Returns the addresses that the guest has claimed.
    fn message(&mut self) -> Option<Message> {
        let claims = self.snooper.as_ref().filter(|_| self.expects_first_frames)?.claims();
        Some(Message::Claims { cards: claims.iter().map(card).collect() })
    }

    fn freeze(&mut self, _: &mut SourceVm, _: Comparison, _: &mut [PageSet]) -> Result<(), Failure> {
        self.conntrack.iter().for_each(ConntrackCopier::finish_list);
        Ok(())
    }

    fn hash(
        &mut self,
        _: &mut SourceVm,
        _: usize,
        _: &[PageSet],
        _: &mut BlockHashes,
    ) -> Result<(), Failure> {
        Ok(())
    }

    fn ready(&mut self, _: &mut SourceVm) -> Result<(), Failure> {
        if self.conntrack.as_ref().is_some_and(|conntrack| !conntrack.wait_answer()) {
            let reason = "the destination has not installed the last ones when the guest runs there";
            self.environment.controls.note("connections-late", reason);
        }
        Ok(())
    }

    /// The observation ends later: to close its sockets takes the kernel milliseconds, for which the guest would wait.
    fn commit(&mut self) {
        self.may_be_announced = true;
    }

    /// The guest runs here again. Switches learn that first, and then it gets the frames that were held for it.
    fn undo(&mut self, vm: Option<&mut SourceVm>) -> UndoResult {
        (self.conntrack, self.connection) = (None, None);
        if let Some(vm) = vm
            && std::mem::take(&mut self.may_be_announced)
            && let Err(reason) = self.announce(vm)
        {
            warn!(reason, "the guest is not announced here; switches learn its place when it sends");
        }
        self.snooper = None;
        let Some(held) = self.holder.take() else { return UndoResult::Done };
        match held.deliver_back() {
            Ok(frames) => self.environment.controls.note("frames-delivered-back", frames.to_string()),
            // The rules are gone all the same.
            Err(error) => warn!(%error, "frames that were held for the guest are lost"),
        }
        UndoResult::Done
    }

    fn running(&mut self) {}

    fn finish(&mut self) {
        if self.expects_first_frames {
            let claims = self.snooper.as_ref().map_or_else(Vec::new, |snooper| snooper.claims());
            let guests = self.conntrack.as_ref().map(ConntrackCopier::addresses).unwrap_or_default();
            self.arping = arping::start(&self.bridged, &claims, &guests);
        }
        self.report_conntrack();
        let (connection, snooper, held) = (self.connection.take(), self.snooper.take(), self.holder.take());
        if let Some(held) = &held {
            self.environment.controls.note("frames-held", held.sent().to_string());
        }
        // To close sockets takes the kernel tens of milliseconds, for which the migration would seem to last.
        let end = move || {
            drop((connection, snooper));
            if let Some(held) = held {
                held.pass_on_late_frames();
            }
        };
        if let Err(error) = thread::Builder::new().name("late-frames".to_owned()).spawn(end) {
            warn!(%error, "late frames are not passed on to the guest");
        }
    }

    fn expects_message(&self) -> bool {
        self.expects_first_frames
    }

    /// Records the destination's measurement of the guest's first frames.
    fn learn(&mut self, message: &Message) {
        let Environment { controls, terms, .. } = &self.environment;
        let Message::FirstFrames { epoch, cards } = message else { return };
        if *epoch != terms.epoch() {
            return;
        }
        (self.expects_first_frames, self.arping) = (false, None);
        let host = terms.destination.as_str();
        controls.report(|report| {
            report.findings.extend(cards.iter().filter_map(|card| silence(card, host)));
            report.network.clone_from(cards);
        });
    }
}

/// Returns the cards of a VM with taps, and the interfaces behind them.
fn find_cards(vm: &mut SourceVm) -> Result<(Vec<Card>, Vec<network_cards::Interface>), String> {
    let process = vm.process.try_clone().map_err(|error| crate::chain(&error))?;
    let qmp = vm.monitor().map_err(|error| crate::chain(&error))?;
    let cards = network_cards::cards(qmp, &process).map_err(|error| crate::chain(&error))?;
    let interfaces = network_cards::interfaces(&cards, &process).map_err(|error| crate::chain(&error))?;
    Ok((cards, interfaces))
}

/// Waits until QEMU has read what is in its queues.
fn wait_until_read(cards: &[Card]) {
    let until = Instant::now() + RING_PATIENCE;
    let has_frames = || cards.iter().flat_map(|card| &card.taps).any(|tap| !tap.is_empty().unwrap_or(true));
    while has_frames() && Instant::now() < until {
        thread::sleep(RING_PAUSE);
    }
}

/// Encodes frames in pieces that can be sent.
fn pieces(frames: &[HeldFrame]) -> Vec<Vec<u8>> {
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    for frame in frames {
        if pieces.last().is_none_or(|piece| piece.len() >= PIECE_BYTES) {
            pieces.push(Vec::new());
        }
        if let Some(piece) = pieces.last_mut() {
            frame.encode(piece);
        }
    }
    pieces
}

/// Returns a warning about connections that could not be carried.
fn cut_off(copied: &TrackedConnections, host: &str) -> Option<Finding> {
    let first = copied.failed.first()?;
    let count = copied.not_carried();
    Some(Finding {
        severity: Severity::Warning,
        code: "connections-not-carried".to_owned(),
        what: format!(
            "{count} tracked connections could not be installed on {host}, among them {}: {}",
            first.flow, first.reason
        ),
        advice: "a firewall or NAT there may cut them; their programs have to connect again".to_owned(),
    })
}

/// Returns a warning about a card that nothing reached.
fn silence(card: &CardFrames, host: &str) -> Option<Finding> {
    if card.first_in_us.is_some() {
        return None;
    }
    let CardFrames { mac, interface, first_out_us, .. } = card;
    let (heard, advice) = if first_out_us.is_some() {
        (
            "the guest sends, and nothing was sent to it",
            "if clients do not reach it, see if the bridge, the VLAN and the switches' ports there are those of the \
             network that it had at the source, and if a firewall or port security keeps its address back",
        )
    } else {
        (
            "the guest sends nothing either",
            "if it is not idle, see if its program runs, and if its interface is up and in the bridge of the network \
             that it had at the source",
        )
    };
    Some(Finding {
        severity: Severity::Warning,
        code: "guest-not-reached".to_owned(),
        what: format!("no frame for {mac} reached {interface} on {host} within a second: {heard}"),
        advice: advice.to_owned(),
    })
}

fn card(claims: &Claims) -> CardClaims {
    let address = |claim: net::Claim| ClaimedAddress {
        address: claim.address,
        vlan: claim.vlan,
        router: claim.is_router,
    };
    CardClaims { mac: claims.mac().to_string(), addresses: claims.all().into_iter().map(address).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Goals, MigrationControls};
    use api::MigrationSettings;
    use host::testing::{Qemu, World, terms};
    use proto::message::FailedFlow;

    /// Undoes with fresh cards of a VM that `prepare` has changed. Returns true if QEMU was asked for cards to announce.
    fn is_announced(is_resumed: bool, prepare: impl FnOnce(&mut Network)) -> bool {
        let (world, terms, settings) = (World::new(), terms("a", "b"), MigrationSettings::default());
        let qemu = Qemu::start(world.folder.path());
        let mut vm = SourceVm::find(&world.context, &qemu.record()).unwrap();
        let (source, destination) = (terms.source.clone(), terms.destination.clone());
        let report = Report::begin(terms.migration.clone(), source, destination, settings.clone());
        let goals = Goals::restored(settings, &world.context.config);
        let controls = Arc::new(MigrationControls::new(goals, report, Instant::now()));
        let context = Arc::clone(&world.context);
        let mut network = Network::new(&Environment { context, terms, controls, is_resumed });
        prepare(&mut network);
        assert_eq!(network.undo(Some(&mut vm)), UndoResult::Done);
        qemu.monitor().received.iter().any(|command| command == "human-monitor-command")
    }

    #[test]
    fn only_a_guest_that_may_have_left_is_announced_here() {
        assert!(!is_announced(false, |_| {}), "no other host has announced it");
        assert!(is_announced(false, Network::commit));
        assert!(is_announced(true, |_| {}), "an agent before this one may have committed");
    }

    #[test]
    fn frames_are_sent_in_pieces_that_fit() {
        let frame = |number: u8| HeldFrame {
            card: net::Mac([number; 6]),
            header: [0; 10],
            frame: vec![number; 66_000],
        };
        let frames: Vec<_> = (0..40).map(frame).collect();
        let pieces = pieces(&frames);
        assert!(pieces.len() > 1 && pieces.iter().all(|piece| piece.len() <= proto::limits::BLOB_BYTES));
        let decoded = pieces.iter().flat_map(|piece| net::held::decode(piece).unwrap());
        assert_eq!(decoded.collect::<Vec<_>>(), frames);
        assert_eq!(super::pieces(&[]), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn connections_that_are_not_carried_are_reported() {
        let failed = FailedFlow { flow: "tcp a → b".to_owned(), reason: "no room".to_owned() };
        let copied = TrackedConnections { carried: 3, failed: vec![failed], more_failed: 4 };
        let finding = cut_off(&copied, "b").unwrap();
        assert!(finding.what.starts_with("5 tracked") && finding.what.ends_with("tcp a → b: no room"));
        assert_eq!(cut_off(&TrackedConnections { carried: 3, ..TrackedConnections::default() }, "b"), None);
    }

    #[test]
    fn only_a_card_that_nothing_reached_is_reported() {
        let card = |first_in_us, first_out_us| CardFrames {
            mac: "52:54:00:00:00:01".to_owned(),
            interface: "tap7".to_owned(),
            first_in_us,
            first_out_us,
        };
        assert_eq!(silence(&card(Some(9), None), "b"), None);
        let finding = silence(&card(None, Some(9)), "b").unwrap();
        assert!(finding.what.contains("reached tap7 on b") && finding.what.contains("the guest sends"));
        assert!(silence(&card(None, None), "b").unwrap().what.contains("sends nothing"));
    }
}
