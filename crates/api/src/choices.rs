//! Choices for a migration.

use std::fmt;
use std::str::FromStr;

use proto::packed::{BadCompression, Compression};
use serde::{Deserialize, Serialize};

/// Action when no more rounds are to be made and the expected downtime is still too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum OnLimit {
    /// Stop the guest and send the remaining pages, however long that takes.
    Stop,
    /// Start the guest at the destination and send the remaining pages after that (post-copy). Until all pages are
    /// present the VM needs both hosts.
    PostCopy,
    /// Abort the migration; the VM stays where it is.
    #[default]
    Abort,
}

/// Policy for the stop of the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum StopPolicy {
    /// Stop when rounds do not make the downtime shorter any more, or when the guest's write pattern shows that they
    /// will not (Ibrahim et al., *Optimized pre-copy live migration*, section VII).
    #[default]
    Pattern,
    /// Stop after the first pass over all memory: the remaining pages are sent when the guest runs at the destination
    /// (post-copy). Until all pages are present the VM needs both hosts.
    Hybrid,
    /// Stop by the method that is expected to keep two limits, on the downtime and on the total time: rounds, rounds
    /// with CPU throttling, or post-copy.
    Sla,
    /// Stop as soon as the downtime would be short enough: KVM's rule.
    #[cfg(feature = "comparison")]
    Target,
    /// Stop after a number of rounds: Xen's rule.
    #[cfg(feature = "comparison")]
    Rounds,
}

impl StopPolicy {
    /// Returns the policy's name, as used everywhere.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pattern => "pattern",
            Self::Hybrid => "hybrid",
            Self::Sla => "sla",
            #[cfg(feature = "comparison")]
            Self::Target => "target",
            #[cfg(feature = "comparison")]
            Self::Rounds => "rounds",
        }
    }

    /// Returns true if no downtime at all may be requested: benchmarks do that with one policy, so that rounds go on
    /// until their maximum.
    pub(crate) fn may_have_no_downtime(self) -> bool {
        self.name() == "target"
    }
}

/// Ways in which copying may restrain itself while the guest waits for processors.
#[cfg(feature = "comparison")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Restraints {
    /// None.
    None,
    /// Niceness of its threads.
    Niceness,
    /// Niceness, fewer threads at a time, and rarer scans.
    #[default]
    All,
}

/// Limit on the guest's write rate to copied disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum ThrottleWrites {
    /// No limit.
    #[default]
    Off,
    /// Two fifths of the sending rate, if the guest writes faster than that.
    Drain,
    /// A delay of each write that grows with the number of writes: 2 ms from 16,384 writes on, twice as long from twice
    /// as many on (Bradford et al. 2007, section 3.2).
    Threshold,
}

/// Limit on the guest's CPU time during the migration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum ThrottleCpu {
    /// No limit.
    #[default]
    Off,
    /// A dirty rate of half the sending rate, if the guest would dirty more than that and could not be stopped in time;
    /// each vCPU keeps the time that it uses, up to a sixth of a processor.
    Drain,
}

/// Check of the VM's networks before a migration: whether they are the same at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum NetworkCheck {
    /// None.
    Off,
    /// A warning for each network that is not proven to be the same.
    #[default]
    Warn,
    /// No migration unless all networks are proven to be the same.
    Require,
}

/// Use of packets that arrive for the guest from shortly before its stop until it runs at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum PacketsAtStop {
    /// They are sent to the destination, and delivered there.
    #[default]
    Hold,
    /// They are lost, as with other hypervisors: their senders send them again (Bradford et al., section 3.3).
    Drop,
}

/// Owner of the addresses that a VM gets in another network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum NewAddressOwner {
    /// The destination translates them: nothing changes in the VM.
    #[default]
    Host,
    /// The VM itself, beside its old ones (Bradford et al., section 3.3). Something in the VM adds them.
    Vm,
}

/// Use of deltas for pages that are sent again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum DeltaUse {
    /// Deltas if the link is slower than computing them.
    #[default]
    Auto,
    /// Deltas from the first page on.
    Always,
    /// Pages are sent in full.
    Never,
}

/// The kinds of the guest's memory that are not sent because the guest can do without them, as hinted by a program in
/// the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum HintedMemory {
    /// Everything is sent.
    None,
    /// Free memory is not sent.
    #[default]
    Free,
    /// In addition, pages of the page cache without recent use are not sent: the guest frees them before the stop.
    Cold,
    /// In addition, no page of the page cache that can be freed is sent.
    All,
}

/// Kind of RAM that the destination gives the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum RamChoice {
    /// The destination chooses, so that the VM loses nothing that it had (`qemu::preflight::ram::choose`).
    #[default]
    Auto,
    /// A shared memfd.
    Memfd,
    /// Anonymous memory.
    Anonymous,
}

/// Compression of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Compress {
    /// A level that fits the link and the processors at each moment.
    #[default]
    Auto,
    /// A fixed level, or no compression.
    Fixed(Compression),
}

impl fmt::Display for Compress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(way) => way.fmt(f),
        }
    }
}

impl FromStr for Compress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        text.parse().map(Self::Fixed).map_err(|bad: BadCompression| format!("{bad}, or auto"))
    }
}

impl TryFrom<String> for Compress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Compress> for String {
    fn from(choice: Compress) -> Self {
        choice.to_string()
    }
}
