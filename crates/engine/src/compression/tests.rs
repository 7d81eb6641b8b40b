use super::*;

const MB: u64 = 1_000_000;
const SAMPLE_NS: u64 = 50_000_000;
const WORKERS: u64 = 4;
/// Processor time of handling a byte, in nanoseconds.
const HANDLING: f64 = 0.5;

/// A simulated host, link and content.
#[derive(Clone, Copy, Debug)]
struct World {
    link_bytes_per_s: f64,
    processors: f64,
    /// Rate at which the destination applies data, in bytes per second.
    peer_bytes_per_s: f64,
    /// Output per input byte, by way.
    ratios: [f64; WAYS.len()],
}

/// Processor time of packing a byte, in nanoseconds, by way.
const PACKING: [f64; WAYS.len()] = [0.0, 1.0, 2.5, 4.0, 16.0];
const TEXT: [f64; WAYS.len()] = [1.0, 0.45, 0.35, 0.32, 0.30];
const NOISE: [f64; WAYS.len()] = [1.0, 1.0, 1.0, 1.0, 1.0];

impl World {
    fn new(link_mb_per_s: u64, processors: f64) -> Self {
        let link_bytes_per_s = (link_mb_per_s * MB) as f64;
        Self { link_bytes_per_s, processors, peer_bytes_per_s: 3e9, ratios: TEXT }
    }

    fn rate(&self, way: usize) -> f64 {
        (self.link_bytes_per_s / self.ratios[way])
            .min(self.processors * 1e9 / (HANDLING + PACKING[way]))
            .min(self.peer_bytes_per_s)
    }

    /// Returns the counters of an interval with this way.
    fn interval(&self, decision: &CompressionDecision) -> CompressionObservation {
        let way = WAYS.iter().position(|way| *way == decision.way).unwrap();
        let seconds = SAMPLE_NS as f64 / 1e9;
        let data = self.rate(way) * seconds;
        let cpu = data * (HANDLING + PACKING[way]);
        let all = SAMPLE_NS as f64 * WORKERS as f64;
        let is_cpu_bound = self.processors * 1e9 / (HANDLING + PACKING[way]) <= self.rate(way) * 1.001;
        let trial = |tried: &Compression| {
            let way = WAYS.iter().position(|way| way == tried).unwrap();
            CompressionTrial {
                way: *tried,
                data_bytes: 262_144,
                compressed_bytes: (262_144.0 * self.ratios[way]) as u64,
                pack_ns: (262_144.0 * PACKING[way]) as u64,
            }
        };
        CompressionObservation {
            interval_ns: SAMPLE_NS,
            workers: WORKERS as u32,
            data_bytes: data as u64,
            wire_bytes: (data * self.ratios[way]) as u64,
            pack_ns: (data * PACKING[way]) as u64,
            cpu_ns: cpu as u64,
            blocked_ns: if is_cpu_bound { 0 } else { (all - cpu) as u64 },
            peer_waited_ns: (all * (1.0 - self.rate(way) / self.peer_bytes_per_s)) as u64,
            idle_ns: (SAMPLE_NS as f64 * self.processors - cpu).max(0.0) as u64,
            trials: decision.try_out.iter().map(trial).collect(),
        }
    }
}

/// Returns the ways that are chosen, sample by sample.
fn run(chooser: &mut CompressionPolicy, world: &World, looks: u32) -> Vec<Compression> {
    let mut decision = CompressionDecision { way: WAYS[chooser.present], ..CompressionDecision::default() };
    (0..looks)
        .map(|_| {
            decision = chooser.decide(&world.interval(&decision));
            decision.way
        })
        .collect()
}

/// Returns the way that is chosen in the end. Where processors are the bottleneck, the policy checks now and then
/// whether the link carries more than before.
fn settles(world: &World) -> Compression {
    let mut chooser = CompressionPolicy::default();
    let ways = run(&mut chooser, world, 200);
    assert!(chooser.is_informed || !chooser.link_is_slow, "what it picks counts");
    let taken = |way: Compression| ways[40..].iter().filter(|one| **one == way).count();
    let most = WAYS.into_iter().max_by_key(|way| taken(*way)).unwrap();
    assert!(taken(most) >= 150, "{ways:?}");
    most
}

#[test]
fn a_link_that_nobody_waits_for_is_left_alone() {
    let world = World::new(100_000, 2.0);
    let mut chooser = CompressionPolicy::default();
    for look in 1..=100 {
        let decision = chooser.decide(&world.interval(&CompressionDecision::default()));
        // It has not reported idle time; at first it may only not have reported it yet.
        let is_informed = look >= BUSY_SAMPLES;
        let nothing =
            CompressionDecision { peer_is_busy: true, is_informed, ..CompressionDecision::default() };
        assert_eq!(decision, nothing, "nothing is even tried out");
    }
}

#[test]
fn pages_are_looked_at_where_the_link_is_slow_and_from_then_on() {
    for (world, slow) in [
        (World::new(118, 2.0), true),
        (World { ratios: NOISE, ..World::new(1_200, 3.5) }, true),
        // Processors are the bottleneck, or the destination.
        (World::new(100_000, 2.0), false),
        (World { peer_bytes_per_s: 5e9, ..World::new(1_800, 1.0) }, false),
        (World { peer_bytes_per_s: 0.9e9, ..World::new(1_200, 3.5) }, false),
    ] {
        let mut chooser = CompressionPolicy::default();
        run(&mut chooser, &world, 10);
        assert_eq!(chooser.link_is_slow, slow, "{world:?}");
        run(&mut chooser, &World { peer_bytes_per_s: 1e12, ..World::new(100_000, 2.0) }, 10);
        assert_eq!(chooser.link_is_slow, slow, "{world:?}");
    }
    let slow = World::new(118, 2.0);
    let mut chooser = CompressionPolicy::default();
    assert!(
        !chooser.decide(&slow.interval(&CompressionDecision::default())).link_is_slow,
        "one look may be wrong"
    );
}

#[test]
fn the_slower_the_link_the_harder_it_is_tried() {
    // 10 Gb/s and one processor: even the cheapest way would take longer than the link does.
    assert_eq!(settles(&World { processors: 0.8, ..World::new(1_200, 0.8) }), Compression::None);
    // 10 Gb/s and enough processors.
    assert_eq!(settles(&World::new(1_200, 3.5)), Compression::Lz4);
    // 1 Gb/s.
    assert_eq!(settles(&World::new(118, 2.0)), Compression::Zstd(3));
    // 100 Mb/s.
    assert_eq!(settles(&World::new(12, 2.0)), Compression::Zstd(7));
}

/// Packing runs beside sending in a long round, but the last round waits for it.
#[test]
fn a_guest_that_stands_still_is_not_kept_waiting_by_hard_ways() {
    let standing = |world: &World| {
        let mut chooser = CompressionPolicy::default();
        run(&mut chooser, world, 60);
        WAYS[chooser.standing]
    };
    // 10 Gb/s: sending takes less than even the cheapest way.
    assert_eq!(standing(&World::new(1_200, 3.5)), Compression::None);
    assert_eq!(standing(&World::new(118, 2.0)), Compression::Lz4);
    assert_eq!(standing(&World::new(12, 2.0)), Compression::Zstd(3));
    assert_eq!(standing(&World { ratios: NOISE, ..World::new(12, 2.0) }), Compression::None);
}

#[test]
fn what_does_not_compress_is_sent_as_it_is() {
    assert_eq!(settles(&World { ratios: NOISE, ..World::new(12, 2.0) }), Compression::None);
}

#[test]
fn a_busy_host_compresses_less() {
    assert_eq!(settles(&World::new(118, 0.4)), Compression::Lz4);
    assert_eq!(settles(&World::new(118, 0.1)), Compression::None);
}

#[test]
fn a_destination_without_a_pause_is_not_burdened() {
    let world = World { peer_bytes_per_s: 0.9e9, ..World::new(1_200, 3.5) };
    let ways = run(&mut CompressionPolicy::default(), &world, 100);
    assert!(ways.iter().all(|way| *way == Compression::None), "{ways:?}");
    // A destination that cannot follow compressed data.
    let world = World { peer_bytes_per_s: 2e9, ..World::new(1_200, 3.5) };
    let ways = run(&mut CompressionPolicy::default(), &world, 30);
    assert!(ways.contains(&Compression::Lz4) && ways[29] == Compression::None, "{ways:?}");
}

/// A destination acknowledges several frames at once, and reports its idle time with them.
#[test]
fn idle_time_reported_in_bursts_counts() {
    let world = World::new(118, 2.0);
    let (mut chooser, mut decision) = (CompressionPolicy::default(), CompressionDecision::default());
    let mut unreported_ns = 0;
    for look in 0..60 {
        let mut observed = world.interval(&decision);
        unreported_ns += observed.peer_waited_ns;
        observed.peer_waited_ns = if look % 3 == 0 { std::mem::take(&mut unreported_ns) } else { 0 };
        decision = chooser.decide(&observed);
        assert!(look < 20 || decision.way == Compression::Zstd(3), "{look}: {decision:?}");
    }
}

#[test]
fn it_follows_a_link_that_changes() {
    let mut chooser = CompressionPolicy::default();
    run(&mut chooser, &World::new(12, 2.0), 60);
    assert_eq!(WAYS[chooser.present], Compression::Zstd(7));
    // No worker waits for a link that became faster; its rate is found out step by step.
    run(&mut chooser, &World::new(118, 2.0), 60);
    assert_eq!(WAYS[chooser.present], Compression::Zstd(3));
    run(&mut chooser, &World::new(12, 2.0), 60);
    assert_eq!(WAYS[chooser.present], Compression::Zstd(7));
    let noise = World { ratios: NOISE, ..World::new(12, 2.0) };
    run(&mut chooser, &noise, 200);
    assert_eq!(WAYS[chooser.present], Compression::None);
}

/// A wait for a processor counts like a wait for the link. Trials would use the resource that is
/// short.
#[test]
fn a_host_without_idle_processors_tries_nothing() {
    let world = World { processors: 1.0, peer_bytes_per_s: 5e9, ..World::new(1_800, 1.0) };
    let mut chooser = CompressionPolicy::default();
    for _ in 0..100 {
        let observed = world.interval(&CompressionDecision::default());
        assert!(observed.blocked_ns > 0 && observed.peer_waited_ns > 0);
        let decision = chooser.decide(&observed);
        assert_eq!((decision.way, decision.try_out), (Compression::None, Vec::new()));
    }
}

/// Memory whose parts differ: a trial may have seen the part that does not compress, and noise behind text is no
/// reason to send the text behind it uncompressed.
#[test]
fn scattered_noise_does_not_stop_compression_of_text() {
    let (text, noise) = (World::new(12, 2.0), World { ratios: NOISE, ..World::new(12, 2.0) });
    let mut chooser = CompressionPolicy::default();
    let ways = run(&mut chooser, &noise, 10);
    assert!(ways.iter().all(|way| *way == Compression::None), "{ways:?}");
    for _ in 0..10 {
        let ways = run(&mut chooser, &text, 10);
        assert!(ways[5..].iter().all(|way| *way != Compression::None), "{ways:?}");
        let ways = run(&mut chooser, &noise, 10);
        assert!(ways.iter().all(|way| *way != Compression::None), "{ways:?}");
    }
}

/// This holds however long the data was different.
#[test]
fn text_behind_much_noise_is_compressed_at_once() {
    let (text, noise) = (World::new(12, 2.0), World { ratios: NOISE, ..World::new(12, 2.0) });
    let mut chooser = CompressionPolicy::default();
    for _ in 0..3 {
        let ways = run(&mut chooser, &text, 60);
        assert!(ways[5..].iter().all(|way| *way != Compression::None), "{ways:?}");
        let ways = run(&mut chooser, &noise, 50);
        assert!(ways[49] == Compression::None, "{ways:?}");
    }
}

/// Text for which the destination has no time: it is known to compress, and is no reason to try all ways again before
/// their time.
#[test]
fn compressible_data_is_not_retried_early_if_it_does_not_pay() {
    let taken = World::new(1_200, 3.5);
    let world = World { peer_bytes_per_s: 0.9e9, ..taken };
    let mut chooser = CompressionPolicy::default();
    run(&mut chooser, &taken, 30);
    run(&mut chooser, &world, 10);
    let mut decision = CompressionDecision { way: WAYS[chooser.present], ..CompressionDecision::default() };
    let mut tries_all = || {
        decision = chooser.decide(&world.interval(&decision));
        assert_eq!(decision.way, Compression::None);
        decision.try_out.len() > 1
    };
    let tried = (0..5 * TRIAL_SAMPLES).filter(|_| tries_all()).count();
    assert!((1..=5).contains(&tried), "{tried}");
}

/// Text, and then noise: the result of a way on the noise is known at the next sample, too.
#[test]
fn changing_content_is_followed_without_oscillation() {
    let mut chooser = CompressionPolicy::default();
    run(&mut chooser, &World::new(118, 2.0), 60);
    let noise = World { ratios: NOISE, ..World::new(118, 2.0) };
    let ways = run(&mut chooser, &noise, 200);
    let changes = ways.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(changes < 20, "{changes}: {ways:?}");
    assert_eq!(ways[199], Compression::None);
}

#[test]
fn what_a_link_may_carry_has_its_bounds() {
    let mut chooser = CompressionPolicy::default();
    run(&mut chooser, &World::new(118, 2.0), 20);
    // An hour of samples in which no worker waits.
    let calm = CompressionObservation {
        blocked_ns: 0,
        ..World::new(118, 2.0)
            .interval(&CompressionDecision { way: Compression::Zstd(3), ..CompressionDecision::default() })
    };
    (0..72_000).for_each(|_| drop(chooser.decide(&calm)));
    let link = chooser.link_bytes_per_s.unwrap();
    assert!(link <= 4.1 * 118e6, "{link}");
    run(&mut chooser, &World::new(118, 2.0), 5);
    assert!((chooser.link_bytes_per_s.unwrap() - 118e6).abs() < 1e6);
}

#[test]
fn an_interval_without_data_changes_nothing() {
    let mut chooser = CompressionPolicy::default();
    run(&mut chooser, &World::new(118, 2.0), 60);
    let before = chooser.clone();
    let decision = chooser.decide(&CompressionObservation {
        interval_ns: SAMPLE_NS,
        workers: 4,
        ..CompressionObservation::default()
    });
    assert_eq!((decision.way, chooser.present), (WAYS[before.present], before.present));
    assert_eq!(chooser.link_bytes_per_s, before.link_bytes_per_s);
}
