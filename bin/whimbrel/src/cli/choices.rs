//! Choices for a migration, as words of the command line.

use api::{Deltas, DiskMode, OnLimit, RamChoice, SoftPages, StopPolicy, ThrottleCpu, ThrottleWrites};
use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLimitArg {
    /// Stop the guest and send the rest, in any length of time
    Stop,
    /// Send the rest after the VM has resumed at the destination
    PostCopy,
    /// Abort; the VM stays at the source
    Abort,
}

impl From<OnLimitArg> for OnLimit {
    fn from(arg: OnLimitArg) -> Self {
        match arg {
            OnLimitArg::Stop => Self::Stop,
            OnLimitArg::PostCopy => Self::PostCopy,
            OnLimitArg::Abort => Self::Abort,
        }
    }
}

/// See [`StopPolicy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyArg {
    Pattern,
    Target,
    Rounds,
    Hybrid,
    Sla,
}

impl From<PolicyArg> for StopPolicy {
    fn from(arg: PolicyArg) -> Self {
        match arg {
            PolicyArg::Pattern => Self::Pattern,
            PolicyArg::Target => Self::Target,
            PolicyArg::Rounds => Self::Rounds,
            PolicyArg::Hybrid => Self::Hybrid,
            PolicyArg::Sla => Self::Sla,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ThrottleArg {
    /// No limit
    Off,
    /// At most two fifths of the sending rate
    Drain,
    /// Slower the more the guest has written
    Threshold,
}

impl From<ThrottleArg> for ThrottleWrites {
    fn from(arg: ThrottleArg) -> Self {
        match arg {
            ThrottleArg::Off => Self::Off,
            ThrottleArg::Drain => Self::Drain,
            ThrottleArg::Threshold => Self::Threshold,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ThrottleCpuArg {
    Off,
    Drain,
}

impl From<ThrottleCpuArg> for ThrottleCpu {
    fn from(arg: ThrottleCpuArg) -> Self {
        match arg {
            ThrottleCpuArg::Off => Self::Off,
            ThrottleCpuArg::Drain => Self::Drain,
        }
    }
}

/// See [`Deltas`].
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum DeltasArg {
    Auto,
    Always,
    Never,
}

impl From<DeltasArg> for Deltas {
    fn from(arg: DeltasArg) -> Self {
        match arg {
            DeltasArg::Auto => Self::Auto,
            DeltasArg::Always => Self::Always,
            DeltasArg::Never => Self::Never,
        }
    }
}

/// See [`SoftPages`].
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SoftPagesArg {
    None,
    Free,
    Cold,
    All,
}

impl From<SoftPagesArg> for SoftPages {
    fn from(arg: SoftPagesArg) -> Self {
        match arg {
            SoftPagesArg::None => Self::None,
            SoftPagesArg::Free => Self::Free,
            SoftPagesArg::Cold => Self::Cold,
            SoftPagesArg::All => Self::All,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RamArg {
    /// The destination chooses, so that the VM keeps all properties that it has now
    Auto,
    /// A shared memfd
    Memfd,
    /// Anonymous memory
    Anonymous,
}

impl From<RamArg> for RamChoice {
    fn from(arg: RamArg) -> Self {
        match arg {
            RamArg::Auto => Self::Auto,
            RamArg::Memfd => Self::Memfd,
            RamArg::Anonymous => Self::Anonymous,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DisksArg {
    /// Shared if the destination sees the same image there, copied otherwise
    Auto,
    /// On storage that both hosts see
    Shared,
    /// Copied to an image that the destination makes
    Copy,
}

impl From<DisksArg> for DiskMode {
    fn from(arg: DisksArg) -> Self {
        match arg {
            DisksArg::Auto => Self::Auto,
            DisksArg::Shared => Self::Shared,
            DisksArg::Copy => Self::Copy,
        }
    }
}

pub(super) fn one_disk(text: &str) -> Result<(String, DisksArg), String> {
    let wrong = || format!("{text:?} is not NAME=auto, NAME=shared or NAME=copy");
    let (name, mode) = text.rsplit_once('=').ok_or_else(wrong)?;
    let mode = DisksArg::from_str(mode, false).map_err(|_| wrong())?;
    if name.is_empty() { Err(wrong()) } else { Ok((name.to_owned(), mode)) }
}
