//! Hosts whose power fails in the middle of a migration, at moments that a seed chooses.

use std::cell::RefCell;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use lab::rack::{HostSpec, Rack, RackHost, WITNESS};
use lab::{Boot, GuestSpec, disk};
use serde_json::Value;
use toml::toml;

use crate::draw::{Generator, seed};
use crate::storage::{CONTENT, guest_with, rack_with_disk};
use crate::support::{VM, assert_whole, begin, guest_at, qemus, with_patience};
use crate::tried::Trial;

/// Seeds in `make rack`: one for each pair of host and witness. Fifty in `make soak`.
const SEEDS: u64 = 4;
const FIRST_SEED: u64 = 32;
/// More bytes than a migration of the guest and its disk sends.
const BYTES: usize = 110 << 20;
/// More rewrites than the guest's writers make of any block.
const VERSIONS: u32 = 400;
/// The directory of images on each host, and the guest's disk at the source.
const IMAGES: &str = "/srv/images";
const DISK: &str = "/srv/images/disk.raw";

/// The case that a seed describes.
#[derive(Debug)]
struct Case {
    /// True if the source's power fails, otherwise the destination's.
    source: bool,
    witness: bool,
    moment: Moment,
}

/// The moment of a power failure. It comes at the end of the migration at the latest.
#[derive(Debug)]
enum Moment {
    /// Number of bytes that are sent.
    Sent(u64),
    /// Time since the guest was stopped.
    Stopped(Duration),
    /// Time since its devices were about to be saved: in the handover.
    Saved(Duration),
}

impl Case {
    fn of(seed: u64) -> Self {
        let mut generator = Generator(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        // The first draws of neighbouring seeds are alike.
        for _ in 0..8 {
            let _ = generator.below(2);
        }
        let moment = match generator.below(3) {
            0 => Moment::Sent(generator.below(BYTES) as u64),
            1 => Moment::Stopped(Duration::from_millis(generator.below(8000) as u64)),
            _ => Moment::Saved(Duration::from_millis(generator.below(2000) as u64)),
        };
        Self { source: seed.is_multiple_of(2), witness: (seed / 2).is_multiple_of(2), moment }
    }

    /// Returns the number of the host whose power fails.
    fn victim(&self) -> usize {
        usize::from(!self.source)
    }

    fn subject(&self) -> String {
        format!(
            "power failure of the {}, {} witness",
            if self.source { "source" } else { "destination" },
            if self.witness { "with a" } else { "without" }
        )
    }
}

/// The guest runs on one host at most; it is whole if it runs. It may be gone only with the host that had it, and then
/// its disk has all writes that the disk had flushed; or an operator has to decide, as the documentation says.
#[test]
#[ignore = "make rack"]
fn the_power_of_either_host_fails() {
    let seeds = if std::env::var_os("WHIMBREL_SOAK").is_some() { 50 } else { SEEDS };
    let first = seed(FIRST_SEED);
    for seed in first..first + seeds {
        let case = Case::of(seed);
        eprintln!("WHIMBREL_SEED={seed}: {case:?}");
        if !fails(&case) {
            return;
        }
    }
}

/// A guest whose disk flushes each write before it acknowledges it.
fn flushing_guest() -> GuestSpec {
    let mut guest = guest_with(DISK, "raw");
    if let Boot::Tiny(load) = &mut guest.boot {
        "load.disk_sync=1".clone_into(&mut load.kernel);
    }
    guest
}

/// Returns false where there can be no rack.
fn fails(case: &Case) -> bool {
    let mut specs: Vec<_> = ["alpha", "beta"].map(|name| HostSpec::new(name).durable()).into();
    if case.witness {
        specs.push(HostSpec::new(WITNESS));
    }
    let Some(mut rack) = rack_with_disk(&specs) else { return false };
    let trial = Trial::begin(&rack, &case.subject()).storage("raw, copied");
    let timeouts = toml! {
        timeouts = { qmp_ms = 60_000, qemu_start_ms = 120_000, standstill_ms = 60_000, peer_silence_ms = 10_000, connect_ms = 5000, give_up_after_ms = 20_000, reclaim_after_ms = 20_000 }
    };
    rack.install_agents(&with_patience(&timeouts)).unwrap();
    rack.hosts[0].shell(&format!("cp /mnt/rack/{CONTENT} {DISK}; sync")).unwrap();
    let serial = rack.start_guest(&rack.hosts[0], &flushing_guest()).unwrap();
    serial.wait_for_disk_writes().unwrap();
    let mut migration = begin(&rack.hosts[0], &rack.hosts[1], &["--disks", "copy", "--bandwidth", "5M"]);
    wait_for_moment(&rack, &mut migration, &case.moment);

    let victim = case.victim();
    let flushed = serial.ticks().unwrap().last().map_or(0, |tick| tick.disk_writes);
    rack.hosts[victim].fail_power().unwrap();
    drop(serial);
    rack.hosts[victim].boot().unwrap();
    let ends = settle(&rack);
    eprintln!("source {}, destination {}; {flushed} writes were flushed", ends[0].state, ends[1].state);
    let in_doubt = is_in_doubt(&ends);
    let owner = if in_doubt {
        run_at_source(&rack, case);
        0
    } else {
        usize::from(ends[0].state == "done")
    };
    let _ = migration.kill();
    let _ = migration.wait();
    if owner == victim {
        assert_gone(&rack, owner, flushed);
    } else {
        assert_runs_at(&rack, owner);
    }
    if ends[0].state == "aborted" {
        wait(|| "the destination has no image".to_owned(), || images(&rack.hosts[1]).is_empty());
    }
    trial.works();
    true
}

/// The state in which a migration has ended on a host, and its standing for users.
#[derive(Debug, Default, Clone)]
struct End {
    state: String,
    standing: String,
}

/// Returns the last migration of a host. `None` if its agent does not answer, null if there was none.
fn last_migration(rack: &Rack, host: &RackHost) -> Option<Value> {
    let list = rack.whimbrel(host, &["migrations"]);
    let list = serde_json::from_str::<Value>(list.stdout.trim()).ok()?;
    Some(list.as_array()?.first().cloned().unwrap_or_default())
}

fn end_at(rack: &Rack, host: &RackHost) -> Option<End> {
    let last = last_migration(rack, host)?;
    let word = |key: &str| last[key].as_str().unwrap_or("none").to_owned();
    Some(End { state: word("state"), standing: word("standing") })
}

/// True if both agents have reported all that they can know, and an operator has to decide at the source: it gave the
/// guest up, and the destination has lost its copy, which may have run.
fn is_in_doubt([source, destination]: &[End; 2]) -> bool {
    source.state == "committed" && source.standing == "in-doubt" && destination.state == "crashed"
}

/// True if no agent does more by itself.
fn is_settled(ends: &[End; 2]) -> bool {
    let [source, destination] = ends;
    let is_over = ["none", "aborted", "returned", "done"].contains(&source.state.as_str());
    let is_over_there =
        ["none", "active", "copy-destroyed", "refused", "crashed"].contains(&destination.state.as_str());
    let is_underway = ends.iter().any(|end| end.standing == "underway");
    is_over_there && !is_underway && (is_over || is_in_doubt(ends))
}

/// Waits until no agent can do more by itself, and returns the ends on both hosts.
fn settle(rack: &Rack) -> [End; 2] {
    let seen = RefCell::new([End::default(), End::default()]);
    let is_over = || {
        let ends = [0, 1].map(|host| end_at(rack, &rack.hosts[host]));
        let [Some(source), Some(destination)] = ends else { return false };
        seen.replace([source, destination]);
        is_settled(&seen.borrow())
    };
    wait(|| format!("the migration ends: {:?}", seen.borrow()), is_over);
    seen.into_inner()
}

/// Decides as the manual says for a destination whose host died: the guest goes on at the source, from its stop.
fn run_at_source(rack: &Rack, case: &Case) {
    assert!(!case.source, "only a destination that lost its copy leaves a doubt");
    let source = &rack.hosts[0];
    assert_eq!(guest_at(rack, source).unwrap()["state"], "in-doubt");
    let decision = ["recover", VM, "--run-here", "--accept-risk"];
    // It asks the registry, in which the destination may have won.
    let overrule: &[&str] = if case.witness { &["--overrule-registry"] } else { &[] };
    let decided = rack.whimbrel(source, &[&decision[..], overrule].concat());
    assert_eq!(decided.code, 0, "{decided:?}");
}

/// Asserts that the guest runs on that host alone, and is whole.
fn assert_runs_at(rack: &Rack, owner: usize) {
    let (host, other) = (&rack.hosts[owner], &rack.hosts[1 - owner]);
    let runs = || guest_at(rack, host).is_some_and(|vm| vm["state"] == "running");
    wait(|| format!("it runs on {}", host.name()), runs);
    assert_eq!((qemus(host), qemus(other)), (1, 0), "{} has it", host.name());
    assert_whole(rack, host).wait_for_disk_writes().unwrap();
}

/// Asserts that the guest has ended with the host that had it, and that its disk there has all that it had flushed.
fn assert_gone(rack: &Rack, owner: usize, flushed: u64) {
    for host in &rack.hosts[..2] {
        wait(|| format!("{} has no QEMU", host.name()), || qemus(host) == 0);
    }
    let host = &rack.hosts[owner];
    let path = match owner {
        0 => DISK.to_owned(),
        _ => format!("{IMAGES}/{}", images(host).join(" and ")),
    };
    let copy = host.directory().join("disk.raw");
    host.get(&path, &copy).unwrap();
    let rewrites = disk::rewrites(&copy, VERSIONS).unwrap();
    assert!(rewrites >= flushed, "{path} on {}: {rewrites} of {flushed} writes", host.name());
}

/// Returns the names of the images on a host.
fn images(host: &RackHost) -> Vec<String> {
    host.run(&["ls", IMAGES]).unwrap().lines().map(str::to_owned).collect()
}

/// Waits longer than most tests: agents give up after their timeouts.
fn wait(what: impl Fn() -> String, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_mins(5);
    while !is_so() {
        assert!(Instant::now() < deadline, "in vain: {}", what());
        thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for the moment of the power failure, or for the end of the migration.
fn wait_for_moment(rack: &Rack, migration: &mut Child, moment: &Moment) {
    let is_in = |progress: &Value, phases: &[&str]| phases.iter().any(|phase| progress["phase"] == *phase);
    let after_stop = ["last-round", "verifying", "device-state", "handover"];
    let has_come = |progress: &Value| match moment {
        Moment::Sent(bytes) => progress["sent_bytes"].as_u64() >= Some(*bytes),
        Moment::Stopped(_) => is_in(progress, &after_stop),
        Moment::Saved(_) => is_in(progress, &after_stop[2..]),
    };
    let is_now = || {
        let last = last_migration(rack, &rack.hosts[0]).unwrap_or_default();
        has_come(&last["progress"]) || migration.try_wait().unwrap().is_some()
    };
    wait(|| "the moment comes".to_owned(), is_now);
    // The moment is what the seed has drawn; there is no event to wait for.
    if let Moment::Stopped(pause) | Moment::Saved(pause) = moment {
        thread::sleep(*pause);
    }
}
