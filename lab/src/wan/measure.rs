//! Measuring: there and back, turn by turn.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use toml::toml;

use super::case::WanCase;
use super::client::{Answer, INTERVAL, TickingClient};
use crate::agents::Agents;
use crate::bench::DowntimeParts;
use crate::bench::result::Provenance;
use crate::bench::usage::processes_of;
use crate::emulator::Emulator;
use crate::environment::{Environment, QemuVersion};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::host::Host;
use crate::lab::{Lab, LabConfig, Link, vm_address};
use crate::migrating::{adopt, is_qemu, migrate, number, serial_of};
use crate::run::Daemon;
use crate::spec::{Boot, Device, GuestSpec, Load, Net};
use crate::two_networks::{NEW_ADDRESS, separate_far};

const VM: &str = "wan";
const PORT: u16 = 7000;
/// Time for which the client is watched before each move, and after it.
const WATCHED: Duration = Duration::from_secs(5);
/// Answers whose median is compared with that before the move: a single one may be late on an emulated link.
const TOGETHER: usize = 20;
/// Answers in time, one after the other, after which a client is served as before.
const MIN_GOOD: usize = 100;
/// Time after which a migration is given up.
const PATIENCE: Duration = Duration::from_mins(20);

/// All results.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WanResults {
    /// Always [`super::SCHEMA`].
    pub schema: String,
    /// Case by case.
    pub cases: Vec<WanResult>,
}

/// Results of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WanResult {
    /// The case.
    pub case: WanCase,
    /// Time and circumstances.
    pub made: Provenance,
    /// Moves in their order.
    pub moves: Vec<WanMove>,
}

/// A move, and what the client observed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WanMove {
    /// The turn, from 1 on.
    pub turn: u32,
    /// True for the move back to the first network.
    pub is_back: bool,
    /// Time from the request to the end, ms.
    pub total_ms: f64,
    /// Time from before `stop` to the return of `cont`, ms.
    pub downtime_ms: f64,
    /// Bytes sent over the link from the source.
    pub sent_bytes: u64,
    /// The longest time between two answers, ms.
    pub silence_ms: f64,
    /// The median time that answers took before the move, ms.
    pub answer_before_ms: f64,
    /// The same at the end of the observation after the move, ms.
    pub answer_after_ms: f64,
    /// Time from the moment at which the guest ran at its destination until answers took no longer than twice that
    /// before, and the interval of messages, ms; absent if they did not within the observation.
    pub recovered_ms: Option<f64>,
    /// Parts of the downtime.
    pub parts: DowntimeParts,
}

/// Two networks, far from each other, with agents, a guest, and its client.
#[derive(Debug)]
pub struct WanBench {
    case: WanCase,
    environment: Environment,
    // Ends when this is dropped.
    _guest: Guest,
    agents: Agents,
    // Ended in this order.
    _daemons: Vec<Daemon>,
    _ways: [Emulator; 2],
    lab: Lab,
}

impl WanBench {
    /// Makes both networks for a case, with agents by the program `whimbrel`, and boots the guest.
    pub fn prepare(prefix: &str, case: WanCase, whimbrel: &Path) -> Result<Self> {
        let environment = Environment::discover();
        let lab = Lab::up(&LabConfig::new(prefix).link(Link::Emulated(case.settings())))?;
        let ways = separate_far(&lab, case.delay())?;
        let agents = Agents::new(&lab, &environment, whimbrel)
            .with_qemu(QemuVersion::Newer)
            .with(toml! { network = { redirection = { trusted_path = true } } });
        agents.write()?;
        let daemons = agents.start_all()?;
        let load = Load { fill_mib: case.fill_mib, wss_mib: 4, rate_mib_per_s: 1, ..Load::default() };
        let mut spec = GuestSpec { qemu: QemuVersion::Newer, ..GuestSpec::tiny(VM, load) };
        spec.devices.push(Device::Net(Net::new(1)));
        if let Boot::Tiny(load) = &mut spec.boot {
            (load.address, load.port) = (Some(vm_address(1)), PORT);
        }
        lab.b.tap(&Net::new(1).tap)?;
        let guest = Guest::start_and_wait(&lab.a, &environment, &spec)?;
        adopt(&agents, &lab.a, &guest)?;
        Ok(Self { case, environment, _guest: guest, agents, _daemons: daemons, _ways: ways, lab })
    }

    /// Moves the guest there and back in `turns` turns; `say` receives each move.
    pub fn run(&self, turns: u32, mut say: impl FnMut(&WanMove)) -> Result<WanResult> {
        let made = Provenance::now(&self.environment, QemuVersion::Newer)?;
        let service = SocketAddr::from((vm_address(1), PORT));
        let client = TickingClient::start(&self.lab.client, service)?;
        let mut moves = Vec::new();
        for (turn, is_back) in (1..=turns).flat_map(|turn| [(turn, false), (turn, true)]) {
            let observed = self.observe(&client, turn, is_back)?;
            say(&observed);
            moves.push(observed);
        }
        Ok(WanResult { case: self.case.clone(), made, moves })
    }

    fn observe(&self, client: &TickingClient, turn: u32, is_back: bool) -> Result<WanMove> {
        let (from, to) = if is_back { (&self.lab.b, &self.lab.a) } else { (&self.lab.a, &self.lab.b) };
        let before = client.answers_until(WATCHED)?;
        // Both clocks are those of this machine.
        let (now, calendar) = (Instant::now(), SystemTime::now());
        let new_address = format!("--new-address={}={NEW_ADDRESS}", vm_address(1));
        let more: &[&str] = if is_back { &[] } else { &[&new_address] };
        let migration = migrate(&self.agents, from, to, VM, more, PATIENCE)?;
        if !migration.has_moved()? {
            return Err(Error::Config(format!("the guest was not moved: {}", migration.report())));
        }
        let during = client.answers_until(WATCHED)?;
        let after = client.answers_until(WATCHED)?;
        verify(to)?;
        let resumed = now + migration.at("running")?.duration_since(calendar).unwrap_or_default();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let moving = [during, after.clone()].concat();
        let usual = median_wait(&before);
        Ok(WanMove {
            turn,
            is_back,
            total_ms: ms(migration.total()?),
            downtime_ms: ms(migration.downtime("total_us")?),
            sent_bytes: number(migration.report(), "sent_bytes")?,
            silence_ms: ms(silence(&moving)),
            answer_before_ms: ms(usual),
            answer_after_ms: ms(median_wait(&after)),
            recovered_ms: recovery(&moving, resumed, usual * 2 + INTERVAL).map(ms),
            parts: DowntimeParts::of(&migration)?,
        })
    }
}

/// Lets the guest verify all of its memory.
fn verify(host: &Host) -> Result<()> {
    let [pid] = processes_of(host, is_qemu)?[..] else {
        return Err(Error::Config(format!("{} does not run one guest", host.name())));
    };
    let check = serial_of(pid)?.check()?;
    if check.ok { Ok(()) } else { Err(Error::Config("memory is wrong after the move".to_owned())) }
}

/// Returns the longest time between two answers.
fn silence(answers: &[Answer]) -> Duration {
    answers.windows(2).map(|two| two[1].came - two[0].came).max().unwrap_or_default()
}

fn median_wait(answers: &[Answer]) -> Duration {
    let mut waits: Vec<_> = answers.iter().map(|answer| answer.wait()).collect();
    waits.sort_unstable();
    waits.get(waits.len() / 2).copied().unwrap_or_default()
}

/// Returns the time from `resumed` until answers took longer than `bound` for the last time, by the median of some that
/// follow one another; `None` if that is at the end.
fn recovery(answers: &[Answer], resumed: Instant, bound: Duration) -> Option<Duration> {
    let Some(last) = answers.windows(TOGETHER).rposition(|some| median_wait(some) > bound) else {
        return Some(Duration::ZERO);
    };
    let is_over = last + TOGETHER + MIN_GOOD < answers.len();
    is_over.then(|| answers[last + TOGETHER / 2].came.saturating_duration_since(resumed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_and_recovery_follow_from_the_answers() {
        let start = Instant::now();
        let ms = Duration::from_millis;
        let at = |sent, came| Answer { sent: start + ms(sent), came: start + ms(came) };
        let good = (0..400).map(|number| at(1000 + number * 5, 1020 + number * 5));
        let slow = (0..100).map(|number| at(number * 5, 600 + number));
        let answers: Vec<_> = [at(0, 10)].into_iter().chain(slow).chain(good).collect();
        assert_eq!(silence(&answers), ms(590));
        assert_eq!(median_wait(&answers), ms(20));
        assert_eq!(recovery(&answers, start + ms(500), ms(40)), Some(ms(520)));
        assert_eq!(recovery(&answers, start + ms(500), ms(1000)), Some(ms(0)));
        assert_eq!(recovery(&answers, start, ms(15)), None, "the last ones are too slow");
    }
}
