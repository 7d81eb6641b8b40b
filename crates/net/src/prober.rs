//! The two ends of a [probe](crate::probe): frames from the taps of a guest that runs, and a look for them at the taps
//! of the QEMU that waits for it.

use std::io;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracee::PacketSocket;
use tracing::debug;

use crate::announcer::{Card, send};
use crate::ethernet::{Frame, Mac};
use crate::loop_thread::{LoopThread, Pause};
use crate::probe::{NetworkProof, Side, frame, probe_mac, question};
use crate::{bridge_ports, filter};

/// Pause between the frames of the source, of which any may be lost: short at first, because the destination waits for
/// one as soon as its QEMU has started.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Pause after [`FIRST_TIME`].
const PAUSE: Duration = Duration::from_millis(50);
/// Time in which most QEMUs start.
const FIRST_TIME: Duration = Duration::from_secs(1);
/// Time after which the source ends by itself.
const LONGEST: Duration = Duration::from_mins(2);
/// Pause between two questions for the same gateway.
const QUESTION_PAUSE: Duration = Duration::from_millis(200);

/// Sends the frames of a probe in a thread, until it is dropped.
#[derive(Debug)]
pub struct Prober {
    _loop_thread: LoopThread,
}

impl Prober {
    /// Begins to send from the taps of these cards, each without a tag and in each of its VLANs.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(nonce: u64, cards: Vec<(Card, Vec<u16>)>) -> io::Result<Self> {
        let loop_thread = LoopThread::start("probe", move |pause| repeat(nonce, &cards, pause))?;
        Ok(Self { _loop_thread: loop_thread })
    }
}

fn repeat(nonce: u64, cards: &[(Card, Vec<u16>)], pause: &Pause) {
    let began = Instant::now();
    loop {
        for (number, (card, vlans)) in cards.iter().enumerate() {
            let from = probe_mac(nonce, number, Side::Source);
            for vlan in vlans.iter().copied().map(Some).chain([None]) {
                if let Err(error) = send(&card.taps, &frame(nonce, card.mac, from, vlan)) {
                    debug!(mac = %card.mac, %error, "a frame of the probe was not sent");
                }
            }
        }
        let time = if began.elapsed() < FIRST_TIME { FIRST_PAUSE } else { PAUSE };
        if !pause.wait(time) || began.elapsed() > LONGEST {
            break;
        }
    }
    for (number, (card, _)) in cards.iter().enumerate() {
        forget(card, probe_mac(nonce, number, Side::Source));
    }
}

/// Makes the bridge of this host forget the MAC address of a probe; it would do so by itself after some minutes.
fn forget(card: &Card, probe_mac: Mac) {
    let forgotten = card.interface().map(|interface| bridge_ports::forget(interface, probe_mac));
    if let Some(Err(error)) = forgotten {
        debug!(mac = %card.mac, %error, "the bridge does not know the MAC address of the probe");
    }
}

/// A card of a QEMU that waits for its guest, and what is expected at its tap.
#[derive(Debug)]
pub struct ProbedTap<'a> {
    /// The card.
    pub card: &'a Card,
    /// VLANs in which the source sends, beside frames without a tag.
    pub vlans: &'a [u16],
    /// Gateways that are to answer.
    pub gateways: &'a [IpAddr],
}

/// Looks for the frames of a probe at the taps of a QEMU that waits for its guest, and asks the gateways, until nothing
/// remains to be proven, at most `patience`. The taps are in the network namespace of this thread. Returns a proof for
/// each card.
///
/// # Errors
/// If the taps cannot be observed.
pub fn prove(nonce: u64, taps: &[ProbedTap<'_>], patience: Duration) -> io::Result<Vec<NetworkProof>> {
    let deadline = Instant::now() + patience;
    let mut sockets = Vec::new();
    for tap in taps {
        let interface = tap.card.interface().ok_or(io::ErrorKind::NotFound)?;
        sockets.push(PacketSocket::listen(interface, &filter::probe())?);
    }
    let proof = |tap: &ProbedTap<'_>| NetworkProof::new(nonce, tap.card.mac, tap.vlans, tap.gateways);
    let mut proofs: Vec<_> = taps.iter().map(proof).collect();
    let mut asked = None;
    while !proofs.iter().all(NetworkProof::is_complete) && Instant::now() < deadline {
        if asked.is_none_or(|asked: Instant| asked.elapsed() >= QUESTION_PAUSE) {
            asked = Some(Instant::now());
            for (number, (tap, proof)) in taps.iter().zip(&proofs).enumerate() {
                ask(tap.card, proof, probe_mac(nonce, number, Side::Destination));
            }
        }
        let mut waits: Vec<_> = sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
        // After an error the deadline ends this all the same.
        let _ = poll(&mut waits, Timespec::try_from(PAUSE).ok().as_ref());
        for (socket, proof) in sockets.iter().zip(&mut proofs) {
            read(socket, proof)?;
        }
    }
    for (number, tap) in taps.iter().enumerate().filter(|(_, tap)| !tap.gateways.is_empty()) {
        forget(tap.card, probe_mac(nonce, number, Side::Destination));
    }
    Ok(proofs)
}

/// Asks the gateways that have not answered.
fn ask(card: &Card, proof: &NetworkProof, from: Mac) {
    for gateway in proof.silent() {
        if let Err(error) = send(&card.taps, &question(gateway, from)) {
            debug!(mac = %card.mac, %gateway, %error, "a gateway was not asked");
        }
    }
}

/// Reads the frames that have passed towards the guest.
fn read(socket: &PacketSocket, proof: &mut NetworkProof) -> io::Result<()> {
    let mut buffer = [0; filter::FRAME_BYTES];
    while let Some(received) = socket.receive(&mut buffer)? {
        let bytes = buffer.get(..received.bytes).unwrap_or(&buffer);
        if received.is_outgoing
            && let Some(frame) = Frame::parse(bytes, received.vlan)
        {
            proof.observe(&frame);
        }
    }
    Ok(())
}
