//! The project's own targets ("bars"), and the check whether the results meet them.

use super::bar::Bar;
use super::case::{Case, Program};
use super::contender::{Contender, FreePageHints, PageCompression, Policy, QemuMode};
use super::result::{CaseResult, Measured, Quantity, Results, Run, Spread};
use super::{converging, nas};

const OURS: Contender = Contender::Whimbrel(None);

/// Returns all bars for which there are results.
pub fn bars(results: &Results) -> Vec<Bar> {
    let case = |name: &str| results.cases.iter().find(|result| result.case.name == name);
    let mut bars = Vec::new();
    for name in ["idle", "idle-7.2"] {
        bars.extend(case(name).into_iter().flat_map(|result| {
            [
                ratio(result, Quantity::Total, "total", 0.4),
                ratio(result, Quantity::Cpu, "CPU", 0.4),
                no_longer(result, Quantity::Brownout, "brownout"),
            ]
        }));
    }
    bars.extend(case("busy").into_iter().map(|result| no_longer(result, Quantity::Brownout, "brownout")));
    bars.push(scans(&results.cases));
    bars.extend(["idle-tls", "idle-tls-7.2"].into_iter().filter_map(case).flat_map(|result| {
        [ratio(result, Quantity::Total, "total", 0.5), ratio(result, Quantity::Cpu, "CPU", 0.6)]
    }));
    for (name, most_ms) in
        [("tiny-idle", 10.0), ("tiny-128-150", 10.0), ("devices-idle", 20.0), ("devices-128-150", 20.0)]
    {
        bars.extend(case(name).into_iter().flat_map(|result| {
            [
                at_most(result, Quantity::Standstill, "downtime with `stop` and `cont`", most_ms),
                no_longer(result, Quantity::Downtime, "downtime"),
            ]
        }));
    }
    bars.push(downtimes(&results.cases));
    bars.extend(results.cases.iter().filter(|result| result.case.client).flat_map(silence));
    bars.push(growth(&results.cases));
    bars.extend(["idle-1g", "idle-100m"].into_iter().filter_map(case).flat_map(link));
    bars.extend(results.cases.iter().filter(|result| is_writing(&result.case)).map(lost_work));
    // Reductions: their costs where they are of no use, and their benefits where they are.
    let both = |(what, of, beside, quantity, most)| {
        move |result: &CaseResult| beside_another(result, what, of, beside, quantity, most)
    };
    let (plain, xbzrle) = (Contender::Compressed(PageCompression::None), Contender::Qemu(QemuMode::Xbzrle));
    let zstd = Contender::Qemu(QemuMode::MultifdZstd(2));
    let (everything, dispensable) =
        (Contender::FreePageHints(FreePageHints::None), Contender::FreePageHints(FreePageHints::All));
    for (name, bar) in [
        ("packing-random", ("total", OURS, plain, Quantity::Total, 1.05)),
        ("packing-random", ("CPU", OURS, plain, Quantity::Cpu, 1.05)),
        ("packing", ("total", OURS, plain, Quantity::Total, 1.05)),
        ("packing", ("CPU", OURS, plain, Quantity::Cpu, 1.05)),
        ("debian-1g", ("total", OURS, zstd, Quantity::Total, 1.0)),
        ("debian-1g", ("sent", OURS, zstd, Quantity::Sent, 1.0)),
        ("debian-1g", ("CPU", OURS, zstd, Quantity::Cpu, 1.0)),
        ("debian-100m", ("sent", OURS, zstd, Quantity::Sent, 0.5)),
        ("changes-1g", ("total", OURS, xbzrle, Quantity::Total, 1.0)),
        ("changes-1g", ("sent", OURS, xbzrle, Quantity::Sent, 1.0)),
        ("cache-0", ("total", dispensable, everything, Quantity::Total, 0.15)),
        ("cache-0", ("sent", dispensable, everything, Quantity::Sent, 0.07)),
    ] {
        bars.push(case(name).and_then(both(bar)));
    }
    bars.extend(case("converge-1g").into_iter().flat_map(converging::bars).map(Some));
    let here_and_there = case("converge-hot-1g").into_iter().flat_map(converging::bars_here_and_there);
    bars.extend(here_and_there.map(Some));
    bars.extend(nas::bars(results).into_iter().map(Some));
    bars.push(agents_memory(&results.cases));
    bars.into_iter().flatten().collect()
}

fn is_writing(case: &Case) -> bool {
    case.name.starts_with("write-") && matches!(case.program, Program::Load { rate_mib_per_s: 1.., .. })
}

fn ratio(result: &CaseResult, quantity: Quantity, word: &str, most: f64) -> Option<Bar> {
    let (best, _) = result.best_of_qemu(quantity)?;
    let ratio = result.ratio(OURS, best, quantity)?;
    Some(Bar {
        what: format!("{}: {word}, ratio to QEMU's best", result.case.name),
        wanted: format!("≤ {most}"),
        found: format!("{ratio:.2} (of {best})"),
        held: ratio <= most,
    })
}

/// Compares a contender with another one, whichever of QEMU's ways is the best.
fn beside_another(
    result: &CaseResult,
    word: &str,
    of: Contender,
    other: Contender,
    quantity: Quantity,
    most: f64,
) -> Option<Bar> {
    let ratio = result.ratio(of, other, quantity)?;
    Some(Bar {
        what: format!("{}: {word} of {of}, ratio to {other}", result.case.name),
        wanted: format!("≤ {most}"),
        found: format!("{ratio:.3}"),
        held: ratio <= most,
    })
}

fn no_longer(result: &CaseResult, quantity: Quantity, word: &str) -> Option<Bar> {
    let (best, theirs_ms) = result.best_of_qemu(quantity)?;
    let ours_ms = result.spread(OURS, quantity)?.median;
    Some(Bar {
        what: format!("{}: {word}, beside QEMU's best", result.case.name),
        wanted: format!("≤ {theirs_ms:.1} ms ({best})"),
        found: format!("{ours_ms:.1} ms"),
        held: ours_ms <= theirs_ms,
    })
}

fn at_most(result: &CaseResult, quantity: Quantity, word: &str, most_ms: f64) -> Option<Bar> {
    let found_ms = result.spread(OURS, quantity)?.median;
    Some(Bar {
        what: format!("{}: {word}", result.case.name),
        wanted: format!("≤ {most_ms} ms"),
        found: format!("{found_ms:.1} ms"),
        held: found_ms <= most_ms,
    })
}

fn measured(result: &CaseResult) -> impl Iterator<Item = &Measured> {
    result.runs_of(OURS).filter_map(|run| run.measured.as_ref())
}

/// Checks that a limited link is fully used.
fn link(result: &CaseResult) -> [Option<Bar>; 2] {
    let Some(link) = result.case.link_bytes_per_s.map(|rate| rate as f64) else { return [None, None] };
    let name = &result.case.name;
    let used = Spread::of(measured(result).filter_map(|m| Some(m.first_round_bytes_per_s? / link)));
    let time = Spread::of(measured(result).map(|m| m.total_ms / (m.sent_bytes as f64 / link * 1e3)));
    let used = used.map(|used| Bar {
        what: format!("{name}: share of the rate used in the first round"),
        wanted: "≥ 95%".to_owned(),
        found: format!("{:.1}%", used.median * 100.0),
        held: used.median >= 0.95,
    });
    let time = time.map(|time| Bar {
        what: format!("{name}: total, to bytes / rate"),
        wanted: "≤ 1.03".to_owned(),
        found: format!("{:.3}", time.median),
        held: time.median <= 1.03,
    });
    [used, time]
}

/// Returns the largest value over all cases, with the name of its case.
fn worst(cases: &[CaseResult], of: impl Fn(&CaseResult) -> Option<f64>) -> Option<(f64, &str)> {
    cases
        .iter()
        .filter_map(|result| Some((of(result)?, result.case.name.as_str())))
        .max_by(|a, b| a.0.total_cmp(&b.0))
}

/// Checks that a client waits hardly longer than the guest is stopped: in nearly all moves, and never much longer.
fn silence(result: &CaseResult) -> [Option<Bar>; 2] {
    const FEW_MS: f64 = 15.0;
    const MOST_MS: f64 = 50.0;
    let beyond: Vec<_> =
        result.runs_of(OURS).filter_map(|run| Quantity::SilenceBeyondDowntime.of(run)).collect();
    let within = beyond.iter().filter(|ms| **ms <= FEW_MS).count();
    let name = &result.case.name;
    let nearly_all = (!beyond.is_empty()).then(|| Bar {
        what: format!("{name}: moves with a silence of at most downtime + {FEW_MS} ms"),
        wanted: "≥ 94%".to_owned(),
        found: format!("{within} of {}", beyond.len()),
        held: within * 100 >= beyond.len() * 94,
    });
    let longest = Spread::of(beyond).map(|spread| Bar {
        what: format!("{name}: longest silence beyond the downtime"),
        wanted: format!("≤ {MOST_MS} ms"),
        found: format!("{:.1} ms", spread.most),
        held: spread.most <= MOST_MS,
    });
    [nearly_all, longest]
}

/// Checks the duration of a dirty scan of a stopped guest.
fn scans(cases: &[CaseResult]) -> Option<Bar> {
    let scan = |result: &CaseResult| {
        let gib = result.case.memory_mib as f64 / 1024.0;
        // There are two scans.
        let scans = measured(result).filter_map(|m| Some(m.last_scans_ms? / 2.0 / gib));
        Some(Spread::of(scans)?.median)
    };
    let (found, name) = worst(cases, scan)?;
    Some(Bar {
        what: "a scan for dirty pages, to a GiB of memory, all cases".to_owned(),
        wanted: "≤ 3 ms".to_owned(),
        found: format!("{found:.2} ms ({name})"),
        held: found <= 3.0,
    })
}

/// Counts the cases in which the downtime is longer than with the best of QEMU's ways.
fn downtimes(cases: &[CaseResult]) -> Option<Bar> {
    let ratio = |result: &CaseResult| {
        let (best, _) = result.best_of_qemu(Quantity::Downtime)?;
        result.ratio(OURS, best, Quantity::Downtime)
    };
    let (most, name) = worst(cases, ratio)?;
    let all = cases.iter().filter_map(ratio).count();
    let longer = cases.iter().filter_map(ratio).filter(|ratio| *ratio > 1.0).count();
    Some(Bar {
        what: "downtime, ratio to QEMU's best, all cases".to_owned(),
        wanted: "≤ 1".to_owned(),
        found: format!("more in {longer} of {all}, at most {most:.2} ({name})"),
        held: longer == 0,
    })
}

/// Compares the time for each byte of the largest guest with that of a guest with an eighth of its memory.
fn growth(cases: &[CaseResult]) -> Option<Bar> {
    let of = |memory_mib: u64| {
        let name = format!("size-{memory_mib}");
        let result = cases.iter().find(|result| result.case.name == name)?;
        // Without the start, which does not grow with the memory.
        let ms = measured(result).map(|m| (m.total_ms - m.start_ms) / m.sent_bytes as f64);
        Some(Spread::of(ms)?.median)
    };
    let found = of(8192)? / of(1024)?;
    Some(Bar {
        what: "time for each byte of a guest of 8 GiB, to one of 1 GiB".to_owned(),
        wanted: "≤ 1.1".to_owned(),
        found: format!("{found:.2}"),
        held: found <= 1.1,
    })
}

/// Checks that the guest's program loses no more work than under QEMU's own migration.
fn lost_work(result: &CaseResult) -> Option<Bar> {
    no_longer(result, Quantity::Lost, "lost work")
}

/// Checks that agents stay small: the largest share of the allowed memory, over all cases. Endless rounds, which only
/// the laboratory requests, have an endless report.
fn agents_memory(cases: &[CaseResult]) -> Option<Bar> {
    let may_have = |result: &CaseResult| f64::from(64 << 20) + (result.case.memory_mib << 20) as f64 / 1000.0;
    let share = |result: &CaseResult| {
        // A migration that continues as long as possible is no migration that a user wants.
        let ends = |run: &&Run| run.contender != Contender::Policy(Policy::Endless);
        let measured = result.runs.iter().filter(ends).filter_map(|run| run.measured.as_ref());
        let peaks = measured.flat_map(|m| [m.source_agent_peak_bytes, m.destination_agent_peak_bytes]);
        Some(peaks.max()? as f64 / may_have(result))
    };
    let (share, name) = worst(cases, share)?;
    Some(Bar {
        what: "memory of an agent at its peak, all cases".to_owned(),
        wanted: "≤ 64 MiB + 0.1% of the guest's".to_owned(),
        found: format!("{:.0}% of that ({name})", share * 100.0),
        held: share <= 1.0,
    })
}
