//! Sampler of the link: a thread that judges link and processors while pages are sent, and informs the reductions.

use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{LinkCounters, LinkMeter};
use engine::compression::{CompressionDecision, CompressionObservation, CompressionPolicy};
use engine::trace::TracedPolicy;
use proto::packed::CompressionTrial;

use super::active::{ActiveReduction, Interval, ReductionProgress};
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

/// Starts the sampler; returns none if no thread can be started, and then nothing is chosen. It ends when the returned
/// value is dropped, or when no reduction needs samples.
pub(super) fn start(
    reductions: Vec<Arc<dyn ActiveReduction>>,
    meter: Arc<LinkMeter>,
    workers: u16,
    controls: Arc<MigrationControls>,
) -> Option<Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    let samples = move || LinkSampler::new(reductions, meter, workers, controls).run(&stopped);
    thread::Builder::new().name("link-sampler".to_owned()).spawn(samples).ok().map(|_| stop)
}

/// Judgement of the link, interval by interval.
struct LinkSampler {
    reductions: Vec<Arc<dyn ActiveReduction>>,
    meter: Arc<LinkMeter>,
    workers: u16,
    controls: Arc<MigrationControls>,
    policy: TracedPolicy<CompressionPolicy>,
    /// Counters at the end of the last interval.
    before: LinkSample,
    /// True once the link was found to be slow.
    is_slow: bool,
    /// Number of intervals that were judged.
    samples: u32,
}

impl LinkSampler {
    fn new(
        reductions: Vec<Arc<dyn ActiveReduction>>,
        meter: Arc<LinkMeter>,
        workers: u16,
        controls: Arc<MigrationControls>,
    ) -> Self {
        let before = LinkSample::now(&meter, &reductions);
        let policy = TracedPolicy::new(CompressionPolicy::default());
        Self { reductions, meter, workers, controls, policy, before, is_slow: false, samples: 0 }
    }

    /// Takes samples until the channel is closed, or no reduction needs them.
    fn run(mut self, stopped: &Receiver<()>) {
        while stopped.recv_timeout(self.pause()) == Err(RecvTimeoutError::Timeout) {
            let now = LinkSample::now(&self.meter, &self.reductions);
            if !self.sample(now) {
                return;
            }
        }
    }

    fn pause(&self) -> Duration {
        if self.samples < EARLY_SAMPLES { EARLY_INTERVAL } else { SAMPLE_INTERVAL }
    }

    /// Judges the interval that ends now, and informs the reductions. An interval without enough data goes on. Returns
    /// false if no reduction needs more samples.
    fn sample(&mut self, now: LinkSample) -> bool {
        if now.progress.interruptions != self.before.progress.interruptions {
            // A connection was lost: the missing answers do not measure the destination's speed.
            for reduction in &self.reductions {
                reduction.interrupted(self.is_slow);
            }
            self.before = now;
            return true;
        }
        let Some(is_awaited) = now.conclusion(&self.before) else { return true };
        self.samples += 1;
        let before = mem::replace(&mut self.before, now);
        let decision = self.judge(&before, is_awaited);
        if decision.link_is_slow && !self.is_slow {
            self.is_slow = true;
            for reduction in &self.reductions {
                reduction.link_is_slow(&self.controls);
            }
        }
        self.reductions.iter().any(|reduction| reduction.needs_samples(self.is_slow))
    }

    /// Asks the policy about the interval since `before`, and informs the reductions of it.
    fn judge(&mut self, before: &LinkSample, is_awaited: bool) -> CompressionDecision {
        let now = &self.before;
        let trials = self.reductions.iter().flat_map(|reduction| reduction.take_trials()).collect();
        let working = self.meter.active_workers(self.workers).into();
        let policy = &mut self.policy;
        let decision = policy.decide_on(now.since(before, working, trials));
        self.controls.report(|report| policy.update_report(&mut report.traces.others.compression));
        let interval = Interval {
            length_ns: now.at.duration_since(before.at).as_nanos() as u64,
            data_bytes: now.link.data_bytes - before.link.data_bytes,
            progress: now.progress.since(&before.progress),
            is_awaited,
            is_slow: self.is_slow,
            decision: &decision,
        };
        for reduction in &self.reductions {
            reduction.sampled(&interval, &self.controls);
        }
        decision
    }
}

/// Counters at one moment.
#[derive(Clone, Copy)]
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

    /// Returns none if too little has passed since `before` for a conclusion; otherwise true if nothing has, because
    /// the destination has yet to answer.
    fn conclusion(&self, before: &Self) -> Option<bool> {
        let passed_bytes = self.passed_bytes() - before.passed_bytes();
        let is_long = self.at.duration_since(before.at) >= MAX_INTERVAL;
        match passed_bytes {
            0 => (is_long && self.progress.awaited_bytes > 0).then_some(true),
            bytes => (is_long || bytes >= MIN_DATA_BYTES).then_some(false),
        }
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

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use ::memory::Reduction;
    use api::MigrationSettings;
    use api::report::Report;
    use host::testing::{World, terms};

    use super::*;
    use crate::source::Goals;

    /// Records what it learns, and needs samples until it has learned of `most` intervals.
    #[derive(Debug)]
    struct Recorder {
        learned: Mutex<Vec<(u64, bool)>>,
        interruptions: Mutex<u32>,
        most: usize,
    }

    impl Recorder {
        fn learned(&self) -> Vec<(u64, bool)> {
            self.learned.lock().unwrap_or_else(PoisonError::into_inner).clone()
        }
    }

    impl ActiveReduction for Recorder {
        fn of_streams(&self) -> Arc<dyn Reduction> {
            panic!("no stream is open")
        }

        fn progress(&self) -> ReductionProgress {
            ReductionProgress::default()
        }

        fn take_trials(&self) -> Vec<CompressionTrial> {
            Vec::new()
        }

        fn needs_samples(&self, _is_slow: bool) -> bool {
            self.learned().len() < self.most
        }

        fn interrupted(&self, _is_slow: bool) {
            *self.interruptions.lock().unwrap() += 1;
        }

        fn sampled(&self, interval: &Interval<'_>, _controls: &MigrationControls) {
            self.learned.lock().unwrap().push((interval.data_bytes, interval.is_awaited));
        }

        fn link_is_slow(&self, _controls: &Arc<MigrationControls>) {}

        fn report(&self, _link: &LinkCounters, _report: &mut Report) {}
    }

    fn sampler(most: usize) -> (LinkSampler, Arc<Recorder>) {
        let recorder =
            Arc::new(Recorder { learned: Mutex::default(), interruptions: Mutex::default(), most });
        let (world, terms, settings) = (World::new(), terms("a", "b"), MigrationSettings::default());
        let report = Report::begin(terms.migration, terms.source, terms.destination, settings.clone());
        let goals = Goals::restored(settings, &world.context.config);
        let controls = Arc::new(MigrationControls::new(goals, report, Instant::now()));
        let reductions: Vec<Arc<dyn ActiveReduction>> = vec![Arc::<Recorder>::clone(&recorder)];
        (LinkSampler::new(reductions, Arc::default(), 1, controls), recorder)
    }

    /// Returns the counters after a time, when so much data has been sent since the last judged interval.
    fn after(sampler: &LinkSampler, time: Duration, data_bytes: u64) -> LinkSample {
        let LinkSample { at, mut link, progress, idle_ns } = sampler.before;
        link.data_bytes += data_bytes;
        LinkSample { at: at + time, link, progress, idle_ns }
    }

    #[test]
    fn an_interval_goes_on_until_it_has_enough_data() {
        let (mut sampler, recorder) = sampler(3);
        let short = EARLY_INTERVAL;
        assert!(sampler.sample(after(&sampler, short, MIN_DATA_BYTES - 1)));
        assert!(sampler.sample(after(&sampler, MAX_INTERVAL, 0)));
        assert_eq!(recorder.learned(), []);
        assert!(sampler.sample(after(&sampler, short, MIN_DATA_BYTES)));
        assert!(sampler.sample(after(&sampler, MAX_INTERVAL, 1)));
        assert_eq!(recorder.learned(), [(MIN_DATA_BYTES, false), (1, false)]);
        let mut awaiting = after(&sampler, MAX_INTERVAL, 0);
        awaiting.progress.awaited_bytes = 1;
        assert!(!sampler.sample(awaiting), "no reduction needs more samples");
        assert_eq!(recorder.learned()[2..], [(0, true)]);
    }

    #[test]
    fn an_interval_with_a_lost_connection_is_not_judged() {
        let (mut sampler, recorder) = sampler(1);
        let mut lost = after(&sampler, MAX_INTERVAL, MIN_DATA_BYTES);
        lost.progress.interruptions = 1;
        assert!(sampler.sample(lost));
        assert_eq!((recorder.learned(), *recorder.interruptions.lock().unwrap()), (vec![], 1));
        assert!(!sampler.sample(after(&sampler, EARLY_INTERVAL, MIN_DATA_BYTES)));
        assert_eq!(recorder.learned(), [(MIN_DATA_BYTES, false)], "what was sent before does not count");
    }
}
