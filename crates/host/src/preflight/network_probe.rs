//! Reachability of a guest at its destination, shown before it moves: a probe proves that the networks of its taps are
//! the same on both hosts, and that their gateways answer there.
//!
//! The source sends frames from the guest's taps, through their ports of the bridges, until its proposal is answered.
//! The destination looks for them at the taps of the QEMU that it starts for the guest, in a check and in a migration.
//! So a wrong bridge, a missing VLAN and a switch that does not carry it are found before the guest is touched. A
//! filter of MAC addresses hides the probe, too: that a network is not proven does not mean that it is another one.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use engine::handover::MigrationTerms;
use net::announcer::Card;
use net::bridge_ports::{self, BridgePort};
use net::{NetworkProof, ProbedTap, Prober};
use proto::HostId;
use proto::limits::{PROBED_GATEWAYS, PROBED_VLANS};
use proto::message::{Finding, NetworkProbe, ProbedCard, Severity};
use qemu::qmp::Qmp;
use tracee::Process;

use crate::{SourceVm, network_cards};
use api::NetworkCheck;

/// Longest look for the source's frames, and for the answers of gateways.
const PATIENCE: Duration = Duration::from_secs(2);

/// Probe of a guest's networks by its source.
#[derive(Debug, Default)]
pub struct SourceProbe {
    /// Probe for the proposal; none if there is no network to probe.
    pub proposed: Option<NetworkProbe>,
    /// Networks that cannot be probed.
    pub findings: Vec<Finding>,
    /// Sends the frames until it is dropped.
    pub prober: Option<Prober>,
}

/// Begins to probe the networks of a guest. That a network cannot be probed is no reason not to migrate.
pub fn begin_probe(vm: &mut SourceVm, choice: NetworkCheck) -> SourceProbe {
    let begun = match choice {
        NetworkCheck::Off => return SourceProbe::default(),
        NetworkCheck::Warn => try_begin(vm, false),
        NetworkCheck::Require => try_begin(vm, true),
    };
    begun.unwrap_or_else(|reason| SourceProbe {
        findings: vec![not_probed(&reason)],
        ..SourceProbe::default()
    })
}

fn try_begin(vm: &mut SourceVm, required: bool) -> Result<SourceProbe, String> {
    let process = vm.process.try_clone().map_err(|error| crate::chain(&error))?;
    let qmp = vm.monitor().map_err(|error| crate::chain(&error))?;
    let (mut findings, mut probed, mut sending) = (Vec::new(), Vec::new(), Vec::new());
    for card in reachable_cards(qmp, &process)? {
        let Some(interface) = card.interface().map(str::to_owned) else { continue };
        match bridge_ports::bridge_port(&interface) {
            Ok(Some(port)) => {
                let card_here = probed_card(&card, interface, port);
                sending.push((card, card_here.tagged.clone()));
                probed.push(card_here);
            }
            Ok(None) => findings.push(not_probed(&format!("{interface} is in no bridge"))),
            Err(error) => {
                findings.push(not_probed(&format!("the bridge of {interface} is unknown: {error}")));
            }
        }
    }
    if sending.is_empty() {
        return Ok(SourceProbe { findings, ..SourceProbe::default() });
    }
    let nonce = RandomState::new().hash_one(std::process::id());
    let prober = Prober::start(nonce, sending).map_err(|error| crate::chain(&error))?;
    let proposed = NetworkProbe { nonce, required, cards: probed };
    Ok(SourceProbe { proposed: Some(proposed), findings, prober: Some(prober) })
}

/// Returns the cards of a QEMU whose taps can be reached by their names.
pub(super) fn reachable_cards(qmp: &mut Qmp, process: &Process) -> Result<Vec<Card>, String> {
    let cards = network_cards::cards(qmp, process).map_err(|error| crate::chain(&error))?;
    let interfaces = network_cards::interfaces(&cards, process).map_err(|error| crate::chain(&error))?;
    if interfaces.is_empty() && !cards.is_empty() {
        return Err("QEMU's taps are in another network namespace than the agent".to_owned());
    }
    Ok(cards)
}

/// Describes a card with its tap's place for the destination.
fn probed_card(card: &Card, interface: String, port: BridgePort) -> ProbedCard {
    // The gateways of the host are those of the guest only in the same VLAN.
    let gateways =
        if port.vlan == port.host_vlan { bridge_ports::gateways(port.bridge_index) } else { Ok(Vec::new()) };
    let mut gateways = gateways.unwrap_or_default();
    gateways.truncate(PROBED_GATEWAYS);
    let mut tagged = port.tagged;
    tagged.truncate(PROBED_VLANS);
    ProbedCard {
        mac: card.mac.to_string(),
        interface,
        bridge: port.bridge,
        vlan: port.vlan,
        tagged,
        gateways,
    }
}

/// Probe that the source of a VM sends.
pub(super) struct ExpectedProbe {
    probe: NetworkProbe,
    hosts: ProbedHosts,
}

/// Names of the two hosts.
struct ProbedHosts {
    source: HostId,
    destination: HostId,
}

/// Place of a card's tap at the destination.
struct TapHere {
    interface: String,
    /// None if the tap is in no bridge.
    port: Option<BridgePort>,
}

impl ExpectedProbe {
    /// Returns the probe of a proposal, if it has one.
    pub(super) fn of(terms: &MigrationTerms, probe: Option<&NetworkProbe>) -> Option<Self> {
        let hosts = ProbedHosts { source: terms.source.clone(), destination: terms.destination.clone() };
        probe.map(|probe| Self { probe: probe.clone(), hosts })
    }

    /// Looks for the source's frames at the taps of a QEMU that waits for the guest.
    pub(super) fn look(&self, qmp: &mut Qmp, pid: u32) -> Vec<Finding> {
        let process = Process::open(pid).map_err(|error| crate::chain(&error));
        let looked = process.and_then(|process| self.look_at(&reachable_cards(qmp, &process)?));
        looked.unwrap_or_else(|reason| vec![not_probed(&reason)])
    }

    fn look_at(&self, cards: &[Card]) -> Result<Vec<Finding>, String> {
        // A card that has another address here has no tap that could be compared.
        let here = |probed: &ProbedCard| cards.iter().find(|card| card.mac.to_string() == probed.mac);
        let pairs: Vec<_> =
            self.probe.cards.iter().filter_map(|probed| Some((probed, here(probed)?))).collect();
        let taps = pairs.iter().map(|&(probed, card)| ProbedTap {
            card,
            vlans: &probed.tagged,
            gateways: &probed.gateways,
        });
        let taps: Vec<_> = taps.collect();
        let proofs = net::prober::prove(self.probe.nonce, &taps, PATIENCE)
            .map_err(|error| format!("the taps of the waiting QEMU cannot be observed: {error}"))?;
        let mut findings = Vec::new();
        for ((probed, card), proof) in pairs.iter().zip(&proofs) {
            let interface = card.interface().unwrap_or_default().to_owned();
            let port = bridge_ports::bridge_port(&interface).unwrap_or_default();
            findings.extend(self.judge(probed, &TapHere { interface, port }, proof));
        }
        Ok(findings)
    }

    /// Returns the findings about the network of a card.
    fn judge(&self, card: &ProbedCard, here: &TapHere, proof: &NetworkProof) -> Vec<Finding> {
        let ProbedHosts { source, destination } = &self.hosts;
        let there = format!("{} on {source} ({})", card.interface, network_name(&card.bridge, card.vlan));
        let place = match &here.port {
            Some(port) => network_name(&port.bridge, port.vlan),
            None => "in no bridge".to_owned(),
        };
        let here_text = format!("{} on {destination} ({place})", here.interface);
        let missing: Vec<_> = proof.missing().collect();
        if here.port.as_ref().is_some_and(|port| !port.is_forwarding) && !missing.is_empty() {
            return vec![not_probed(&format!("the bridge of {here_text} does not pass frames on yet"))];
        }
        if !missing.is_empty() {
            return vec![self.unproven(&there, &here_text, &missing)];
        }
        let silent = proof.silent().map(|gateway| Finding {
            severity: Severity::Warning,
            code: "gateway-silent".to_owned(),
            what: format!("the gateway {gateway} of {there} does not answer at {here_text}"),
            advice: format!(
                "look at filters of ARP and of neighbour discovery between {destination} and the gateway"
            ),
        });
        let silent: Vec<_> = silent.collect();
        if silent.is_empty() { vec![proven(card, &there, &here_text)] } else { silent }
    }

    fn unproven(&self, there: &str, here: &str, missing: &[Option<u16>]) -> Finding {
        let destination = &self.hosts.destination;
        let vlans: Vec<_> = missing.iter().flatten().map(ToString::to_string).collect();
        let frames = match (missing.contains(&None), vlans.is_empty()) {
            (true, true) => "frames".to_owned(),
            (true, false) => format!("frames without a VLAN tag and in VLAN {}", vlans.join(", ")),
            (false, _) => format!("frames in VLAN {}", vlans.join(", ")),
        };
        Finding {
            severity: if self.probe.required { Severity::Blocker } else { Severity::Warning },
            code: "network-unproven".to_owned(),
            what: format!("{frames} from {there} do not arrive at {here}: the VM may not be reachable there"),
            advice: format!(
                "put the tap on {destination} into the bridge of the same network (`bridge link`), with the same \
                 VLANs (`bridge vlan`), and let the switch's port to {destination} carry them; a filter of MAC \
                 addresses hides the probe, too. For a VM that moves to another network choose --network-check off"
            ),
        }
    }
}

/// Describes the place of a tap.
fn network_name(bridge: &str, vlan: Option<u16>) -> String {
    vlan.map_or_else(|| format!("bridge {bridge}"), |vlan| format!("bridge {bridge}, VLAN {vlan}"))
}

fn proven(card: &ProbedCard, there: &str, here: &str) -> Finding {
    let gateways: Vec<_> = card.gateways.iter().map(ToString::to_string).collect();
    let answers = match &gateways[..] {
        [] => String::new(),
        gateways => format!("; gateways that answer there: {}", gateways.join(", ")),
    };
    Finding {
        severity: Severity::Info,
        code: "network-proven".to_owned(),
        what: format!("{there} and {here} are in one network{answers}"),
        advice: "nothing to do".to_owned(),
    }
}

fn not_probed(reason: &str) -> Finding {
    Finding {
        severity: Severity::Info,
        code: "network-not-probed".to_owned(),
        what: format!("it is not known whether the VM's networks are the same at the destination: {reason}"),
        advice: "compare the networks of both hosts yourself".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use net::ethernet::Frame;
    use net::probe::{self, Side};

    use super::*;
    use crate::testing::terms;

    const NONCE: u64 = 7;
    const MAC: &str = "52:54:00:00:00:07";

    fn card(tagged: &[u16], gateways: &[IpAddr]) -> ProbedCard {
        ProbedCard {
            mac: MAC.to_owned(),
            interface: "tap0".to_owned(),
            bridge: "br0".to_owned(),
            vlan: Some(5),
            tagged: tagged.to_vec(),
            gateways: gateways.to_vec(),
        }
    }

    fn here(is_forwarding: bool) -> TapHere {
        let port = BridgePort { bridge: "br9".to_owned(), is_forwarding, ..BridgePort::default() };
        TapHere { interface: "tap7".to_owned(), port: Some(port) }
    }

    /// Returns severity and code of the finding, after frames in these VLANs have arrived.
    fn judge(required: bool, card: &ProbedCard, here: &TapHere, arrived: &[Option<u16>]) -> Finding {
        let probe = NetworkProbe { nonce: NONCE, required, cards: vec![card.clone()] };
        let expected = ExpectedProbe::of(&terms("alpha", "beta"), Some(&probe)).unwrap();
        let mac = MAC.parse().unwrap();
        let mut proof = NetworkProof::new(NONCE, mac, &card.tagged, &card.gateways);
        for vlan in arrived {
            let frame = probe::frame(NONCE, mac, probe::probe_mac(NONCE, 0, Side::Source), *vlan);
            proof.observe(&Frame::parse(&frame, None).unwrap());
        }
        let mut findings = expected.judge(card, here, &proof);
        assert_eq!(findings.len(), 1, "{findings:#?}");
        findings.remove(0)
    }

    #[test]
    fn a_network_without_our_frames_is_not_proven() {
        for (required, severity) in [(false, Severity::Warning), (true, Severity::Blocker)] {
            let found = judge(required, &card(&[6], &[]), &here(true), &[]);
            assert_eq!((found.severity, found.code.as_str()), (severity, "network-unproven"));
            let parts = ["VLAN 6", "tap0 on alpha (bridge br0, VLAN 5)", "tap7 on beta (bridge br9)"];
            assert!(parts.iter().all(|part| found.what.contains(part)), "{}", found.what);
            assert!(found.advice.contains("--network-check off"));
        }
        let found = judge(false, &card(&[6], &[]), &here(true), &[None]);
        assert!(found.what.starts_with("frames in VLAN 6 from"), "{}", found.what);
        let found = judge(false, &card(&[], &[]), &TapHere { port: None, ..here(true) }, &[]);
        assert!(found.what.contains("tap7 on beta (in no bridge)"), "{}", found.what);
    }

    #[test]
    fn a_proven_network_is_reported() {
        let found = judge(true, &card(&[6], &[]), &here(true), &[None, Some(6)]);
        assert_eq!((found.severity, found.code.as_str()), (Severity::Info, "network-proven"));
    }

    #[test]
    fn a_gateway_that_is_silent_is_a_warning() {
        let gateway = "10.0.0.254".parse().unwrap();
        let found = judge(true, &card(&[], &[gateway]), &here(true), &[None]);
        assert_eq!((found.severity, found.code.as_str()), (Severity::Warning, "gateway-silent"));
        assert!(found.what.contains("10.0.0.254"), "{}", found.what);
    }

    #[test]
    fn a_port_that_does_not_forward_yet_shows_nothing() {
        let found = judge(true, &card(&[], &[]), &here(false), &[]);
        assert_eq!((found.severity, found.code.as_str()), (Severity::Info, "network-not-probed"));
    }
}
