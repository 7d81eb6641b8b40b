//! Bytes on the link, and the guest's writes, second by second.

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::Result;
use crate::host::Host;
use crate::monitor::Monitor;
use crate::traffic::traffic;

const STEP: Duration = Duration::from_millis(500);

/// Values second by second, from the clients' start on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Time of the migration's request, seconds.
    pub requested_s: f64,
    /// Time of the guest's stop, seconds; absent if it was not stopped.
    pub stopped_s: Option<f64>,
    /// Time at which it resumed at its destination, seconds.
    pub resumed_s: Option<f64>,
    /// Bytes that clients received in each second.
    pub client_bytes: Vec<u64>,
    /// Bytes on the link to the destination in each second, with all headers.
    pub link_bytes: Vec<u64>,
    /// Bytes that the guest wrote to its disk at its source in each second.
    pub written_bytes: Vec<u64>,
    /// The longest time between two frames of the film that ended in each second, ms.
    pub frame_gap_ms: Vec<f64>,
}

/// Samples of a counter that only grows.
pub(super) type Growth = Vec<(Duration, f64)>;

/// Samples, by the clock of the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Samples {
    pub(super) sent_bytes: Growth,
    pub(super) writes: Growth,
    pub(super) written_bytes: Growth,
}

/// A sampling thread.
#[derive(Debug)]
pub(super) struct Sampler {
    stop: Sender<()>,
    thread: JoinHandle<Samples>,
}

impl Sampler {
    /// Begins to sample the link of `host` and, as long as it is there, the QEMU behind a monitor that has no other
    /// client. Times count from `start`.
    pub(super) fn start(host: &Host, monitor: &Path, start: Instant) -> Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let host = host.clone();
        let mut monitor = Some(Monitor::connect(monitor)?);
        let thread = thread::spawn(move || {
            let mut sampled = Samples::default();
            loop {
                if let Ok(traffic) = traffic(&host) {
                    sampled.sent_bytes.push((start.elapsed(), traffic.bytes as f64));
                }
                let statistics =
                    monitor.as_mut().and_then(|it| it.command("query-blockstats", &json!({})).ok());
                match statistics {
                    Some(statistics) => {
                        let (writes, bytes) = written(&statistics);
                        let now = start.elapsed();
                        sampled.writes.push((now, writes));
                        sampled.written_bytes.push((now, bytes));
                    }
                    // The guest has left.
                    None => monitor = None,
                }
                if stopped.recv_timeout(STEP) != Err(RecvTimeoutError::Timeout) {
                    return sampled;
                }
            }
        });
        Ok(Self { stop, thread })
    }

    /// Ends, and returns the samples.
    pub(super) fn finish(self) -> Samples {
        drop(self.stop);
        // The thread does not panic; if it did, the panic continues here.
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Returns a guest's writes to its disks, and their bytes.
fn written(blockstats: &Value) -> (f64, f64) {
    let devices = blockstats.as_array().into_iter().flatten().filter(|of| of["qdev"].is_string());
    devices.fold((0.0, 0.0), |(writes, bytes), of| {
        let count = |key: &str| of["stats"][key].as_f64().unwrap_or(0.0);
        (writes + count("wr_operations"), bytes + count("wr_bytes"))
    })
}

/// Returns the counter at a moment: on the straight line between the samples before and after it.
pub(super) fn at(growth: &Growth, moment: Duration) -> f64 {
    let after = growth.partition_point(|(at, _)| *at <= moment);
    match (after.checked_sub(1).map(|before| growth[before]), growth.get(after)) {
        (Some((from, low)), Some((to, high))) => {
            let share =
                moment.saturating_sub(from).as_secs_f64() / to.saturating_sub(from).as_secs_f64().max(1e-9);
            low + (high - low) * share
        }
        (Some((_, value)), None) | (None, Some(&(_, value))) => value,
        (None, None) => 0.0,
    }
}

/// Returns the growth in each second.
pub(super) fn by_seconds(growth: &Growth, seconds: usize) -> Vec<u64> {
    let grown = |second: usize| {
        let second = Duration::from_secs(second as u64);
        (at(growth, second + Duration::from_secs(1)) - at(growth, second)).max(0.0) as u64
    };
    (0..seconds).map(grown).collect()
}

/// Returns the longest time between two moments, for each second in which it ended, ms.
pub(super) fn gaps_by_seconds(moments: &[Duration], seconds: usize) -> Vec<f64> {
    let mut gaps = vec![0.0_f64; seconds];
    for pair in moments.windows(2) {
        if let Some(gap) = gaps.get_mut(pair[1].as_secs() as usize) {
            *gap = gap.max((pair[1].saturating_sub(pair[0])).as_secs_f64() * 1e3);
        }
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_told_by_seconds() {
        let ms = Duration::from_millis;
        let growth: Growth = vec![(ms(500), 100.0), (ms(1500), 300.0), (ms(3500), 300.0)];
        assert_eq!(by_seconds(&growth, 4), [100, 100, 0, 0]);
        assert!((at(&growth, ms(750)) - 150.0).abs() < 1e-9);
        assert!(at(&Growth::new(), ms(1)).abs() < 1e-9);
        assert_eq!(gaps_by_seconds(&[ms(100), ms(140), ms(1200), ms(1300)], 2), [40.0, 1060.0]);
    }

    #[test]
    fn writes_of_devices_are_counted_once() {
        let stats = |operations: u64| json!({"wr_operations": operations, "wr_bytes": operations * 4096});
        let statistics = json!([
            {"qdev": "/machine/peripheral-anon/device[0]/virtio-backend", "stats": stats(3)},
            {"node-name": "disk0", "stats": stats(3)},
            {"qdev": "cd", "stats": {}},
        ]);
        assert_eq!(written(&statistics), (3.0, 12288.0));
    }
}
