//! Cases: the guest's workload, the link, and the movers.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::emulator::Settings;
use crate::lab::Link;

/// A guest with a workload, on a link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCase {
    /// Its name, unique in a run.
    pub name: String,
    /// The workload of the guest.
    pub workload: Workload,
    /// The guest's memory, MiB.
    pub memory_mib: u64,
    /// Rate of the link, bytes per second.
    pub link_bytes_per_s: u64,
    /// Round-trip time between the hosts, milliseconds; 0 for a rack's link.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub round_trip_ms: u64,
    /// Downtime limit for movers that accept one, milliseconds.
    #[serde(default = "usual_downtime_ms", skip_serializing_if = "is_usual_downtime")]
    pub max_downtime_ms: u64,
    /// Time after which a migration is given up, seconds.
    pub patience_s: u64,
}

/// A guest's workload, with its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// nginx hands out a file of 512 KiB to 25 clients, again and again.
    Static,
    /// A bulletin board (Fossil's forum, kept in SQLite) behind nginx; 250 readers, of whose visits 5% are posts.
    Board,
    /// nginx hands out a film, which one client shows at a constant rate.
    Video,
    /// fio writes all over a file, faster than the link carries, beside a second fio that reads back and compares its
    /// own writes.
    Writer,
    /// fio writes small blocks for a requested time, without any part of Whimbrel, and while Whimbrel works.
    Io,
}

/// A way to migrate a guest with its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mover {
    /// Whimbrel, with its disk, in the default configuration.
    Whimbrel,
    /// Whimbrel without compression and other reductions: everything is sent as it is.
    WhimbrelPlain,
    /// Like `WhimbrelPlain`; the more the guest has written, the more its writes are throttled.
    WhimbrelThreshold,
    /// Like `WhimbrelPlain`; the guest's writes are limited to a rate at which copying converges.
    WhimbrelDrain,
    /// Whimbrel, with the disk on storage that both hosts see: the cost of the memory alone.
    MemoryOnly,
    /// QEMU's `blockdev-mirror` to an NBD server at the destination, and its own migration.
    Mirror,
    /// The guest is stopped, and its memory and disk are copied by `scp`.
    Scp,
    /// The disk is copied by `rsync` three times while the guest runs, and once more, with its memory, when it is
    /// stopped.
    Rsync,
}

const NAMES: [(Mover, &str); 8] = [
    (Mover::Whimbrel, "whimbrel"),
    (Mover::WhimbrelPlain, "whimbrel-plain"),
    (Mover::WhimbrelThreshold, "whimbrel-threshold"),
    (Mover::WhimbrelDrain, "whimbrel-drain"),
    (Mover::MemoryOnly, "memory-only"),
    (Mover::Mirror, "mirror"),
    (Mover::Scp, "scp"),
    (Mover::Rsync, "rsync"),
];

impl Mover {
    /// Returns true if Whimbrel's agents migrate the guest.
    pub(super) fn is_whimbrel(self) -> bool {
        !matches!(self, Self::Mirror | Self::Scp | Self::Rsync)
    }

    /// Returns true if the guest's writes are throttled.
    pub(super) fn is_throttled(self) -> bool {
        matches!(self, Self::WhimbrelThreshold | Self::WhimbrelDrain)
    }
}

impl fmt::Display for Mover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(mover, _)| mover == self).map_or("", |(_, name)| name);
        f.pad(name)
    }
}

impl FromStr for Mover {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|(_, known)| *known == name).map(|(mover, _)| *mover);
        found.ok_or_else(|| {
            let known = NAMES.map(|(_, name)| name).join(", ");
            format!("no mover is named {name}; choose from {known}")
        })
    }
}

impl Workload {
    /// Returns its word on the guest's kernel command line; see `guest/services/start`.
    pub(super) fn load(self) -> &'static str {
        match self {
            Self::Static | Self::Video => "files",
            Self::Board => "board",
            Self::Writer => "writer",
            Self::Io => "io",
        }
    }
}

/// Whimbrel's default, and QEMU's own.
const USUAL_DOWNTIME_MS: u64 = 300;

fn usual_downtime_ms() -> u64 {
    USUAL_DOWNTIME_MS
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde wants it")]
fn is_usual_downtime(ms: &u64) -> bool {
    *ms == USUAL_DOWNTIME_MS
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde wants it")]
fn is_nothing(ms: &u64) -> bool {
    *ms == 0
}

impl DiskCase {
    /// Returns the link between the two hosts. One with a delay is emulated, with a queue as long as two round trips.
    pub(super) fn link(&self) -> Link {
        let rate_bytes_per_s = self.link_bytes_per_s;
        if self.round_trip_ms == 0 {
            return Link::Limited { rate_bytes_per_s };
        }
        let waits_bytes = rate_bytes_per_s * 2 * self.round_trip_ms / 1000;
        Link::Emulated(Settings {
            rate_bytes_per_s: Some(rate_bytes_per_s),
            delay: Duration::from_millis(self.round_trip_ms) / 2,
            queue_bytes: usize::try_from(waits_bytes).unwrap_or(usize::MAX),
            ..Settings::default()
        })
    }

    /// Describes the case in a few words.
    pub fn describe(&self) -> String {
        let what = match self.workload {
            Workload::Static => "nginx, a file of 512 KiB, 25 clients",
            Workload::Board => {
                "a bulletin board (Fossil, SQLite) behind nginx, 250 readers, 5% of visits are posts"
            }
            Workload::Video => "a film of 245 MB over HTTP, one client, 1 MB/s",
            Workload::Writer => "fio rewrites 256 MiB at random in blocks of 64 KiB, 40 MiB/s",
            Workload::Io => "fio rewrites 256 MiB at random in blocks of 4 KiB, one after the other",
        };
        let megabits = self.link_bytes_per_s * 8 / 1_000_000;
        let far = match self.round_trip_ms {
            0 => String::new(),
            ms => format!(", {ms} ms there and back"),
        };
        let downtime = match self.max_downtime_ms {
            USUAL_DOWNTIME_MS => String::new(),
            ms => format!(", {} s of downtime allowed", ms / 1000),
        };
        format!("{what}; {} MiB of memory, {megabits} Mb/s{far}{downtime}", self.memory_mib)
    }
}

/// Returns all cases, in the order in which they are measured, each with its movers.
pub fn cases() -> Vec<(DiskCase, Vec<Mover>)> {
    use Mover::{MemoryOnly, Mirror, Rsync, Scp, Whimbrel, WhimbrelDrain, WhimbrelPlain, WhimbrelThreshold};
    let case = |name: &str, workload, megabits: u64| DiskCase {
        name: name.to_owned(),
        workload,
        memory_mib: 512,
        link_bytes_per_s: megabits * 1_000_000 / 8,
        round_trip_ms: 0,
        max_downtime_ms: USUAL_DOWNTIME_MS,
        patience_s: 600,
    };
    // The paper's delay between London and the east coast of America, section 4.2. The board's memory changes nearly as
    // fast as such a link carries it (the paper's guest was stopped for 68 s at 5 Mb/s): it has to be migrated all the
    // same.
    let far = |megabits, max_downtime_ms, name| DiskCase {
        round_trip_ms: 100,
        max_downtime_ms,
        patience_s: 3600,
        ..case(name, Workload::Board, megabits)
    };
    // The first pass of the disk needs a minute; a mover that has not ended after four times that will not converge.
    let diabolical = DiskCase { patience_s: 240, ..case("diabolical", Workload::Writer, 100) };
    let live = vec![MemoryOnly, Whimbrel, Mirror];
    let web = vec![MemoryOnly, Whimbrel, WhimbrelPlain, Mirror];
    let copied = [Scp, Rsync];
    vec![
        (case("static", Workload::Static, 100), web.clone()),
        (case("dynamic", Workload::Board, 100), [&web[..], &copied].concat()),
        (case("video", Workload::Video, 100), live.clone()),
        (diabolical, vec![Whimbrel, WhimbrelThreshold, WhimbrelDrain, Mirror]),
        (case("io", Workload::Io, 100), Vec::new()),
        (case("static-1g", Workload::Static, 1000), live.clone()),
        (case("dynamic-1g", Workload::Board, 1000), live.clone()),
        (far(20, 10_000, "dynamic-wan"), [&live[..], &copied].concat()),
        (far(5, 60_000, "dynamic-wan-5m"), [&live[..], &copied].concat()),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn movers_are_named_and_found_by_their_names() {
        for (mover, name) in NAMES {
            assert_eq!((mover.to_string().as_str(), name.parse()), (name, Ok(mover)));
            assert_eq!(serde_json::to_value(mover).unwrap(), name);
        }
        assert!("whimbrel-2".parse::<Mover>().unwrap_err().contains("choose from whimbrel, "));
    }

    #[test]
    fn no_two_cases_have_the_same_name() {
        let names: BTreeSet<String> = cases().into_iter().map(|(case, _)| case.name).collect();
        assert_eq!(names.len(), cases().len());
    }
}
