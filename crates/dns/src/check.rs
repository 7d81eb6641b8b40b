//! Pre-flight check: what would keep the names of a VM from following it. Nothing is changed.
//!
//! A server is asked for updates that it must not make: their prerequisite is that the zone's own name has no records, which
//! is never true (RFC 2136, section 2.4.5). So its answer shows whether it accepts the key, serves the zone, and, as far as
//! it looks at permissions before prerequisites (BIND does so in 9.18), whether it permits each of the changes.

use std::collections::{BTreeMap, BTreeSet};

use proto::message::{Finding, Severity};

use crate::answer::{self, UpdateResult};
use crate::change::{Goal, OriginalRrset, Rrset, RrsetChange};
use crate::client::{Client, now_s};
use crate::config::CheckMode;
use crate::decide::{self, Step};
use crate::failure::Failure;
use crate::message::Update;
use crate::name::Name;
use crate::rdata::RecordType;
use crate::relocation::{Relocation, RelocationError, changes_of};
use crate::tsig::KeyRejection;
use crate::zones::{Zone, Zones};

/// Checks whether the names of a VM can follow it. Takes four seconds for each server that does not answer.
pub fn check(zones: &Zones, relocation: &Relocation, mode: CheckMode) -> Vec<Finding> {
    let severity = match mode {
        CheckMode::Require => Severity::Blocker,
        CheckMode::Warn => Severity::Warning,
    };
    let mut checker = Checker { zones, severity, findings: Vec::new() };
    match changes_of(zones.configs(), relocation) {
        Ok(changes) => {
            let mut by_zone: BTreeMap<Name, Vec<RrsetChange>> = BTreeMap::new();
            for change in changes {
                by_zone.entry(change.zone.clone()).or_default().push(change);
            }
            for (zone, changes) in by_zone {
                if let Err(failure) = checker.check_zone(&zone, changes) {
                    checker.report_failure(&zone, &failure);
                }
            }
        }
        Err(RelocationError::NoZone(name)) => checker.report_no_zone(&name),
    }
    checker.findings
}

struct Checker<'a> {
    zones: &'a Zones,
    /// Severity of what keeps a name from following.
    severity: Severity,
    findings: Vec<Finding>,
}

/// Change whose records are the source's.
struct Known {
    change: RrsetChange,
    original: OriginalRrset,
    observed: Rrset,
}

impl Checker<'_> {
    fn problem(&mut self, code: &'static str, what: String, advice: impl Into<String>) {
        self.find(self.severity, code, what, advice);
    }

    fn find(&mut self, severity: Severity, code: &'static str, what: String, advice: impl Into<String>) {
        self.findings.push(Finding::new(severity, code, what, advice));
    }

    fn check_zone(&mut self, name: &Name, changes: Vec<RrsetChange>) -> Result<(), Failure> {
        let zone = self.zones.zone(name)?;
        let mut client = Client::connect(zone.primary, Some(zone.key))?;
        let prerequisites = vec![Update::impossible(name)];
        let nothing = Update { zone: name.clone(), prerequisites, edits: vec![] };
        if client.update(&nothing)? == UpdateResult::Made {
            self.problem(
                "dns-conditions-ignored",
                format!("the DNS server {} makes updates whose prerequisites are not met", zone.primary),
                "it could overwrite what others have changed, so that Whimbrel does not use it: name another server",
            );
            return Ok(());
        }
        let serial = client.serial(name)?;
        let (mut known, mut missing, mut having) = (Vec::new(), Vec::new(), BTreeSet::new());
        for mut change in changes {
            let observed = client.records(name, &change.owner, change.kind)?;
            if observed != Rrset::default() {
                having.insert(change.owner.clone());
            }
            match decide::read_original(&change, &observed) {
                Some((_, rdata_changes)) if rdata_changes.is_empty() => missing.push(change),
                Some((original, rdata_changes)) => {
                    change.rdata_changes = rdata_changes;
                    known.push(Known { change, original, observed });
                }
                None => self.report_records(&change, &observed),
            }
        }
        // A name need not have all kinds of addresses that the VM has, but one of them.
        for change in missing.iter().filter(|change| change.kind != RecordType::Ptr) {
            if !having.contains(&change.owner) {
                self.report_records(change, &Rrset::default());
            }
        }
        for known in &known {
            self.check_permission(&mut client, &zone, known)?;
        }
        self.check_secondaries(&zone, serial, &known);
        Ok(())
    }

    /// Asks for a change with the prerequisite that is never met, and for its own prerequisites without a change.
    fn check_permission(
        &mut self,
        client: &mut Client<'_>,
        zone: &Zone<'_>,
        known: &Known,
    ) -> Result<(), Failure> {
        let Known { change, original, observed } = known;
        let prerequisites = decide::prerequisites(change, observed);
        let unchanged = Update { zone: change.zone.clone(), prerequisites, edits: vec![] };
        if client.update(&unchanged)? != UpdateResult::Made {
            self.problem(
                "dns-record-different",
                format!(
                    "{} {}: the DNS server {} denies the records that it gives",
                    change.owner, change.kind, zone.primary
                ),
                "a wildcard may make them: give the name records of its own",
            );
            return Ok(());
        }
        let Step::Update(mut update) = decide::next_step(change, original, Goal::Switched, observed) else {
            return Ok(());
        };
        update.prerequisites = vec![Update::impossible(&change.zone)];
        match client.update(&update) {
            Ok(_) => {
                self.find(
                    Severity::Info,
                    "dns-ready",
                    format!("{change} can be changed at {}", zone.primary),
                    ttl_advice(original.ttl_s, change.lowered_ttl_s),
                );
                Ok(())
            }
            Err(Failure::Refused { server }) => {
                self.problem(
                    "dns-update-refused",
                    format!("the DNS server {server} does not permit the key to change {change}"),
                    "permit it for this name and type, in BIND by `update-policy` or `allow-update` of the zone",
                );
                Ok(())
            }
            Err(failure) => Err(failure),
        }
    }

    /// Compares the secondaries of a zone with its primary.
    fn check_secondaries(&mut self, zone: &Zone<'_>, serial: u32, known: &[Known]) {
        for server in zone.secondaries {
            let checked = Client::connect(*server, None).and_then(|mut client| {
                let its_serial = client.serial(zone.name)?;
                for Known { change, .. } in known {
                    client.records(zone.name, &change.owner, change.kind)?;
                }
                Ok(its_serial)
            });
            match checked {
                Ok(its_serial) if answer::is_older(its_serial, serial) => self.find(
                    Severity::Warning,
                    "dns-server-behind",
                    format!("the DNS server {server} has the serial {its_serial} of {}, not {serial}", zone.name),
                    "make the primary notify it; else clients learn the new addresses late",
                ),
                Ok(_) => {}
                Err(failure) => self.find(
                    Severity::Warning,
                    "dns-server-unread",
                    format!("{}: {failure}", zone.name),
                    "permit this host to query it, or remove it from `servers`; else a change there is not verified",
                ),
            }
        }
    }

    /// Reports records that are not those of the source.
    fn report_records(&mut self, change: &RrsetChange, observed: &Rrset) {
        let name = format!("{} {}", change.owner, change.kind);
        if let Some(alias) = &observed.alias {
            self.problem(
                "dns-record-different",
                format!("{name}: the name is an alias of {alias}"),
                format!("configure {alias} as a name of the VM in its place"),
            );
        } else if observed.values.is_empty() {
            self.problem(
                "dns-record-missing",
                format!("{change}: the name has no such record"),
                "add the record, or remove the name from the VM's names",
            );
        } else {
            // The name of an address is of little use to clients.
            let severity = if change.kind == RecordType::Ptr { Severity::Warning } else { self.severity };
            self.find(
                severity,
                "dns-record-different",
                format!("{change}: the name has {observed}"),
                "correct the record, or remove the name from the VM's names: only a record that the VM has is replaced",
            );
        }
    }

    fn report_no_zone(&mut self, name: &Name) {
        self.problem(
            "dns-zone-not-configured",
            format!("the name {name} is in none of the zones that this host may change"),
            "add [[dns.zones]] for it, or remove the name from the VM's names",
        );
    }

    /// Reports what keeps all names of a zone from following.
    fn report_failure(&mut self, zone: &Name, failure: &Failure) {
        let what = format!("{zone}: {failure}");
        match failure {
            Failure::Unreachable { .. } => self.problem(
                "dns-unreachable",
                what,
                "start it, permit this host to reach it by TCP, or correct `servers`",
            ),
            Failure::Key { rejection: KeyRejection::BadTime { server_s }, .. } => {
                let difference = server_s.map(|server_s| server_s.abs_diff(now_s()));
                let by = difference.map_or(String::new(), |seconds| format!(", now by {seconds} s"));
                self.problem("dns-clock", format!("{what}{by}"), "set both clocks, for instance by NTP");
            }
            Failure::Key { .. } => self.problem(
                "dns-key-refused",
                what,
                "give both the same key: its name, algorithm and secret (`tsig-keygen`)",
            ),
            Failure::KeyFile { .. } => self.problem("dns-key-file", what, "then start the agent again"),
            Failure::Unsigned { .. } | Failure::WrongSignature { .. } => self.problem(
                "dns-unsigned",
                what,
                "only a server with the key may answer: look at what stands between, and whether `servers` is right",
            ),
            Failure::Refused { .. } => self.problem(
                "dns-update-refused",
                what,
                "permit the key to query and to update the zone, in BIND by `allow-query` and `update-policy`",
            ),
            Failure::NoZone { .. } => self.problem(
                "dns-zone-not-served",
                what,
                "correct `zone`, or name the server that has the zone first in `servers`",
            ),
            Failure::NotConfigured { .. } => self.report_no_zone(zone),
            Failure::Malformed { .. }
            | Failure::Code { .. }
            | Failure::Contended { .. }
            | Failure::LostAnswer
            | Failure::NotRecorded { .. } => {
                self.problem("dns-server-failed", what, "look at the server's log");
            }
        }
    }
}

/// Returns what happens to the TTL of a record, and to caches.
fn ttl_advice(ttl_s: u32, lowered_ttl_s: u32) -> String {
    if ttl_s <= lowered_ttl_s {
        return format!(
            "its TTL of {ttl_s} s stays; if an earlier move has lowered it, wait until `whimbrel net show` on the host \
             that the VM left does not list the name any longer"
        );
    }
    format!(
        "its TTL of {ttl_s} s becomes {lowered_ttl_s} s; caches may have the old one for {ttl_s} s after that"
    )
}
