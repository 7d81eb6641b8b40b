//! Points that are measured.

use crate::bench::suite::{megabits, nas_case};
use crate::bench::{Cap, Case, CaseResult, Contender, Policy, QemuMode, Results};
use crate::environment::QemuVersion;
use crate::lab::Packets;
use crate::spec::{LoadMode, Pattern};

/// A case with its contenders.
pub type Point = (Case, Vec<Contender>);

/// Points that form a figure.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Its number in its paper.
    pub number: u32,
    /// The subject.
    pub about: &'static str,
    /// Its points.
    pub points: Vec<Point>,
}

/// One of the configurations of figure 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Configuration {
    pub(super) number: u32,
    buffer_kib: u32,
    link_megabits_per_s: u64,
    mtu_bytes: u32,
    cap: Cap,
}

/// The paper's configurations. For the fourth its text states only that larger packets change little where the buffer
/// is small.
pub(super) const CONFIGURATIONS: [Configuration; 7] = [
    configuration(1, 1, 1_000, 1500, Cap::SlowStart),
    configuration(2, 1, 10_000, 1500, Cap::SlowStart),
    configuration(3, 1, 1_000, 1500, Cap::Unlimited),
    configuration(4, 1, 1_000, 8000, Cap::Unlimited),
    configuration(5, 32, 1_000, 1500, Cap::Unlimited),
    configuration(6, 32, 10_000, 1500, Cap::Unlimited),
    configuration(7, 32, 10_000, 8000, Cap::Unlimited),
];

const fn configuration(
    number: u32,
    buffer_kib: u32,
    link_megabits_per_s: u64,
    mtu_bytes: u32,
    cap: Cap,
) -> Configuration {
    Configuration { number, buffer_kib, link_megabits_per_s, mtu_bytes, cap }
}

/// Active memory in figure 1: filled, and rewritten over and over, MiB.
pub(super) const ACTIVE_MIB: [u64; 4] = [64, 192, 384, 640];
/// Rewrite rate there, MiB/s: less than a link of 1 Gb/s carries, and more than the slow start's first rate.
const ACTIVE_RATE_MIB_PER_S: u64 = 80;
/// The kernels of figure 5.
pub(super) const KERNELS: [&str; 5] = ["cg", "ep", "ft", "is", "mg"];
/// Numbers of iterations after which they are stopped there.
pub(super) const ITERATIONS: [u32; 6] = [1, 2, 3, 4, 6, 8];

impl Configuration {
    /// Describes the configuration.
    pub(super) fn describe(self) -> String {
        let Self { number, buffer_kib, link_megabits_per_s, mtu_bytes, cap } = self;
        let cap = if cap == Cap::SlowStart { "slow start" } else { "unlimited" };
        format!("{number}: {buffer_kib} KiB, {} Gb/s, {mtu_bytes} B, {cap}", link_megabits_per_s / 1000)
    }

    /// Returns the name of its point.
    pub(super) fn case_name(self, active_mib: u64) -> String {
        format!("fig1-{}-{active_mib}", self.number)
    }

    fn case(self, active_mib: u64) -> Case {
        let case = Case::idle(&self.case_name(active_mib), QemuVersion::Newer).sized(1024, active_mib);
        Case {
            link_bytes_per_s: Some(megabits(self.link_megabits_per_s)),
            packets: Packets { mtu_bytes: Some(self.mtu_bytes), buffer_bytes: Some(self.buffer_kib << 10) },
            cap: self.cap,
            patience_s: 180,
            ..case.writing(active_mib, ACTIVE_RATE_MIB_PER_S, LoadMode::Random)
        }
    }
}

/// Returns the name of a kernel's point in figure 5.
pub(super) fn kernel_case_name(kernel: &str) -> String {
    format!("fig5-{kernel}")
}

/// Returns the figures.
pub fn figures() -> Vec<Figure> {
    let who = [
        Contender::Policy(Policy::Pattern),
        Contender::Policy(Policy::Hybrid),
        Contender::Qemu(QemuMode::Default),
        Contender::Qemu(QemuMode::Multifd(2)),
        Contender::Qemu(QemuMode::PostCopy),
    ];
    let latency = CONFIGURATIONS.into_iter().flat_map(|configuration| {
        ACTIVE_MIB.map(|active_mib| (configuration.case(active_mib), who.to_vec()))
    });
    let stopped = ITERATIONS.into_iter().flat_map(|passes| {
        [Contender::Policy(Policy::After(passes)), Contender::Qemu(QemuMode::After(passes))]
    });
    let stopped: Vec<_> = stopped.collect();
    let downtime = KERNELS
        .map(|kernel| (Case { name: kernel_case_name(kernel), ..nas_case(kernel, None) }, stopped.clone()));
    vec![
        Figure {
            number: 1,
            about: "total time by active memory, in seven configurations",
            points: latency.collect(),
        },
        Figure {
            number: 5,
            about: "downtime of NAS kernels that are stopped after so many iterations",
            points: downtime.into(),
        },
    ]
}

/// A grid: each value of an axis with each of the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axes {
    /// The QEMU on both sides.
    pub qemu: QemuVersion,
    /// The guest's memory, MiB.
    pub memory_mib: u64,
    /// Working sets: filled and rewritten over and over, MiB.
    pub wss_mib: Vec<u64>,
    /// Write rates, MiB/s.
    pub rate_mib_per_s: Vec<u64>,
    /// Patterns of writes: choice and order of the pages.
    pub pattern: Vec<Pattern>,
    /// Links, bytes per second; `None` for no limit.
    pub link_bytes_per_s: Vec<Option<u64>>,
    /// Streams: of Whimbrel, and of QEMU's `multifd`. Empty for Whimbrel's own choice, and QEMU's default.
    pub streams: Vec<u16>,
    /// Bytes that a connection sends at once, KiB; `None` for the kernel's choice.
    pub buffer_kib: Vec<Option<u32>>,
    /// Packets, bytes; `None` for 1500.
    pub mtu_bytes: Vec<Option<u32>>,
    /// Caps.
    pub cap: Vec<Cap>,
    /// Time after which a migration is given up, seconds.
    pub patience_s: u64,
}

impl Axes {
    /// Returns all points, in the order of their axes.
    pub fn points(&self) -> Vec<Point> {
        let of = |wss: &u64| self.rate_mib_per_s.iter().map(|rate| (*wss, *rate)).collect::<Vec<_>>();
        let loads: Vec<_> = self.wss_mib.iter().flat_map(of).collect();
        let points = vec![Case::idle("grid", self.qemu)];
        let mut points = crossed(points, &loads, |case, (wss, rate)| {
            let case = case.sized(self.memory_mib, *wss).writing(*wss, *rate, LoadMode::Random);
            named(case, &format!("w{wss}-r{rate}"))
        });
        points = crossed(points, &self.pattern, |case, pattern| {
            let word = match pattern {
                Pattern::Sequential => String::new(),
                other => other.to_string().replace([':', '/'], "-"),
            };
            named(case.in_pattern(*pattern), &word)
        });
        points = crossed(points, &self.link_bytes_per_s, |case, link| {
            let word = link.map_or("any".to_owned(), |rate| (rate * 8 / 1_000_000).to_string());
            named(Case { link_bytes_per_s: *link, ..case }, &format!("l{word}"))
        });
        points = crossed(points, &self.buffer_kib, |case, kib| {
            let packets = Packets { buffer_bytes: kib.map(|kib| kib << 10), ..case.packets };
            let word = kib.map(|kib| format!("b{kib}")).unwrap_or_default();
            named(Case { packets, ..case }, &word)
        });
        points = crossed(points, &self.mtu_bytes, |case, mtu_bytes| {
            let packets = Packets { mtu_bytes: *mtu_bytes, ..case.packets };
            let word = mtu_bytes.map(|bytes| format!("m{bytes}")).unwrap_or_default();
            named(Case { packets, ..case }, &word)
        });
        points = crossed(points, &self.cap, |case, cap| {
            let word = if *cap == Cap::SlowStart { "slow" } else { "" };
            named(Case { cap: *cap, patience_s: self.patience_s, ..case }, word)
        });
        points.into_iter().map(|case| (case, self.contenders())).collect()
    }

    fn contenders(&self) -> Vec<Contender> {
        if self.streams.is_empty() {
            return vec![Contender::Policy(Policy::Pattern), Contender::Qemu(QemuMode::Default)];
        }
        // QEMU allows at most 255 channels.
        let pair = |n: &u16| {
            let channels = u8::try_from(*n).unwrap_or(u8::MAX);
            [Contender::Whimbrel(Some(*n)), Contender::Qemu(QemuMode::Multifd(channels))]
        };
        self.streams.iter().flat_map(pair).collect()
    }
}

fn crossed<T>(points: Vec<Case>, axis: &[T], with: impl Fn(Case, &T) -> Case) -> Vec<Case> {
    points
        .into_iter()
        .flat_map(|case| axis.iter().map(|value| with(case.clone(), value)).collect::<Vec<_>>())
        .collect()
}

/// Returns the case with `word` added to its name, unless it is empty.
fn named(case: Case, word: &str) -> Case {
    let name = if word.is_empty() { case.name.clone() } else { format!("{}-{word}", case.name) };
    Case { name, ..case }
}

/// Returns true if a point was measured already, by all of its contenders, in at least `turns` turns.
pub fn is_measured(results: &Results, (case, contenders): &Point, turns: u32) -> bool {
    let known = results.cases.iter().find(|known| known.case == *case);
    known.is_some_and(|known| contenders.iter().all(|one| known.runs_of(*one).count() >= turns as usize))
}

/// Returns the position of a result among all: figures first, others in the order in which they were measured.
pub fn place(result: &CaseResult) -> usize {
    let all = figures().into_iter().flat_map(|figure| figure.points);
    all.map(|(case, _)| case.name).position(|name| name == result.case.name).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::bench::{Provenance, Run, SCHEMA};

    fn axes() -> Axes {
        Axes {
            qemu: QemuVersion::Newer,
            memory_mib: 512,
            wss_mib: vec![32, 64],
            rate_mib_per_s: vec![0, 40],
            pattern: vec![Pattern::Sequential, Pattern::HotSpot { writes_percent: 90, pages_percent: 10 }],
            link_bytes_per_s: vec![None, Some(125_000_000)],
            streams: vec![1, 4],
            buffer_kib: vec![None, Some(32)],
            mtu_bytes: vec![None, Some(8000)],
            cap: vec![Cap::Unlimited, Cap::SlowStart],
            patience_s: 60,
        }
    }

    #[test]
    fn a_grid_has_each_with_each_of_the_others() {
        let points = axes().points();
        assert_eq!(points.len(), 128);
        let names: BTreeSet<_> = points.iter().map(|(case, _)| case.name.as_str()).collect();
        assert_eq!(names.len(), 128);
        for name in ["grid-w32-r0-lany", "grid-w64-r40-hot-spot-90-10-l1000-b32-m8000-slow"] {
            assert!(names.contains(name), "{names:?}");
        }
        let (case, contenders) = &points[127];
        assert_eq!(
            (case.cap, case.packets.buffer_bytes, case.memory_mib),
            (Cap::SlowStart, Some(32 << 10), 512)
        );
        let names: Vec<_> = contenders.iter().map(Contender::to_string).collect();
        assert_eq!(names, ["whimbrel-1", "multifd-1", "whimbrel-4", "multifd-4"]);
    }

    #[test]
    fn figure_points_are_valid_and_have_unique_names() {
        let points: Vec<_> = figures().into_iter().flat_map(|figure| figure.points).collect();
        assert_eq!(points.len(), 7 * ACTIVE_MIB.len() + KERNELS.len());
        let names: BTreeSet<_> = points.iter().map(|(case, _)| case.name.clone()).collect();
        assert_eq!(names.len(), points.len());
        assert!(points.iter().all(|(case, _)| case.check().is_ok()));
    }

    #[test]
    fn only_new_points_are_measured() {
        let (case, contenders) = axes().points().remove(0);
        let runs = (1..=2).flat_map(|turn| {
            let run = move |contender| Run::new(contender, turn);
            contenders.clone().into_iter().map(run)
        });
        let result = CaseResult { case: case.clone(), made: Provenance::default(), runs: runs.collect() };
        let results = Results { schema: SCHEMA.to_owned(), cases: vec![result] };
        let point = (case.clone(), contenders.clone());
        assert!(is_measured(&results, &point, 2));
        assert!(!is_measured(&results, &point, 3), "too few turns");
        let more = [contenders, vec![Contender::Whimbrel(Some(2))]].concat();
        assert!(!is_measured(&results, &(case.clone(), more), 2), "somebody else takes part");
        assert!(
            !is_measured(&results, &(Case { memory_mib: 1, ..case }, point.1), 2),
            "another case of that name"
        );
    }
}
