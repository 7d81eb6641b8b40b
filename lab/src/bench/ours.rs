//! Migrating the guest with Whimbrel, as a user would.

use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::contender::{Contender, Policy};
use super::mover::{Destination, MoveInput, MoveOutcome, Moved};
use super::statistics::{CompressionStats, DowntimeParts, StopCircumstances};
use super::subject::VM;
use super::usage::processes_of;
use crate::error::{Error, Result};
use crate::migrating::{MigrationReport, is_qemu, migrate_while, number, serial_of};
use crate::monitor::Monitor;
use crate::nas::PATIENCE;
use crate::run::run;

/// Interval of checks whether a pass has begun, where the rate grows with each.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Migrates the guest with Whimbrel.
pub(super) fn by_whimbrel(stage: &MoveInput<'_>, contender: Contender) -> Result<MoveOutcome> {
    if contender != Contender::Policy(Policy::Frozen) {
        return moved(stage, contender);
    }
    // It is stopped before, and resumes only by a command.
    let mut from = stage.source.monitor()?;
    from.command("stop", &json!({}))?;
    let stopped = from.wait_for_event(|event| event.name == "STOP")?;
    let MoveOutcome::Moved(moved) = moved(stage, contender)? else { return Ok(MoveOutcome::GivenUp) };
    let mut to = Monitor::connect(&moved.serial.socket().with_file_name("lab.sock"))?;
    to.command("cont", &json!({}))?;
    let resumed = to.wait_for_event(|event| event.name == "RESUME")?;
    let downtime = Duration::from_micros(resumed.at_unix_us.saturating_sub(stopped.at_unix_us));
    Ok(MoveOutcome::Moved(Box::new(Moved {
        downtime,
        events: Some(downtime),
        parts: None,
        resumed: SystemTime::UNIX_EPOCH + Duration::from_micros(resumed.at_unix_us),
        ..*moved
    })))
}

fn moved(stage: &MoveInput<'_>, contender: Contender) -> Result<MoveOutcome> {
    let MoveInput { lab, meter, .. } = *stage;
    let neighbours = processes_of(&lab.b, is_qemu)?;
    let migration = migration(stage, contender)?;
    let arrived = processes_of(&lab.b, is_qemu)?.into_iter().find(|pid| !neighbours.contains(pid));
    let used = arrived.map(|pid| meter.read(pid)).transpose()?;
    if !migration.has_moved()? {
        return Ok(MoveOutcome::GivenUp);
    }
    let report = migration.report();
    let is_frozen = contender == Contender::Policy(Policy::Frozen);
    let rounds = report["rounds"].as_array().map_or(&[][..], Vec::as_slice);
    let first = rounds.iter().filter(|round| round["pass"] == 1);
    let sum = |what: &str| first.clone().map(|round| number(round, what)).sum::<Result<u64>>();
    let share = sum("sent_bytes")? as f64 / number(report, "sent_bytes")? as f64;
    let (Some(pid), Some(used)) = (arrived, used) else {
        return Err(Error::Config(format!("the guest that Whimbrel moved has no QEMU: {report}")));
    };
    // The guest's QEMU receives no queries while the guest is watched, so its agent receives none either.
    let serial = serial_of(pid)?;
    Ok(MoveOutcome::Moved(Box::new(Moved {
        total: migration.total()?,
        start: migration.since_request("accepted")?,
        downtime: migration.downtime("total_us")?,
        // A guest that was stopped already has none.
        events: (!is_frozen).then(|| migration.downtime("events_us")).transpose()?,
        parts: Some(DowntimeParts::of(&migration)?),
        last_scans: Some(migration.downtime("last_scans_us")?),
        used,
        resumed: migration.at("running")?,
        first_round: Some((share, Duration::from_micros(sum("duration_us")?))),
        rounds: passes(rounds),
        stop: stop(report),
        has_switched_to_post_copy: (contender == Contender::Policy(Policy::Hybrid))
            .then(|| report["post_copy"].is_object()),
        packing: packing(report),
        serial,
        _destination: Destination::Process(pid),
    })))
}

/// Migrates the guest, and does what the contender and the cap need in the meantime.
fn migration(stage: &MoveInput<'_>, contender: Contender) -> Result<MigrationReport> {
    let MoveInput { lab, agents, case, source, .. } = *stage;
    let mut options = contender.options();
    options.extend(case.cap.in_pass(1).map(|rate| format!("--bandwidth={rate}")));
    let more: Vec<&str> = options.iter().map(String::as_str).collect();
    let limit = |option: String| run(&mut agents.command(&lab.a, &["limit", VM, &option])).map(drop);
    let is_endless = contender == Contender::Policy(Policy::Endless);
    let during_migration = |underway: &Receiver<()>| {
        if is_endless && source.serial().wait_for_nas_end()?.is_some() {
            // The guest may have arrived at this very moment; otherwise this migration is given up.
            let _ = limit(format!("--max-downtime={}", case.downtime_limit_ms()));
        }
        let mut rate = case.cap.in_pass(1);
        while rate.is_some() && underway.recv_timeout(CHECK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let now = rate_now(stage)?;
            if now != rate {
                let word = now.map_or("none".to_owned(), |rate| rate.to_string());
                // The migration may have ended at this very moment.
                let _ = limit(format!("--bandwidth={word}"));
                rate = now;
            }
        }
        Ok(())
    };
    let patience = Duration::from_secs(case.patience_s) + if is_endless { PATIENCE } else { Duration::ZERO };
    migrate_while(agents, &lab.a, &lab.b, VM, &more, patience, during_migration)
}

/// Returns the rate allowed by the case's cap at the migration's progress. Post-copy is not limited, as in QEMU. Before
/// any page is sent, the rate is that of the first pass.
fn rate_now(stage: &MoveInput<'_>) -> Result<Option<u64>> {
    let output = run(&mut stage.agents.command(&stage.lab.a, &["migrations", "--json"]))?;
    let list: Value =
        serde_json::from_str(&output).map_err(|error| Error::Config(format!("{error}: {output}")))?;
    let mut all = list.as_array().into_iter().flatten().map(|one| &one["progress"]);
    let progress = all.find(|progress| progress.is_object());
    let is_post_copy = progress.is_some_and(|progress| progress["phase"] == "post-copy");
    let pass = progress.and_then(|progress| progress["pass"].as_u64()).unwrap_or(0).max(1);
    Ok(if is_post_copy { None } else { stage.case.cap.in_pass(pass) })
}

/// Returns the passes over memory, those with the guest stopped included.
fn passes(rounds: &[Value]) -> u64 {
    let live = rounds.iter().filter_map(|round| round["pass"].as_u64()).max().unwrap_or(0);
    live + rounds.iter().filter(|round| round["stopped"] == true).count() as u64
}

/// Returns the statistics of compression; absent from the report where there was nothing to compress, and nothing to
/// measure.
fn packing(report: &Value) -> Option<CompressionStats> {
    let compression = report["compression"].as_object()?;
    let count = |what: &str| compression.get(what)?.as_u64();
    Some(CompressionStats {
        data_bytes: count("data_bytes")?,
        wire_bytes: count("wire_bytes")?,
        cpu_ms: count("compression_cpu_us")? as f64 / 1e3,
    })
}

/// Returns the observations of the policy, from the trace in the report.
fn stop(report: &Value) -> Option<StopCircumstances> {
    let trace = report["traces"].as_array()?.last()?;
    let is_look = |entry: &&Value| entry["what"] == "round" && entry["observed"]["pass"] != 0;
    let looks: Vec<_> = trace["entries"].as_array()?.iter().filter(is_look).collect();
    let last = looks.last()?;
    Some(StopCircumstances {
        // The first dirty scan follows the pass over all of memory.
        intervals: looks.len() as u64 - 1,
        remaining_pages: last["observed"]["dirty_pages"].as_u64()?,
        needed_pages: needed_pages(report),
        pattern: last["decision"]["pattern"].as_str().map(str::to_owned),
    })
}

/// Returns the pages that post-copy had to send: each once in the first pass, and the remaining pages, which are named
/// one by one.
fn needed_pages(report: &Value) -> Option<u64> {
    let remaining_pages = report["post_copy"]["remaining_pages"].as_u64()?;
    let rounds = report["rounds"].as_array()?.iter().filter(|round| round["stopped"] != true);
    Some(rounds.map(|round| round["data_pages"].as_u64().unwrap_or(0)).sum::<u64>() + remaining_pages)
}

/// Returns a predicate that is true for this program.
pub(super) fn runs(program: &Path) -> impl Fn(&Path) -> bool + '_ {
    move |found| found == program
}
