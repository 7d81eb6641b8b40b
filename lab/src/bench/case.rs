//! Cases: a guest, its work, and the link over which it is migrated.

use serde::{Deserialize, Serialize};

use crate::environment::QemuVersion;
use crate::error::Error;
use crate::lab::Packets;
use crate::nas::Nas;
use crate::spec::{LoadMode, Pattern};

/// Higher than any guest's read rate, MiB/s.
pub(super) const UNPACED_MIB_PER_S: u64 = 1_000_000;
/// Memory of the tiny guest that its kernel and programs use.
const SYSTEM_MIB: u64 = 96;

/// One guest on one link, migrated in turn by all contenders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Its name, unique in a run.
    pub name: String,
    /// The QEMU on both sides.
    pub qemu: QemuVersion,
    /// The program that runs in the guest.
    pub program: Program,
    /// The guest's memory, MiB.
    pub memory_mib: u64,
    /// RAM blocks (NUMA nodes) that share the memory evenly.
    pub regions: u64,
    /// With VGA, USB and five virtio devices: disk, network, balloon, random numbers, serial.
    pub devices: bool,
    /// True if the guest's memory is a shared memfd rather than anonymous.
    pub memfd: bool,
    /// True if QEMU allocates all of the memory when it starts, on both sides.
    #[serde(default)]
    pub preallocated: bool,
    /// Length of a disk that the guest has read through its page cache before its program began, MiB; it has kept as
    /// much as there is room for. The guest then also answers requests for free page hints.
    #[serde(default)]
    pub cache_mib: u64,
    /// Rate of the link, bytes per second. `None`: as fast as this machine allows.
    pub link_bytes_per_s: Option<u64>,
    /// Sizes of the packets on the link.
    #[serde(default, skip_serializing_if = "Packets::are_usual")]
    pub packets: Packets,
    /// Limit on the sending rate.
    #[serde(default, skip_serializing_if = "Cap::is_none")]
    pub cap: Cap,
    /// Encrypted and authenticated, on both sides of the comparison.
    pub tls: bool,
    /// True if each host has another guest, which computes as fast as it can.
    #[serde(default, skip_serializing_if = "is_false")]
    pub neighbours: bool,
    /// True if a client exchanges messages with the guest all the time.
    #[serde(default, skip_serializing_if = "is_false")]
    pub client: bool,
    /// Connections to the guest that the source's firewall tracks and translates when the migration is requested.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub tracked_connections: u16,
    /// Limit on the additional time that guests wait for processors while Whimbrel copies, in hundredths of the time;
    /// with 0 copying does not yield. `None` for Whimbrel's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_wait_percent: Option<u32>,
    /// Time after which a migration is given up, seconds.
    pub patience_s: u64,
}

/// Programs that run in a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Program {
    /// The load generator: fills memory with random content, and rewrites a part of it.
    Load {
        /// Filled, MiB.
        fill_mib: u64,
        /// Rewritten over and over, MiB.
        wss_mib: u64,
        /// Write rate, MiB/s of pages touched. 0: none.
        rate_mib_per_s: u64,
        /// Verified (read), MiB/s.
        verify_mib_per_s: u64,
        /// A few bytes of each page, rather than all of it.
        few: bool,
        /// Choice and order of the pages.
        #[serde(default, skip_serializing_if = "is_sequential", with = "as_text")]
        pattern: Pattern,
        /// Share of the filled memory that looks random, in percent; the rest compresses well.
        #[serde(default = "all")]
        noise_percent: u64,
    },
    /// Debian with nginx and SQLite, booted and idle.
    Debian,
    /// A kernel of the NAS Parallel Benchmarks, saved after its first iteration. With a number of runs, each
    /// measurement lasts until the last run has ended.
    Nas(Nas),
}

/// Limits on the sending rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cap {
    /// The rate of the link.
    #[default]
    Unlimited,
    /// KVM's former default (Isci et al., Fig. 1): slowly at first, faster with each pass over memory
    /// ([`Cap::in_pass`]).
    SlowStart,
}

impl Cap {
    /// KVM's former default for the first pass, bytes per second.
    const FIRST_BYTES_PER_S: u64 = 32 << 20;

    /// Returns true if there is no limit.
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
    pub(super) fn is_none(&self) -> bool {
        *self == Self::Unlimited
    }

    /// Returns the limit in a pass over memory, counted from 1 on, in bytes per second: twice that of the pass before.
    /// `None` where there is no limit. (The paper states that the rate grows in steps with the progress, but not by how
    /// much.)
    pub(super) fn in_pass(self, pass: u64) -> Option<u64> {
        let doublings = pass.saturating_sub(1).min(20);
        (self == Self::SlowStart).then_some(Self::FIRST_BYTES_PER_S << doublings)
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_false(is: &bool) -> bool {
    !is
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_zero(number: &u16) -> bool {
    *number == 0
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_sequential(pattern: &Pattern) -> bool {
    *pattern == Pattern::Sequential
}

/// A pattern in the syntax of a command line.
mod as_text {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::spec::Pattern;

    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
    pub(super) fn serialize<S: Serializer>(pattern: &Pattern, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(pattern)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Pattern, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// Default: all content looks random.
const fn all() -> u64 {
    100
}

impl Case {
    /// Returns a guest of 1 GiB, 700 MiB of it random, that only reads a little of its memory, on a link without limit.
    pub fn idle(name: &str, qemu: QemuVersion) -> Self {
        Self {
            name: name.to_owned(),
            qemu,
            program: Program::Load {
                fill_mib: 700,
                wss_mib: 0,
                rate_mib_per_s: 0,
                verify_mib_per_s: 4,
                few: false,
                pattern: Pattern::Sequential,
                noise_percent: 100,
            },
            memory_mib: 1024,
            regions: 1,
            devices: false,
            memfd: false,
            preallocated: false,
            cache_mib: 0,
            link_bytes_per_s: None,
            packets: Packets::default(),
            cap: Cap::default(),
            tls: false,
            neighbours: false,
            client: false,
            tracked_connections: 0,
            guest_wait_percent: None,
            patience_s: 90,
        }
    }

    /// Sets a part of the memory to be rewritten.
    #[must_use]
    pub fn writing(mut self, wss: u64, rate: u64, mode: LoadMode) -> Self {
        if let Program::Load { wss_mib, rate_mib_per_s, few, verify_mib_per_s, .. } = &mut self.program {
            (*wss_mib, *rate_mib_per_s, *few, *verify_mib_per_s) = (wss, rate, mode == LoadMode::Few, 0);
        }
        self
    }

    /// Sets the order of rewriting.
    #[must_use]
    pub fn in_pattern(mut self, wanted: Pattern) -> Self {
        if let Program::Load { pattern, .. } = &mut self.program {
            *pattern = wanted;
        }
        self
    }

    /// Sets the share of content that looks random, in percent; the rest compresses well.
    #[must_use]
    pub fn noisy(mut self, percent: u64) -> Self {
        if let Program::Load { noise_percent, .. } = &mut self.program {
            *noise_percent = percent;
        }
        self
    }

    /// Sets the amount of memory and of random content in it, both in MiB.
    #[must_use]
    pub fn sized(mut self, memory: u64, fill: u64) -> Self {
        self.memory_mib = memory;
        if let Program::Load { fill_mib, .. } = &mut self.program {
            *fill_mib = fill;
        }
        self
    }

    /// Fails if the case is invalid.
    pub fn check(&self) -> Result<(), Error> {
        let Program::Load { fill_mib, wss_mib, .. } = self.program else { return Ok(()) };
        // A part grows with the memory: the kernel's page descriptors, and its free reserve.
        let system_mib = SYSTEM_MIB + self.memory_mib / 20;
        if fill_mib + system_mib > self.memory_mib {
            return Err(Error::Config(format!(
                "a guest of {} MiB cannot fill {fill_mib}: its kernel and programs take {system_mib}",
                self.memory_mib
            )));
        }
        if wss_mib > fill_mib {
            return Err(Error::Config(format!(
                "{wss_mib} MiB cannot be rewritten where {fill_mib} are filled: it is a part of them"
            )));
        }
        Ok(())
    }

    /// Returns QEMU's downtime limit, ms. QEMU stops the guest as soon as it can keep the limit, so that a shorter
    /// limit shows QEMU's abilities. Over a slow link a short limit needs more passes and may be out of reach, so that
    /// QEMU gets Whimbrel's limit there, which is QEMU's own default.
    pub fn downtime_limit_ms(&self) -> u64 {
        const SLOW_BYTES_PER_S: u64 = 1_000_000_000 / 8;
        if self.link_bytes_per_s.is_some_and(|rate| rate <= SLOW_BYTES_PER_S) { 300 } else { 30 }
    }

    /// Makes the guest's program read its memory as fast as it can.
    #[must_use]
    pub fn unpaced(mut self) -> Self {
        if let Program::Load { verify_mib_per_s, .. } = &mut self.program {
            *verify_mib_per_s = UNPACED_MIB_PER_S;
        }
        self
    }

    /// Describes the case, human-readable.
    pub fn describe(&self) -> String {
        let memory = self.memory_mib;
        let mut words = vec![match &self.program {
            Program::Debian => format!("Debian in {memory} MiB"),
            Program::Nas(Nas { kernel, class, threads, runs, .. }) => {
                let runs = runs.map_or("over and over".to_owned(), |runs| format!("{runs} times"));
                let threads = if *threads == 1 { String::new() } else { format!(" by {threads} threads") };
                format!("NAS {kernel}, class {class}, {runs}{threads}, in {memory} MiB")
            }
            Program::Load { fill_mib, noise_percent: 100, .. } => {
                format!("{memory} MiB, {fill_mib} of them random")
            }
            Program::Load { fill_mib, noise_percent, .. } => {
                format!("{memory} MiB, {fill_mib} of them filled, {noise_percent}% of that random")
            }
        }];
        match self.program {
            Program::Load { rate_mib_per_s: rate_mib_per_s @ 1.., wss_mib, few, pattern, .. } => {
                let how = if few { "a few bytes of each page" } else { "whole pages" };
                let order = match pattern {
                    Pattern::Sequential => String::new(),
                    other => format!(", {other}"),
                };
                words.push(format!("{wss_mib} MiB rewritten at {rate_mib_per_s} MiB/s ({how}{order})"));
            }
            Program::Load { verify_mib_per_s: UNPACED_MIB_PER_S, .. } => {
                words.push("read as fast as it can".to_owned());
            }
            Program::Load { verify_mib_per_s: verify_mib_per_s @ 1.., .. } => {
                words.push(format!("{verify_mib_per_s} MiB/s read"));
            }
            _ => {}
        }
        if self.cache_mib > 0 {
            words.push(format!("{} MiB of its disk read before", self.cache_mib));
        }
        words.push(match self.qemu {
            QemuVersion::Installed => "QEMU of the distribution".to_owned(),
            QemuVersion::Newer => "newer QEMU".to_owned(),
        });
        let more = [
            (self.memfd, "shared memfd"),
            (self.preallocated, "preallocated"),
            (self.devices, "VGA, USB, disk, network, balloon, random numbers, serial"),
            (self.tls, "TLS"),
            (self.neighbours, "a neighbour that computes at each host"),
            (self.client, "a client that exchanges messages with it"),
        ];
        words.extend(more.into_iter().filter(|(has, _)| *has).map(|(_, word)| word.to_owned()));
        if self.tracked_connections > 0 {
            words.push(format!("{} tracked connections with NAT", self.tracked_connections));
        }
        words.extend(
            self.guest_wait_percent.map(|percent| format!("Whimbrel with guest_wait_percent {percent}")),
        );
        if self.regions > 1 {
            words.push(format!("{} RAM blocks", self.regions));
        }
        words.push(match self.link_bytes_per_s {
            None => "no limit".to_owned(),
            Some(rate) => format!("{} Mb/s", rate * 8 / 1_000_000),
        });
        words.extend(self.packets.describe());
        if self.cap == Cap::SlowStart {
            words.push("slow start".to_owned());
        }
        words.join(", ")
    }

    /// Returns true if the guest's program ends, and the measurement lasts until then.
    pub(super) fn has_end(&self) -> bool {
        matches!(self.program, Program::Nas(Nas { runs: Some(_), .. }))
    }

    /// Returns true if the guest's program reports its progress.
    pub fn has_load(&self) -> bool {
        matches!(self.program, Program::Load { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_said_before_anything_is_begun() {
        let case = Case::idle("x", QemuVersion::Newer);
        assert!(case.check().is_ok());
        let full = case.clone().sized(128, 64).check().unwrap_err();
        assert!(full.to_string().contains("a guest of 128 MiB cannot fill 64"), "{full}");
        let beyond = case.sized(256, 64).writing(65, 10, LoadMode::Few).check().unwrap_err();
        assert!(beyond.to_string().contains("65 MiB cannot be rewritten where 64"), "{beyond}");
    }

    #[test]
    fn the_order_of_pages_is_told_where_it_is_not_the_usual_one() {
        let case = Case::idle("x", QemuVersion::Newer).writing(64, 10, LoadMode::Random);
        let usual = serde_json::to_value(&case).unwrap();
        assert_eq!((usual["program"].get("pattern"), case.describe().contains("sequential")), (None, false));
        let hot = case.clone().in_pattern("hot-spot:90/10".parse().unwrap());
        assert!(hot.describe().contains("64 MiB rewritten at 10 MiB/s (whole pages, hot-spot:90/10)"));
        for case in [case, hot] {
            let text = serde_json::to_string(&case).unwrap();
            assert_eq!(serde_json::from_str::<Case>(&text).unwrap(), case, "{text}");
        }
    }

    #[test]
    fn a_slow_start_grows_with_each_pass() {
        let mib = |pass| Cap::SlowStart.in_pass(pass).map(|rate| rate >> 20);
        assert_eq!([mib(1), mib(2), mib(4)], [Some(32), Some(64), Some(256)]);
        assert!(mib(u64::MAX) > mib(10));
        assert_eq!(Cap::Unlimited.in_pass(1), None);
    }
}
