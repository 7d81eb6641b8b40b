//! Network cards of a VM on this host, and the taps behind them.

use std::fs;
use std::io;
use std::thread;

use net::announcer::Card;
use net::{Announcer, Mac, announcement};
use qemu::nics::{Nic, NicTap};
use qemu::qmp::{Qmp, QmpError};
use tracee::{Process, ProcessError, Tap};

/// Name of an interface, and the address of the card behind which it is.
pub type Interface = (String, Mac);

/// Error: the network cards of a VM cannot be found.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// QEMU's monitor failed, or refused the query.
    #[error("QEMU does not list its network cards")]
    Qmp(#[from] QmpError),
    /// QEMU's descriptors cannot be examined.
    #[error("the taps of QEMU cannot be examined")]
    Process(#[from] ProcessError),
}

/// Returns the network cards of a VM behind which there are taps, with duplicates of QEMU's descriptors.
pub fn cards(qmp: &mut Qmp, process: &Process) -> Result<Vec<Card>, NetworkError> {
    let nics = qemu::nics::nics(qmp)?;
    if nics.iter().all(|nic| nic.taps.is_empty()) {
        return Ok(Vec::new());
    }
    let taps = Tap::of_process(process)?;
    let names: Vec<_> = taps.iter().map(|(number, tap)| (*number, tap.interface())).collect();
    let owners = assign(&nics, &names);
    // A card whose address QEMU does not print is not announced in any other name.
    let mut cards: Vec<Option<Card>> =
        nics.iter().map(|nic| Some(Card { mac: nic.mac.parse().ok()?, taps: Vec::new() })).collect();
    for ((_, tap), owner) in taps.into_iter().zip(owners) {
        if let Some(card) = owner.and_then(|owner| cards.get_mut(owner)?.as_mut()) {
            card.taps.push(tap);
        }
    }
    Ok(cards.into_iter().flatten().filter(|card| !card.taps.is_empty()).collect())
}

/// Returns for each tap, with its number and the name of its interface, the index of the card that uses it. Several
/// cards of a hub use the same tap; the first one gets it.
fn assign(nics: &[Nic], taps: &[(i32, &str)]) -> Vec<Option<usize>> {
    let is_of = |wanted: &NicTap, (number, interface): (i32, &str)| match wanted {
        NicTap::Interface(name) => name == interface,
        NicTap::Descriptor(descriptor) => *descriptor == number,
        NicTap::Helper => false,
    };
    let owner = |tap: &(i32, &str)| nics.iter().position(|nic| nic.taps.iter().any(|of| is_of(of, *tap)));
    let mut owners: Vec<_> = taps.iter().map(owner).collect();
    // A helper's taps have unknown names. Only if one card and one tap remain, they belong together.
    let mut by_helper = (0..nics.len()).filter(|nic| nics[*nic].taps.contains(&NicTap::Helper));
    let mut unowned = (0..taps.len()).filter(|tap| owners[*tap].is_none());
    if let (Some(nic), None, Some(tap), None) =
        (by_helper.next(), by_helper.next(), unowned.next(), unowned.next())
    {
        owners[tap] = Some(nic);
    }
    owners
}

/// Returns the interfaces of cards, with the cards' addresses, if this process can reach them by their names: QEMU may
/// run in a network namespace of its own, in which the names are others'.
pub fn interfaces<'a>(
    cards: impl IntoIterator<Item = &'a Card>,
    process: &Process,
) -> io::Result<Vec<Interface>> {
    let namespace = fs::read_link("/proc/self/ns/net")?;
    if fs::read_link(process.path("ns/net"))? != namespace {
        return Ok(Vec::new());
    }
    let named = |card: &Card| Some((card.interface()?.to_owned(), card.mac));
    Ok(cards.into_iter().filter_map(named).collect())
}

/// Repeats an announcement, in a thread, for as long as the guest is here: a QEMU that is held or has ended has passed
/// it on. The thread ends with QEMU: the next one could not have a tap that is still in use.
pub fn repeat_announcement(announcer: Announcer, process: Process) -> io::Result<()> {
    let repeat = move || {
        for pause in announcement::PAUSES {
            if !matches!(process.wait_exit(Some(pause)), Ok(false)) {
                return;
            }
            if process.status().is_ok_and(|status| !matches!(status.state, 'T' | 'Z' | 'X')) {
                announcer.announce();
            }
        }
    };
    thread::Builder::new().name("announce".to_owned()).spawn(repeat).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(taps: &[NicTap]) -> Nic {
        Nic { name: "n".to_owned(), mac: "52:54:00:00:00:01".to_owned(), taps: taps.to_vec() }
    }

    fn interface(name: &str) -> NicTap {
        NicTap::Interface(name.to_owned())
    }

    #[test]
    fn taps_belong_to_cards_by_name_or_number() {
        let nics =
            [nic(&[interface("tap1")]), nic(&[NicTap::Descriptor(9), NicTap::Descriptor(10)]), nic(&[])];
        let taps = [(9, "tap2"), (10, "tap2"), (11, "tap1"), (12, "tap1"), (13, "tap3")];
        assert_eq!(assign(&nics, &taps), [Some(1), Some(1), Some(0), Some(0), None]);
    }

    #[test]
    fn a_helpers_tap_is_known_only_if_nothing_else_remains() {
        let helper = || nic(&[NicTap::Helper]);
        assert_eq!(assign(&[helper()], &[(9, "tap0")]), [Some(0)]);
        assert_eq!(
            assign(&[helper(), nic(&[interface("tap1")])], &[(9, "tap0"), (10, "tap1")]),
            [Some(0), Some(1)]
        );
        assert_eq!(assign(&[helper(), helper()], &[(9, "tap0"), (10, "tap1")]), [None, None]);
        assert_eq!(assign(&[helper()], &[(9, "tap0"), (10, "tap1")]), [None, None]);
    }

    #[test]
    fn all_cards_of_a_hub_share_a_tap() {
        let nics = [nic(&[interface("tap0")]), nic(&[interface("tap0")])];
        assert_eq!(assign(&nics, &[(9, "tap0")]), [Some(0)]);
    }
}
