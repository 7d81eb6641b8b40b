//! Choices for disks, as words of the command line.

use api::DiskMode;
use clap::ValueEnum;

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
