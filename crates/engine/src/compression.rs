//! Which way to compress, by what the link carries and what the processors have left.
//!
//! Compressing pays where the link is waited for, and only as far as there are processors for it: for the paper
//! (Yang, Hong, *VM live migration speedup in Xen*) 21 s of compression in the place of 22 s of transfer were no gain.
//! What a way would give is predicted from what was measured:
//!
//! ```text
//! rate(way) = min(link / ratio(way), processors / (handling + packing(way)))
//! ```
//!
//! *link* is what it carried when workers waited for it, in bytes per second; *ratio* is what comes out of a byte that
//! goes in; *handling* and *packing* are processor time for a byte; *processors* are those that the workers had, and
//! most of what was idle beside them. Ratio and packing of a way are tried out on a few frames now and then; the rest
//! counts as the work goes on. Memory is not alike everywhere: what is tried out may be the one part of it that does not
//! compress. So while nothing is compressed the cheapest way is tried again and again, and as soon as that is worth it, where it
//! was not the last time, all are; and a way that is worth nothing at the moment is kept for a while where the processors can follow, for what it skips
//! costs little. Taken is the cheapest way whose rate is next to the best one. Where the destination is
//! what is waited for, because its workers have no pause, nothing helps, and least is done.
//!
//! A guest that stands still waits for both, one after the other: for its last pages that way is taken in which packing and
//! sending a byte take the least together, `packing(way) + ratio(way) / link`. What keeps a link busy best in a long round
//! is far too slow for that. (As if one processor packed: of few pages that is so, and of more it errs towards the quicker
//! way.)
//!
//! Where the link is waited for it pays as well to know of every page what was sent, so that of what is sent again only
//! changes go. Marking pages takes processor time long before anything comes of it, and so it is begun only then, and is
//! not ended any more: what is not marked in one round is not known in the next.

use proto::packed::{Compression, Trial};
use serde::{Deserialize, Serialize};

use crate::trace::{Blank, Decider};

/// Ways to choose from, the cheapest first.
pub const WAYS: [Compression; 5] =
    [Compression::None, Compression::Lz4, Compression::Zstd(1), Compression::Zstd(3), Compression::Zstd(7)];

/// A worker waits for the link if it does so for this part of the time.
const WAITS: f64 = 0.1;
/// The destination's workers have no pause if they wait for less than this part of the time.
const NO_PAUSE: f64 = 0.1;
/// As good as the best: this part of its rate.
const AS_GOOD: f64 = 0.95;
/// The part of idle processors that is reckoned with: guests come first.
const OF_IDLE: f64 = 0.75;
/// A link that is not waited for may carry more than was seen: by how much more is expected after each look, and at most,
/// of what it carries then.
const MORE: f64 = 1.01;
const MOST_MORE: f64 = 4.0;
/// An estimate that is so many times what a link carries is none.
const FAR_OFF: f64 = 2.0;
/// No way takes less processor time for a byte, in nanoseconds: where that alone is too much, nothing is tried out.
const LEAST_PACKING_NS: f64 = 0.5;
/// Processor time of marking a byte, in nanoseconds.
const MARKING_NS: f64 = 0.15;
/// A link is slow when so many looks in a row found that it was waited for.
const SLOW_LOOKS: u32 = 2;
/// As long as it has not told for so many looks that it had a pause, it may not have told of any yet.
const BUSY_LOOKS: u32 = 5;
/// Looks from one trial to the next, and where nothing is compressed from one trial of the cheapest way to the next.
const TRIAL_LOOKS: u32 = 20;
const PROBE_LOOKS: u32 = 2;
/// Where the cheapest way leaves less than this of a byte, and did not the last time, all are tried.
const PROBE_WORTH: f64 = 0.9;
/// Looks for which a way is kept that is worth nothing at the moment.
const STAY_LOOKS: u32 = 20;
/// Looks for which a way that the destination could not follow is not taken again.
const BAN_LOOKS: u32 = 40;
/// The newest measurement's weight.
const WEIGHT: f64 = 0.4;

/// What was counted in an interval, all workers together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observation {
    /// How long the interval was, in nanoseconds.
    pub interval_ns: u64,
    /// How many workers there are.
    pub workers: u32,
    /// Data that was to be sent, in bytes.
    pub data_bytes: u64,
    /// What went for it, in bytes.
    pub wire_bytes: u64,
    /// Processor time of compressing, in nanoseconds.
    pub pack_ns: u64,
    /// Processor time of the workers, that of compressing included, in nanoseconds.
    pub cpu_ns: u64,
    /// For how long workers waited until the connection took more, in nanoseconds.
    pub blocked_ns: u64,
    /// For how long the destination's workers had nothing to do, in nanoseconds.
    pub peer_waited_ns: u64,
    /// Time of this host's processors that nobody used, in nanoseconds.
    pub idle_ns: u64,
    /// What was tried out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trials: Vec<Trial>,
}

/// What to do until the next look.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// The way from now on.
    pub way: Compression,
    /// Whether it is known what is waited for, so that the way is picked by something; for good.
    pub is_informed: bool,
    /// The way for a guest that stands still.
    pub standing_way: Compression,
    /// Ways to be tried out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub try_out: Vec<Compression>,
    /// What the link seems to carry, in bytes per second; absent as long as nobody waited for it.
    pub link_bytes_per_s: Option<u64>,
    /// The link is what is waited for, and processors could look at each page before it is sent: pages are to be marked,
    /// and what changed of those that are marked is to be sent; and what the destination has elsewhere is to be looked up.
    pub link_is_slow: bool,
    /// The destination's workers have no pause, as far as is known.
    pub peer_is_busy: bool,
}

/// What a way is like, by its trials: bytes out and nanoseconds, both for a byte in.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Seen {
    ratio: f64,
    pack_ns: f64,
}

impl Seen {
    fn of(trial: &Trial) -> Self {
        let of = |amount: u64| amount as f64 / trial.data_bytes.max(1) as f64;
        Self { ratio: of(trial.packed_bytes), pack_ns: of(trial.pack_ns) }
    }

    fn toward(self, newer: Self) -> Self {
        let mean = |old: f64, new: f64| old + (new - old) * WEIGHT;
        Self { ratio: mean(self.ratio, newer.ratio), pack_ns: mean(self.pack_ns, newer.pack_ns) }
    }
}

/// What a way saves and spends, to what it did in its trials.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Shares {
    saved: f64,
    spent: f64,
}

/// Chooses a way again and again. Begins without compression, and without being informed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Blank", into = "Blank")]
pub struct Chooser {
    /// Place of the present way in [`WAYS`].
    present: usize,
    /// The same for a guest that stands still.
    standing: usize,
    link_bytes_per_s: Option<f64>,
    /// For how many looks in a row the link was waited for, where processors could have done more.
    slow_looks: u32,
    link_is_slow: bool,
    /// For how many looks in a row the destination was waited for.
    busy_looks: u32,
    is_informed: bool,
    seen: [Option<Seen>; WAYS.len()],
    looks_since_trial: Option<u32>,
    looks_since_probe: u32,
    /// What LZ4 made of a byte when it was tried last.
    probed: Option<f64>,
    /// For how many looks in a row the present way was worth nothing.
    unworthy_looks: u32,
    /// For which part of the time the destination's workers had nothing to do: a mean, for it tells of it in lumps.
    pause: Option<f64>,
    /// Not all data is worth it: by how much less is saved and spent than in trials, as it was seen last.
    shares: Option<Shares>,
    /// Ways from this one on are not taken, for so many looks.
    banned: Option<(usize, u32)>,
}

impl Decider for Chooser {
    type Observed = Observation;
    /// The way from now on, and what to try out.
    type Decision = Decision;

    const KEPT: usize = 600;

    fn decide(&mut self, observed: &Observation) -> Decision {
        self.learn(&observed.trials);
        let tells = observed.data_bytes > 0 && observed.interval_ns > 0 && observed.workers > 0;
        let pause = self.hear_of_peer(observed);
        if tells {
            self.look(observed, pause);
        }
        let try_out = if tells { self.due_trials(observed) } else { Vec::new() };
        Decision {
            way: WAYS[self.present],
            is_informed: self.is_informed,
            standing_way: WAYS[self.standing],
            try_out,
            link_bytes_per_s: self.link_bytes_per_s.map(|rate| rate as u64),
            link_is_slow: self.link_is_slow,
            peer_is_busy: self.pause.is_some_and(|pause| pause < NO_PAUSE),
        }
    }
}

impl From<Blank> for Chooser {
    fn from(_: Blank) -> Self {
        Self::default()
    }
}

impl Chooser {
    fn learn(&mut self, trials: &[Trial]) {
        if let [probe] = trials
            && probe.way == WAYS[1]
        {
            // Data that is worth it, where what was tried before was not: all is found out anew, and at once.
            let ratio = Seen::of(probe).ratio;
            let is_news = self.probed.replace(ratio).is_none_or(|before| before >= PROBE_WORTH);
            if is_news && ratio < PROBE_WORTH {
                self.seen = [None; WAYS.len()];
                self.looks_since_trial = None;
            }
            return;
        }
        for trial in trials {
            let Some(place) = WAYS.iter().position(|way| *way == trial.way) else { continue };
            let newer = Seen::of(trial);
            if place == 1 {
                self.probed = Some(newer.ratio);
            }
            self.seen[place] = Some(self.seen[place].map_or(newer, |seen| seen.toward(newer)));
        }
    }

    /// For which part of the time the destination's workers have nothing to do, also where nothing was sent but references.
    fn hear_of_peer(&mut self, observed: &Observation) -> f64 {
        // What is told in lumps may be of more than this interval.
        let pause_now = of_workers(observed, observed.peer_waited_ns).min(1.0);
        let pause = self.pause.map_or(pause_now, |pause| pause + (pause_now - pause) * WEIGHT);
        self.pause = Some(pause);
        pause
    }

    fn look(&mut self, observed: &Observation, pause: f64) {
        self.banned = self.banned.and_then(|(way, looks)| Some((way, looks.checked_sub(1)?)));
        let wire_bytes_per_s = observed.wire_bytes as f64 * 1e9 / observed.interval_ns as f64;
        if of_workers(observed, observed.blocked_ns) < WAITS {
            // Nobody waits. The link carries what it did, and maybe more.
            (self.slow_looks, self.busy_looks) = (0, 0);
            let more =
                |link: f64| (link * MORE).min(link.max(wire_bytes_per_s * MOST_MORE)).max(wire_bytes_per_s);
            self.link_bytes_per_s = self.link_bytes_per_s.map(more);
        } else if pause < NO_PAUSE {
            if self.present > 0 {
                self.banned = Some((self.present, BAN_LOOKS));
                self.present -= 1;
            }
            self.slow_looks = 0;
            self.busy_looks += 1;
            self.is_informed |= self.busy_looks >= BUSY_LOOKS;
            return;
        } else {
            self.busy_looks = 0;
            let known = self.link_bytes_per_s.filter(|link| *link < wire_bytes_per_s * FAR_OFF);
            let link = known.unwrap_or(wire_bytes_per_s);
            let link = link + (wire_bytes_per_s - link) * WEIGHT;
            self.link_bytes_per_s = Some(link);
            let carried = link * observed.data_bytes as f64 / observed.wire_bytes.max(1) as f64;
            let is_slow = handled_bytes_per_s(observed, MARKING_NS) >= carried;
            self.slow_looks = if is_slow { self.slow_looks + 1 } else { 0 };
            self.link_is_slow |= self.slow_looks >= SLOW_LOOKS;
        }
        if let Some(link) = self.link_bytes_per_s
            && self.seen[1..].iter().all(Option::is_some)
        {
            self.choose(observed, link);
            self.is_informed = true;
        }
    }

    fn choose(&mut self, observed: &Observation, link: f64) {
        let data_bytes = observed.data_bytes as f64;
        let now = Seen {
            ratio: observed.wire_bytes as f64 / data_bytes,
            pack_ns: observed.pack_ns as f64 / data_bytes,
        };
        let handled_at = |packing_ns| handled_bytes_per_s(observed, packing_ns);
        if self.present > 0
            && let Some(seen) = self.seen[self.present]
        {
            self.shares = Some(Shares {
                saved: ((1.0 - now.ratio) / (1.0 - seen.ratio).max(0.01)).clamp(0.0, 1.0),
                spent: (now.pack_ns / seen.pack_ns.max(0.001)).clamp(0.0, 2.0),
            });
        }
        let Shares { saved, spent } = self.shares.unwrap_or(Shares { saved: 1.0, spent: 1.0 });
        let costs = |way: usize| match self.seen[way] {
            // What it does now is better known than what it did in trials.
            Some(_) if way > 0 && way == self.present => (now.ratio, now.pack_ns),
            Some(seen) if way > 0 => (1.0 - (1.0 - seen.ratio) * saved, seen.pack_ns * spent),
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
        let present = (0..allowed).find(|way| rate(*way) >= best * AS_GOOD).unwrap_or(0);
        let standing = (0..allowed).min_by(|one, other| standing_ns(*one).total_cmp(&standing_ns(*other)));
        self.standing = standing.unwrap_or(0);
        // Where the processors can follow, nothing is lost by it.
        let may_stay = present == 0 && self.present < allowed && handled_at(costs(self.present).1) >= link;
        self.unworthy_looks = if may_stay { self.unworthy_looks + 1 } else { 0 };
        if !may_stay || self.unworthy_looks > STAY_LOOKS {
            self.present = present;
        }
    }

    /// Nothing is tried out before the link was waited for, nor where the processors could not follow it.
    fn due_trials(&mut self, observed: &Observation) -> Vec<Compression> {
        let Some(link) = self.link_bytes_per_s else { return Vec::new() };
        if self.present == 0 && handled_bytes_per_s(observed, LEAST_PACKING_NS) < link {
            self.is_informed = true;
            return Vec::new();
        }
        let looks = self.looks_since_trial.map_or(TRIAL_LOOKS, |looks| looks + 1);
        if looks < TRIAL_LOOKS {
            self.looks_since_trial = Some(looks);
            self.looks_since_probe += 1;
            if self.present > 0 || self.looks_since_probe < PROBE_LOOKS {
                return Vec::new();
            }
            self.looks_since_probe = 0;
            return vec![WAYS[1]];
        }
        (self.looks_since_trial, self.looks_since_probe) = (Some(0), 0);
        // What was not worth it when it was done last may be by now: new trials count in full.
        if self.present == 0 {
            self.shares = None;
        }
        WAYS[1..].to_vec()
    }
}

/// Which part of the workers' time this is.
fn of_workers(observed: &Observation, ns: u64) -> f64 {
    ns as f64 / (observed.interval_ns.max(1) as f64 * f64::from(observed.workers.max(1)))
}

/// How fast the processors that there are can handle data, each byte of which takes so long to compress.
fn handled_bytes_per_s(observed: &Observation, packing_ns: f64) -> f64 {
    let handling_ns = observed.cpu_ns.saturating_sub(observed.pack_ns) as f64 / observed.data_bytes as f64;
    let idle_ns = observed.idle_ns as f64 * OF_IDLE;
    let processors =
        ((observed.cpu_ns as f64 + idle_ns) / observed.interval_ns as f64).min(f64::from(observed.workers));
    processors * 1e9 / (handling_ns + packing_ns).max(0.001)
}

#[cfg(test)]
mod tests;
