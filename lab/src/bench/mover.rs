//! Moving the guest: by QEMU's own migration, or by Whimbrel. Each tells the same of what it did.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::case::{Case, Contender, Mode};
use super::result::Stop;
use super::subject::{Subject, UNLIMITED, VM, failed};
use super::usage::{Meter, Used, processes_of};
use crate::agents::Agents;
use crate::environment::Environment;
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::host::Host;
use crate::lab::Lab;
use crate::migrating::{is_qemu, migrate, number};
use crate::monitor::Monitor;
use crate::pki::Identity;
use crate::run::kill_pid;
use crate::serial::Serial;

/// Where QEMU waits for its own migration.
const PORT: u16 = 7799;

/// Parts of a downtime, ms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DowntimeParts {
    /// QEMU's `stop`.
    pub stop_ms: f64,
    /// The last pages.
    pub last_pages_ms: f64,
    /// The state of the devices on its way.
    pub device_state_ms: f64,
    /// Loading it.
    pub load_ms: f64,
    /// Journals, GO and RUNNING.
    pub handover_ms: f64,
    /// QEMU's `cont`.
    pub continue_ms: f64,
}

/// A guest that has been moved.
#[derive(Debug)]
pub(super) struct Moved {
    /// From the request to the end of the source's QEMU, with the start of the destination's.
    pub(super) total: Duration,
    /// From the request until the destination's QEMU was there.
    pub(super) start: Duration,
    pub(super) downtime: Duration,
    /// The part of it from QEMU's event STOP to its event RESUME, where they were told.
    pub(super) events: Option<Duration>,
    pub(super) parts: Option<DowntimeParts>,
    /// Both scans for dirty pages while the guest stood still, where that is known.
    pub(super) last_scans: Option<Duration>,
    /// Processor time up to the end.
    pub(super) used: Used,
    /// When the guest ran at its destination, by the host's calendar.
    pub(super) resumed: SystemTime,
    /// The first round's share of all bytes that were sent, and how long it took, where that is known.
    pub(super) first_round: Option<(f64, Duration)>,
    /// Passes over memory, the last one included.
    pub(super) rounds: u64,
    /// What the policy of the stop saw, where it told.
    pub(super) stop: Option<Stop>,
    /// Of post-copy: whether the guest ran on before all was there.
    pub(super) has_switched: Option<bool>,
    pub(super) serial: Serial,
    /// Held for as long as the guest is looked at.
    pub(super) _destination: Destination,
}

/// The QEMU that has the guest now. Ends when this is dropped.
#[derive(Debug)]
pub(super) enum Destination {
    /// Started here.
    Guest { _guest: Guest },
    /// Started by an agent.
    Process(u32),
}

impl Drop for Destination {
    fn drop(&mut self) {
        if let Self::Process(pid) = self {
            // `Lab::down` kills what is left.
            let _ = kill_pid(*pid);
        }
    }
}

/// Whether it has ended in time.
#[derive(Debug)]
pub(super) enum End {
    Moved(Box<Moved>),
    /// Given up, by us or by itself: it did not converge.
    GivenUp,
}

// ---- QEMU's own

/// Puts the files with which QEMU authenticates itself where it expects them, under the names that it expects.
pub(super) fn credentials(host: &Host, identity: &Identity) -> Result<()> {
    let directory = credentials_of(host);
    let prepare = || {
        fs::create_dir_all(&directory)?;
        for (file, name) in [
            (&identity.ca, "ca-cert.pem"),
            (&identity.certificate, "server-cert.pem"),
            (&identity.key, "server-key.pem"),
            (&identity.certificate, "client-cert.pem"),
            (&identity.key, "client-key.pem"),
        ] {
            fs::copy(file, directory.join(name))?;
        }
        Ok::<_, std::io::Error>(())
    };
    prepare().map_err(|source| Error::Io { what: format!("cannot fill {}", directory.display()), source })
}

fn credentials_of(host: &Host) -> PathBuf {
    host.directory().join("qemu-pki")
}

fn set_up(monitor: &mut Monitor, mode: Mode, case: &Case, tls: Option<&str>) -> Result<()> {
    let mut capabilities = vec!["events"];
    let mut parameters = json!({"max-bandwidth": UNLIMITED, "downtime-limit": case.downtime_limit_ms()});
    match mode {
        Mode::Default => {}
        Mode::Multifd(channels) => {
            capabilities.push("multifd");
            parameters["multifd-channels"] = channels.into();
        }
        Mode::MultifdZstd(channels) => {
            capabilities.push("multifd");
            parameters["multifd-channels"] = channels.into();
            parameters["multifd-compression"] = "zstd".into();
        }
        Mode::Xbzrle => {
            capabilities.push("xbzrle");
            parameters["xbzrle-cache-size"] = (case.memory_mib << 20).next_power_of_two().into();
        }
        Mode::PostCopy => {
            capabilities.extend(["postcopy-ram", "postcopy-preempt"]);
            parameters["max-postcopy-bandwidth"] = 0.into();
        }
        Mode::AutoConverge => capabilities.push("auto-converge"),
    }
    if let Some(host) = tls {
        parameters["tls-creds"] = "tls0".into();
        parameters["tls-hostname"] = host.into();
    }
    let capabilities: Vec<_> =
        capabilities.iter().map(|name| json!({"capability": name, "state": true})).collect();
    monitor.command("migrate-set-capabilities", &json!({ "capabilities": capabilities }))?;
    monitor.command("migrate-set-parameters", &parameters)?;
    Ok(())
}

fn add_credentials(monitor: &mut Monitor, host: &Host, endpoint: &str) -> Result<()> {
    let directory = credentials_of(host);
    let object = json!({
        "qom-type": "tls-creds-x509", "id": "tls0", "dir": directory, "endpoint": endpoint, "verify-peer": true
    });
    monitor.command("object-add", &object).map(drop)
}

/// What a move needs.
pub(super) struct Stage<'a> {
    pub(super) lab: &'a Lab,
    pub(super) environment: &'a Environment,
    pub(super) agents: &'a Agents,
    pub(super) subject: &'a Subject,
    pub(super) case: &'a Case,
    /// The guest that is moved.
    pub(super) source: &'a Guest,
    pub(super) meter: &'a Meter,
}

/// Moves the guest by QEMU's own migration.
pub(super) fn by_qemu(stage: &Stage<'_>, mode: Mode) -> Result<End> {
    let Stage { lab, environment, subject, case, source, meter, .. } = *stage;
    let began = Instant::now();
    let destination = subject.start_waiting(&lab.b, environment)?;
    let (mut from, mut to) = (source.monitor()?, destination.monitor()?);
    let start = began.elapsed();
    let peer = case.tls.then(|| lab.b.name());
    if case.tls {
        add_credentials(&mut from, &lab.a, "client")?;
        add_credentials(&mut to, &lab.b, "server")?;
    }
    set_up(&mut from, mode, case, peer)?;
    set_up(&mut to, mode, case, peer.map(|_| ""))?;
    let uri = format!("tcp:{}:{PORT}", lab.b.address());
    to.command("migrate-incoming", &json!({ "uri": uri }))?;
    from.command("migrate", &json!({ "uri": uri }))?;
    from.set_patience(Duration::from_secs(case.patience_s))?;
    let mut ended = false;
    let mut has_switched = false;
    let mut stopped_us = None;
    let until = began + Duration::from_secs(case.patience_s);
    while !ended {
        let event = match from.wait_for_event(|_| true) {
            Ok(event) if Instant::now() < until => event,
            // Nothing is said for so long, or too much.
            Ok(_) => return Ok(End::GivenUp),
            Err(error) if is_late(&error) => return Ok(End::GivenUp),
            Err(error) => return Err(error),
        };
        match (event.name.as_str(), event.data["status"].as_str()) {
            ("STOP", _) => stopped_us = Some(event.at_unix_us),
            // The first pass is over.
            ("MIGRATION_PASS", _) if mode == Mode::PostCopy && event.data["pass"] == 2 => {
                from.command("migrate-start-postcopy", &json!({}))?;
            }
            ("MIGRATION", Some("postcopy-active")) => has_switched = true,
            ("MIGRATION", Some("completed")) => ended = true,
            ("MIGRATION", Some("failed")) => return Err(failed(&mut from)),
            _ => {}
        }
    }
    let resumed_us = to.wait_for_event(|event| event.name == "RESUME")?.at_unix_us;
    let told = from.command("query-migrate", &json!({}))?;
    // As whoever moves a VM does; its memory is free only then.
    from.command("quit", &json!({}))?;
    source.wait_for_end()?;
    let total = began.elapsed();
    let stopped_us =
        stopped_us.ok_or_else(|| Error::Config(format!("QEMU did not tell of its stop: {told}")))?;
    let downtime = Duration::from_micros(resumed_us.saturating_sub(stopped_us));
    let used = meter.read(destination.pid())?;
    let serial = destination.serial().clone();
    Ok(End::Moved(Box::new(Moved {
        total,
        start,
        downtime,
        events: Some(downtime),
        parts: None,
        last_scans: None,
        used,
        resumed: SystemTime::UNIX_EPOCH + Duration::from_micros(resumed_us),
        first_round: None,
        rounds: number(&told["ram"], "dirty-sync-count")?,
        stop: None,
        has_switched: (mode == Mode::PostCopy).then_some(has_switched),
        serial,
        _destination: Destination::Guest { _guest: destination },
    })))
}

// ---- Whimbrel

/// Whether it is patience that has run out.
pub(crate) fn is_late(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&source.kind()))
}

/// Moves the guest by Whimbrel, as a user would.
pub(super) fn by_whimbrel(stage: &Stage<'_>, contender: Contender) -> Result<End> {
    let Stage { lab, agents, meter, .. } = *stage;
    let options = contender.options();
    let more: Vec<&str> = options.iter().map(String::as_str).collect();
    let told = migrate(agents, &lab.a, &lab.b, VM, &more, Duration::from_secs(stage.case.patience_s))?;
    let arrived = processes_of(&lab.b, is_qemu)?;
    let used = arrived.first().map(|pid| meter.read(*pid)).transpose()?;
    if !told.has_moved()? {
        return Ok(End::GivenUp);
    }
    let report = told.report();
    let part = |name: &str| Ok::<_, Error>(told.downtime(name)?.as_secs_f64() * 1e3);
    let rounds = report["rounds"].as_array().map_or(&[][..], Vec::as_slice);
    let first = rounds.iter().filter(|round| round["pass"] == 1);
    let sum = |what: &str| first.clone().map(|round| number(round, what)).sum::<Result<u64>>();
    let share = sum("sent_bytes")? as f64 / number(report, "sent_bytes")? as f64;
    let (Some(pid), Some(used)) = (arrived.first().copied(), used) else {
        return Err(Error::Config(format!("the guest that Whimbrel moved has no QEMU: {report}")));
    };
    // Nobody asks a guest's QEMU about it while the guest is watched, so its agent is not asked either.
    let socket = serial_socket(pid)?;
    Ok(End::Moved(Box::new(Moved {
        total: told.total()?,
        start: told.since_request("accepted")?,
        downtime: told.downtime("total_us")?,
        events: Some(told.downtime("events_us")?),
        parts: Some(DowntimeParts {
            stop_ms: part("stop_us")?,
            last_pages_ms: part("last_pages_us")?,
            device_state_ms: part("device_state_us")?,
            load_ms: part("load_us")?,
            handover_ms: part("handover_us")?,
            continue_ms: part("continue_us")?,
        }),
        last_scans: Some(told.downtime("last_scans_us")?),
        used,
        resumed: told.at("running")?,
        first_round: Some((share, Duration::from_micros(sum("duration_us")?))),
        rounds: passes(rounds),
        stop: stop(report),
        has_switched: None,
        serial: Serial::new(&socket, &socket.with_extension("log"), Some(pid)),
        _destination: Destination::Process(pid),
    })))
}

/// Ways through memory, those with the guest stopped included.
fn passes(rounds: &[Value]) -> u64 {
    let live = rounds.iter().filter_map(|round| round["pass"].as_u64()).max().unwrap_or(0);
    live + rounds.iter().filter(|round| round["stopped"] == true).count() as u64
}

/// What the policy was shown, from the trace in the report.
fn stop(report: &Value) -> Option<Stop> {
    let trace = report["traces"].as_array()?.last()?;
    let is_look = |entry: &&Value| entry["what"] == "round" && entry["observed"]["round"] != 0;
    let looks: Vec<_> = trace["entries"].as_array()?.iter().filter(is_look).collect();
    let last = looks.last()?;
    Some(Stop {
        // The first look is the one right after all of memory went.
        intervals: looks.len() as u64 - 1,
        left_pages: last["observed"]["dirty_pages"].as_u64()?,
        pattern: last["decision"]["pattern"].as_str().map(str::to_owned),
    })
}

/// The socket of a guest's serial line, from its QEMU's command line.
fn serial_socket(pid: u32) -> Result<PathBuf> {
    let path = format!("/proc/{pid}/cmdline");
    let line = fs::read_to_string(&path).context(|| format!("cannot read {path}"))?;
    let ends_word = |character: char| "\0,=\"".contains(character);
    let socket = line.split(ends_word).find(|word| word.ends_with("/serial.sock")).map(PathBuf::from);
    socket.ok_or_else(|| Error::Config(format!("no serial line in {path}")))
}

/// Whether a process runs this program.
pub(super) fn runs(program: &Path) -> impl Fn(&Path) -> bool + '_ {
    move |found| found == program
}
