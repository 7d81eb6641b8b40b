//! Cost of a guest's writes in the four states of the driver (Bradford et al. 2007, section 4.7, table 3): one small
//! write after the other, measured by the guest's own fio.

use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::guest::{VM, ask, word};
use super::ours::PLAIN;
use crate::agents::Agents;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::lab::Lab;
use crate::migrating::{adopt, forget};
use crate::run::run;
use crate::traffic::traffic;

/// Number and duration of the guest's writing phases in each state.
const SAMPLES: usize = 3;
const SAMPLE_S: u64 = 10;
/// Sending rate of the rest while only the recording is to be measured.
const NEARLY_IDLE: &str = "256k";
/// Far longer than copying a disk needs.
const PATIENCE: Duration = Duration::from_mins(15);

/// State of Whimbrel with regard to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriverState {
    /// No agent has adopted it.
    Alone,
    /// Its agent has adopted it; no migration is under way.
    Adopted,
    /// Its writes are recorded: its disk has been copied, and the rest is sent so slowly that the link is nearly idle.
    Recording,
    /// Its disk is copied at the full rate of the link.
    Transferring,
}

/// Write performance of the guest, reported by its own fio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct IoRate {
    /// Writes per second.
    pub writes_per_s: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Average latency of a write, µs.
    pub latency_us: f64,
    /// 99th percentile of the latency, µs.
    pub p99_us: f64,
}

/// A state, and the guest's write performance in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StateRates {
    /// The state.
    pub state: DriverState,
    /// Rate on the link in the meantime, bytes per second.
    pub link_bytes_per_s: f64,
    /// Measurements in the order in which they were made.
    pub samples: Vec<IoRate>,
}

/// All states of one guest, one after the other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IoTurn {
    /// The turn, from 1 on.
    pub turn: u32,
    /// The states.
    pub states: Vec<StateRates>,
}

impl IoTurn {
    /// Returns the writes per second in a state: the median of its samples.
    pub fn writes_per_s(&self, state: DriverState) -> Option<f64> {
        self.median(state, |rate| rate.writes_per_s)
    }

    /// Returns a figure of a state: the median of its samples.
    pub(super) fn median(&self, state: DriverState, of: impl Fn(&IoRate) -> f64) -> Option<f64> {
        let rates = self.states.iter().find(|rates| rates.state == state)?;
        crate::bench::Spread::of(rates.samples.iter().map(of)).map(|spread| spread.median)
    }

    /// Returns the additional duration of a write in a state compared with no agent, as a share: from one write to the
    /// next.
    pub fn excess(&self, state: DriverState) -> Option<f64> {
        let (alone, there) = (self.writes_per_s(DriverState::Alone)?, self.writes_per_s(state)?);
        (there > 0.0).then(|| alone / there - 1.0)
    }
}

/// Measures all states with a guest that no agent has adopted yet; its disk holds `held_bytes` bytes.
pub(super) fn measure(
    lab: &Lab,
    agents: &Agents,
    guest: &Guest,
    turn: u32,
    held_bytes: u64,
) -> Result<IoTurn> {
    // Discarded: it is the first after a start.
    written(guest)?;
    let (mut alone, mut adopted) = (Sampling::of(DriverState::Alone), Sampling::of(DriverState::Adopted));
    // In alternation, so that other influences affect both alike.
    for _ in 0..SAMPLES {
        forget(agents, [&lab.a], VM);
        alone.sample(lab, guest)?;
        adopt(agents, &lab.a, guest)?;
        adopted.sample(lab, guest)?;
    }
    let (alone, adopted) = (alone.rates(), adopted.rates());

    // Without reductions: the sent bytes show the copied ones.
    let migrate = [&["migrate", VM, "--to", lab.b.name(), "--disks=copy", "--detach"], &PLAIN[..]].concat();
    let agent = |words: &[&str]| run(&mut agents.command(&lab.a, words)).map(drop);
    let before = traffic(&lab.a)?;
    agent(&migrate)?;
    let began = Instant::now();
    // With all headers, the sent bytes are a little more than the copied ones: then memory has begun.
    while traffic(&lab.a)?.since(before).bytes < held_bytes + held_bytes / 15 {
        if began.elapsed() > PATIENCE {
            return Err(Error::Config("the disk is not copied".to_owned()));
        }
        thread::sleep(Duration::from_millis(100));
    }
    agent(&["limit", VM, "--bandwidth", NEARLY_IDLE])?;
    let recording = sampled(lab, guest, DriverState::Recording)?;
    end_migration(lab, agents)?;

    agent(&migrate)?;
    // The agent examines the guest first.
    thread::sleep(Duration::from_secs(2));
    let transferring = sampled(lab, guest, DriverState::Transferring)?;
    end_migration(lab, agents)?;
    Ok(IoTurn { turn, states: vec![alone, adopted, recording, transferring] })
}

/// Cancels the migration, which must be under way still, and waits until it has been cleaned up.
fn end_migration(lab: &Lab, agents: &Agents) -> Result<()> {
    run(&mut agents.command(&lab.a, &["cancel", VM]))?;
    let began = Instant::now();
    loop {
        let output = run(&mut agents.command(&lab.a, &["vm", "list", "--json"]))?;
        let vms: Value =
            serde_json::from_str(&output).map_err(|error| Error::Config(format!("{error}: {output}")))?;
        let vm = vms.as_array().into_iter().flatten().find(|vm| vm["vm"] == VM);
        if vm.is_some_and(|vm| vm["migration"].is_null()) {
            return Ok(());
        }
        if began.elapsed() > PATIENCE {
            return Err(Error::Config(format!("the migration does not end: {output}")));
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// A state in which samples are taken.
struct Sampling {
    state: DriverState,
    samples: Vec<IoRate>,
    sent_bytes: u64,
    took: Duration,
}

impl Sampling {
    fn of(state: DriverState) -> Self {
        Self { state, samples: Vec::new(), sent_bytes: 0, took: Duration::ZERO }
    }

    fn sample(&mut self, lab: &Lab, guest: &Guest) -> Result<()> {
        let (before, began) = (traffic(&lab.a)?, Instant::now());
        self.samples.push(written(guest)?);
        self.sent_bytes += traffic(&lab.a)?.since(before).bytes;
        self.took += began.elapsed();
        Ok(())
    }

    fn rates(self) -> StateRates {
        let link_bytes_per_s = self.sent_bytes as f64 / self.took.as_secs_f64();
        StateRates { state: self.state, link_bytes_per_s, samples: self.samples }
    }
}

/// Takes all samples of a state, one after the other.
fn sampled(lab: &Lab, guest: &Guest, state: DriverState) -> Result<StateRates> {
    let mut sampling = Sampling::of(state);
    for _ in 0..SAMPLES {
        sampling.sample(lab, guest)?;
    }
    Ok(sampling.rates())
}

/// Makes the guest write for a while.
fn written(guest: &Guest) -> Result<IoRate> {
    let command = |id| format!("/etc/whimbrel/io {id} {SAMPLE_S}");
    let line = ask(guest.serial(), &command, "WRITTEN", Duration::from_mins(1))?;
    parse(&line).ok_or_else(|| Error::Config(format!("the guest's answer cannot be understood: {line}")))
}

fn parse(line: &str) -> Option<IoRate> {
    let number = |key| word(line, key)?.parse().ok();
    Some(IoRate {
        writes_per_s: number("writes_per_s")?,
        bytes_per_s: number("bytes_per_s")?,
        latency_us: number("latency_us")?,
        p99_us: number("p99_us")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_s_line_is_read() {
        let line = "# WRITTEN id=3 writes_per_s=1881 bytes_per_s=7705600 latency_us=521.703165 p99_us=4014";
        let rate = parse(line).unwrap();
        assert!((rate.latency_us - 521.703_165).abs() < 1e-9, "{rate:?}");
        assert!((rate.writes_per_s - 1881.0).abs() < 1e-9 && (rate.p99_us - 4014.0).abs() < 1e-9);
        assert_eq!(parse("WRITTEN id=3 writes_per_s=x"), None);
    }

    #[test]
    fn excess_is_by_medians_within_a_turn() {
        let rates = |state, rates: [f64; 3]| StateRates {
            state,
            link_bytes_per_s: 0.0,
            samples: rates.map(|writes_per_s| IoRate { writes_per_s, ..IoRate::default() }).to_vec(),
        };
        let turn = IoTurn {
            turn: 1,
            states: vec![
                rates(DriverState::Alone, [1050.0, 900.0, 2000.0]),
                rates(DriverState::Recording, [10.0, 1000.0, 1100.0]),
            ],
        };
        assert!((turn.excess(DriverState::Recording).unwrap() - 0.05).abs() < 1e-9);
        assert_eq!(turn.excess(DriverState::Adopted), None);
    }
}
