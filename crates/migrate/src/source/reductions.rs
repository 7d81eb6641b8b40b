//! Reductions of the data that is sent: compression, deltas and page references, as requested, or as the policy picks
//! them while pages are sent.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{
    CompressionCounters, CompressionState, ContentIndex, DeltaCounters, Deltas, ReferenceOutcome,
};
use engine::compression::{CompressionObservation, CompressionPolicy, Decision, WAYS};
use engine::references::{ReferenceObservation, ReferencePolicy};
use engine::trace::TracedPolicy;
use proto::limits::PAGE_BYTES;
use proto::packed::{Codec, Compression as Way, CompressionTrial};

use super::references::SharedImages;
use super::{Controls, Goals, Telemetry};
use api::report::{self, Compression, LevelChoice};
use api::{Compress, Deltas as WantedDeltas, MigrationSettings};
use host::cpu;

/// Interval of the policy's samples, and the shorter one at first, when the policy knows nothing.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
const EARLY_INTERVAL: Duration = Duration::from_millis(20);
const EARLY_SAMPLES: u32 = 10;
/// Less data allows no conclusion about a link: data that fits into a buffer is sent at once, and a worker that waits
/// reports its wait only afterwards. Then the policy waits for more data, but not for ever.
const MIN_DATA_BYTES: u64 = 2 << 20;
const MAX_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum number of compression choices in the report.
const MAX_REPORTED: usize = 100;

/// Reductions of a migration. Dropping it ends the samples and completes the report.
#[derive(Debug)]
pub(super) struct Reductions {
    active: ActiveReductions,
    controls: Arc<Controls>,
    _stop: Option<Sender<()>>,
}

/// Reductions that the policy controls.
#[derive(Clone, Debug)]
struct ActiveReductions {
    wanted: Compress,
    /// Compression; none if nothing is compressed and the link need not be measured either.
    packing: Option<Arc<CompressionState>>,
    wanted_deltas: WantedDeltas,
    /// Deltas; none if pages are sent in full.
    deltas: Option<Arc<Deltas>>,
    /// Page references; none if they are not used. Pages of memory are looked up, and images that both hosts have are
    /// read, only if the link is slow.
    known: Option<(Arc<ContentIndex>, Option<SharedImages>)>,
}

impl Reductions {
    /// Starts the reductions that were requested and that the destination can undo; the report notes each request that
    /// is left out for that reason. Deltas need a seed.
    pub(super) fn begin(
        codecs: &[Codec],
        delta_seed: Option<u64>,
        ram_blocks: usize,
        known: Option<(Arc<ContentIndex>, Option<SharedImages>)>,
        controls: &Arc<Controls>,
        telemetry: &Telemetry,
    ) -> Self {
        let Goals { settings, worth, deltas_bytes, .. } = controls.goals();
        let MigrationSettings { compression, streams, deltas: wanted_deltas, .. } = settings;
        let wanted = supported_compression(compression, codecs, controls, telemetry);
        let seed = delta_seed.filter(|_| wanted_deltas != WantedDeltas::Never && deltas_bytes > 0);
        let deltas = seed.map(|seed| Arc::new(Deltas::new(ram_blocks, deltas_bytes, seed)));
        if wanted_deltas == WantedDeltas::Always && deltas.is_none() {
            let detail = "pages are sent in full: the destination does not support deltas, or no memory is \
                          configured for them";
            let at_us = telemetry.elapsed_us();
            controls.report(|report| report.event(at_us, "deltas", detail));
        }
        let is_watched = wanted == Compress::Auto
            || (deltas.is_some() && wanted_deltas == WantedDeltas::Auto)
            || known.is_some();
        let way = match wanted {
            Compress::Auto => Way::None,
            Compress::Fixed(way) => way,
        };
        let packing = (is_watched || way != Way::None).then(|| {
            let opens = wanted == Compress::Auto;
            Arc::new(if opens { CompressionState::opening(worth) } else { CompressionState::new(way, worth) })
        });
        let active = ActiveReductions { wanted, packing, wanted_deltas, deltas, known };
        if wanted_deltas == WantedDeltas::Always {
            active.start_deltas(controls);
        }
        let watched = active.packing.clone().filter(|_| is_watched);
        let stop =
            watched.and_then(|packing| start_policy(active.clone(), packing, streams, Arc::clone(controls)));
        Self { active, controls: Arc::clone(controls), _stop: stop }
    }

    pub(super) fn packing(&self) -> Option<Arc<CompressionState>> {
        self.active.packing.clone()
    }

    pub(super) fn deltas(&self) -> Option<Arc<Deltas>> {
        self.active.deltas.clone()
    }
}

/// Returns the requested compression, or none if the destination cannot unpack it.
fn supported_compression(
    wanted: Compress,
    codecs: &[Codec],
    controls: &Controls,
    telemetry: &Telemetry,
) -> Compress {
    let needed: Vec<_> = match wanted {
        Compress::Auto => WAYS.iter().filter_map(|way| way.codec()).collect(),
        Compress::Fixed(way) => way.codec().into_iter().collect(),
    };
    if needed.iter().all(|codec| codecs.contains(codec)) {
        return wanted;
    }
    let at_us = telemetry.elapsed_us();
    let detail = format!("nothing is compressed: the destination does not support {wanted}");
    controls.report(|report| report.event(at_us, "compression", detail));
    Compress::Fixed(Way::None)
}

impl Drop for Reductions {
    fn drop(&mut self) {
        let ActiveReductions { wanted, packing, deltas, .. } = &self.active;
        self.controls.report(|report| {
            if let Some(packing) = packing.as_ref().filter(|_| *wanted != Compress::Fixed(Way::None)) {
                let CompressionCounters {
                    opening_bytes,
                    data_bytes,
                    compressed_bytes,
                    wire_bytes,
                    pack_ns,
                    trial_ns,
                    ..
                } = packing.count();
                let compression = report.compression.get_or_insert_default();
                let ways = std::mem::take(&mut compression.ways);
                let (wanted, compression_cpu_us) = (wanted.to_string(), (pack_ns + trial_ns) / 1000);
                *compression = Compression {
                    wanted,
                    data_bytes,
                    compressed_bytes,
                    wire_bytes,
                    compression_cpu_us,
                    opening_bytes,
                    ways,
                };
            }
            if let Some((deltas, reported)) = deltas.as_ref().zip(report.deltas.as_mut()) {
                let DeltaCounters { pages, bytes, mark_ns } = deltas.count();
                *reported = report::Deltas {
                    since_us: reported.since_us,
                    pages,
                    page_bytes: pages * PAGE_BYTES,
                    delta_bytes: bytes,
                    mark_cpu_us: mark_ns / 1000,
                };
            }
        });
    }
}

impl ActiveReductions {
    /// Starts the reductions that need time for each page: the senders wait for the link, so that these are worthwhile
    /// from here on.
    fn start_slow_link_reductions(&self, controls: &Arc<Controls>) {
        if self.wanted_deltas == WantedDeltas::Auto {
            self.start_deltas(controls);
        }
        self.start_memory_references();
        if let Some((known, Some(shared))) = &self.known {
            shared.clone().learn(known, controls);
        }
    }

    /// Returns the statistics of references to memory.
    fn referred(&self) -> ReferenceOutcome {
        self.known.as_ref().map_or_else(ReferenceOutcome::default, |(known, _)| known.referred())
    }

    fn start_memory_references(&self) {
        if let Some((known, _)) = &self.known {
            known.enable_memory_lookup();
        }
    }

    /// Ends references to memory, because the destination reads the content more slowly than the link would carry it.
    fn end_memory_references(&self, controls: &Controls) {
        let Some((known, _)) = self.known.as_ref().filter(|(known, _)| known.is_memory_lookup_enabled())
        else {
            return;
        };
        known.disable_memory_lookup();
        let at_us = controls.requested.elapsed().as_micros() as u64;
        let detail = "page references are switched off: the destination reads pages more slowly than they \
                      can be sent, or has different content";
        controls.report(|report| report.event(at_us, "references", detail));
    }

    /// Turns deltas on: from here on the versions of sent pages are recorded, and deltas are sent.
    fn start_deltas(&self, controls: &Controls) {
        let Some(deltas) = &self.deltas else { return };
        deltas.set(true);
        let since_us = controls.requested.elapsed().as_micros() as u64;
        controls.report(|report| report.deltas.get_or_insert_default().since_us = since_us);
    }
}

/// Notes the picked compression in the report.
fn update_report(decision: &Decision, controls: &Controls) {
    let picked = LevelChoice {
        at_us: controls.requested.elapsed().as_micros() as u64,
        way: decision.way.to_string(),
        link_bytes_per_s: decision.link_bytes_per_s.unwrap_or(0),
    };
    controls.report(|report| {
        let ways = &mut report.compression.get_or_insert_default().ways;
        if ways.len() < MAX_REPORTED {
            ways.push(picked);
        }
    });
}

/// Runs the policy in a separate thread; returns none if no thread can be started, and then nothing is picked.
fn start_policy(
    active: ActiveReductions,
    packing: Arc<CompressionState>,
    workers: u16,
    controls: Arc<Controls>,
) -> Option<Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    let samples = move || {
        let now = || LinkSample::now(&packing, active.referred());
        let mut chooser = TracedPolicy::<CompressionPolicy>::new(CompressionPolicy::default());
        let mut referring = TracedPolicy::<ReferencePolicy>::new(ReferencePolicy::default());
        let mut before = now();
        let (mut present, mut is_slow, mut samples) = (Way::None, false, 0);
        let pause = |samples| if samples < EARLY_SAMPLES { EARLY_INTERVAL } else { SAMPLE_INTERVAL };
        while stopped.recv_timeout(pause(samples)) == Err(RecvTimeoutError::Timeout) {
            let now = now();
            if now.referred.interruptions != before.referred.interruptions {
                // A connection was lost: the missing answers do not measure the destination's speed.
                referring.reset();
                before = now;
                if is_slow {
                    active.start_memory_references();
                }
                continue;
            }
            let passed_bytes = now.passed_bytes() - before.passed_bytes();
            let is_long = before.at.elapsed() >= MAX_INTERVAL;
            let is_awaited = is_long && passed_bytes == 0 && now.referred.awaited_bytes > 0;
            if !is_awaited && (passed_bytes == 0 || (passed_bytes < MIN_DATA_BYTES && !is_long)) {
                continue;
            }
            samples += 1;
            let working = packing.active_workers(workers).into();
            let decision = chooser.decide_on(now.since(&before, working, packing.take_trials()));
            if is_slow && !referring.decide_on(now.passed_since(&before, &decision, is_awaited)) {
                active.end_memory_references(&controls);
            }
            controls.report(|report| {
                let reported = &mut report.traces.others;
                chooser.update_report(&mut reported.compression);
                if is_slow {
                    referring.update_report(&mut reported.references);
                }
            });
            before = now;
            if decision.link_is_slow && !is_slow {
                is_slow = true;
                active.start_slow_link_reductions(&controls);
            }
            if active.wanted != Compress::Auto {
                if is_slow && active.known.is_none() {
                    return;
                }
                continue;
            }
            if !decision.try_out.is_empty() {
                packing.try_out(&decision.try_out);
            }
            // Before that the opening's choice is better, no matter how long the policy needs.
            if !decision.is_informed {
                continue;
            }
            packing.set_compression(decision.way, decision.standing_way);
            if decision.way != present {
                present = decision.way;
                update_report(&decision, &controls);
            }
        }
    };
    thread::Builder::new().name("sparing".to_owned()).spawn(samples).ok().map(|_| stop)
}

/// Counters at one moment.
struct LinkSample {
    at: Instant,
    counted: CompressionCounters,
    referred: ReferenceOutcome,
    idle_ns: u64,
}

impl LinkSample {
    fn now(packing: &CompressionState, referred: ReferenceOutcome) -> Self {
        Self { at: Instant::now(), counted: packing.count(), referred, idle_ns: cpu::idle_ns() }
    }

    /// Returns the bytes of data and of pages that were referred to.
    fn passed_bytes(&self) -> u64 {
        self.counted.data_bytes + self.referred.taken_bytes + self.referred.refused_bytes
    }

    fn passed_since(&self, before: &Self, decision: &Decision, is_awaited: bool) -> ReferenceObservation {
        ReferenceObservation {
            interval_ns: self.at.duration_since(before.at).as_nanos() as u64,
            data_bytes: self.counted.data_bytes - before.counted.data_bytes,
            referred_bytes: self.referred.taken_bytes - before.referred.taken_bytes,
            refused_bytes: self.referred.refused_bytes - before.referred.refused_bytes,
            is_awaited,
            link_bytes_per_s: decision.link_bytes_per_s,
            peer_is_busy: decision.peer_is_busy,
        }
    }

    fn since(&self, before: &Self, workers: u32, trials: Vec<CompressionTrial>) -> CompressionObservation {
        let (now, then) = (&self.counted, &before.counted);
        let (interval, data_bytes) = (self.at.duration_since(before.at), now.data_bytes - then.data_bytes);
        // Between references there may be too little data for a conclusion about the link.
        let tells = data_bytes >= MIN_DATA_BYTES || interval >= MAX_INTERVAL;
        CompressionObservation {
            interval_ns: interval.as_nanos() as u64,
            workers,
            data_bytes: if tells { data_bytes } else { 0 },
            wire_bytes: now.wire_bytes - then.wire_bytes,
            pack_ns: now.pack_ns - then.pack_ns,
            cpu_ns: (now.cpu_ns - then.cpu_ns).saturating_sub(now.trial_ns - then.trial_ns),
            blocked_ns: now.blocked_ns - then.blocked_ns,
            peer_waited_ns: (now.peer_waited_us - then.peer_waited_us) * 1000,
            idle_ns: self.idle_ns.saturating_sub(before.idle_ns),
            trials,
        }
    }
}
