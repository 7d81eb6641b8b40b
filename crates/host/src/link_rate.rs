//! Rate and round trip of the link to another host, for forecasts: measured over a connection of its own, by data that
//! means nothing.
//!
//! Parts of growing length are sent, until one takes long enough to show the rate: TCP has found the link's rate by then.
//! The receiver states how long each took, without its first frame, so that no round trip is counted.

use std::time::{Duration, Instant};

use engine::forecast::history::MeasuredLink;
use link::transport::{Channel, Incoming, MessageReceiver, MessageSender, TransportError};
use proto::HostId;
use proto::limits::MEASURED_BYTES;
use proto::message::{Message, Purpose};
use rustix::rand::{GetRandomFlags, getrandom};
use tracing::debug;

use crate::Context;
use crate::peers::{self, PeerError};
use api::report::unix_ms_now;

/// Length of a frame, in bytes.
const FRAME_BYTES: usize = 64 << 10;
/// Length of the first part, in bytes; each later one is four times as long.
const FIRST_BYTES: u64 = 256 << 10;
/// Duration of a part that shows the rate; on a link with a long round trip TCP needs some of them beside.
const ENOUGH: Duration = Duration::from_millis(100);
/// Number of round trips that TCP needs to find the rate of a link.
const ROUND_TRIPS: u32 = 4;
/// Longest measurement.
const LONGEST: Duration = Duration::from_secs(10);
/// Number of round trips of which the shortest counts.
const PINGS: u32 = 3;

/// Measures the link to a host, not faster than `cap` bytes per second.
pub fn measure(context: &Context, to: &HostId, cap: Option<u64>) -> Result<MeasuredLink, PeerError> {
    let channel = peers::connect(context, to, None, Purpose::Measurement)?;
    let (mut receiver, mut sender) = channel.split();
    let mut link =
        Link { to, deadline: Instant::now() + LONGEST, receiver: &mut *receiver, sender: &mut *sender };
    link.sender.set_deadline(Some(link.deadline));
    let rtt = link.round_trip()?;
    let mut data = vec![0; FRAME_BYTES];
    // Devices on the way must not be able to compress it. A shorter result is as good.
    let _ = getrandom(&mut data[..], GetRandomFlags::empty());
    let (mut part_bytes, mut sent_bytes) = (FIRST_BYTES, 0);
    loop {
        let (counted, took) = link.send_part(&data, part_bytes, cap)?;
        sent_bytes += part_bytes;
        if took >= ENOUGH + rtt * ROUND_TRIPS || part_bytes >= MEASURED_BYTES {
            let rate = u128::from(counted) * 1_000_000_000 / took.as_nanos().max(1);
            return Ok(MeasuredLink {
                unix_ms: unix_ms_now(),
                bytes_per_s: u64::try_from(rate).unwrap_or(u64::MAX).max(1),
                rtt_ns: rtt.as_nanos() as u64,
                sent_bytes,
            });
        }
        part_bytes = (part_bytes * 4).min(MEASURED_BYTES);
    }
}

/// Connection over which a link is measured.
struct Link<'a> {
    to: &'a HostId,
    deadline: Instant,
    receiver: &'a mut dyn MessageReceiver,
    sender: &'a mut dyn MessageSender,
}

impl Link<'_> {
    fn lost(&self) -> impl Fn(TransportError) -> PeerError + use<> {
        let host = self.to.clone();
        move |source| PeerError::Lost { host: host.clone(), source }
    }

    fn receive(&mut self) -> Result<Message, PeerError> {
        match self.receiver.recv(Some(self.deadline)).map_err(self.lost())? {
            Incoming::Message(message) => Ok(message),
            Incoming::Blob(_) => Err(PeerError::NoSense(self.to.clone())),
        }
    }

    fn round_trip(&mut self) -> Result<Duration, PeerError> {
        let mut shortest = LONGEST;
        for _ in 0..PINGS {
            let sent = Instant::now();
            self.sender.send(&Message::Ping).map_err(self.lost())?;
            let Message::Pong = self.receive()? else { return Err(PeerError::NoSense(self.to.clone())) };
            shortest = shortest.min(sent.elapsed());
        }
        Ok(shortest)
    }

    /// Sends a part; returns the bytes that count, and the time that they took.
    fn send_part(&mut self, data: &[u8], bytes: u64, cap: Option<u64>) -> Result<(u64, Duration), PeerError> {
        self.sender.send(&Message::MeasureLink { bytes }).map_err(self.lost())?;
        let (began, mut sent) = (Instant::now(), 0);
        while sent < bytes {
            let length = (bytes - sent).min(data.len() as u64);
            self.sender.send_blob(&data[..length as usize]).map_err(self.lost())?;
            sent += length;
            if let Some(cap) = cap {
                let earliest = began + Duration::from_secs_f64(sent as f64 / cap.max(1) as f64);
                std::thread::sleep(earliest.min(self.deadline).saturating_duration_since(Instant::now()));
            }
        }
        match self.receive()? {
            Message::LinkMeasured { bytes: counted, duration_us } if counted <= bytes => {
                Ok((counted, Duration::from_micros(duration_us)))
            }
            _ => Err(PeerError::NoSense(self.to.clone())),
        }
    }
}

/// Answers the measurement of a peer, until it closes the connection or sends anything else.
pub fn answer(channel: Channel) {
    let peer = channel.peer().clone();
    let (mut receiver, mut sender) = channel.split();
    let deadline = Instant::now() + 2 * LONGEST;
    sender.set_deadline(Some(deadline));
    // All parts of a measurement together.
    let mut left = 2 * MEASURED_BYTES;
    while let Ok(Incoming::Message(message)) = receiver.recv(Some(deadline)) {
        let answer = match message {
            Message::Ping => Message::Pong,
            Message::MeasureLink { bytes } if bytes <= left => {
                left -= bytes;
                let Some(measured) = receive_part(&mut *receiver, bytes, deadline) else { break };
                measured
            }
            _ => break,
        };
        if let Err(error) = sender.send(&answer) {
            debug!(%peer, error = crate::chain(&error), "cannot answer a measurement of the link");
            return;
        }
    }
}

/// Receives a part; none if the peer sends something else.
fn receive_part(receiver: &mut dyn MessageReceiver, bytes: u64, deadline: Instant) -> Option<Message> {
    let (mut left, mut counted, mut first) = (bytes, 0, None);
    while left > 0 {
        let Ok(Incoming::Blob(data)) = receiver.recv(Some(deadline)) else { return None };
        let length = data.len() as u64;
        left = left.checked_sub(length).filter(|_| length > 0)?;
        if first.is_some() {
            counted += length;
        } else {
            first = Some(Instant::now());
        }
    }
    let duration_us = first.map_or(0, |first| first.elapsed().as_micros() as u64);
    Some(Message::LinkMeasured { bytes: counted, duration_us })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;
    use crate::testing::{self, Peer, World};

    /// Measures the link to a peer that does `work`.
    fn measured_by(work: impl FnOnce(Peer)) -> Result<MeasuredLink, PeerError> {
        let world = World::new();
        let context = Arc::clone(&world.context);
        let measuring = thread::spawn(move || measure(&context, &testing::host("b"), None));
        work(world.accept());
        measuring.join().unwrap()
    }

    #[test]
    fn a_link_is_measured_until_its_rate_shows() {
        let measured = measured_by(|peer| answer(peer.0.into())).unwrap();
        assert!(measured.bytes_per_s > 0 && measured.rtt_ns > 0, "{measured:?}");
        assert!((FIRST_BYTES..=2 * MEASURED_BYTES).contains(&measured.sent_bytes), "{measured:?}");
    }

    #[test]
    fn a_peer_that_answers_nonsense_or_hangs_up_measures_nothing() {
        let other = measured_by(|mut peer| {
            assert_eq!(peer.receive_message(), Message::Ping);
            peer.send_message(&Message::PagesComplete);
            peer.receive_until_closed();
        });
        assert!(matches!(other, Err(PeerError::NoSense(_))), "{other:?}");
        let too_much = measured_by(|mut peer| {
            for _ in 0..PINGS {
                assert_eq!(peer.receive_message(), Message::Ping);
                peer.send_message(&Message::Pong);
            }
            assert_eq!(peer.receive_message(), Message::MeasureLink { bytes: FIRST_BYTES });
            peer.send_message(&Message::LinkMeasured { bytes: FIRST_BYTES + 1, duration_us: 1 });
            peer.receive_until_closed();
        });
        assert!(matches!(too_much, Err(PeerError::NoSense(_))), "{too_much:?}");
        let gone = measured_by(drop);
        assert!(matches!(gone, Err(PeerError::Lost { .. })), "{gone:?}");
    }

    #[test]
    fn more_than_was_announced_ends_the_answers() {
        let (here, mut there) = World::from_peer();
        let answering = thread::spawn(move || answer(here));
        there.send_message(&Message::Ping);
        assert_eq!(there.receive_message(), Message::Pong);
        there.send_message(&Message::MeasureLink { bytes: 10 });
        there.0.send_blob(&[1; 4]).unwrap();
        there.0.send_blob(&[2; 6]).unwrap();
        let measured = there.receive_message();
        assert!(matches!(measured, Message::LinkMeasured { bytes: 6, .. }), "{measured:?}");
        there.send_message(&Message::MeasureLink { bytes: 10 });
        there.0.send_blob(&[1; 11]).unwrap();
        assert_eq!(there.receive_until_closed(), []);
        answering.join().unwrap();
    }
}
