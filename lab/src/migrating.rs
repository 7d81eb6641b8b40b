//! Migrating a guest with Whimbrel, as a user would, and reading its report.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::agents::Agents;
use crate::error::{Context, Error, Result};
use crate::guest::Guest;
use crate::host::Host;
use crate::run::run;
use crate::serial::Serial;

/// Lets a host's agent adopt a guest, before the migration that is measured.
pub(crate) fn adopt(agents: &Agents, host: &Host, guest: &Guest) -> Result<()> {
    let socket = guest.qmp_socket();
    run(&mut agents.command(host, &["vm", "adopt", "--qmp", &socket.display().to_string()])).map(drop)
}

/// Lets agents forget a guest that is gone.
pub(crate) fn forget<'a>(agents: &Agents, hosts: impl IntoIterator<Item = &'a Host>, vm: &str) {
    for host in hosts {
        // The agent may not know the guest.
        let _ = run(&mut agents.command(host, &["vm", "forget", vm]));
    }
}

/// Migrates a guest, with `more` words on the command line; cancels the migration after `patience`.
pub(crate) fn migrate(
    agents: &Agents,
    from: &Host,
    to: &Host,
    vm: &str,
    more: &[&str],
    patience: Duration,
) -> Result<MigrationReport> {
    migrate_while(agents, from, to, vm, more, patience, |_| Ok(()))
}

/// Migrates like [`migrate`], and runs `concurrent` at the same time. The receiver passed to it is disconnected when
/// the migration has ended, with success or without. Returns when both have ended.
pub(crate) fn migrate_while(
    agents: &Agents,
    from: &Host,
    to: &Host,
    vm: &str,
    more: &[&str],
    patience: Duration,
    concurrent: impl FnOnce(&mpsc::Receiver<()>) -> Result<()> + Send,
) -> Result<MigrationReport> {
    let mut command = agents.command(from, &["migrate", vm, "--to", to.name(), "--json"]);
    command.args(more);
    // The program ends with an error if the guest was not moved, and reports the reason in the same document.
    let printed = thread::scope(|scope| {
        let (ended, waiting) = mpsc::channel::<()>();
        scope.spawn(move || {
            if waiting.recv_timeout(patience) == Err(mpsc::RecvTimeoutError::Timeout) {
                // The migration may end at this very moment.
                let _ = run(&mut agents.command(from, &["cancel", vm]));
            }
        });
        let (over, underway) = mpsc::channel::<()>();
        let concurrent = scope.spawn(move || concurrent(&underway));
        let printed = command.stderr(Stdio::null()).output();
        drop((ended, over));
        // A panic of `concurrent` continues here.
        concurrent.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        printed.context(|| "cannot run Whimbrel")
    })?;
    serde_json::from_slice(&printed.stdout)
        .map(MigrationReport)
        .map_err(|error| Error::Config(format!("Whimbrel's report cannot be read: {error}")))
}

/// Whimbrel's report of a migration.
#[derive(Debug, Clone)]
pub(crate) struct MigrationReport(Value);

impl MigrationReport {
    /// Returns the whole report.
    pub(crate) fn report(&self) -> &Value {
        &self.0
    }

    /// Returns true if the guest was moved, false if it was left where it was. Any other outcome is an error.
    pub(crate) fn has_moved(&self) -> Result<bool> {
        match self.0["outcome"].as_str() {
            Some("moved") => Ok(true),
            Some("aborted" | "cancelled") => Ok(false),
            _ => Err(Error::Config(format!("Whimbrel did not move the guest: {}", self.0))),
        }
    }

    /// Returns the time from the request to the end of the source's QEMU.
    pub(crate) fn total(&self) -> Result<Duration> {
        number(&self.0, "total_us").map(Duration::from_micros)
    }

    /// Returns the downtime, or a part of it.
    pub(crate) fn downtime(&self, part: &str) -> Result<Duration> {
        number(&self.0["downtime"], part).map(Duration::from_micros)
    }

    /// Returns the time of an event, counted from the request.
    pub(crate) fn since_request(&self, what: &str) -> Result<Duration> {
        let events = self.0["events"].as_array().into_iter().flatten();
        let at_us = events.filter(|event| event["what"] == what).find_map(|event| event["at_us"].as_u64());
        at_us
            .map(Duration::from_micros)
            .ok_or_else(|| Error::Config(format!("no event {what} in {}", self.0)))
    }

    /// Returns the time of an event by the host's calendar.
    pub(crate) fn at(&self, what: &str) -> Result<SystemTime> {
        let started = Duration::from_millis(number(&self.0, "started_unix_ms")?);
        Ok(SystemTime::UNIX_EPOCH + started + self.since_request(what)?)
    }
}

/// Returns a required number: a missing one is an error, with no default.
pub(crate) fn number(value: &Value, name: &str) -> Result<u64> {
    value[name].as_u64().ok_or_else(|| Error::Config(format!("no number {name} in {value}")))
}

/// Returns true if a program is a QEMU.
pub(crate) fn is_qemu(program: &Path) -> bool {
    program.to_string_lossy().contains("qemu-system")
}

/// Returns the serial line of the guest that a QEMU runs, from its command line.
pub(crate) fn serial_of(pid: u32) -> Result<Serial> {
    let path = format!("/proc/{pid}/cmdline");
    let line = fs::read_to_string(&path).context(|| format!("cannot read {path}"))?;
    let ends_word = |character: char| "\0,=\"".contains(character);
    let socket = line.split(ends_word).find(|word| word.ends_with("/serial.sock")).map(PathBuf::from);
    let socket = socket.ok_or_else(|| Error::Config(format!("no serial line in {path}")))?;
    Ok(Serial::new(&socket, &socket.with_extension("log"), Some(pid)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_is_read() {
        let migration = MigrationReport(json!({
            "outcome": "moved", "total_us": 7, "started_unix_ms": 1000, "downtime": {"stop_us": 3},
            "events": [{"what": "running", "at_us": 500_000}],
        }));
        assert!(migration.has_moved().unwrap());
        assert_eq!(
            (migration.total().unwrap(), migration.downtime("stop_us").unwrap()),
            (Duration::from_micros(7), Duration::from_micros(3))
        );
        assert!(migration.downtime("load_us").unwrap_err().to_string().contains("no number load_us"));
        assert_eq!(migration.at("running").unwrap(), SystemTime::UNIX_EPOCH + Duration::from_millis(1500));
        assert!(migration.at("stopped").is_err());
        assert!(!MigrationReport(json!({"outcome": "cancelled"})).has_moved().unwrap());
        assert!(MigrationReport(json!({"outcome": "in-doubt"})).has_moved().is_err());
    }
}
