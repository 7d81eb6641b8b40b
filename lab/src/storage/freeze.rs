//! Moving the guest by copying it while it is stopped, as Bradford et al. 2007, section 4.4: by `scp`, or by `rsync`
//! that has copied the disk three times before.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use super::mirror::calendar;
use super::mover::{ArrivedGuest, DiskMoveInput, DiskMoveOutcome, MovedGuest};
use super::ssh::Ssh;
use crate::agents::Agents;
use crate::bench::subject::{UNLIMITED, wait_for_status};
use crate::error::Result;
use crate::monitor::Monitor;

/// Number of copies of the disk by `rsync` while the guest runs: the paper found no other number better.
const RSYNC_PASSES: usize = 3;

/// The copying program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copier {
    Scp,
    Rsync,
}

pub(super) fn by_copying(stage: &DiskMoveInput<'_>, copier: Copier) -> Result<DiskMoveOutcome> {
    let ssh = Ssh::start(stage.lab)?;
    let began = Instant::now();
    let (image, pool) = (stage.image()?, Agents::pool(&stage.lab.b));
    // The source's files, and their paths at the destination.
    let state = stage.source.directory().join("state");
    let copy = |file: &Path| match copier {
        Copier::Scp => ssh.scp(&[file], &pool),
        Copier::Rsync => ssh.rsync(file, &pool),
    };
    let mut disk = Duration::ZERO;
    let mut copy_disk = || {
        let began = Instant::now();
        copy(&image)?;
        disk += began.elapsed();
        Ok::<_, crate::Error>(())
    };
    if copier == Copier::Rsync {
        (0..RSYNC_PASSES).try_for_each(|_| copy_disk())?;
    }
    // The second one belongs to the sampler.
    let mut from = Monitor::connect(&stage.source.qmp_socket())?;
    from.set_patience(Duration::from_mins(5))?;
    from.command("stop", &json!({}))?;
    let stopped = from.wait_for_event(|event| event.name == "STOP")?;
    let events = json!({ "capabilities": [{ "capability": "events", "state": true }] });
    from.command("migrate-set-capabilities", &events)?;
    from.command("migrate-set-parameters", &json!({ "max-bandwidth": UNLIMITED }))?;
    from.command("migrate", &json!({ "uri": format!("exec:cat > {}", state.display()) }))?;
    wait_for_status(&mut from, "completed")?;
    from.command("quit", &json!({}))?;
    stage.source.wait_for_end()?;
    copy_disk()?;
    copy(&state)?;

    let (image, state) = (stage.new_image(), pool.join("state"));
    stage.compare_images(&image)?;
    let destination = stage.start_destination(&image)?;
    let mut to = destination.monitor()?;
    to.set_patience(Duration::from_mins(5))?;
    to.command("migrate-set-capabilities", &events)?;
    to.command("migrate-incoming", &json!({ "uri": format!("exec:cat {}", state.display()) }))?;
    wait_for_status(&mut to, "completed")?;
    to.command("cont", &json!({}))?;
    let resumed = to.wait_for_event(|event| event.name == "RESUME")?;
    let total = began.elapsed();
    drop(to);
    Ok(DiskMoveOutcome::MovedGuest(Box::new(MovedGuest {
        total,
        disk,
        memory: total.saturating_sub(disk),
        downtime: Duration::from_micros(resumed.at_unix_us.saturating_sub(stopped.at_unix_us)),
        stopped: calendar(&stopped),
        resumed: calendar(&resumed),
        resent_bytes: None,
        arrived: ArrivedGuest::of_guest(destination, &image),
    })))
}
