//! The guest's network cards, and the taps behind them.

use crate::qmp::{Qmp, QmpError};

/// A network card of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// Name: that of the device, or one that QEMU made up.
    pub name: String,
    /// MAC address as QEMU prints it; it is the guest's present one where the guest has changed it.
    pub mac: String,
    /// Taps behind it: one for each of its queues, several behind a hub, none for other back ends.
    pub taps: Vec<NicTap>,
}

/// A tap as QEMU names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NicTap {
    /// Name of the interface.
    Interface(String),
    /// Number of the descriptor in QEMU's process, with which QEMU was started.
    Descriptor(i32),
    /// A tap that a helper program of QEMU has opened: QEMU does not print its name.
    Helper,
}

/// Returns the network cards of the guest.
pub fn nics(qmp: &mut Qmp) -> Result<Vec<Nic>, QmpError> {
    Ok(parse(&qmp.hmp("info network")?))
}

/// Reads `info network`: each card is followed by its back end, once for each queue; a hub by all that it connects.
///
/// ```text
/// n1: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:01
///  \ h1: index=0,type=tap,ifname=tap0,script=no,downscript=no
/// ```
fn parse(text: &str) -> Vec<Nic> {
    let mut nics: Vec<Nic> = Vec::new();
    // Cards to which the back ends of the present lines belong.
    let mut connected: Vec<usize> = Vec::new();
    let mut is_hub = false;
    let mut hub_taps: Vec<NicTap> = Vec::new();
    for line in text.lines() {
        let is_indented = line.starts_with([' ', '\t']);
        if !is_indented {
            connect(&mut nics, &connected, &std::mem::take(&mut hub_taps));
            connected.clear();
            is_hub = line.starts_with("hub ");
        }
        let Some((name, details)) = client(line) else { continue };
        let value = |key: &str| details.split(',').find_map(|part| part.trim().strip_prefix(key));
        match value("type=") {
            // Queues but the first have no details.
            Some("nic") => {
                let mac = value("macaddr=").unwrap_or_default();
                let known = nics.iter().position(|nic| nic.name == name);
                let place = known.unwrap_or_else(|| {
                    nics.push(Nic { name: name.to_owned(), mac: mac.to_owned(), taps: Vec::new() });
                    nics.len() - 1
                });
                if !is_hub {
                    connected.clear();
                }
                connected.push(place);
            }
            Some("tap") => {
                let tap = if let Some(interface) = value("ifname=") {
                    NicTap::Interface(interface.to_owned())
                } else if let Some(number) = value("fd=").and_then(|number| number.parse().ok()) {
                    NicTap::Descriptor(number)
                } else {
                    NicTap::Helper
                };
                hub_taps.push(tap);
            }
            _ => {}
        }
    }
    connect(&mut nics, &connected, &hub_taps);
    nics
}

fn connect(nics: &mut [Nic], connected: &[usize], taps: &[NicTap]) {
    for nic in connected {
        if let Some(nic) = nics.get_mut(*nic) {
            nic.taps.extend(taps.iter().filter(|tap| !nic.taps.contains(tap)).cloned().collect::<Vec<_>>());
        }
    }
}

/// Returns the name and the details of a line. In a hub the port precedes them: `hub0port1: #net185: index=0,…`.
fn client(line: &str) -> Option<(&str, &str)> {
    let (name, details) = line.trim().trim_start_matches("\\ ").split_once(": ")?;
    Some(details.split_once(": ").unwrap_or((name, details)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str) -> NicTap {
        NicTap::Interface(name.to_owned())
    }

    #[test]
    fn each_card_has_the_taps_behind_it() {
        let text = "n1: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:01\r
 \\ h1: index=0,type=tap,ifname=tap3,script=no,downscript=no\r
n2: index=0,type=nic,model=e1000,macaddr=52:54:00:00:00:02\r
 \\ h2: index=0,type=tap,fd=27\r
n3: index=0,type=nic,model=e1000,macaddr=52:54:00:00:00:03\r
 \\ h3: index=0,type=tap,helper=/usr/lib/qemu/qemu-bridge-helper,br=br0\r
n4: index=0,type=nic,model=e1000,macaddr=52:54:00:00:00:04\r
 \\ h4: index=0,type=user,net=10.0.2.0,restrict=off\r
h5: index=0,type=tap,ifname=tap9,script=no,downscript=no\r
";
        let found = parse(text);
        let taps: Vec<_> = found.iter().map(|nic| (nic.name.as_str(), nic.taps.as_slice())).collect();
        let expected: [(&str, &[NicTap]); 4] = [
            ("n1", &[interface("tap3")]),
            ("n2", &[NicTap::Descriptor(27)]),
            ("n3", &[NicTap::Helper]),
            ("n4", &[]),
        ];
        assert_eq!(taps, expected);
        assert_eq!(found[1].mac, "52:54:00:00:00:02");
    }

    #[test]
    fn queues_are_one_card() {
        let text = "n1: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:00:00:01
 \\ h1: index=0,type=tap,fd=7
n1: index=1,type=nic,
 \\ h1: index=1,type=tap,fd=8
";
        let taps = vec![NicTap::Descriptor(7), NicTap::Descriptor(8)];
        let mac = "52:54:00:00:00:01".to_owned();
        assert_eq!(parse(text), [Nic { name: "n1".to_owned(), mac, taps }]);
    }

    #[test]
    fn all_cards_of_a_hub_use_its_tap() {
        let text = "hub 0
 \\ hub0port2: #net185: index=0,type=tap,ifname=tap3,script=no,downscript=no
 \\ hub0port1: e1000.1: index=0,type=nic,model=e1000,macaddr=52:54:00:00:00:02
 \\ hub0port0: e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:00:00:01
n3: index=0,type=nic,model=e1000,macaddr=52:54:00:00:00:03
";
        let found = parse(text);
        assert_eq!(found.len(), 3);
        assert!(found[..2].iter().all(|nic| nic.taps == [interface("tap3")]), "{found:?}");
        assert!(found[2].taps.is_empty(), "{found:?}");
    }
}
