//! Sampler of the link: a thread that judges link and processors while pages are sent, and informs the reductions.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{LinkCounters, LinkMeter};
use engine::compression::{CompressionDecision, CompressionObservation, CompressionPolicy};
use engine::trace::TracedPolicy;
use proto::packed::CompressionTrial;

use super::{ActiveReduction, ReductionProgress};
use crate::source::MigrationControls;
use host::cpu;

/// Interval of the policy's samples, and the shorter one at first, when the policy knows nothing.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
const EARLY_INTERVAL: Duration = Duration::from_millis(20);
const EARLY_SAMPLES: u32 = 10;
/// Less data allows no conclusion about a link: data that fits into a buffer is sent at once, and a worker that waits
/// reports its wait only afterwards. Then the policy waits for more data, but not for ever.
const MIN_DATA_BYTES: u64 = 2 << 20;
const MAX_INTERVAL: Duration = Duration::from_millis(500);

/// An interval, as reductions learn of it.
pub(crate) struct Interval<'a> {
    pub(super) length_ns: u64,
    /// Data of the pages that were sent, in bytes before compression.
    pub(super) data_bytes: u64,
    /// Progress of the reductions during it.
    pub(super) progress: ReductionProgress,
    /// True if the destination has yet to answer, and nothing else passes.
    pub(super) is_awaited: bool,
    /// True if the link was slow before it, too.
    pub(super) is_slow: bool,
    /// Judgement of link and processors.
    pub(super) decision: &'a CompressionDecision,
}

/// Starts the sampler; returns none if no thread can be started, and then nothing is chosen. It ends when the returned
/// value is dropped, or when no reduction needs samples.
pub(super) fn start(
    reductions: Vec<Arc<dyn ActiveReduction>>,
    meter: Arc<LinkMeter>,
    workers: u16,
    controls: Arc<MigrationControls>,
) -> Option<Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    let samples = move || {
        let now = || LinkSample::now(&meter, &reductions);
        let mut chooser = TracedPolicy::<CompressionPolicy>::new(CompressionPolicy::default());
        let mut before = now();
        let (mut is_slow, mut samples) = (false, 0);
        let pause = |samples| if samples < EARLY_SAMPLES { EARLY_INTERVAL } else { SAMPLE_INTERVAL };
        while stopped.recv_timeout(pause(samples)) == Err(RecvTimeoutError::Timeout) {
            let now = now();
            if now.progress.interruptions != before.progress.interruptions {
                // A connection was lost: the missing answers do not measure the destination's speed.
                for reduction in &reductions {
                    reduction.interrupted(is_slow);
                }
                before = now;
                continue;
            }
            let passed_bytes = now.passed_bytes() - before.passed_bytes();
            let is_long = before.at.elapsed() >= MAX_INTERVAL;
            let is_awaited = is_long && passed_bytes == 0 && now.progress.awaited_bytes > 0;
            if !is_awaited && (passed_bytes == 0 || (passed_bytes < MIN_DATA_BYTES && !is_long)) {
                continue;
            }
            samples += 1;
            let trials = reductions.iter().flat_map(|reduction| reduction.take_trials()).collect();
            let working = meter.active_workers(workers).into();
            let decision = chooser.decide_on(now.since(&before, working, trials));
            controls.report(|report| chooser.update_report(&mut report.traces.others.compression));
            let interval = Interval {
                length_ns: now.at.duration_since(before.at).as_nanos() as u64,
                data_bytes: now.link.data_bytes - before.link.data_bytes,
                progress: now.progress.since(&before.progress),
                is_awaited,
                is_slow,
                decision: &decision,
            };
            for reduction in &reductions {
                reduction.sampled(&interval, &controls);
            }
            before = now;
            if decision.link_is_slow && !is_slow {
                is_slow = true;
                for reduction in &reductions {
                    reduction.link_is_slow(&controls);
                }
            }
            if !reductions.iter().any(|reduction| reduction.needs_samples(is_slow)) {
                return;
            }
        }
    };
    thread::Builder::new().name("link-sampler".to_owned()).spawn(samples).ok().map(|_| stop)
}

/// Counters at one moment.
struct LinkSample {
    at: Instant,
    link: LinkCounters,
    progress: ReductionProgress,
    idle_ns: u64,
}

impl LinkSample {
    fn now(meter: &LinkMeter, reductions: &[Arc<dyn ActiveReduction>]) -> Self {
        let (at, link) = (Instant::now(), meter.count());
        let progress = reductions.iter().map(|reduction| reduction.progress());
        Self { at, link, progress: progress.sum(), idle_ns: cpu::idle_ns() }
    }

    /// Returns the bytes of data, and of pages that the destination had or refused.
    fn passed_bytes(&self) -> u64 {
        self.link.data_bytes + self.progress.taken_bytes + self.progress.refused_bytes
    }

    fn since(&self, before: &Self, workers: u32, trials: Vec<CompressionTrial>) -> CompressionObservation {
        let (now, then) = (&self.link, &before.link);
        let progress = self.progress.since(&before.progress);
        let (interval, data_bytes) = (self.at.duration_since(before.at), now.data_bytes - then.data_bytes);
        // Between references there may be too little data for a conclusion about the link.
        let is_conclusive = data_bytes >= MIN_DATA_BYTES || interval >= MAX_INTERVAL;
        CompressionObservation {
            interval_ns: interval.as_nanos() as u64,
            workers,
            data_bytes: if is_conclusive { data_bytes } else { 0 },
            wire_bytes: now.wire_bytes - then.wire_bytes,
            pack_ns: progress.pack_ns,
            cpu_ns: (now.cpu_ns - then.cpu_ns).saturating_sub(progress.trial_ns),
            blocked_ns: now.blocked_ns - then.blocked_ns,
            peer_waited_ns: (now.peer_waited_us - then.peer_waited_us) * 1000,
            idle_ns: self.idle_ns.saturating_sub(before.idle_ns),
            trials,
        }
    }
}
