//! Facts that earlier migrations have shown: of the link to a host, and of the times that no policy decides.

use serde::{Deserialize, Serialize};

use super::facts::{LinkFacts, OverheadTimes};

/// Facts that one migration has shown. Facts that it did not show are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathSample {
    /// Time of the migration's end, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Highest rate on the wire, in bytes per second; absent if a cap has limited it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_bytes_per_s: Option<u64>,
    /// Duration of a dirty scan, in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan_ns: Option<u64>,
    /// Duration of a drain of block I/O, in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_ns: Option<u64>,
    /// Time from the request to the first page, in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setup_ns: Option<u64>,
    /// Time from the guest's start at the destination to the end, in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish_ns: Option<u64>,
}

/// Rate and round trip of a link, as they were measured for a forecast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredLink {
    /// Time of the measurement, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Rate, in bytes per second.
    pub bytes_per_s: u64,
    /// Round trip time, in nanoseconds.
    pub rtt_ns: u64,
    /// Bytes that the measurement has sent.
    pub sent_bytes: u64,
}

/// Record of the path to a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PathMemory {
    /// Facts of the last migrations, the newest first.
    pub samples: Vec<PathSample>,
    /// The last measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<MeasuredLink>,
}

/// Origin of the rate of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkOrigin {
    /// It was measured for a forecast.
    Measured,
    /// Earlier migrations have sent at this rate.
    Migrations,
    /// It is not known, and taken for a link of 1 Gb/s.
    Assumed,
}

/// Rate of a link, and its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkRate {
    /// Rate, in bytes per second.
    pub bytes_per_s: u64,
    /// Origin.
    pub origin: LinkOrigin,
    /// Time at which it was seen last, in milliseconds since 1970; 0 if it was assumed.
    pub unix_ms: u64,
}

impl PathMemory {
    /// Most migrations that are remembered.
    pub const MOST_SAMPLES: usize = 8;
    /// Longest age of a rate that is used without a new measurement, in milliseconds: a day.
    pub const LONGEST_AGE_MS: u64 = 24 * 3600 * 1000;

    /// Records the facts of a migration.
    pub fn learn(&mut self, sample: PathSample) {
        self.samples.insert(0, sample);
        self.samples.truncate(Self::MOST_SAMPLES);
    }

    /// Returns the rate of the link, and its origin: that of the last measurement or of the migrations since then,
    /// whichever is newer. A rate may be so old that it is to be measured ([`Self::LONGEST_AGE_MS`]).
    pub fn link(&self) -> LinkRate {
        let measured = self.measured.map(|measured| LinkRate {
            bytes_per_s: measured.bytes_per_s,
            origin: LinkOrigin::Measured,
            unix_ms: measured.unix_ms,
        });
        let since = self.measured.map_or(0, |measured| measured.unix_ms);
        let newer = self.samples.iter().filter(|sample| sample.unix_ms >= since);
        let rates: Vec<_> =
            newer.filter_map(|sample| Some((sample.unix_ms, sample.link_bytes_per_s?))).collect();
        let sent = rates.first().map(|(unix_ms, _)| LinkRate {
            bytes_per_s: median(rates.iter().map(|(_, rate)| *rate)).unwrap_or_default(),
            origin: LinkOrigin::Migrations,
            unix_ms: *unix_ms,
        });
        // A migration whose pages the hosts' processors could not supply faster shows less than the link carries.
        let slower =
            |sent: &LinkRate| measured.is_some_and(|measured| sent.bytes_per_s < measured.bytes_per_s / 2);
        sent.filter(|sent| !slower(sent)).or(measured).unwrap_or(LinkRate {
            bytes_per_s: LinkFacts::default().link_bytes_per_s,
            origin: LinkOrigin::Assumed,
            unix_ms: 0,
        })
    }

    /// Returns true if the rate of the link was seen within [`Self::LONGEST_AGE_MS`] before `unix_ms`.
    pub fn is_fresh(&self, unix_ms: u64) -> bool {
        let link = self.link();
        link.origin != LinkOrigin::Assumed && unix_ms.saturating_sub(link.unix_ms) <= Self::LONGEST_AGE_MS
    }

    /// Returns the facts of the path; those that no migration has shown have their defaults.
    pub fn facts(&self) -> LinkFacts {
        let default = LinkFacts::default();
        let of = |of: fn(&PathSample) -> Option<u64>| median(self.samples.iter().filter_map(of));
        let link_bytes_per_s = self.link().bytes_per_s;
        LinkFacts {
            link_bytes_per_s,
            rtt_ns: self.measured.map_or(default.rtt_ns, |measured| measured.rtt_ns),
            // Hosts that fill a link can copy as fast as it carries.
            copy_bytes_per_s: default.copy_bytes_per_s.max(link_bytes_per_s),
            wire_permille: default.wire_permille,
            scan_ns: of(|sample| sample.scan_ns).unwrap_or(default.scan_ns),
            drain_ns: of(|sample| sample.drain_ns).unwrap_or(default.drain_ns),
        }
    }

    /// Returns the times that no policy decides; `setup_ns` if no migration has shown the first of them.
    pub fn times(&self, setup_ns: u64) -> OverheadTimes {
        let of = |of: fn(&PathSample) -> Option<u64>| median(self.samples.iter().filter_map(of));
        OverheadTimes {
            setup_ns: of(|sample| sample.setup_ns).unwrap_or(setup_ns),
            finish_ns: of(|sample| sample.finish_ns).unwrap_or(OverheadTimes::default().finish_ns),
        }
    }
}

fn median<N: Ord + Copy>(values: impl Iterator<Item = N>) -> Option<N> {
    let mut values: Vec<N> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MS: u64 = 3_600_000;

    fn sample(unix_ms: u64, link_bytes_per_s: u64) -> PathSample {
        PathSample { unix_ms, link_bytes_per_s: Some(link_bytes_per_s), ..PathSample::default() }
    }

    fn measured(unix_ms: u64, bytes_per_s: u64) -> MeasuredLink {
        MeasuredLink { unix_ms, bytes_per_s, rtt_ns: 5000, sent_bytes: 1 }
    }

    #[test]
    fn the_newest_rate_counts_and_an_unknown_one_is_assumed() {
        let mut memory = PathMemory::default();
        assert_eq!(memory.link().origin, LinkOrigin::Assumed);
        assert!(!memory.is_fresh(0));
        memory.learn(sample(10, 100));
        memory.learn(sample(20, 300));
        memory.learn(sample(30, 200));
        let expected = LinkRate { bytes_per_s: 200, origin: LinkOrigin::Migrations, unix_ms: 30 };
        assert_eq!(memory.link(), expected);
        memory.measured = Some(measured(40, 250));
        assert_eq!(memory.link().origin, LinkOrigin::Measured);
        memory.learn(PathSample { unix_ms: 50, ..PathSample::default() });
        assert_eq!(memory.link().bytes_per_s, 250, "a migration with a cap shows no rate");
        memory.learn(sample(60, 240));
        assert_eq!((memory.link().bytes_per_s, memory.link().unix_ms), (240, 60));
        memory.learn(sample(70, 20));
        memory.learn(sample(80, 20));
        assert_eq!(memory.link().bytes_per_s, 250, "the hosts were slower than the link");
        assert_eq!(memory.facts().rtt_ns, 5000);
    }

    #[test]
    fn rates_become_old() {
        let memory = PathMemory { measured: Some(measured(HOUR_MS, 7)), ..PathMemory::default() };
        assert!(memory.is_fresh(2 * HOUR_MS) && memory.is_fresh(0));
        assert!(!memory.is_fresh(26 * HOUR_MS));
    }

    #[test]
    fn facts_are_medians_and_defaults() {
        let mut memory = PathMemory::default();
        assert_eq!(memory.times(7), OverheadTimes { setup_ns: 7, ..OverheadTimes::default() });
        for setup_ns in [100, 900, 200] {
            memory.learn(PathSample { setup_ns: Some(setup_ns), ..PathSample::default() });
        }
        assert_eq!(memory.times(7).setup_ns, 200);
        assert_eq!(memory.facts(), LinkFacts::default());
        for _ in 0..20 {
            memory.learn(sample(1, 2_000_000_000));
        }
        assert_eq!(memory.samples.len(), PathMemory::MOST_SAMPLES);
        assert_eq!(memory.facts().copy_bytes_per_s, 2_000_000_000);
    }
}
