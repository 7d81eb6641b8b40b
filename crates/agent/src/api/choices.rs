//! What can be chosen for a migration.

use std::fmt;
use std::str::FromStr;

use proto::packed::{BadCompression, Compression};
use serde::{Deserialize, Serialize};

/// What to do when no more rounds are to be made and the expected downtime is still too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnLimit {
    /// Stop the guest and send the rest, however long that takes.
    Stop,
    /// Have the rest come when the guest runs at the destination (post-copy). Until all is there the VM needs both hosts.
    PostCopy,
    /// Give up; the VM stays where it is.
    #[default]
    Abort,
}

/// When the guest is stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StopPolicy {
    /// When rounds do not make the downtime shorter any more, or when it shows in how the guest writes that they will
    /// not (Ibrahim et al., *Optimized pre-copy live migration*, section VII).
    #[default]
    Pattern,
    /// As soon as the downtime would be short enough: KVM's rule.
    Target,
    /// After a number of rounds: Xen's rule.
    Rounds,
    /// After all of memory went once: what is left then comes when the guest runs at the destination (post-copy). Until all
    /// is there the VM needs both hosts.
    Hybrid,
    /// By whichever way is expected to keep two limits, that of the downtime and that of the time in all: by rounds, by rounds
    /// with slower processors, or by post-copy.
    Sla,
}

impl StopPolicy {
    /// Its name, as everywhere.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pattern => "pattern",
            Self::Target => "target",
            Self::Rounds => "rounds",
            Self::Hybrid => "hybrid",
            Self::Sla => "sla",
        }
    }
}

/// How fast a guest may write to disks that are copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ThrottleWrites {
    /// As fast as it likes.
    #[default]
    Off,
    /// Held to two fifths of what is sent, where it writes faster than that.
    Drain,
    /// The more it has written the longer each write takes: from 16,384 writes on 2 ms, from twice as many on twice as
    /// long (Bradford et al. 2007, section 3.2).
    Threshold,
}

/// How fast a guest's processors may be while it is moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ThrottleCpu {
    /// As fast as ever.
    #[default]
    Off,
    /// So fast that it dirties half of what is sent, where it would dirty more than that and could not be stopped in time;
    /// each keeps what it uses up to a sixth.
    Drain,
}

/// Whether only what changed is sent of pages that are sent again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Deltas {
    /// Where the link is slower than finding out what changed.
    #[default]
    Auto,
    /// From the first page on.
    Always,
    /// Pages are sent in full.
    Never,
}

/// Which of a guest's memory is not sent because it can do without, as far as a program in the guest says which that
/// is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SoftPages {
    /// Everything is sent.
    None,
    /// Not what is used for nothing.
    #[default]
    Free,
    /// And not what of the page cache was not used of late: the guest gives it back before the stop.
    Cold,
    /// And nothing of the page cache that can be given back.
    All,
}

/// Which kind of RAM the destination gives the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RamChoice {
    /// The destination chooses, so that the VM loses nothing that it had (`qemu::preflight::ram::choose`).
    #[default]
    Auto,
    /// A shared memfd.
    Memfd,
    /// Anonymous memory.
    Anonymous,
}

/// How pages are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Compress {
    /// As the link and the processors want it, at each moment.
    #[default]
    Auto,
    /// In this way, or not at all.
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
        text.parse().map(Self::Fixed).map_err(|bad: BadCompression| format!("{bad}, and auto"))
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
