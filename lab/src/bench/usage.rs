//! Costs of a migration, read from the kernel: processor time, memory, bytes on the link.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::param::clock_ticks_per_second;

use crate::error::{Context, Error, Result};
use crate::host::Host;
use crate::traffic::traffic;

/// Returns the processor time that a process has used so far, with its children that have ended, also if it has ended
/// and was not reaped. The kernel counts it exactly and reports it in hundredths of a second.
pub(super) fn cpu_time(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).context(|| format!("cannot read {path}"))?;
    parse_cpu(&text).ok_or_else(|| Error::Config(format!("{path} cannot be understood: {text}")))
}

fn parse_cpu(stat: &str) -> Option<Duration> {
    // The name, in parentheses, may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut ticks = 0;
    for _ in 0..4 {
        ticks += fields.next()?.parse::<u64>().ok()?;
    }
    Some(Duration::from_millis(ticks * 1000 / clock_ticks_per_second()))
}

/// Returns the processes of a host that run this program.
pub(crate) fn processes_of(host: &Host, is_wanted: impl Fn(&Path) -> bool) -> Result<Vec<u32>> {
    let program = |pid: &u32| fs::read_link(format!("/proc/{pid}/exe"));
    Ok(host.processes()?.into_iter().filter(|pid| program(pid).is_ok_and(|path| is_wanted(&path))).collect())
}

/// Resets the kernel's record of a process's peak memory.
pub(super) fn reset_peak(pid: u32) -> Result<()> {
    let path = format!("/proc/{pid}/clear_refs");
    fs::write(&path, "5").context(|| format!("cannot write {path}"))
}

/// Returns the peak memory of a process since the last reset, in bytes.
pub(super) fn peak_bytes(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).context(|| format!("cannot read {path}"))?;
    let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.and_then(|peak| peak.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| Error::Config(format!("{path} has no peak of memory")))
}

/// Returns the bytes that a host has sent over the migration link so far, with all headers.
pub(super) fn sent_so_far(host: &Host) -> Result<u64> {
    traffic(host).map(|traffic| traffic.bytes)
}

/// Processor time of a migration: that of both QEMUs and both agents, from the creation of the meter.
#[derive(Debug)]
pub(super) struct Meter {
    source: u32,
    source_before: Duration,
    agents: Vec<u32>,
    agents_before: Duration,
}

/// A reading of a [`Meter`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Used {
    /// Used by all of them.
    pub(super) all: Duration,
    /// Used by the agents.
    pub(super) agents: Duration,
}

impl Meter {
    /// Begins to count.
    pub(super) fn begin(source: u32, agents: Vec<u32>) -> Result<Self> {
        let (source_before, agents_before) = (cpu_time(source)?, sum(&agents)?);
        Ok(Self { source, source_before, agents, agents_before })
    }

    /// Returns the time used until now, with all that the destination's QEMU has used, which was started since.
    pub(super) fn read(&self, destination: u32) -> Result<Used> {
        let agents = sum(&self.agents)?.saturating_sub(self.agents_before);
        let source = cpu_time(self.source)?.saturating_sub(self.source_before);
        Ok(Used { all: source + cpu_time(destination)? + agents, agents })
    }
}

fn sum(processes: &[u32]) -> Result<Duration> {
    processes.iter().map(|pid| cpu_time(*pid)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_read_behind_any_name() {
        let stat = "7 (a) b) c) S 1 7 7 0 -1 4194560 1 2 3 4 50 25 10 15 20 0 1 0 9";
        let ticks = clock_ticks_per_second();
        assert_eq!(parse_cpu(stat), Some(Duration::from_millis(100 * 1000 / ticks)));
        assert_eq!(parse_cpu("7 (a) S 1"), None);
        let own = std::process::id();
        let before = cpu_time(own).unwrap();
        while cpu_time(own).unwrap() == before {}
        assert!(peak_bytes(own).unwrap() > 0);
    }
}
