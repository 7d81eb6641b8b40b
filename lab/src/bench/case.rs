//! What is measured: a guest, what it does, the link, and who moves it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::environment::QemuVersion;
use crate::error::Error;
use crate::spec::LoadMode;

/// More than any guest reads, MiB/s.
const UNPACED_MIB_PER_S: u64 = 1_000_000;
/// What the tiny guest's kernel and programs take of its memory.
const SYSTEM_MIB: u64 = 96;

/// One guest on one link, moved in turn by all contenders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    /// Its name, unlike all others of a run.
    pub name: String,
    /// The QEMU on both sides.
    pub qemu: QemuVersion,
    /// What runs in the guest.
    pub program: Program,
    /// The guest's memory, MiB.
    pub memory_mib: u64,
    /// RAM blocks (NUMA nodes) that share it evenly.
    pub regions: u64,
    /// With VGA, USB and five virtio devices: disk, network, balloon, random numbers, serial.
    pub devices: bool,
    /// Memory of the guest: a shared memfd rather than anonymous.
    pub memfd: bool,
    /// All of it taken by QEMU when it starts, on both sides.
    #[serde(default)]
    pub preallocated: bool,
    /// How much of a disk the guest has read through its page cache before its program began, MiB; of which it has kept
    /// what it has room for. It can be asked what of its memory it can do without.
    #[serde(default)]
    pub cache_mib: u64,
    /// Bytes per second that the link lets through. None: as fast as this machine can.
    pub link_bytes_per_s: Option<u64>,
    /// Encrypted and authenticated, on both sides of the comparison.
    pub tls: bool,
    /// A migration that has not ended by then is given up, seconds.
    pub patience_s: u64,
}

/// What runs in a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Program {
    /// The load generator: fills memory with random content, and rewrites a part of it.
    Load {
        /// Filled, MiB.
        fill_mib: u64,
        /// Rewritten over and over, MiB.
        wss_mib: u64,
        /// How fast, MiB/s of pages touched. 0: not at all.
        rate_mib_per_s: u64,
        /// Verified (read), MiB/s.
        verify_mib_per_s: u64,
        /// A few bytes of each page, rather than all of it.
        few: bool,
        /// How much of what is filled looks random, in percent; the rest compresses well.
        #[serde(default = "all")]
        noise_percent: u64,
    },
    /// Debian with nginx and SQLite, that has booted and waits.
    Debian,
}

/// Of content that looks random.
const fn all() -> u64 {
    100
}

/// Who moves a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Contender {
    /// Nobody: what the guest's program does by itself.
    Nobody,
    /// Whimbrel, with so many data streams; None: as many as it chooses.
    Whimbrel(Option<u16>),
    /// Whimbrel, told how to compress; where not at all, it sends pages in full, too.
    Packing(Way),
    /// Whimbrel, told to send pages in full that it sent before.
    Whole,
    /// Whimbrel, told what of the guest's memory need not be sent.
    Soft(Soft),
    /// Whimbrel, told when to stop the guest; it does so however long the guest stands still then.
    Policy(Policy),
    /// QEMU's own migration.
    Qemu(Mode),
}

/// What need not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Soft {
    /// Everything is sent.
    None,
    /// What is used for nothing.
    Free,
    /// And page cache.
    All,
}

impl Soft {
    const WORDS: [(Self, &'static str); 3] = [(Self::None, "none"), (Self::Free, "free"), (Self::All, "all")];

    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(soft, _)| *soft == self).map_or("", |(_, word)| word)
    }
}

/// When the guest is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Policy {
    /// When a pattern shows that rounds help no more.
    Pattern,
    /// As soon as the downtime would be short enough: KVM's rule.
    Target,
    /// After some rounds: Xen's rule.
    Rounds,
}

impl Policy {
    const WORDS: [(Self, &'static str); 3] =
        [(Self::Pattern, "pattern"), (Self::Target, "target"), (Self::Rounds, "rounds")];

    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(policy, _)| *policy == self).map_or("", |(_, word)| word)
    }
}

/// What Whimbrel is told of compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// Not at all.
    None,
    /// LZ4.
    Lz4,
    /// Zstandard at a level.
    Zstd(u8),
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
        }
    }
}

impl FromStr for Way {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        match name {
            "none" => Ok(Self::None),
            "lz4" => Ok(Self::Lz4),
            _ => {
                let level = name.strip_prefix("zstd:").and_then(|level| level.parse().ok());
                level.filter(|level| (1..=19).contains(level)).map(Self::Zstd).ok_or(())
            }
        }
    }
}

/// A way to set up QEMU's own migration, as its documentation advises. In all of them the bandwidth is not limited; for
/// the downtime see [`Case::downtime_limit_ms`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
    /// One connection, nothing more.
    Default,
    /// Capability `multifd` with so many channels.
    Multifd(u8),
    /// The same with compression by zstd.
    MultifdZstd(u8),
    /// Capability `xbzrle` with a cache for the whole guest.
    Xbzrle,
    /// Capabilities `postcopy-ram` and `postcopy-preempt`, switched over after the first pass.
    PostCopy,
    /// Capability `auto-converge`.
    AutoConverge,
}

impl Contender {
    /// All ways of QEMU, then Whimbrel.
    pub fn all() -> Vec<Self> {
        let modes = [
            Mode::Default,
            Mode::Multifd(2),
            Mode::Multifd(4),
            Mode::MultifdZstd(2),
            Mode::Xbzrle,
            Mode::PostCopy,
            Mode::AutoConverge,
        ];
        modes.map(Self::Qemu).into_iter().chain([Self::Whimbrel(None)]).collect()
    }

    /// Whether it is Whimbrel, whatever it was told.
    pub fn is_whimbrel(self) -> bool {
        !matches!(self, Self::Nobody | Self::Qemu(_))
    }

    /// What Whimbrel is told on its command line.
    pub(super) fn options(self) -> Vec<String> {
        match self {
            Self::Whimbrel(Some(streams)) => vec![format!("--streams={streams}")],
            Self::Packing(Way::None) => vec!["--compress=none".to_owned(), "--deltas=never".to_owned()],
            Self::Packing(way) => vec![format!("--compress={way}")],
            Self::Whole => vec!["--deltas=never".to_owned()],
            Self::Soft(soft) => vec![format!("--soft-pages={}", soft.word())],
            Self::Policy(policy) => {
                vec![format!("--policy={}", policy.word()), "--on-limit=stop".to_owned()]
            }
            Self::Whimbrel(None) | Self::Nobody | Self::Qemu(_) => Vec::new(),
        }
    }

    /// Whether it is one of QEMU's own ways.
    pub fn is_qemu(self) -> bool {
        matches!(self, Self::Qemu(_))
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nobody => f.write_str("nobody"),
            Self::Whimbrel(None) => f.write_str("whimbrel"),
            Self::Whimbrel(Some(streams)) => write!(f, "whimbrel-{streams}"),
            Self::Packing(way) => write!(f, "whimbrel-{way}"),
            Self::Whole => f.write_str("whimbrel-whole"),
            Self::Soft(soft) => write!(f, "whimbrel-soft-{}", soft.word()),
            Self::Policy(policy) => write!(f, "whimbrel-{}", policy.word()),
            Self::Qemu(Mode::Default) => f.write_str("qemu"),
            Self::Qemu(Mode::Multifd(channels)) => write!(f, "multifd-{channels}"),
            Self::Qemu(Mode::MultifdZstd(2)) => f.write_str("multifd-zstd"),
            Self::Qemu(Mode::MultifdZstd(channels)) => write!(f, "multifd-zstd-{channels}"),
            Self::Qemu(Mode::Xbzrle) => f.write_str("xbzrle"),
            Self::Qemu(Mode::PostCopy) => f.write_str("post-copy"),
            Self::Qemu(Mode::AutoConverge) => f.write_str("auto-converge"),
        }
    }
}

impl FromStr for Contender {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let fixed =
            [Self::Nobody, Self::Whole].into_iter().chain(Self::all()).find(|one| one.to_string() == name);
        let counted = || {
            let (kind, count) = name.rsplit_once('-')?;
            let channels = || count.parse().ok().filter(|count| *count > 0);
            match kind {
                "whimbrel" => count.parse().ok().filter(|count| *count > 0).map(|n| Self::Whimbrel(Some(n))),
                "multifd" => channels().map(|n| Self::Qemu(Mode::Multifd(n))),
                "multifd-zstd" => channels().map(|n| Self::Qemu(Mode::MultifdZstd(n))),
                _ => None,
            }
        };
        let packing = || name.strip_prefix("whimbrel-")?.parse().ok().map(Self::Packing);
        let soft = || {
            let word = name.strip_prefix("whimbrel-soft-")?;
            Soft::WORDS.iter().find(|(_, known)| *known == word).map(|(soft, _)| Self::Soft(*soft))
        };
        let policy = || {
            let word = name.strip_prefix("whimbrel-")?;
            Policy::WORDS.iter().find(|(_, known)| *known == word).map(|(policy, _)| Self::Policy(*policy))
        };
        fixed.or_else(counted).or_else(packing).or_else(soft).or_else(policy).ok_or_else(|| {
            let known = Self::all().iter().map(Self::to_string).collect::<Vec<_>>().join(", ");
            format!("no such contender: {name}; there are nobody, {known}, whimbrel-N, multifd-N and multifd-zstd-N for N streams, and whimbrel-none, -lz4, -zstd:LEVEL, -whole, -soft-none, -soft-free, -soft-all, -pattern, -target and -rounds")
        })
    }
}

impl TryFrom<String> for Contender {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        name.parse()
    }
}

impl From<Contender> for String {
    fn from(contender: Contender) -> Self {
        contender.to_string()
    }
}

impl Case {
    /// A guest of 1 GiB, 700 MiB of it random, that does nothing but read a little of its memory, on a link without
    /// limit.
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
                noise_percent: 100,
            },
            memory_mib: 1024,
            regions: 1,
            devices: false,
            memfd: false,
            preallocated: false,
            cache_mib: 0,
            link_bytes_per_s: None,
            tls: false,
            patience_s: 90,
        }
    }

    /// The same, but a part of the memory is rewritten.
    #[must_use]
    pub fn writing(mut self, wss: u64, rate: u64, mode: LoadMode) -> Self {
        if let Program::Load { wss_mib, rate_mib_per_s, few, verify_mib_per_s, .. } = &mut self.program {
            (*wss_mib, *rate_mib_per_s, *few, *verify_mib_per_s) = (wss, rate, mode == LoadMode::Few, 0);
        }
        self
    }

    /// The same, but so much of the content looks random; the rest compresses well.
    #[must_use]
    pub fn noisy(mut self, percent: u64) -> Self {
        if let Program::Load { noise_percent, .. } = &mut self.program {
            *noise_percent = percent;
        }
        self
    }

    /// The same with another amount of memory and of random content in it, both in MiB.
    #[must_use]
    pub fn sized(mut self, memory: u64, fill: u64) -> Self {
        self.memory_mib = memory;
        if let Program::Load { fill_mib, .. } = &mut self.program {
            *fill_mib = fill;
        }
        self
    }

    /// Whether it can be.
    pub(super) fn check(&self) -> Result<(), Error> {
        let Program::Load { fill_mib, wss_mib, .. } = self.program else { return Ok(()) };
        // A part of it grows with the memory: what describes its pages, and what is kept free.
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

    /// The downtime that QEMU is told to keep, ms. It stops the guest as soon as that can be kept, so that a shorter
    /// one shows what it can do; over a slow link that costs passes and may be out of reach, so that there it may take
    /// as long as Whimbrel may, which is QEMU's own default.
    pub fn downtime_limit_ms(&self) -> u64 {
        const SLOW_BYTES_PER_S: u64 = 1_000_000_000 / 8;
        if self.link_bytes_per_s.is_some_and(|rate| rate <= SLOW_BYTES_PER_S) { 300 } else { 30 }
    }

    /// The same, but the guest's program reads its memory as fast as it can.
    #[must_use]
    pub fn unpaced(mut self) -> Self {
        if let Program::Load { verify_mib_per_s, .. } = &mut self.program {
            *verify_mib_per_s = UNPACED_MIB_PER_S;
        }
        self
    }

    /// In words, for people.
    pub fn describe(&self) -> String {
        let memory = self.memory_mib;
        let mut words = vec![match &self.program {
            Program::Debian => format!("Debian in {memory} MiB"),
            Program::Load { fill_mib, noise_percent: 100, .. } => {
                format!("{memory} MiB, {fill_mib} of them random")
            }
            Program::Load { fill_mib, noise_percent, .. } => {
                format!("{memory} MiB, {fill_mib} of them filled, {noise_percent}% of that random")
            }
        }];
        match self.program {
            Program::Load { rate_mib_per_s: rate_mib_per_s @ 1.., wss_mib, few, .. } => {
                let how = if few { "a few bytes of each page" } else { "whole pages" };
                words.push(format!("{wss_mib} MiB rewritten at {rate_mib_per_s} MiB/s ({how})"));
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
        ];
        words.extend(more.into_iter().filter(|(has, _)| *has).map(|(_, word)| word.to_owned()));
        if self.regions > 1 {
            words.push(format!("{} RAM blocks", self.regions));
        }
        words.push(match self.link_bytes_per_s {
            None => "no limit".to_owned(),
            Some(rate) => format!("{} Mb/s", rate * 8 / 1_000_000),
        });
        words.join(", ")
    }

    /// Whether the guest's program says what it does.
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
    fn contenders_are_named_and_found_by_their_names() {
        let more = [
            Contender::Nobody,
            Contender::Whimbrel(Some(3)),
            Contender::Packing(Way::None),
            Contender::Packing(Way::Lz4),
            Contender::Packing(Way::Zstd(7)),
            Contender::Soft(Soft::None),
            Contender::Soft(Soft::All),
            Contender::Policy(Policy::Pattern),
            Contender::Policy(Policy::Rounds),
            Contender::Qemu(Mode::Multifd(8)),
            Contender::Qemu(Mode::MultifdZstd(4)),
        ];
        for contender in Contender::all().into_iter().chain(more) {
            assert_eq!(contender.to_string().parse(), Ok(contender));
        }
        for wrong in
            ["", "whimbrel-zstd", "whimbrel-zstd:20", "whimbrel-0", "whimbrel-x", "multifd-", "xbz-3"]
        {
            assert!(wrong.parse::<Contender>().unwrap_err().contains("there are nobody"), "{wrong}");
        }
    }
}
