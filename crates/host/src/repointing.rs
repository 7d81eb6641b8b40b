//! Tunnels of hosts that a VM has left before the one where it is: when it moves on, they lead to its next host.
//!
//! The source of that migration asks these hosts for their ends, and orders what they do: it is where the VM is by their own
//! records. A host that no order reaches finds out by itself how the migration has ended ([`crate::redirections`]).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::time::{Duration, Instant};

use link::Incoming;
use link::transport::Channel;
use net::Mac;
use net::redirection::kernel_names::free_number;
use net::redirection::offered_end::{OfferedEnd, may_repoint};
use net::redirection::{RecordStage, Redirection, RedirectionRecord, TunnelKind, host_facts};
use proto::message::{Message, RepointStep, TunnelRequest};
use proto::{HostId, MigrationId, Purpose};
use tracing::{info, warn};

use crate::Context;
use crate::peers::{self, PeerError};
use crate::redirections;

// ---- the source

/// Asks a host that a VM has left before for its end of a tunnel to another one.
///
/// # Errors
/// The reason why there is none.
pub fn ask_end(
    context: &Context,
    id: &MigrationId,
    (host, card): (&str, Mac),
    to: &HostId,
    is_check: bool,
) -> Result<OfferedEnd, String> {
    let request = TunnelRequest { card: card.to_string(), destination: to.clone(), check_only: is_check };
    let mut connection = connect(context, id, host)?;
    let end = match exchange(context, &mut connection, &Message::AskTunnelEnd(request))? {
        Message::TunnelEnd { end: Some(end), .. } => end,
        Message::TunnelEnd { reason, .. } => return Err(reason.unwrap_or_else(|| "no reason".to_owned())),
        _ => return Err(crate::chain(&PeerError::NoSense(connection.peer().clone()))),
    };
    let end: Result<OfferedEnd, _> = serde_json::from_value(end);
    let end = end.map_err(|error| format!("the end of {host} cannot be read: {error}"))?;
    if end.is_valid() { Ok(end) } else { Err(format!("the end of {host} is none of a tunnel")) }
}

/// Lets a host that a VM has left before make its end of the next tunnel for one card, by the connection of a former order
/// if there is one. Returns the connection, by which the next order arrives soon.
///
/// # Errors
/// The reason why it does not.
pub fn prepare(
    context: &Context,
    id: &MigrationId,
    (host, connection): (&str, Option<Channel>),
    redirection: &Redirection,
) -> Result<Channel, String> {
    let redirection = serde_json::to_value(redirection).map_err(|error| crate::chain(&error))?;
    let mut connection = connection.map_or_else(|| connect(context, id, host), Ok)?;
    let order = Message::Repoint { step: RepointStep::Prepare, redirection: Some(redirection) };
    obeyed(exchange(context, &mut connection, &order)?, host)?;
    Ok(connection)
}

/// Lets a host do what its preparation leads to, by the connection of that if it still works.
///
/// # Errors
/// The reason why it does not.
pub fn order(
    context: &Context,
    id: &MigrationId,
    host: &str,
    connection: Option<Channel>,
    step: RepointStep,
) -> Result<(), String> {
    let message = Message::Repoint { step, redirection: None };
    let first = connection.map(|mut connection| exchange(context, &mut connection, &message));
    let answer = match first {
        Some(Ok(answer)) => answer,
        Some(Err(_)) | None => exchange(context, &mut connect(context, id, host)?, &message)?,
    };
    obeyed(answer, host)
}

fn connect(context: &Context, id: &MigrationId, host: &str) -> Result<Channel, String> {
    let host = HostId::new(host).map_err(|error| crate::chain(&error))?;
    let purpose = Purpose::Redirection { migration: id.clone() };
    peers::connect(context, &host, None, purpose).map_err(|error| crate::chain(&error))
}

fn exchange(context: &Context, connection: &mut Channel, message: &Message) -> Result<Message, String> {
    let host = connection.peer().clone();
    let lost = |source| crate::chain(&PeerError::Lost { host: host.clone(), source });
    connection.send(message).map_err(lost)?;
    let deadline = Instant::now() + Duration::from_millis(context.config.timeouts.peer_silence_ms);
    match connection.recv(Some(deadline)).map_err(lost)? {
        Incoming::Message(answer) => Ok(answer),
        Incoming::Blob(_) => Err(crate::chain(&PeerError::NoSense(host))),
    }
}

fn obeyed(answer: Message, host: &str) -> Result<(), String> {
    match answer {
        Message::Repointed { error: None } => Ok(()),
        Message::Repointed { error: Some(error) } => Err(format!("{host}: {error}")),
        _ => Err(format!("{host} sent an unexpected answer; use the same version of whimbrel on all hosts")),
    }
}

// ---- a host that the VM has left before

/// Returns the answer to a message of another host about a redirection; none if it is not about one. Every host may ask
/// whether one stands; orders are those of the host that has the VM by this host's records.
pub fn answer(context: &Context, peer: &HostId, id: &MigrationId, message: Message) -> Option<Message> {
    Some(match message {
        Message::AskRedirection => {
            let redirections::Standing { stands, confirmed } = redirections::standing(context, id);
            Message::RedirectionStands { stands, confirmed }
        }
        Message::AskTunnelEnd(request) => {
            let end = offer_end(context, peer, id, &request);
            let end = end.and_then(|end| serde_json::to_value(end).map_err(|error| crate::chain(&error)));
            let (end, reason) = end.map_or_else(|reason| (None, Some(reason)), |end| (Some(end), None));
            Message::TunnelEnd { end, reason }
        }
        Message::Repoint { step, redirection } => {
            let done = repoint(context, peer, id, step, redirection);
            if let Err(error) = &done {
                warn!(migration = %id, from = %peer, ?step, error, "a redirection is not changed");
            }
            Message::Repointed { error: done.err() }
        }
        _ => return None,
    })
}

/// Returns the active redirections of a VM that is at `peer` and was here before.
fn active(context: &Context, peer: &HostId, id: &MigrationId) -> Result<Vec<RedirectionRecord>, String> {
    let mut records = context.redirections.records().map_err(|error| crate::chain(&error))?;
    records.retain(|record| {
        let redirection = &record.redirection;
        record.stage == RecordStage::Active
            && redirection.guest() == id.vm.as_str()
            && redirection.place.host == peer.as_str()
            && redirection.legs.iter().any(|leg| leg.host == record.host)
    });
    if records.is_empty() {
        return Err(format!("{} redirects no connection of {} to {peer}", context.config.host, id.vm));
    }
    Ok(records)
}

fn offer_end(
    context: &Context,
    peer: &HostId,
    id: &MigrationId,
    request: &TunnelRequest,
) -> Result<OfferedEnd, String> {
    let io = |error: io::Error| crate::chain(&error);
    let (host, to) = (&context.config.host, &request.destination);
    let records = active(context, peer, id)?;
    let is_asked = |record: &&RedirectionRecord| record.redirection.card.to_string() == request.card;
    records
        .iter()
        .find(is_asked)
        .ok_or_else(|| format!("{host} redirects no connection of card {}", request.card))?;
    let address = context.config.peer(to);
    let address = address.ok_or_else(|| format!("{host} has no address of {to}: add [hosts.{to}] there"))?;
    let (own, other) = tunnel_ends(address).map_err(|error| format!("{host} has no way to {to}: {error}"))?;
    let mut used = host_facts::numbers().map_err(io)?;
    let keeper = &context.redirections;
    used.extend(
        keeper.records().map_err(|error| crate::chain(&error))?.iter().map(|record| record.names().0),
    );
    // Another one than that of the host that the VM leaves.
    let number = free_number(&format!("{id}/{host}/{}", request.card), &used);
    let number = number.ok_or_else(|| format!("too many redirections are active on {host}"))?;
    let mut facts = host_facts::read_facts(None, number, [own, other], &[]).map_err(io)?;
    let ports = context.config.redirection.ports();
    facts.ports = keeper.free_ports(ports).map_err(|error| crate::chain(&error))?;
    let mut key = None;
    if !request.check_only && facts.tunnels.contains(&TunnelKind::WireGuard) {
        let reserved =
            keeper.reserve(&id.to_string(), number, ports).map_err(|error| crate::chain(&error))?;
        (key, facts.ports.wireguard) = reserved.unzip();
    }
    Ok(OfferedEnd {
        number,
        old_endpoint: own,
        new_endpoint: other,
        is_trusted: context.config.redirection.trusted_path,
        key,
        facts,
    })
}

fn repoint(
    context: &Context,
    peer: &HostId,
    id: &MigrationId,
    step: RepointStep,
    redirection: Option<serde_json::Value>,
) -> Result<(), String> {
    let keeper = &context.redirections;
    let _exclusive = context.names.exclusive(&id.vm);
    match step {
        RepointStep::Prepare => {
            let next = redirection.ok_or("the redirection is missing")?;
            let next: Redirection = serde_json::from_value(next)
                .map_err(|error| format!("the redirection cannot be read: {error}"))?;
            let (host, is_trusted) = (context.config.host.as_str(), context.config.redirection.trusted_path);
            let may = |record: &RedirectionRecord| may_repoint(&record.redirection, &next, host, is_trusted);
            if next.migration != id.to_string() || next.epoch != id.epoch.0 {
                return Err(format!("the redirection is not one of {id}"));
            }
            if !active(context, peer, id)?.iter().any(may) {
                return Err("it is not the one that follows the present one".to_owned());
            }
            keeper.prepare(&next).map(drop).map_err(|error| crate::chain(&error))
        }
        RepointStep::Switch | RepointStep::Remove => {
            let mut records = redirections::records_of(keeper, id).map_err(|error| crate::chain(&error))?;
            let is_new = records.is_empty();
            records.retain(|record| record.stage == RecordStage::Prepared);
            if records.is_empty() && !is_new {
                return Ok(());
            }
            active(context, peer, id)?;
            let done = match step {
                // With what was reserved for a proposal that was refused.
                RepointStep::Remove => redirections::remove_of(keeper, id),
                _ if is_new => return Err(format!("nothing is prepared for {id}")),
                _ => records.into_iter().try_for_each(|record| redirections::confirm(keeper, record)),
            };
            done.inspect(|()| info!(migration = %id, from = %peer, ?step, "a tunnel of old connections"))
                .map_err(|error| crate::chain(&error))
        }
    }
}

/// Returns the addresses by which this host reaches another one, its own first.
pub(crate) fn tunnel_ends(address: &str) -> io::Result<(IpAddr, IpAddr)> {
    let other = address.to_socket_addrs()?.next().ok_or(io::ErrorKind::NotFound)?;
    let any: IpAddr =
        if other.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // No packet is sent for that.
    let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
    socket.connect(other)?;
    Ok((socket.local_addr()?.ip(), other.ip()))
}

#[cfg(test)]
mod tests;
