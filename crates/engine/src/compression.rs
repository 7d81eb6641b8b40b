//! Choice of the compression, by the rate of the link and the idle time of the processors.
//!
//! Compression pays where workers wait for the link, and only as far as there are processors for it: in the paper
//! (Yang, Hong, *VM live migration speedup in Xen*) 21 s of compression instead of 22 s of transfer were no gain. The
//! rate of each way to compress is predicted from measurements:
//!
//! ```text
//! rate(way) = min(link / ratio(way), processors / (handling + packing(way)))
//! ```
//!
//! *link* is the rate of the link when workers waited for it, in bytes per second; *ratio* is output bytes per input
//! byte; *handling* and *packing* are processor time per byte; *processors* are those that the workers had, and most
//! of the idle ones. Ratio and packing of a way are measured in trials on a few frames now and then; the other values
//! are counted continuously.
//!
//! Memory is not alike everywhere: a trial may see the one part that does not compress. So while nothing is
//! compressed, the cheapest way is probed repeatedly; as soon as it pays and did not the last time, all ways are
//! tried. A way that does not pay at the moment is kept for a while if the processors can follow, because it costs
//! little on data that it skips.
//!
//! The choice is the cheapest way whose rate is close to the best one. Where workers wait for the destination, because
//! the destination's workers are never idle, no way helps, and the one with the least work is used.
//!
//! A stopped guest waits for both packing and sending, one after the other. For its last pages the way is chosen for
//! which packing and sending a byte take the least time together, `packing(way) + ratio(way) / link`. The way that
//! keeps a link busiest in a long round is far too slow for that. (The formula assumes one processor: this holds for
//! few pages, and for more pages it errs towards the quicker way.)
//!
//! If workers wait for the link it also pays to track the sent version of every page, so that deltas can be sent.
//! Marking pages takes processor time long before it has any use, so it begins only then. It does not end any more,
//! because a page that is not marked in one round is unknown in the next.

use proto::packed::{Compression, CompressionTrial};
use serde::{Deserialize, Serialize};

use crate::trace::{Decider, NoParameters};

/// Ways to compress, the cheapest first.
pub const WAYS: [Compression; 5] =
    [Compression::None, Compression::Lz4, Compression::Zstd(1), Compression::Zstd(3), Compression::Zstd(7)];

/// Workers wait for the link if they are blocked for at least this share of the time.
const BLOCKED_SHARE: f64 = 0.1;
/// The destination's workers are busy if they wait for less than this share of the time.
const BUSY_SHARE: f64 = 0.1;
/// A way whose rate is at least this share of the best rate is as good as the best.
const AS_GOOD_SHARE: f64 = 0.95;
/// Share of the idle processor time that may be used: guests have precedence.
const USABLE_IDLE_SHARE: f64 = 0.75;
/// A link for which no worker waits may carry more than was seen. The expected rate grows by the first factor with
/// each sample, up to the second factor times the present rate.
const LINK_GROWTH: f64 = 1.01;
const MAX_LINK_GROWTH: f64 = 4.0;
/// An estimate of more than this many times the present rate of the link is discarded.
const MAX_ESTIMATE_RATIO: f64 = 2.0;
/// Least processor time of any way for a byte, in nanoseconds: where this alone is too much, no trial is made.
const MIN_PACKING_NS: f64 = 0.5;
/// Processor time of marking a byte, in nanoseconds.
const MARKING_NS: f64 = 0.15;
/// Number of consecutive samples with workers waiting for the link after which the link is slow.
const SLOW_SAMPLES: u32 = 2;
/// Number of consecutive samples after which a destination without reported idle time is taken as busy. It may not
/// have reported any yet before.
const BUSY_SAMPLES: u32 = 5;
/// Samples from one trial of all ways to the next; and, while nothing is compressed, from one probe of the cheapest
/// way to the next.
const TRIAL_SAMPLES: u32 = 20;
const PROBE_SAMPLES: u32 = 2;
/// If the cheapest way leaves less than this share of a byte, and did not the last time, all ways are tried.
const PROBE_WORTH: f64 = 0.9;
/// Samples for which a way is kept that does not pay at the moment.
const KEEP_SAMPLES: u32 = 20;
/// Samples for which a way is excluded after the destination could not follow it.
const BAN_SAMPLES: u32 = 40;
/// Weight of the newest measurement in a mean.
const WEIGHT: f64 = 0.4;

/// Counters of an interval, summed over all workers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressionObservation {
    /// Length of the interval, in nanoseconds.
    pub interval_ns: u64,
    /// Number of workers.
    pub workers: u32,
    /// Data that was to be sent, in bytes.
    pub data_bytes: u64,
    /// Bytes on the wire for this data.
    pub wire_bytes: u64,
    /// Processor time of compressing, in nanoseconds.
    pub pack_ns: u64,
    /// Processor time of the workers, that of compressing included, in nanoseconds.
    pub cpu_ns: u64,
    /// Time that workers waited for the connection to accept more data, in nanoseconds.
    pub blocked_ns: u64,
    /// Time that the destination's workers were idle, in nanoseconds.
    pub peer_waited_ns: u64,
    /// Idle time of this host's processors, in nanoseconds.
    pub idle_ns: u64,
    /// Results of trials.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trials: Vec<CompressionTrial>,
}

/// Decision for the time until the next sample.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompressionDecision {
    /// Way to compress from now on.
    pub way: Compression,
    /// True once the policy knows whether link, processors or destination are the bottleneck, so that the way is
    /// chosen by measurements. It stays true.
    pub is_informed: bool,
    /// Way to compress for a stopped guest.
    pub standing_way: Compression,
    /// Ways to try out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub try_out: Vec<Compression>,
    /// Estimated rate of the link, in bytes per second; absent as long as no worker has waited for it.
    pub link_bytes_per_s: Option<u64>,
    /// True if the link is the bottleneck and processors could check each page before it is sent: pages are then
    /// marked, deltas of marked pages are sent, and content that the destination already has is looked up.
    pub link_is_slow: bool,
    /// True if, as far as is known, the destination's workers are never idle.
    pub peer_is_busy: bool,
}

/// Mean result of a way's trials: output bytes and nanoseconds, both per input byte.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TrialMean {
    ratio: f64,
    pack_ns: f64,
}

impl TrialMean {
    fn of(trial: &CompressionTrial) -> Self {
        let of = |amount: u64| amount as f64 / trial.data_bytes.max(1) as f64;
        Self { ratio: of(trial.compressed_bytes), pack_ns: of(trial.pack_ns) }
    }

    fn toward(self, newer: Self) -> Self {
        let mean = |old: f64, new: f64| old + (new - old) * WEIGHT;
        Self { ratio: mean(self.ratio, newer.ratio), pack_ns: mean(self.pack_ns, newer.pack_ns) }
    }
}

/// Savings and cost of a way, as shares of those in its trials.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TrialShares {
    saved: f64,
    spent: f64,
}

/// Policy that chooses the compression. It starts without compression, and uninformed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "NoParameters", into = "NoParameters")]
pub struct CompressionPolicy {
    /// Index of the present way in [`WAYS`].
    present: usize,
    /// Index of the way for a stopped guest.
    standing: usize,
    link_bytes_per_s: Option<f64>,
    /// Consecutive samples in which workers waited for the link although processors could have done more.
    slow_samples: u32,
    link_is_slow: bool,
    /// Consecutive samples in which workers waited for the destination.
    busy_samples: u32,
    is_informed: bool,
    trial_means: [Option<TrialMean>; WAYS.len()],
    samples_since_trial: Option<u32>,
    samples_since_probe: u32,
    /// Output of the last LZ4 trial, per input byte.
    probed: Option<f64>,
    /// Consecutive samples in which the present way did not pay.
    unworthy_samples: u32,
    /// Share of the time that the destination's workers are idle: a mean, because the destination reports it in
    /// bursts.
    pause: Option<f64>,
    /// Not all data is worth compressing: savings and cost as shares of those in trials, as last measured.
    shares: Option<TrialShares>,
    /// First way that is excluded, and the number of samples for which it and all after it are.
    banned: Option<(usize, u32)>,
}

impl Decider for CompressionPolicy {
    type Observed = CompressionObservation;
    /// Way from now on, and the ways to try out.
    type Decision = CompressionDecision;

    const MAX_ENTRIES: usize = 600;

    fn decide(&mut self, observed: &CompressionObservation) -> CompressionDecision {
        self.learn(&observed.trials);
        let tells = observed.data_bytes > 0 && observed.interval_ns > 0 && observed.workers > 0;
        let pause = self.update_peer_idle(observed);
        if tells {
            self.process_sample(observed, pause);
        }
        let try_out = if tells { self.due_trials(observed) } else { Vec::new() };
        CompressionDecision {
            way: WAYS[self.present],
            is_informed: self.is_informed,
            standing_way: WAYS[self.standing],
            try_out,
            link_bytes_per_s: self.link_bytes_per_s.map(|rate| rate as u64),
            link_is_slow: self.link_is_slow,
            peer_is_busy: self.pause.is_some_and(|pause| pause < BUSY_SHARE),
        }
    }
}

impl From<NoParameters> for CompressionPolicy {
    fn from(_: NoParameters) -> Self {
        Self::default()
    }
}

impl CompressionPolicy {
    fn learn(&mut self, trials: &[CompressionTrial]) {
        if let [probe] = trials
            && probe.way == WAYS[1]
        {
            // This data compresses, and the data of the probe before did not: all ways are tried anew, and at once.
            let ratio = TrialMean::of(probe).ratio;
            let is_news = self.probed.replace(ratio).is_none_or(|before| before >= PROBE_WORTH);
            if is_news && ratio < PROBE_WORTH {
                self.trial_means = [None; WAYS.len()];
                self.samples_since_trial = None;
            }
            return;
        }
        for trial in trials {
            let Some(place) = WAYS.iter().position(|way| *way == trial.way) else { continue };
            let newer = TrialMean::of(trial);
            if place == 1 {
                self.probed = Some(newer.ratio);
            }
            self.trial_means[place] =
                Some(self.trial_means[place].map_or(newer, |trial_means| trial_means.toward(newer)));
        }
    }

    /// Updates and returns the share of the time that the destination's workers are idle, also where nothing but
    /// references was sent.
    fn update_peer_idle(&mut self, observed: &CompressionObservation) -> f64 {
        // A report that arrives in bursts may cover more than this interval.
        let pause_now = share_of_worker_time(observed, observed.peer_waited_ns).min(1.0);
        let pause = self.pause.map_or(pause_now, |pause| pause + (pause_now - pause) * WEIGHT);
        self.pause = Some(pause);
        pause
    }

    fn process_sample(&mut self, observed: &CompressionObservation, pause: f64) {
        self.banned = self.banned.and_then(|(way, looks)| Some((way, looks.checked_sub(1)?)));
        let wire_bytes_per_s = observed.wire_bytes as f64 * 1e9 / observed.interval_ns as f64;
        if share_of_worker_time(observed, observed.blocked_ns) < BLOCKED_SHARE {
            // No worker waits. The link carries as much as before, and maybe more.
            (self.slow_samples, self.busy_samples) = (0, 0);
            let more = |link: f64| {
                (link * LINK_GROWTH).min(link.max(wire_bytes_per_s * MAX_LINK_GROWTH)).max(wire_bytes_per_s)
            };
            self.link_bytes_per_s = self.link_bytes_per_s.map(more);
        } else if pause < BUSY_SHARE {
            if self.present > 0 {
                self.banned = Some((self.present, BAN_SAMPLES));
                self.present -= 1;
            }
            self.slow_samples = 0;
            self.busy_samples += 1;
            self.is_informed |= self.busy_samples >= BUSY_SAMPLES;
            return;
        } else {
            self.busy_samples = 0;
            let known = self.link_bytes_per_s.filter(|link| *link < wire_bytes_per_s * MAX_ESTIMATE_RATIO);
            let link = known.unwrap_or(wire_bytes_per_s);
            let link = link + (wire_bytes_per_s - link) * WEIGHT;
            self.link_bytes_per_s = Some(link);
            let carried = link * observed.data_bytes as f64 / observed.wire_bytes.max(1) as f64;
            let is_slow = handled_bytes_per_s(observed, MARKING_NS) >= carried;
            self.slow_samples = if is_slow { self.slow_samples + 1 } else { 0 };
            self.link_is_slow |= self.slow_samples >= SLOW_SAMPLES;
        }
        if let Some(link) = self.link_bytes_per_s
            && self.trial_means[1..].iter().all(Option::is_some)
        {
            self.choose(observed, link);
            self.is_informed = true;
        }
    }

    fn choose(&mut self, observed: &CompressionObservation, link: f64) {
        let data_bytes = observed.data_bytes as f64;
        let now = TrialMean {
            ratio: observed.wire_bytes as f64 / data_bytes,
            pack_ns: observed.pack_ns as f64 / data_bytes,
        };
        let handled_at = |packing_ns| handled_bytes_per_s(observed, packing_ns);
        if self.present > 0
            && let Some(trial_means) = self.trial_means[self.present]
        {
            self.shares = Some(TrialShares {
                saved: ((1.0 - now.ratio) / (1.0 - trial_means.ratio).max(0.01)).clamp(0.0, 1.0),
                spent: (now.pack_ns / trial_means.pack_ns.max(0.001)).clamp(0.0, 2.0),
            });
        }
        let TrialShares { saved, spent } = self.shares.unwrap_or(TrialShares { saved: 1.0, spent: 1.0 });
        let costs = |way: usize| match self.trial_means[way] {
            // The present result of the present way is known better than that of its trials.
            Some(_) if way > 0 && way == self.present => (now.ratio, now.pack_ns),
            Some(trial_means) if way > 0 => {
                (1.0 - (1.0 - trial_means.ratio) * saved, trial_means.pack_ns * spent)
            }
            _ => (1.0, 0.0),
        };
        let rate = |way: usize| {
            let (ratio, packing_ns) = costs(way);
            (link / ratio.max(0.001)).min(handled_at(packing_ns))
        };
        let standing_ns = |way: usize| {
            let (ratio, packing_ns) = costs(way);
            packing_ns + ratio * 1e9 / link
        };
        let allowed = self.banned.map_or(WAYS.len(), |(way, _)| way);
        let best = (0..allowed).map(rate).fold(0.0, f64::max);
        let present = (0..allowed).find(|way| rate(*way) >= best * AS_GOOD_SHARE).unwrap_or(0);
        let standing = (0..allowed).min_by(|one, other| standing_ns(*one).total_cmp(&standing_ns(*other)));
        self.standing = standing.unwrap_or(0);
        // If the processors can follow, keeping the way costs nothing.
        let may_stay = present == 0 && self.present < allowed && handled_at(costs(self.present).1) >= link;
        self.unworthy_samples = if may_stay { self.unworthy_samples + 1 } else { 0 };
        if !may_stay || self.unworthy_samples > KEEP_SAMPLES {
            self.present = present;
        }
    }

    /// Returns the ways to try out. There are none before workers have waited for the link, nor where the processors
    /// could not follow it.
    fn due_trials(&mut self, observed: &CompressionObservation) -> Vec<Compression> {
        let Some(link) = self.link_bytes_per_s else { return Vec::new() };
        if self.present == 0 && handled_bytes_per_s(observed, MIN_PACKING_NS) < link {
            self.is_informed = true;
            return Vec::new();
        }
        let looks = self.samples_since_trial.map_or(TRIAL_SAMPLES, |looks| looks + 1);
        if looks < TRIAL_SAMPLES {
            self.samples_since_trial = Some(looks);
            self.samples_since_probe += 1;
            if self.present > 0 || self.samples_since_probe < PROBE_SAMPLES {
                return Vec::new();
            }
            self.samples_since_probe = 0;
            return vec![WAYS[1]];
        }
        (self.samples_since_trial, self.samples_since_probe) = (Some(0), 0);
        // Compression that did not pay when it was last used may pay by now: new trials count in full.
        if self.present == 0 {
            self.shares = None;
        }
        WAYS[1..].to_vec()
    }
}

/// Returns the share of the workers' time that `ns` is.
fn share_of_worker_time(observed: &CompressionObservation, ns: u64) -> f64 {
    ns as f64 / (observed.interval_ns.max(1) as f64 * f64::from(observed.workers.max(1)))
}

/// Returns the rate at which the available processors can handle data that takes `packing_ns` per byte to compress.
fn handled_bytes_per_s(observed: &CompressionObservation, packing_ns: f64) -> f64 {
    let handling_ns = observed.cpu_ns.saturating_sub(observed.pack_ns) as f64 / observed.data_bytes as f64;
    let idle_ns = observed.idle_ns as f64 * USABLE_IDLE_SHARE;
    let processors =
        ((observed.cpu_ns as f64 + idle_ns) / observed.interval_ns as f64).min(f64::from(observed.workers));
    processors * 1e9 / (handling_ns + packing_ns).max(0.001)
}

#[cfg(test)]
mod tests;
