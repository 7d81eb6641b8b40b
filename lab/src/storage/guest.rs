//! The guest that is migrated with its disk, and its answers on the console.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::case::DiskCase;
use crate::bench::subject::SavedGuest;
use crate::debian_guest::server;
use crate::environment::{Environment, QemuVersion};
use crate::error::{Context, Error, Result};
use crate::lab::Lab;
use crate::serial::Serial;
use crate::spec::{Device, GuestSpec};

/// Its name.
pub(super) const VM: &str = "services";
/// Its number in the laboratory's network.
pub(super) const NUMBER: u8 = 1;
/// The QEMU on both sides.
pub(super) const QEMU: QemuVersion = QemuVersion::Newer;
/// Time that a guest may need without KVM to compute the sums of its files.
const PATIENCE: Duration = Duration::from_mins(3);

/// Boots the guest of a case, and saves it when its services run.
pub(super) fn boot(lab: &Lab, environment: &Environment, case: &DiskCase) -> Result<SavedGuest> {
    SavedGuest::save(lab, environment, spec(lab, environment, case)?, |guest| {
        guest.serial().follow()?.wait_for_text("SERVING").map(drop)
    })
}

/// Returns a guest whose disk has no backing file, so that every mover copies all of it.
fn spec(lab: &Lab, environment: &Environment, case: &DiskCase) -> Result<GuestSpec> {
    let disk = lab.shared_directory()?.join(format!("{VM}.qcow2"));
    fs::copy(environment.services_disk()?, &disk).context(|| format!("cannot make {}", disk.display()))?;
    let load = format!("guest.load={}", case.workload.load());
    let mut spec = server(environment, VM, NUMBER, &disk, &load)?;
    spec.qemu = QEMU;
    spec.memory_mib = case.memory_mib;
    // Whimbrel's agent holds the first monitor.
    spec.second_monitor = true;
    for device in &mut spec.devices {
        if let Device::Disk(disk) = device {
            // `blockdev-mirror` refers to nodes by their names.
            disk.named_nodes = true;
        }
    }
    Ok(spec)
}

/// The guest's check of its services' data on the disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GuestCheck {
    /// `nothing`, or the errors found.
    pub(super) wrong: String,
    /// Posts on the board.
    pub(super) posts: u64,
}

/// Makes the guest check its services' data, and with `all` its files too.
pub(super) fn check(serial: &Serial, all: bool) -> Result<GuestCheck> {
    let more = if all { " all" } else { "" };
    let line = ask(serial, &|id| format!("/etc/whimbrel/check {id}{more}"), "CHECKED", PATIENCE)?;
    let posts = word(&line, "posts").and_then(|posts| posts.parse().ok());
    let checked =
        word(&line, "wrong").zip(posts).map(|(wrong, posts)| GuestCheck { wrong: wrong.to_owned(), posts });
    checked.ok_or_else(|| Error::Config(format!("the guest's answer cannot be understood: {line}")))
}

/// Types a command into the guest's console and waits for the line that begins with `answer` and contains its number.
/// An emulated serial line loses a character now and then, so the command may be typed again.
pub(super) fn ask(
    serial: &Serial,
    command: &dyn Fn(u64) -> String,
    answer: &str,
    patience: Duration,
) -> Result<String> {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let mut failed = None;
    for _ in 0..3 {
        let id = NUMBER.fetch_add(1, Relaxed);
        let begin = format!("{answer} id={id} ");
        match serial.ask(&command(id), answer, patience, |line| line.contains(&begin)) {
            Ok(line) => return Ok(line),
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| Error::Config("no request was sent".to_owned())))
}

/// Returns the value of `KEY=VALUE` in a line.
pub(super) fn word<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split_ascii_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_by_their_keys() {
        let line = "/ # CHECKED id=7 wrong=nothing posts=103 verified=2";
        assert_eq!((word(line, "wrong"), word(line, "posts")), (Some("nothing"), Some("103")));
        assert_eq!(word(line, "post"), None);
    }
}
