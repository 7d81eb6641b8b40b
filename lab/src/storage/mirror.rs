//! Migrating the guest by QEMU alone, as libvirt does it with storage that is not shared: an NBD server in the
//! destination's QEMU, `blockdev-mirror` until both sides are the same, then QEMU's own migration, which waits before
//! the switchover until the mirror has ended.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::mover::{ArrivedGuest, DiskMoveInput, DiskMoveOutcome, MovedGuest};
use crate::bench::qemu::is_late;
use crate::bench::subject::{UNLIMITED, failed, wait_for_status};
use crate::error::{Error, Result};
use crate::monitor::{Event, Monitor};
use crate::run::run;

/// Ports on which the destination waits for the disk, and for memory.
const NBD_PORT: u16 = 7800;
const PORT: u16 = 7801;
/// Interval of queries of the mirror.
const QUERY_INTERVAL: Duration = Duration::from_millis(50);
/// The disk at both sides, and the source's node for the remote one.
const DISK: &str = "disk0";
const EXPORT: &str = "drive-disk0";
const JOB: &str = "mirror";
const FAR: &str = "mirror-format";
const FAR_STORAGE: &str = "mirror-storage";

pub(super) fn by_mirror(stage: &DiskMoveInput<'_>) -> Result<DiskMoveOutcome> {
    let began = Instant::now();
    let deadline = began + Duration::from_secs(stage.case.patience_s);
    let image = stage.new_image();
    make_image(stage, &image)?;
    let destination = stage.start_destination(&image)?;
    // The second one belongs to the sampler.
    let (mut from, mut to) = (Monitor::connect(&stage.source.qmp_socket())?, destination.monitor()?);
    let host = stage.lab.b.address().to_string();

    let server = json!({ "type": "inet", "data": { "host": host, "port": NBD_PORT.to_string() } });
    to.command("nbd-server-start", &json!({ "addr": server }))?;
    let export = json!({ "type": "nbd", "id": EXPORT, "node-name": DISK, "name": EXPORT, "writable": true });
    to.command("block-export-add", &export)?;
    let server = json!({ "type": "inet", "host": host, "port": NBD_PORT.to_string() });
    from.command(
        "blockdev-add",
        &json!({ "driver": "nbd", "node-name": FAR_STORAGE, "server": server, "export": EXPORT, "discard": "unmap" }),
    )?;
    from.command("blockdev-add", &json!({ "driver": "raw", "node-name": FAR, "file": FAR_STORAGE }))?;
    from.command(
        "blockdev-mirror",
        &json!({ "job-id": JOB, "device": DISK, "target": FAR, "sync": "full", "auto-dismiss": false }),
    )?;
    let disk_began = Instant::now();
    let Some(first_bytes) = wait_until_ready(&mut from, deadline)? else {
        return give_up(&mut from, "the mirror was not ready");
    };
    let disk = disk_began.elapsed();

    let memory_began = Instant::now();
    let capabilities = |names: &[&str]| {
        let on: Vec<_> = names.iter().map(|name| json!({ "capability": name, "state": true })).collect();
        json!({ "capabilities": on })
    };
    from.command("migrate-set-capabilities", &capabilities(&["events", "pause-before-switchover"]))?;
    to.command("migrate-set-capabilities", &capabilities(&["events"]))?;
    let limits = json!({ "max-bandwidth": UNLIMITED, "downtime-limit": stage.case.max_downtime_ms });
    from.command("migrate-set-parameters", &limits)?;
    let uri = format!("tcp:{host}:{PORT}");
    to.command("migrate-incoming", &json!({ "uri": uri }))?;
    from.command("migrate", &json!({ "uri": uri }))?;
    let Some(stopped) = wait_for_switchover(&mut from, deadline)? else {
        return give_up(&mut from, "memory did not converge");
    };
    let copied_bytes = end_mirror(&mut from)?;
    from.command("migrate-continue", &json!({ "state": "pre-switchover" }))?;
    wait_for_status(&mut from, "completed")?;
    wait_for_status(&mut to, "completed")?;
    to.command("nbd-server-stop", &json!({}))?;
    stage.compare_images(&image)?;
    to.command("cont", &json!({}))?;
    let resumed = to.wait_for_event(|event| event.name == "RESUME")?;
    from.command("quit", &json!({}))?;
    stage.source.wait_for_end()?;
    drop(to);
    Ok(DiskMoveOutcome::MovedGuest(Box::new(MovedGuest {
        total: began.elapsed(),
        disk,
        memory: memory_began.elapsed(),
        downtime: Duration::from_micros(resumed.at_unix_us.saturating_sub(stopped.at_unix_us)),
        stopped: calendar(&stopped),
        resumed: calendar(&resumed),
        resent_bytes: Some(copied_bytes.saturating_sub(first_bytes)),
        arrived: ArrivedGuest::of_guest(destination, &image),
    })))
}

pub(super) fn calendar(event: &Event) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(event.at_unix_us)
}

/// Makes an empty image of the source's length.
fn make_image(stage: &DiskMoveInput<'_>, image: &Path) -> Result<()> {
    let img = || Command::new(&stage.qemu.img);
    let output = run(img().args(["info", "-U", "--output=json"]).arg(stage.image()?))?;
    let info: Value =
        serde_json::from_str(&output).map_err(|error| Error::Config(format!("{error}: {output}")))?;
    let bytes = info["virtual-size"].as_u64().unwrap_or(0).to_string();
    run(img().args(["create", "-q", "-f", "qcow2"]).arg(image).arg(bytes)).map(drop)
}

/// Returns the progress of the mirror.
fn job(monitor: &mut Monitor) -> Result<Value> {
    let jobs = monitor.command("query-block-jobs", &json!({}))?;
    let job = jobs.as_array().into_iter().flatten().find(|job| job["device"] == JOB).cloned();
    job.ok_or_else(|| Error::Config(format!("the mirror has ended by itself: {jobs}")))
}

fn number(job: &Value, key: &str) -> u64 {
    job[key].as_u64().unwrap_or(0)
}

/// Waits until both sides hold the same. Returns the bytes to copy at the beginning; `None` after the deadline.
fn wait_until_ready(monitor: &mut Monitor, deadline: Instant) -> Result<Option<u64>> {
    let mut first_bytes = 0;
    while Instant::now() < deadline {
        let job = job(monitor)?;
        if first_bytes == 0 {
            first_bytes = number(&job, "len");
        }
        if job["ready"] == true {
            return Ok(Some(first_bytes));
        }
        thread::sleep(QUERY_INTERVAL);
    }
    Ok(None)
}

/// Waits until the guest is stopped and only the switchover remains. Returns the event STOP; `None` after the deadline.
fn wait_for_switchover(monitor: &mut Monitor, deadline: Instant) -> Result<Option<Event>> {
    let mut stopped = None;
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        monitor.set_patience(left)?;
        let event = monitor.wait_for_event(|event| ["STOP", "MIGRATION"].contains(&event.name.as_str()));
        monitor.set_patience(Duration::from_mins(1))?;
        match event {
            Ok(event) if event.name == "STOP" => stopped = Some(event),
            Ok(event) => match event.data["status"].as_str() {
                Some("pre-switchover") => return Ok(stopped),
                Some("failed") => return Err(failed(monitor)),
                _ => {}
            },
            Err(error) if is_late(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

/// Ends the mirror, with both sides the same. Returns the copied bytes.
fn end_mirror(monitor: &mut Monitor) -> Result<u64> {
    monitor.command("block-job-cancel", &json!({ "device": JOB }))?;
    let event = monitor.wait_for_event(|event| {
        let is_end = ["BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED"].contains(&event.name.as_str());
        is_end && event.data["device"] == JOB
    })?;
    if let Some(error) = event.data["error"].as_str() {
        return Err(Error::Config(format!("the mirror has failed: {error}")));
    }
    let concluded = |event: &Event| {
        event.name == "JOB_STATUS_CHANGE" && event.data["id"] == JOB && event.data["status"] == "concluded"
    };
    monitor.wait_for_event(concluded)?;
    monitor.command("job-dismiss", &json!({ "id": JOB }))?;
    monitor.command("blockdev-del", &json!({ "node-name": FAR }))?;
    monitor.command("blockdev-del", &json!({ "node-name": FAR_STORAGE }))?;
    Ok(event.data["offset"].as_u64().unwrap_or(0))
}

/// Aborts the migration; the guest stays at the source.
fn give_up(monitor: &mut Monitor, why: &str) -> Result<DiskMoveOutcome> {
    let job = job(monitor)?;
    let megabytes = |key| number(&job, key) / 1_000_000;
    Ok(DiskMoveOutcome::GivenUp(format!(
        "{why}: {} of {} MB were copied",
        megabytes("offset"),
        megabytes("len")
    )))
}
