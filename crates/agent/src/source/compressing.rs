//! Compression of what is sent: the way that was wished for, or the one that the policy picks while pages are sent.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use ::memory::{Counted, Packing};
use engine::compression::{Chooser, Observation, WAYS};
use proto::packed::{Codec, Compression as Way, Trial};

use super::{Aims, Controls, Telemetry};
use crate::api::Compress;
use crate::cpu;
use crate::report::{Compression, PickedWay};

/// How often the policy looks.
const LOOK: Duration = Duration::from_millis(50);
/// Less data tells nothing of a link: what goes into a buffer goes at once, and a worker that waits says so only when it
/// does not any more. Then the policy waits for more, but not for ever.
const LEAST_DATA_BYTES: u64 = 2 << 20;
const LONGEST: Duration = Duration::from_millis(500);

/// Most ways of which the report tells.
const MOST_TOLD: usize = 100;

/// Compression of a migration. Dropping it ends the looks.
#[derive(Debug)]
pub(super) struct Compressing {
    packing: Arc<Packing>,
    wanted: Compress,
    controls: Arc<Controls>,
    _stop: Option<Sender<()>>,
}

impl Compressing {
    /// None where nothing is compressed: because nobody wants it, or the destination does not unpack it, of which the
    /// report is told.
    pub(super) fn begin(codecs: &[Codec], controls: &Arc<Controls>, telemetry: &Telemetry) -> Option<Self> {
        let Aims { compression: wanted, worth, streams, .. } = controls.aims();
        let (first, needed) = match wanted {
            Compress::Auto => (Way::None, WAYS.iter().filter_map(|way| way.codec()).collect()),
            Compress::Fixed(way) => (way, way.codec().into_iter().collect::<Vec<_>>()),
        };
        if needed.is_empty() {
            return None;
        }
        if !needed.iter().all(|codec| codecs.contains(codec)) {
            let at_us = telemetry.elapsed_us();
            let detail =
                format!("nothing is compressed: the destination does not unpack what {wanted} makes");
            controls.report(|report| report.event(at_us, "compression", detail));
            return None;
        }
        let packing = Arc::new(Packing::new(first, worth));
        let stop = (wanted == Compress::Auto)
            .then(|| look_again_and_again(Arc::clone(&packing), streams, Arc::clone(controls)))
            .flatten();
        Some(Self { packing, wanted, controls: Arc::clone(controls), _stop: stop })
    }

    pub(super) fn packing(&self) -> Arc<Packing> {
        Arc::clone(&self.packing)
    }
}

impl Drop for Compressing {
    fn drop(&mut self) {
        let Counted { data_bytes, packed_bytes, wire_bytes, pack_ns, trial_ns, .. } = self.packing.count();
        let wanted = self.wanted.to_string();
        self.controls.report(|report| {
            let compression = report.compression.get_or_insert_default();
            let ways = std::mem::take(&mut compression.ways);
            let pack_cpu_us = (pack_ns + trial_ns) / 1000;
            *compression = Compression { wanted, data_bytes, packed_bytes, wire_bytes, pack_cpu_us, ways };
        });
    }
}

/// The policy, in a thread of its own; none if there is no thread to be had, and then nothing is compressed.
fn look_again_and_again(packing: Arc<Packing>, workers: u16, controls: Arc<Controls>) -> Option<Sender<()>> {
    let (stop, stopped) = mpsc::channel();
    let looks = move || {
        let (mut chooser, mut before) = (Chooser::default(), Look::now(&packing));
        let mut present = Way::None;
        while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            let data_bytes = packing.count().data_bytes - before.counted.data_bytes;
            if data_bytes == 0 || (data_bytes < LEAST_DATA_BYTES && before.at.elapsed() < LONGEST) {
                continue;
            }
            let now = Look::now(&packing);
            let decision = chooser.decide(&now.since(&before, workers, packing.take_trials()));
            before = now;
            if !decision.try_out.is_empty() {
                packing.try_out(&decision.try_out);
            }
            if decision.way != present {
                present = decision.way;
                packing.set_way(present);
                let at_us = controls.requested.elapsed().as_micros() as u64;
                let picked = PickedWay {
                    at_us,
                    way: present.to_string(),
                    link_bytes_per_s: decision.link_bytes_per_s.unwrap_or(0),
                };
                controls.report(|report| {
                    let ways = &mut report.compression.get_or_insert_default().ways;
                    if ways.len() < MOST_TOLD {
                        ways.push(picked);
                    }
                });
            }
        }
    };
    thread::Builder::new().name("compression".to_owned()).spawn(looks).ok().map(|_| stop)
}

/// What was counted up to a moment.
struct Look {
    at: Instant,
    counted: Counted,
    idle_ns: u64,
}

impl Look {
    fn now(packing: &Packing) -> Self {
        Self { at: Instant::now(), counted: packing.count(), idle_ns: cpu::idle_ns() }
    }

    fn since(&self, before: &Self, workers: u16, trials: Vec<Trial>) -> Observation {
        let (now, then) = (&self.counted, &before.counted);
        Observation {
            interval_ns: self.at.duration_since(before.at).as_nanos() as u64,
            workers: workers.into(),
            data_bytes: now.data_bytes - then.data_bytes,
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
