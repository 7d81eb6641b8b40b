//! Flows of held datagrams, for a guest that comes from another network.
//!
//! The guest gets held frames past the connection tracking of this host, and answers before anything else of the same flow
//! has come through the tunnel. Without an entry such an answer would leave by the guest's new address, and its receiver
//! would not know it. TCP needs none: a connection that is first seen in its middle goes through the tunnel anyway.

use std::collections::BTreeSet;

use host::redirections::AgreedRedirections;
use net::conntrack::ConntrackEntry;
use net::conntrack_sync::EntryChange;
use net::ethernet::Frame;
use net::redirection::next_move;
use net::{ConntrackInstaller, HeldFrame};
use tracing::warn;

/// Most flows that are installed for held frames.
const MOST_FLOWS: usize = 4096;

/// Installs the flows of frames that the source has held.
#[derive(Clone, Debug)]
pub(super) struct HeldFlows {
    installer: ConntrackInstaller,
    agreed: AgreedRedirections,
    known: BTreeSet<Vec<u8>>,
}

impl HeldFlows {
    pub(super) fn new(installer: ConntrackInstaller, agreed: AgreedRedirections) -> Self {
        Self { installer, agreed, known: BTreeSet::new() }
    }

    /// Installs the flows of frames that the guest is about to get, so that its answers return by the tunnel. Does nothing
    /// unless the source is the guest's home: any other host tracks all flows, and has sent their entries.
    pub(super) fn install(&mut self, frames: &[HeldFrame]) {
        let agreed = self.agreed.get().map(Vec::as_slice).unwrap_or_default();
        if agreed.iter().all(|redirection| redirection.home().is_none()) {
            return;
        }
        let entry = |held: &HeldFrame| {
            let frame = Frame::parse(&held.frame, None).filter(|frame| frame.vlan.is_none())?;
            let entry = ConntrackEntry::of_datagram(&frame)?;
            let redirection = next_move::of_entry(&entry, agreed, |redirection| redirection)?;
            let home = redirection.home()?;
            Some(entry.with_mark(home.mark))
        };
        let is_new = |entry: &ConntrackEntry| self.known.len() < MOST_FLOWS && self.known.insert(entry.key());
        let new: Vec<_> = frames.iter().filter_map(entry).filter(is_new).map(EntryChange::Install).collect();
        if new.is_empty() {
            return;
        }
        match self.installer.apply(new) {
            Ok(result) => {
                for (flow, reason) in result.failed {
                    warn!(flow, reason, "answers to held frames may leave by the VM's new address");
                }
            }
            Err(error) => warn!(%error, "answers to held frames may leave by the VM's new address"),
        }
    }
}
