//! Suites that `make bench` measures.

use super::case::{Case, Program};
use super::contender::{Contender, FreePageHints, PageCompression, Policy, QemuMode, Restraints};
use crate::environment::QemuVersion;
use crate::nas::Nas;
use crate::spec::{LoadMode, Pattern};

/// Cases that belong together.
#[derive(Clone, Debug)]
pub struct Suite {
    /// Its name.
    pub name: &'static str,
    /// The subject.
    pub about: &'static str,
    /// The cases, each with its contenders.
    pub cases: Vec<(Case, Vec<Contender>)>,
}

/// Converts the rate of a link from Mb/s to bytes per second.
pub(crate) const fn megabits(per_s: u64) -> u64 {
    per_s * 1_000_000 / 8
}

const OURS: Contender = Contender::Whimbrel(None);
const PATTERN: Contender = Contender::Policy(Policy::Pattern);
const HYBRID: Contender = Contender::Policy(Policy::Hybrid);
const DEFAULT: Contender = Contender::Qemu(QemuMode::Default);
const MULTIFD_2: Contender = Contender::Qemu(QemuMode::Multifd(2));
const MULTIFD_4: Contender = Contender::Qemu(QemuMode::Multifd(4));
const ZSTD: Contender = Contender::Qemu(QemuMode::MultifdZstd(2));
const ZSTD_4: Contender = Contender::Qemu(QemuMode::MultifdZstd(4));
const XBZRLE: Contender = Contender::Qemu(QemuMode::Xbzrle);
const POST_COPY: Contender = Contender::Qemu(QemuMode::PostCopy);
const AUTO: Contender = Contender::Qemu(QemuMode::AutoConverge);

/// Returns a guest that runs a kernel of class W a number of times, or for ever, on a link of 1 Gb/s.
pub(crate) fn nas_case(kernel: &str, runs: Option<u32>) -> Case {
    Case { name: format!("nas-{kernel}"), memory_mib: 256, ..case_of_class("W", kernel, runs) }
}

/// Returns the same with class A: four to sixteen times the work, and up to 450 MiB that are written over and over.
pub(super) fn large_nas_case(kernel: &str, runs: Option<u32>) -> Case {
    Case { name: format!("nas-{kernel}-a"), memory_mib: 768, ..case_of_class("A", kernel, runs) }
}

fn case_of_class(class: &str, kernel: &str, runs: Option<u32>) -> Case {
    Case {
        program: Program::Nas(Nas { runs, ..Nas::forever(&kernel.to_uppercase(), class) }),
        link_bytes_per_s: Some(megabits(1_000)),
        ..Case::idle("", QemuVersion::Newer)
    }
}

/// Returns all suites, in the order in which they are measured.
#[expect(clippy::too_many_lines, reason = "a list of cases")]
pub fn suites() -> Vec<Suite> {
    use QemuVersion::{Installed, Newer};
    let idle = |name: &str| Case::idle(name, Newer);
    let everybody = || [vec![Contender::NoMigration], Contender::all()].concat();
    let few = || vec![Contender::NoMigration, OURS, DEFAULT, MULTIFD_2, POST_COPY];

    let debian = Case { program: Program::Debian, memory_mib: 512, ..idle("debian") };
    let idle_suite = vec![
        (idle("idle"), everybody()),
        (Case::idle("idle-7.2", Installed), everybody()),
        (
            Case { tls: true, ..idle("idle-tls") },
            vec![Contender::NoMigration, OURS, DEFAULT, MULTIFD_2, MULTIFD_4, ZSTD, ZSTD_4, POST_COPY],
        ),
        (
            Case { tls: true, ..Case::idle("idle-tls-7.2", Installed) },
            vec![Contender::NoMigration, OURS, DEFAULT, MULTIFD_2],
        ),
        (Case { memfd: true, ..idle("idle-memfd") }, few()),
        (idle("busy").unpaced(), few()),
        (debian, vec![OURS, DEFAULT, MULTIFD_2, MULTIFD_4, ZSTD, XBZRLE, POST_COPY]),
    ];

    let streams = [1, 2, 4]
        .into_iter()
        .flat_map(|n| [Contender::Whimbrel(Some(n)), Contender::Qemu(QemuMode::Multifd(n as u8))]);
    let streams: Vec<_> = streams.collect();
    let stream_suite =
        vec![(idle("streams"), streams.clone()), (Case { tls: true, ..idle("streams-tls") }, streams)];

    let devices = |name: &str| Case { devices: true, ..idle(name) }.sized(512, 200);
    let downtime = vec![
        (idle("tiny-idle").sized(256, 100), few()),
        (idle("tiny-128-150").sized(256, 140).writing(128, 150, LoadMode::Random), few()),
        (devices("devices-idle"), few()),
        (devices("devices-128-150").writing(128, 150, LoadMode::Random), few()),
    ];

    let mut writing = Vec::new();
    for (wss, rate) in [16, 64, 128].into_iter().flat_map(|wss| [20, 80, 150].map(|rate| (wss, rate))) {
        let case = |mode: LoadMode, word: &str| {
            idle(&format!("write-{wss}-{rate}-{word}")).sized(512, 300).writing(wss, rate, mode)
        };
        let contenders = vec![Contender::NoMigration, OURS, DEFAULT, MULTIFD_2];
        writing.push((case(LoadMode::Random, "random"), contenders.clone()));
        // All contenders where the two ways to write differ most, and least; elsewhere only those that send deltas.
        let few = match (wss, rate) {
            (16, 20) | (64, 80) | (128, 150) => [contenders, vec![XBZRLE, POST_COPY]].concat(),
            _ => vec![Contender::NoMigration, OURS, MULTIFD_2, XBZRLE],
        };
        writing.push((case(LoadMode::Few, "few"), few));
    }

    let memfd = idle("write-128-150-memfd").sized(512, 300).writing(128, 150, LoadMode::Random);
    writing.push((Case { memfd: true, ..memfd }, few()));

    let mut links = Vec::new();
    for (megabit, name) in [(10_000, "10g"), (1_000, "1g"), (100, "100m")] {
        let linked = |case: Case| Case { link_bytes_per_s: Some(megabits(megabit)), ..case };
        // A hundredth of the rate: less memory, or the case would need a day.
        let (memory, fill) = if megabit == 100 { (256, 64) } else { (1024, 700) };
        links.push((
            linked(idle(&format!("idle-{name}")).sized(memory, fill)),
            vec![Contender::NoMigration, OURS, DEFAULT, MULTIFD_2, ZSTD],
        ));
        let (wss, rate) = if megabit == 100 { (16, 4) } else { (64, 80) };
        links.push((
            linked(idle(&format!("write-{name}")).sized(memory, fill).writing(wss, rate, LoadMode::Few)),
            vec![Contender::NoMigration, OURS, DEFAULT, MULTIFD_2, XBZRLE, AUTO, POST_COPY],
        ));
    }

    let ways =
        [PageCompression::None, PageCompression::Lz4, PageCompression::Zstd(1), PageCompression::Zstd(3)]
            .map(Contender::Compressed);
    let compressed = |rivals: &[Contender]| [&[Contender::NoMigration, OURS], &ways[..], rivals].concat();
    let mixed = |name: &str| idle(name).noisy(33);
    let mut packing = vec![
        // Cost of the choice where there is nothing to choose.
        (idle("packing-random"), vec![Contender::NoMigration, OURS, ways[0], MULTIFD_2]),
        (mixed("packing"), compressed(&[MULTIFD_2, ZSTD])),
    ];
    for (megabit, name) in [(1_000, "1g"), (100, "100m")] {
        let (memory, fill) = if megabit == 100 { (256, 128) } else { (1024, 700) };
        let case = mixed(&format!("packing-{name}")).sized(memory, fill);
        let case = Case { link_bytes_per_s: Some(megabits(megabit)), ..case };
        packing.push((case, compressed(&[MULTIFD_2, ZSTD, ZSTD_4, XBZRLE])));
        let debian = Case { program: Program::Debian, memory_mib: 512, ..idle(&format!("debian-{name}")) };
        let debian = Case { link_bytes_per_s: Some(megabits(megabit)), ..debian };
        let one = Contender::OneThread(PageCompression::Zstd(1));
        packing.push((debian, [&[OURS, one], &ways[..], &[DEFAULT, ZSTD, ZSTD_4, XBZRLE]].concat()));
    }

    // A few bytes of each page, faster than the link carries pages.
    let case = idle("changes-1g").sized(512, 300).writing(128, 150, LoadMode::Few);
    let case = Case { link_bytes_per_s: Some(megabits(1_000)), patience_s: 30, ..case };
    packing
        .push((case, vec![Contender::NoMigration, OURS, Contender::NoDeltas, MULTIFD_2, XBZRLE, POST_COPY]));

    // Koto et al., figure 3: 2 GB, of which programs use a part, and a file of 2 GB that was read before.
    let soft = [0, 500, 1000, 1500].map(|user| {
        let case = idle(&format!("cache-{user}")).sized(2048, user);
        let case = Case { cache_mib: 2048, link_bytes_per_s: Some(megabits(1_000)), ..case };
        let ours =
            [FreePageHints::None, FreePageHints::Free, FreePageHints::All].map(Contender::FreePageHints);
        (case, [&[Contender::NoMigration, OURS], &ours[..], &[MULTIFD_2]].concat())
    });

    // Koto et al., section 2: the cost for guests that are not migrated.
    let case = idle("noise").sized(2048, 0);
    let case = Case { cache_mib: 2048, link_bytes_per_s: Some(megabits(1_000)), neighbours: true, ..case };
    let noise = (
        case,
        vec![
            Contender::NoMigration,
            OURS,
            Contender::FreePageHints(FreePageHints::All),
            DEFAULT,
            MULTIFD_2,
            ZSTD,
        ],
    );

    // Three guests that compute on two processors: the value of copying that yields (Isci et al., figures 3, 4, 9).
    let pressure =
        Case { neighbours: true, link_bytes_per_s: Some(megabits(1_000)), ..idle("pressure").unpaced() };
    let headlong = Case { name: "pressure-0".to_owned(), guest_wait_percent: Some(0), ..pressure.clone() };
    let crowded = vec![Contender::NoMigration, OURS, DEFAULT, MULTIFD_2];
    let noise = vec![noise, (pressure, crowded.clone()), (headlong, crowded)];

    // The same, with the ways to give way one by one. A guest that only reads, at the link's rate and as fast as
    // copying goes, when every processor is taken; and one that writes, so that scans cost it as well.
    let restrained = [Restraints::None, Restraints::Niceness, Restraints::All].map(Contender::Restrained);
    let restrained = [&[Contender::NoMigration], &restrained[..]].concat();
    let crowded = |name: &str| Case { neighbours: true, ..idle(name).unpaced() };
    let limited = |case: Case| Case { link_bytes_per_s: Some(megabits(1_000)), ..case };
    let writes = Case { neighbours: true, ..idle("restraint-writes").sized(1024, 400) };
    let writes = limited(writes.writing(64, 60, LoadMode::Random));
    let restraint = [limited(crowded("restraint")), crowded("restraint-fast"), writes]
        .map(|case| (case, restrained.clone()));

    // A client that sends a message, waits for the answer, and sends the next one.
    let with_client = |case: Case| Case { client: true, ..case };
    let rivals = [Contender::NoMigration, OURS, Contender::PacketsDropped, DEFAULT, MULTIFD_2];
    let writes = limited(idle("client-writes").sized(512, 200)).writing(64, 60, LoadMode::Random);
    let silence = vec![
        (with_client(idle("client").sized(256, 100)), rivals.to_vec()),
        (
            Case { tracked_connections: 10_000, ..with_client(idle("client-tracked").sized(256, 100)) },
            vec![OURS, DEFAULT],
        ),
        (with_client(writes), [&rivals[..], &[HYBRID, POST_COPY]].concat()),
    ];

    // Faster than the link carries, and without reductions: no number of rounds converges.
    let policies = [Policy::Hybrid, Policy::Drain, Policy::Pattern, Policy::Target, Policy::Rounds];
    let policies = policies.map(Contender::Policy);
    let rivals = [DEFAULT, MULTIFD_2, XBZRLE, AUTO, POST_COPY];
    let case = idle("converge-1g").sized(1024, 400).writing(128, 150, LoadMode::Random);
    let case = Case { link_bytes_per_s: Some(megabits(1_000)), patience_s: 60, ..case };
    let all_alike = (case, [&[Contender::NoMigration], &policies[..], &rivals].concat());
    // As fast, but most of it to a few pages: rounds reduce the dirty pages to about those, and no further.
    let hot_spot = Pattern::HotSpot { writes_percent: 90, pages_percent: 10 };
    let case = idle("converge-hot-1g").sized(512, 160).writing(128, 150, LoadMode::Random);
    let case = Case { link_bytes_per_s: Some(megabits(1_000)), patience_s: 30, ..case.in_pattern(hot_spot) };
    let who = [Policy::Hybrid, Policy::Pattern, Policy::Target].map(Contender::Policy);
    let rivals = [DEFAULT, MULTIFD_2, POST_COPY];
    let convergence = vec![all_alike, (case, [&[Contender::NoMigration], &who[..], &rivals].concat())];

    // Ibrahim et al., table I.
    let policies_of_kernels = [Policy::Pattern, Policy::Endless, Policy::Frozen].map(Contender::Policy);
    let modes_of_kernels = [DEFAULT, Contender::Qemu(QemuMode::Endless), MULTIFD_2, XBZRLE, AUTO, POST_COPY];
    // So many runs that they need much longer than a migration, emulated.
    let small = [("cg", 5), ("ep", 2), ("ft", 4), ("is", 14), ("mg", 3)];
    let who = [&[Contender::NoMigration], &policies_of_kernels[..], &modes_of_kernels].concat();
    let small = small.map(|(kernel, runs)| (nas_case(kernel, Some(runs)), who.clone()));
    let large = [("cg", 3), ("ep", 1), ("ft", 1), ("is", 5), ("mg", 1)];
    let who = [Contender::NoMigration, PATTERN, HYBRID, DEFAULT, AUTO, POST_COPY];
    let large = large.map(|(kernel, runs)| (large_nas_case(kernel, Some(runs)), who.to_vec()));
    let kernels = small.into_iter().chain(large).collect();

    let mut sizes = Vec::new();
    for (memory, fill) in [(256, 128), (512, 320), (1024, 800), (2048, 1750), (4096, 3700), (8192, 7600)] {
        // Allocated when QEMU starts: a virtual machine that runs this may have to request memory from its host, at a
        // cost that does not depend on the migration, but on the memory that was used shortly before.
        sizes.push((
            Case { preallocated: true, ..idle(&format!("size-{memory}")).sized(memory, fill) },
            vec![Contender::NoMigration, OURS, MULTIFD_2],
        ));
    }
    for wss in [0, 8, 32, 128] {
        let case = idle(&format!("dirty-{wss}")).sized(512, 300).writing(wss, 2 * wss, LoadMode::Random);
        sizes.push((case, vec![Contender::NoMigration, OURS, MULTIFD_2]));
    }
    for regions in [2, 8, 32] {
        sizes.push((
            Case { regions, ..idle(&format!("regions-{regions}")).sized(1024, 500) },
            vec![Contender::NoMigration, OURS, MULTIFD_2],
        ));
    }

    vec![
        Suite { name: "idle", about: "Guests that do next to nothing", cases: idle_suite },
        Suite { name: "downtime", about: "Downtime of the guest", cases: downtime },
        Suite { name: "streams", about: "Parallel streams", cases: stream_suite },
        Suite { name: "writing", about: "Guests that write", cases: writing },
        Suite { name: "links", about: "Links with a limit", cases: links },
        Suite {
            name: "packing",
            about: "Content that compresses, and changes of a few bytes",
            cases: packing,
        },
        Suite { name: "soft", about: "Page cache and free memory", cases: soft.into() },
        Suite { name: "noise", about: "What a migration takes from other guests", cases: noise },
        Suite {
            name: "restraint",
            about: "Ways to give way to guests, where no processor is idle",
            cases: restraint.into(),
        },
        Suite { name: "silence", about: "How long a client waits", cases: silence },
        Suite {
            name: "convergence",
            about: "Guests that write faster than the link carries",
            cases: convergence,
        },
        Suite { name: "nas", about: "Kernels of the NAS Parallel Benchmarks", cases: kernels },
        Suite { name: "sizes", about: "How cost grows", cases: sizes },
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_two_cases_have_the_same_name_and_guests_have_room() {
        let mut names = BTreeSet::new();
        for (case, contenders) in suites().into_iter().flat_map(|suite| suite.cases) {
            assert!(names.insert(case.name.clone()), "{}", case.name);
            let is_ours = |one: &Contender| one.is_whimbrel();
            assert!(contenders.iter().any(is_ours), "{}", case.name);
            assert!(case.check().is_ok(), "{}", case.name);
        }
    }
}
