//! Second act: two networks, far from each other, and a client with an SSH session and a download.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Stdio;

use serde::Serialize;
use serde_json::Value;
use toml::toml;

use super::{VM, document, ended, runs_qemu};
use crate::agents::Agents;
use crate::client::wait_for_service;
use crate::debian_guest::debian_guest;
use crate::environment::Environment;
use crate::error::{Context, Result};
use crate::follow::DEADLINE;
use crate::guest::Guest;
use crate::host::Host;
use crate::lab::{Lab, LabConfig, Link, vm_address};
use crate::run::run;
use crate::sessions::{Download, DownloadReport, SessionReport, SshSession};
use crate::spec::Net;
use crate::two_networks::{NEW_ADDRESS, separate_far};
use crate::wan;

/// Ports of the SSH server and of the web server.
const PORTS: [u16; 2] = [22, 80];
/// Lines of the session, and pieces of the download, that are awaited before the first migration and after each.
const ARRIVALS: usize = 50;

/// Results of the second act.
#[derive(Debug, Clone, Serialize)]
pub struct FarReport {
    /// Report of the migration to the other network.
    pub there: Value,
    /// Report of the migration back.
    pub back: Value,
    /// The SSH session.
    pub ssh: SessionReport,
    /// The download.
    pub download: DownloadReport,
    /// True if the VM's QEMU runs on the first host in the end, and only there.
    pub returned: bool,
}

impl FarReport {
    pub(super) fn is_clean(&self) -> bool {
        let have_moved = [&self.there, &self.back].iter().all(|report| report["outcome"] == "moved");
        let is_whole = self.download.connection.error.is_none() && self.download.files > 0;
        have_moved && self.returned && is_whole && self.ssh.error.is_none()
    }
}

/// Plays the act.
pub(super) fn play(
    whimbrel: &Path,
    environment: &Environment,
    say: &mut impl FnMut(&str),
) -> Result<FarReport> {
    let way = wan::ocean();
    say("");
    say(&format!(
        "Two networks, each with a host: {} ms from one to the other and back, and {} Mb/s.",
        way.round_trip_ms, way.megabits_per_s
    ));
    let lab = Lab::up(&LabConfig::new("demo-far").link(Link::Emulated(way.settings())))?;
    let _ways = separate_far(&lab, way.delay())?;
    lab.b.tap(&Net::new(1).tap)?;
    let agents = Agents::new(&lab, environment, whimbrel)
        .with(toml! { network = { redirection = { trusted_path = true } } });
    agents.write()?;
    [&lab.a, &lab.b].into_iter().try_for_each(|host| give_template(host, environment))?;
    let _daemons = agents.start_all()?;
    let guest = Guest::start(&lab.a, environment, &debian_guest(&lab, environment, VM, 1)?)?;
    guest.serial().follow()?.wait_for_text("SERVING")?;
    PORTS.iter().try_for_each(|port| wait_for_service(&lab.client, vm_address(1), *port, DEADLINE))?;

    say("A client, as far away, logs in by SSH and begins a download; it will not connect again.");
    let ssh = SshSession::start(&lab.client, environment, vm_address(1))?;
    let download = Download::start(&lab.client, environment, vm_address(1))?;
    let go_on = || ssh.wait_for(ARRIVALS).and_then(|()| download.wait_for(ARRIVALS));
    go_on()?;

    run(&mut agents.command(&lab.a, &["vm", "adopt", VM]))?;
    let new_address = format!("--new-address={}={NEW_ADDRESS}", vm_address(1));
    say(&format!("The VM moves to host b, with its disk; it gets the address {NEW_ADDRESS} there."));
    let there = migrate(&agents, &lab.a, &lab.b, &[&new_address], say)?;
    go_on()?;
    say("It moves back to host a.");
    let back = migrate(&agents, &lab.b, &lab.a, &[], say)?;
    go_on()?;

    let (ssh, download) = (ssh.finish(), download.finish());
    let returned = runs_qemu(&lab.a)? && !runs_qemu(&lab.b)?;
    drop(guest);
    let report = FarReport { there, back, ssh, download, returned };
    describe(&report, say);
    Ok(report)
}

/// Gives a host the image from which the VM's disk was made, as hosts of VMs have it: its content is not sent.
fn give_template(host: &Host, environment: &Environment) -> Result<()> {
    let (image, path) = (environment.debian_disk()?, host.directory().join("templates/debian.qcow2"));
    let image = fs::canonicalize(&image).context(|| format!("cannot find {}", image.display()))?;
    symlink(image, &path).context(|| format!("cannot make {}", path.display()))
}

fn migrate(
    agents: &Agents,
    from: &Host,
    to: &Host,
    more: &[&str],
    say: &mut impl FnMut(&str),
) -> Result<Value> {
    let mut command = agents.command(from, &["migrate", VM, "--to", to.name(), "--disks=copy", "--json"]);
    let report = document(&run(command.args(more).stderr(Stdio::inherit()))?);
    let seconds = |us: &Value| us.as_f64().unwrap_or_default() / 1e6;
    let (total, downtime) = (seconds(&report["total_us"]), seconds(&report["downtime"]["total_us"]));
    say(&format!("It has moved after {total:.1} s, and was stopped for {downtime:.2} s of these."));
    Ok(report)
}

/// Describes what the client has seen in a few lines.
fn describe(report: &FarReport, say: &mut impl FnMut(&str)) {
    let FarReport { ssh, download, .. } = report;
    say(&format!(
        "SSH session: {} lines, the longest gap {:.0} ms; {}.",
        ssh.arrived,
        ssh.longest_gap_ms,
        ended(ssh.error.as_deref()),
    ));
    let DownloadReport { connection, files, bytes } = download;
    say(&format!(
        "Download: {:.1} MB in {files} files with the right checksum, the longest gap {:.0} ms; {}.",
        *bytes as f64 / 1e6,
        connection.longest_gap_ms,
        ended(connection.error.as_deref()),
    ));
}
