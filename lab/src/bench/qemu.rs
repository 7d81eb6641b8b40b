//! Migrating the guest by QEMU's own migration.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::case::Case;
use super::contender::QemuMode;
use super::mover::{Destination, MoveInput, MoveOutcome, Moved};
use super::subject::{UNLIMITED, failed};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::host::Host;
use crate::migrating::number;
use crate::monitor::Monitor;
use crate::nas::PATIENCE;
use crate::pki::Identity;

/// Port on which QEMU waits for its own migration.
const PORT: u16 = 7799;
/// QEMU's setting for the link's rate where it must not stop the guest, bytes per second: one byte in its limit of a
/// millisecond.
const NO_SWITCHOVER_BYTES_PER_S: u64 = 1000;
/// Longer than any guest's downtime, ms: the most that QEMU accepts.
const ANY_DOWNTIME_MS: u64 = 2_000_000;

/// Puts the files with which QEMU authenticates itself at the paths that QEMU expects.
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

fn set_up(monitor: &mut Monitor, mode: QemuMode, case: &Case, tls: Option<&str>) -> Result<()> {
    let mut capabilities = vec!["events"];
    let bandwidth = case.cap.in_pass(1).unwrap_or(UNLIMITED);
    let mut parameters = json!({"max-bandwidth": bandwidth, "downtime-limit": case.downtime_limit_ms()});
    match mode {
        QemuMode::Default => {}
        QemuMode::Endless | QemuMode::After(_) => {
            // The guest is not stopped before a command allows it: the remaining pages never fit into the limit. With a
            // limit of 0 QEMU does not synchronize its dirty bitmap again, and stops the guest after the first pass.
            parameters["downtime-limit"] = 1.into();
            parameters["avail-switchover-bandwidth"] = NO_SWITCHOVER_BYTES_PER_S.into();
        }
        QemuMode::Multifd(channels) => {
            capabilities.push("multifd");
            parameters["multifd-channels"] = channels.into();
        }
        QemuMode::MultifdZstd(channels) => {
            capabilities.push("multifd");
            parameters["multifd-channels"] = channels.into();
            parameters["multifd-compression"] = "zstd".into();
        }
        QemuMode::Xbzrle => {
            capabilities.push("xbzrle");
            parameters["xbzrle-cache-size"] = (case.memory_mib << 20).next_power_of_two().into();
        }
        QemuMode::PostCopy => {
            capabilities.extend(["postcopy-ram", "postcopy-preempt"]);
            parameters["max-postcopy-bandwidth"] = 0.into();
        }
        QemuMode::AutoConverge => capabilities.push("auto-converge"),
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

/// Migrates the guest by QEMU's own migration.
pub(super) fn by_qemu(stage: &MoveInput<'_>, mode: QemuMode) -> Result<MoveOutcome> {
    let MoveInput { lab, environment, subject, case, source, meter, .. } = *stage;
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
    let moved = thread::scope(|scope| {
        let stopper = (mode == QemuMode::Endless).then(|| scope.spawn(|| stop_behind_program(source, case)));
        let mut follow = || {
            let Some(seen) = watch(&mut from, mode, case, began)? else { return Ok(None) };
            let resumed_us = to.wait_for_event(|event| event.name == "RESUME")?.at_unix_us;
            Ok::<_, Error>(Some((seen, resumed_us, quit_source(&mut from, source)?)))
        };
        let moved = follow()?;
        // The thread ends with the guest's program, or with the source's QEMU.
        stopper.map_or(Ok(()), |stopper| {
            stopper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        Ok::<_, Error>(moved)
    })?;
    let Some((MigrationEvents { stopped_us, has_switched_to_post_copy }, resumed_us, status)) = moved else {
        return Ok(MoveOutcome::GivenUp);
    };
    let total = began.elapsed();
    let stopped_us =
        stopped_us.ok_or_else(|| Error::Config(format!("QEMU did not tell of its stop: {status}")))?;
    let downtime = Duration::from_micros(resumed_us.saturating_sub(stopped_us));
    let used = meter.read(destination.pid())?;
    let serial = destination.serial().clone();
    Ok(MoveOutcome::Moved(Box::new(Moved {
        total,
        start,
        downtime,
        events: Some(downtime),
        parts: None,
        last_scans: None,
        used,
        resumed: SystemTime::UNIX_EPOCH + Duration::from_micros(resumed_us),
        first_round: None,
        rounds: number(&status["ram"], "dirty-sync-count")?,
        stop: None,
        has_switched_to_post_copy: (mode == QemuMode::PostCopy).then_some(has_switched_to_post_copy),
        packing: None,
        serial,
        _destination: Destination::Guest { _guest: destination },
    })))
}

/// Events of a migration that has ended, from QEMU.
struct MigrationEvents {
    /// Time at which QEMU stopped the guest, in microseconds since 1970.
    stopped_us: Option<u64>,
    /// True if the guest resumed before all of its memory had arrived.
    has_switched_to_post_copy: bool,
}

/// Follows a migration to its end, and applies what its way and the cap need in each pass. Returns `None` if patience
/// ends before.
fn watch(from: &mut Monitor, mode: QemuMode, case: &Case, began: Instant) -> Result<Option<MigrationEvents>> {
    let patience = Duration::from_secs(case.patience_s);
    let patience = if mode == QemuMode::Endless { PATIENCE + patience } else { patience };
    from.set_patience(patience)?;
    let mut seen = MigrationEvents { stopped_us: None, has_switched_to_post_copy: false };
    loop {
        let event = match from.wait_for_event(|_| true) {
            Ok(event) if began.elapsed() < patience => event,
            // No event for so long, or too many.
            Ok(_) => return Ok(None),
            Err(error) if is_late(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        match (event.name.as_str(), event.data["status"].as_str()) {
            ("STOP", _) => seen.stopped_us = Some(event.at_unix_us),
            ("MIGRATION_PASS", _) => {
                let pass = event.data["pass"].as_u64().unwrap_or(0);
                in_pass(from, mode, case, pass)?;
            }
            ("MIGRATION", Some("postcopy-active")) => seen.has_switched_to_post_copy = true,
            ("MIGRATION", Some("completed")) => return Ok(Some(seen)),
            ("MIGRATION", Some("failed")) => return Err(failed(from)),
            _ => {}
        }
    }
}

/// Acts at the beginning of a pass, counted from 1 on.
fn in_pass(from: &mut Monitor, mode: QemuMode, case: &Case, pass: u64) -> Result<()> {
    if let Some(rate) = case.cap.in_pass(pass) {
        from.command("migrate-set-parameters", &json!({ "max-bandwidth": rate }))?;
    }
    match mode {
        QemuMode::PostCopy if pass == 2 => from.command("migrate-start-postcopy", &json!({})).map(drop),
        QemuMode::After(passes) if pass > u64::from(passes) => allow_downtime(from, ANY_DOWNTIME_MS),
        _ => Ok(()),
    }
}

/// Lets QEMU stop a guest that was kept running, as soon as the remaining pages need no longer than this.
fn allow_downtime(from: &mut Monitor, ms: u64) -> Result<()> {
    // 0: QEMU's own estimate of the link's rate.
    let parameters = json!({ "downtime-limit": ms, "avail-switchover-bandwidth": 0 });
    from.command("migrate-set-parameters", &parameters).map(drop)
}

/// Lets QEMU stop the guest as soon as its program has ended. Uses a monitor of its own: the other one is blocked.
fn stop_behind_program(source: &Guest, case: &Case) -> Result<()> {
    if source.serial().wait_for_nas_end()?.is_none() {
        return Ok(());
    }
    // The guest may have arrived at this very moment; otherwise this migration is given up.
    let _ = Monitor::connect(&source.qmp_socket())
        .and_then(|mut monitor| allow_downtime(&mut monitor, case.downtime_limit_ms()));
    Ok(())
}

/// Ends the source's QEMU, as every manager of VMs does: only then is its memory free. Returns its report of the
/// migration.
fn quit_source(from: &mut Monitor, source: &Guest) -> Result<Value> {
    let status = from.command("query-migrate", &json!({}))?;
    from.command("quit", &json!({}))?;
    source.wait_for_end()?;
    Ok(status)
}

/// Returns true if the error is that patience has run out.
pub(crate) fn is_late(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&source.kind()))
}
