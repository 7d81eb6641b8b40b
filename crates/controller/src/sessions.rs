//! Connections of agents: one thread receives, one sends.

use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use link::{ConnectedPeer, Incoming, LinkError, Reader, Rejected, Writer};
use proto::message::Message;
use proto::{HostId, Purpose};
use tracing::{debug, warn};

use crate::coordinator::{Shared, lock};

/// Time without a report after which an agent counts as lost: it reports every five seconds.
const SILENCE: Duration = Duration::from_secs(30);
/// Time for an agent to take a message.
const SEND_PATIENCE: Duration = Duration::from_secs(20);

/// Handles a connection attempt. Runs on a thread of the connection's own, until the connection ends.
pub(crate) fn arrival(shared: &Shared, arrival: Result<ConnectedPeer, Rejected>) {
    let arrival = match arrival {
        Ok(arrival) => arrival,
        Err(rejected) => {
            warn!(error = crate::chain(&rejected), "a connection was refused");
            return;
        }
    };
    let host = arrival.host().clone();
    if *arrival.purpose() != Purpose::Controller {
        warn!(%host, "a connection that is not for a controller was refused");
        arrival
            .refuse("this is a controller, and no agent; name it under `[controller]`, not under `[hosts]`");
        return;
    }
    let is_allowed = {
        let coordinator = lock(shared);
        let only = &coordinator.config.only_hosts;
        only.is_empty() || only.contains(&host)
    };
    if !is_allowed {
        warn!(%host, "a host that is not among `only_hosts` was refused");
        arrival.refuse(format!("{host} is not among the controller's `only_hosts`; add it there"));
        return;
    }
    match arrival.accept() {
        Ok(connection) => {
            let handle = connection.handle();
            let (reader, writer) = connection.split();
            let (outgoing, messages) = mpsc::channel();
            let number = lock(shared).connect(&host, outgoing, handle.clone());
            let sending = {
                let host = host.clone();
                move || send_all(&host, writer, &messages)
            };
            let why = match thread::Builder::new().name("agent-out".to_owned()).spawn(sending) {
                Ok(_) => receive_all(shared, &host, number, reader),
                Err(error) => format!("cannot start a thread: {error}"),
            };
            handle.shutdown();
            debug!(%host, why, "a connection of an agent has ended");
            // The thread that sends ends with the channel.
            lock(shared).disconnect(&host, number, &why);
        }
        Err(error) => warn!(%host, error = crate::chain(&error), "a connection was lost"),
    }
}

/// Sends messages until the channel or the connection ends.
fn send_all(host: &HostId, mut writer: Writer, messages: &Receiver<Message>) {
    for message in messages {
        writer.set_deadline(Some(Instant::now() + SEND_PATIENCE));
        if let Err(error) = writer.send(&message) {
            // The thread that receives notices it, too.
            debug!(%host, error = crate::chain(&error), "cannot send to an agent");
            return;
        }
    }
}

/// Receives reports until the connection ends. Returns the reason.
fn receive_all(shared: &Shared, host: &HostId, number: u64, mut reader: Reader) -> String {
    loop {
        let message = match reader.recv(Some(Instant::now() + SILENCE)) {
            Ok(Incoming::Message(message)) => message,
            Ok(Incoming::Blob(_)) => return "it has sent something that is no message".to_owned(),
            Err(LinkError::TimedOut) => {
                return format!("it has reported nothing for {} s", SILENCE.as_secs());
            }
            Err(LinkError::Ended) => return "its agent has ended".to_owned(),
            Err(error) => return crate::chain(&error),
        };
        match message {
            Message::FleetReport { seq, report } => {
                if let Err(error) = lock(shared).report(host, number, seq, report) {
                    return error;
                }
            }
            Message::ControllerTerm { term } => {
                lock(shared).replaced(host, term);
                return format!("it has seen a controller of term {term}");
            }
            _ => return "it has sent a message that is not for a controller".to_owned(),
        }
    }
}
