//! Questions about a host's table of conntrack entries.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use super::{ConntrackEntry, NFGEN_BYTES, abi, ends, is_of};
use crate::netlink::{DUMP, Requests, Socket, attribute};

/// Returns the entries of connections of which an end has one of these addresses, `most` at most, and true if there are
/// no others.
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn list(
    netfilter: &Socket,
    addresses: &BTreeSet<IpAddr>,
    most: usize,
) -> io::Result<(Vec<ConntrackEntry>, bool)> {
    let mut requests = Requests::default();
    requests.request(abi::GET, DUMP, &[0; NFGEN_BYTES]);
    let (mut entries, mut is_whole) = (Vec::new(), true);
    netfilter.dump(requests, |body| {
        if !body.get(NFGEN_BYTES..).is_some_and(|listed| is_of(listed, addresses)) {
            return;
        }
        if entries.len() < most {
            entries.extend(ConntrackEntry::of_list(body));
        } else {
            is_whole = false;
        }
    })?;
    Ok((entries, is_whole))
}

/// Returns true if an end of a conntrack entry has one of these addresses.
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn any_of(netfilter: Socket, addresses: &BTreeSet<IpAddr>) -> io::Result<bool> {
    let mut requests = Requests::default();
    requests.request(abi::GET, DUMP, &[0; NFGEN_BYTES]);
    netfilter.has(requests, |body| body.get(NFGEN_BYTES..).is_some_and(|listed| is_of(listed, addresses)))
}

/// Returns addresses of the ends of all connections, `most` at most.
///
/// # Errors
/// If the kernel refuses the request, or does not answer in time.
pub fn ends_of_all(netfilter: &Socket, most: usize) -> io::Result<BTreeSet<IpAddr>> {
    let mut requests = Requests::default();
    requests.request(abi::GET, DUMP, &[0; NFGEN_BYTES]);
    let mut found = BTreeSet::new();
    netfilter.dump(requests, |body| {
        let listed = body.get(NFGEN_BYTES..).unwrap_or_default();
        for kind in [abi::ORIGINAL, abi::REPLY] {
            let ends = attribute(listed, kind).and_then(ends).filter(|_| found.len() < most);
            found.extend(ends.into_iter().flatten());
        }
    })?;
    Ok(found)
}
