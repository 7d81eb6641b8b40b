//! Migrating the guest with Whimbrel, as a user would.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::case::Mover;
use super::guest::VM;
use super::mover::{ArrivedGuest, DiskMoveInput, DiskMoveOutcome, MovedGuest};
use crate::error::{Error, Result};
use crate::migrating::{migrate, number};
use crate::run::run;

const PAGE_BYTES: u64 = 4096;
/// Options that turn reductions off: everything is sent as it is.
pub(super) const PLAIN: [&str; 4] =
    ["--compress=none", "--no-references", "--deltas=never", "--free-page-hints=none"];

pub(super) fn by_whimbrel(stage: &DiskMoveInput<'_>, mover: Mover) -> Result<DiskMoveOutcome> {
    let mut words = match mover {
        Mover::MemoryOnly => vec!["--disks=shared"],
        Mover::WhimbrelThreshold => vec!["--disks=copy", "--throttle-writes=threshold"],
        Mover::WhimbrelDrain => vec!["--disks=copy", "--throttle-writes=drain"],
        Mover::WhimbrelPlain => [&["--disks=copy"], &PLAIN[..]].concat(),
        _ => vec!["--disks=copy"],
    };
    let max_downtime = format!("--max-downtime={}", stage.case.max_downtime_ms);
    words.push(&max_downtime);
    if stage.compare {
        words.push("--verify");
    }
    let patience = Duration::from_secs(stage.case.patience_s);
    let reported = migrate(stage.agents, &stage.lab.a, &stage.lab.b, VM, &words, patience)?;
    let report = reported.report();
    if !reported.has_moved()? {
        let reason = report["reason"].as_str().unwrap_or_default();
        return Ok(DiskMoveOutcome::GivenUp(format!("{reason}, after {} s", reported.total()?.as_secs())));
    }
    let rounds = Rounds(report["rounds"].as_array().map_or(&[], Vec::as_slice));
    let copied = report["disks"][0]["path"].as_str().map(PathBuf::from);
    let image = match (copied, mover) {
        (Some(image), _) => image,
        (None, Mover::MemoryOnly) => stage.image()?,
        (None, _) => return Err(Error::Config(format!("no disk was copied: {report}"))),
    };
    let start = reported.since_request("accepted")?;
    let total = reported.total()?;
    let disk = rounds.of_disk_alone()?;
    let first_pass_pages = if mover.is_throttled() {
        // The disk is sent in parts, and the guest's writes are collected between them.
        allocated_bytes(stage)? / PAGE_BYTES
    } else {
        rounds.first_pages()
    };
    Ok(DiskMoveOutcome::MovedGuest(Box::new(MovedGuest {
        total,
        disk,
        memory: total.saturating_sub(start + disk),
        downtime: reported.downtime("events_us")?,
        stopped: reported.at("stopped")?,
        resumed: reported.at("running")?,
        resent_bytes: (mover != Mover::MemoryOnly)
            .then(|| rounds.disk_pages().saturating_sub(first_pass_pages) * PAGE_BYTES),
        arrived: arrived(stage, &image)?,
    })))
}

/// Returns the guest that the destination's agent has now.
fn arrived(stage: &DiskMoveInput<'_>, image: &Path) -> Result<ArrivedGuest> {
    let output = run(&mut stage.agents.command(&stage.lab.b, &["vm", "show", VM, "--json"]))?;
    let shown: Value =
        serde_json::from_str(&output).map_err(|error| Error::Config(format!("{error}: {output}")))?;
    let directory = shown["qmp"].as_str().and_then(|socket| Path::new(socket).parent());
    let pid = shown["pid"].as_u64();
    let (Some(directory), Some(pid)) = (directory, pid) else {
        return Err(Error::Config(format!("the destination does not tell where the guest is: {output}")));
    };
    Ok(ArrivedGuest::of_agent(pid as u32, directory, image))
}

/// Returns the allocated bytes of the saved disk, in bytes of the guest.
fn allocated_bytes(stage: &DiskMoveInput<'_>) -> Result<u64> {
    let saved =
        stage.subject.saved_disk().ok_or_else(|| Error::Config("the guest has no disk".to_owned()))?;
    let mut command = Command::new(&stage.qemu.img);
    let output = run(command.args(["map", "--output=json"]).arg(saved))?;
    let extents: Value =
        serde_json::from_str(&output).map_err(|error| Error::Config(format!("{error}: {output}")))?;
    let data = extents.as_array().into_iter().flatten().filter(|extent| extent["data"] == true);
    Ok(data.filter_map(|extent| extent["length"].as_u64()).sum())
}

/// The rounds of a report.
struct Rounds<'a>(&'a [Value]);

impl Rounds<'_> {
    fn pages(round: &Value, what: &str) -> u64 {
        round[what].as_u64().unwrap_or(0)
    }

    /// Returns the time until memory began.
    fn of_disk_alone(&self) -> Result<Duration> {
        let is_alone = |round: &&Value| {
            Self::pages(round, "disk_pages") > 0
                && Self::pages(round, "disk_pages") == Self::pages(round, "dirty_pages")
        };
        self.0
            .iter()
            .take_while(is_alone)
            .map(|round| number(round, "duration_us").map(Duration::from_micros))
            .sum()
    }

    fn first_pages(&self) -> u64 {
        self.0.first().map_or(0, |round| Self::pages(round, "disk_pages"))
    }

    fn disk_pages(&self) -> u64 {
        self.0.iter().map(|round| Self::pages(round, "disk_pages")).sum()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_disk_comes_first_and_what_is_written_again() {
        let round = |disk: u64, all: u64| json!({"disk_pages": disk, "dirty_pages": all, "duration_us": 5});
        let reported = [round(100, 100), round(10, 10), round(3, 50), round(2, 2), round(0, 4)];
        let rounds = Rounds(&reported);
        assert_eq!(rounds.of_disk_alone().unwrap(), Duration::from_micros(10));
        assert_eq!((rounds.first_pages(), rounds.disk_pages()), (100, 115));
        assert_eq!(Rounds(&[round(0, 50)]).of_disk_alone().unwrap(), Duration::ZERO);
    }
}
