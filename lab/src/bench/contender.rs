//! Contenders: the ways to migrate a guest.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A way to migrate a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Contender {
    /// No migration: the guest's program runs undisturbed.
    NoMigration,
    /// Whimbrel, with a number of data streams; `None`: Whimbrel chooses.
    Whimbrel(Option<u16>),
    /// Whimbrel with a given compression, and without page references; without compression it sends full pages, too.
    Compressed(PageCompression),
    /// Like `Compressed` over one stream, so that one thread compresses and sends.
    OneThread(PageCompression),
    /// Whimbrel without deltas: a page that was sent before is sent in full.
    NoDeltas,
    /// Whimbrel that loses packets which arrive while the guest is stopped.
    PacketsDropped,
    /// Whimbrel with a given use of free page hints, and without page references.
    FreePageHints(FreePageHints),
    /// Whimbrel that restrains itself in some ways while guests wait for processors.
    Restrained(Restraints),
    /// Whimbrel with a given switchover policy and without a downtime limit.
    Policy(Policy),
    /// QEMU's own migration.
    Qemu(QemuMode),
}

/// Memory that need not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FreePageHints {
    /// None: everything is sent.
    None,
    /// Free memory.
    Free,
    /// Free memory and page cache.
    All,
}

impl FreePageHints {
    const WORDS: [(Self, &'static str); 3] = [(Self::None, "none"), (Self::Free, "free"), (Self::All, "all")];

    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(soft, _)| *soft == self).map_or("", |(_, word)| word)
    }
}

/// Ways in which copying may restrain itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Restraints {
    /// None.
    None,
    /// Niceness of its threads.
    Niceness,
    /// Niceness, fewer threads at a time, and rarer scans.
    All,
}

impl Restraints {
    const WORDS: [(Self, &'static str); 3] =
        [(Self::None, "none"), (Self::Niceness, "niceness"), (Self::All, "all")];

    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(restraints, _)| *restraints == self).map_or("", |(_, word)| word)
    }
}

/// Conditions for stopping the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Policy {
    /// A pattern shows that more rounds do not help.
    Pattern,
    /// The downtime would be short enough: KVM's rule.
    Target,
    /// A number of rounds has been made: Xen's rule.
    Rounds,
    /// After one pass; the rest is sent by post-copy.
    Hybrid,
    /// By patterns, with the guest's processors throttled as much as needed.
    Drain,
    /// After the guest's program has ended.
    Endless,
    /// Before any page is sent.
    Frozen,
    /// After a number of passes over memory, however many dirty pages remain.
    After(u32),
}

impl Policy {
    const WORDS: [(Self, &'static str); 7] = [
        (Self::Pattern, "pattern"),
        (Self::Target, "target"),
        (Self::Rounds, "rounds"),
        (Self::Hybrid, "hybrid"),
        (Self::Drain, "drain"),
        (Self::Endless, "endless"),
        (Self::Frozen, "frozen"),
    ];

    /// Returns Whimbrel's command-line options.
    fn options(self) -> Vec<String> {
        let by_count = |rounds: u32, on_limit: &str| {
            let rounds = format!("--max-passes={rounds}");
            // A downtime of 0 is never possible, so it continues until it has made this many rounds.
            vec!["--policy=target".to_owned(), "--max-downtime=0".to_owned(), rounds, on_limit.to_owned()]
        };
        match self {
            Self::Endless => by_count(u32::MAX, "--on-limit=abort"),
            Self::After(passes) => by_count(passes, "--on-limit=stop"),
            Self::Frozen => vec!["--on-limit=stop".to_owned()],
            Self::Hybrid => vec![format!("--policy={self}")],
            Self::Drain => vec!["--throttle-cpu=drain".to_owned(), "--on-limit=stop".to_owned()],
            Self::Pattern | Self::Target | Self::Rounds => {
                vec![format!("--policy={self}"), "--on-limit=stop".to_owned()]
            }
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::After(passes) => write!(f, "after-{passes}"),
            fixed => f.write_str(
                Self::WORDS.iter().find(|(policy, _)| policy == fixed).map_or("", |(_, word)| word),
            ),
        }
    }
}

impl FromStr for Policy {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let fixed = Self::WORDS.iter().find(|(_, word)| *word == name).map(|(policy, _)| *policy);
        fixed.or_else(|| passes(name).map(Self::After)).ok_or(())
    }
}

/// Parses `after-N`.
fn passes(name: &str) -> Option<u32> {
    name.strip_prefix("after-")?.parse().ok().filter(|passes| *passes > 0)
}

/// Compression that Whimbrel is configured to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageCompression {
    /// No compression.
    None,
    /// LZ4.
    Lz4,
    /// Zstandard at a level.
    Zstd(u8),
}

impl fmt::Display for PageCompression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
        }
    }
}

impl FromStr for PageCompression {
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
/// the downtime see [`super::Case::downtime_limit_ms`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum QemuMode {
    /// One connection, nothing more.
    Default,
    /// Capability `multifd` with this many channels.
    Multifd(u8),
    /// Capability `multifd` with compression by zstd.
    MultifdZstd(u8),
    /// Capability `xbzrle` with a cache for the whole guest.
    Xbzrle,
    /// Capabilities `postcopy-ram` and `postcopy-preempt`, switched over after the first pass.
    PostCopy,
    /// Capability `auto-converge`.
    AutoConverge,
    /// One connection; the guest is not stopped before its program has ended.
    Endless,
    /// One connection; the guest is stopped after a number of passes over memory, however many dirty pages remain.
    After(u32),
}

impl Contender {
    /// Returns all ways of QEMU, then Whimbrel.
    pub fn all() -> Vec<Self> {
        let modes = [
            QemuMode::Default,
            QemuMode::Multifd(2),
            QemuMode::Multifd(4),
            QemuMode::MultifdZstd(2),
            QemuMode::Xbzrle,
            QemuMode::PostCopy,
            QemuMode::AutoConverge,
        ];
        modes.map(Self::Qemu).into_iter().chain([Self::Whimbrel(None)]).collect()
    }

    /// Returns true for Whimbrel with any options.
    pub fn is_whimbrel(self) -> bool {
        !matches!(self, Self::NoMigration | Self::Qemu(_))
    }

    /// Returns Whimbrel's command-line options.
    pub(super) fn options(self) -> Vec<String> {
        // One reduction without references, so that its own effect shows.
        let alone = "--no-references";
        match self {
            Self::Whimbrel(Some(streams)) => vec![format!("--streams={streams}")],
            Self::Compressed(PageCompression::None) => {
                [alone, "--compress=none", "--deltas=never"].map(str::to_owned).to_vec()
            }
            Self::Compressed(way) => vec![alone.to_owned(), format!("--compress={way}")],
            Self::OneThread(way) => {
                let mut options = Self::Compressed(way).options();
                options.push("--streams=1".to_owned());
                options
            }
            Self::NoDeltas => vec!["--deltas=never".to_owned()],
            Self::PacketsDropped => vec!["--packets-at-stop=drop".to_owned()],
            Self::FreePageHints(soft) => vec![alone.to_owned(), format!("--free-page-hints={}", soft.word())],
            Self::Restrained(restraints) => vec![format!("--restraints={}", restraints.word())],
            Self::Policy(policy) => policy.options(),
            Self::Whimbrel(None) | Self::NoMigration | Self::Qemu(_) => Vec::new(),
        }
    }

    /// Returns true for QEMU's own ways.
    pub fn is_qemu(self) -> bool {
        matches!(self, Self::Qemu(_))
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoMigration => f.write_str("no-migration"),
            Self::Whimbrel(None) => f.write_str("whimbrel"),
            Self::Whimbrel(Some(streams)) => write!(f, "whimbrel-{streams}"),
            Self::Compressed(way) => write!(f, "whimbrel-{way}"),
            Self::OneThread(way) => write!(f, "whimbrel-one-{way}"),
            Self::NoDeltas => f.write_str("whimbrel-no-deltas"),
            Self::PacketsDropped => f.write_str("whimbrel-packets-dropped"),
            Self::FreePageHints(soft) => write!(f, "whimbrel-hints-{}", soft.word()),
            Self::Restrained(restraints) => write!(f, "whimbrel-restraints-{}", restraints.word()),
            Self::Policy(policy) => write!(f, "whimbrel-{policy}"),
            Self::Qemu(QemuMode::Default) => f.write_str("qemu"),
            Self::Qemu(QemuMode::Multifd(channels)) => write!(f, "multifd-{channels}"),
            Self::Qemu(QemuMode::MultifdZstd(2)) => f.write_str("multifd-zstd"),
            Self::Qemu(QemuMode::MultifdZstd(channels)) => write!(f, "multifd-zstd-{channels}"),
            Self::Qemu(QemuMode::Xbzrle) => f.write_str("xbzrle"),
            Self::Qemu(QemuMode::PostCopy) => f.write_str("post-copy"),
            Self::Qemu(QemuMode::AutoConverge) => f.write_str("auto-converge"),
            Self::Qemu(QemuMode::Endless) => f.write_str("qemu-endless"),
            Self::Qemu(QemuMode::After(passes)) => write!(f, "qemu-after-{passes}"),
        }
    }
}

impl FromStr for Contender {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let fixed = [Self::NoMigration, Self::NoDeltas, Self::PacketsDropped, Self::Qemu(QemuMode::Endless)]
            .into_iter()
            .chain(Self::all())
            .find(|one| one.to_string() == name);
        let counted = || {
            let (kind, count) = name.rsplit_once('-')?;
            let channels = || count.parse().ok().filter(|count| *count > 0);
            match kind {
                "whimbrel" => count.parse().ok().filter(|count| *count > 0).map(|n| Self::Whimbrel(Some(n))),
                "multifd" => channels().map(|n| Self::Qemu(QemuMode::Multifd(n))),
                "multifd-zstd" => channels().map(|n| Self::Qemu(QemuMode::MultifdZstd(n))),
                _ => None,
            }
        };
        let packing = || name.strip_prefix("whimbrel-")?.parse().ok().map(Self::Compressed);
        let one_thread = || name.strip_prefix("whimbrel-one-")?.parse().ok().map(Self::OneThread);
        let soft = || {
            let word = name.strip_prefix("whimbrel-hints-")?;
            FreePageHints::WORDS
                .iter()
                .find(|(_, known)| *known == word)
                .map(|(soft, _)| Self::FreePageHints(*soft))
        };
        let restrained = || {
            let word = name.strip_prefix("whimbrel-restraints-")?;
            Restraints::WORDS
                .iter()
                .find(|(_, known)| *known == word)
                .map(|(restraints, _)| Self::Restrained(*restraints))
        };
        let policy = || name.strip_prefix("whimbrel-")?.parse().ok().map(Self::Policy);
        let counted_passes =
            || passes(name.strip_prefix("qemu-")?).map(|passes| Self::Qemu(QemuMode::After(passes)));
        let found = fixed
            .or_else(counted)
            .or_else(packing)
            .or_else(one_thread)
            .or_else(soft)
            .or_else(restrained)
            .or_else(policy)
            .or_else(counted_passes);
        found.ok_or_else(|| {
            let known = Self::all().iter().map(Self::to_string).collect::<Vec<_>>().join(", ");
            format!(
                "no contender is named {name}; choose from no-migration, {known}; whimbrel-N, multifd-N and \
                 multifd-zstd-N for N streams; whimbrel- with none, lz4, zstd:LEVEL, the same after one- for one \
                 stream, no-deltas, packets-dropped, hints-none, hints-free, hints-all, restraints-none, restraints-niceness, \
                 restraints-all, pattern, hybrid, drain, target, rounds, endless, frozen, and after-N for N passes; qemu-endless and qemu-after-N"
            )
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contenders_are_named_and_found_by_their_names() {
        let more = [
            Contender::NoMigration,
            Contender::PacketsDropped,
            Contender::Whimbrel(Some(3)),
            Contender::Compressed(PageCompression::None),
            Contender::Compressed(PageCompression::Lz4),
            Contender::Compressed(PageCompression::Zstd(7)),
            Contender::OneThread(PageCompression::Zstd(1)),
            Contender::Policy(Policy::Drain),
            Contender::FreePageHints(FreePageHints::None),
            Contender::FreePageHints(FreePageHints::All),
            Contender::Restrained(Restraints::None),
            Contender::Restrained(Restraints::Niceness),
            Contender::Restrained(Restraints::All),
            Contender::Policy(Policy::Pattern),
            Contender::Policy(Policy::Rounds),
            Contender::Policy(Policy::Hybrid),
            Contender::Policy(Policy::Endless),
            Contender::Policy(Policy::After(3)),
            Contender::Qemu(QemuMode::Endless),
            Contender::Qemu(QemuMode::After(12)),
            Contender::Qemu(QemuMode::Multifd(8)),
            Contender::Qemu(QemuMode::MultifdZstd(4)),
        ];
        for contender in Contender::all().into_iter().chain(more) {
            assert_eq!(contender.to_string().parse(), Ok(contender));
        }
        for wrong in [
            "",
            "whimbrel-zstd",
            "whimbrel-zstd:20",
            "whimbrel-0",
            "whimbrel-x",
            "multifd-",
            "xbz-3",
            "whimbrel-after-0",
            "qemu-after-",
        ] {
            assert!(wrong.parse::<Contender>().unwrap_err().contains("choose from no-migration"), "{wrong}");
        }
    }
}
