//! A link between two hosts, emulated in user space: rate, delay, jitter, loss and cuts, each changeable while it runs.
//!
//! The kernel's own emulation (netem) is not everywhere. Here each host gets a tap device; four threads carry packets
//! between the two, one that receives and one that sends in each direction:
//!
//! ```text
//! tap a ──► receive: lost? cut? full? when due? ──► queue ──► send when due ──► tap b      and the same from b to a
//! ```
//!
//! Loss and jitter come from a seeded generator, so that a run's decisions can be repeated packet by packet. Packets
//! are never reordered: jitter makes a packet late, and those behind it wait, as in a queue.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};
use whimbrel_guest_load::mix;

use crate::addresses::Direction;
use crate::error::{Context, Result};
use crate::host::Host;

/// Largest packet. Larger than Ethernet's, so that fewer are handled for the same data.
const MTU: u16 = 9000;

/// Behaviour of the link, the same both ways.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Bytes that can pass each second in each direction. `None`: no limit.
    pub rate_bytes_per_s: Option<u64>,
    /// Time that a packet is on its way.
    pub delay: Duration,
    /// Largest addition to the delay, evenly distributed.
    pub jitter: Duration,
    /// The share of packets lost, 0 to 1.
    pub loss: f64,
    /// Bytes that wait at most in each direction; packets beyond are dropped, as by a switch.
    pub queue_bytes: usize,
    /// Start of the generator that decides on loss and jitter.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            rate_bytes_per_s: None,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            loss: 0.0,
            queue_bytes: 16 << 20,
            seed: 1,
        }
    }
}

/// Packets counted in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PacketCounts {
    /// Delivered.
    pub delivered: u64,
    /// Bytes of those.
    pub delivered_bytes: u64,
    /// Lost by the generator's decision.
    pub lost: u64,
    /// Swallowed by a cut.
    pub cut: u64,
    /// Dropped because too much waited, or because the receiving device was not up.
    pub dropped: u64,
}

/// A running emulated link. It ends, and its devices vanish, when this is dropped.
#[derive(Debug)]
pub struct Emulator {
    settings: Arc<Mutex<Settings>>,
    wires: [Arc<Wire>; 2],
    threads: Vec<JoinHandle<()>>,
}

/// One direction.
struct Wire {
    from: Arc<SyncDevice>,
    to: Arc<SyncDevice>,
    /// Written to when the link ends, so that the receiving thread wakes.
    stop: rustix::fd::OwnedFd,
    stopping: AtomicBool,
    cut: AtomicBool,
    queue: Mutex<Queue>,
    changed: Condvar,
    delivered: AtomicU64,
    delivered_bytes: AtomicU64,
    lost: AtomicU64,
    swallowed: AtomicU64,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    packets: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    /// Time at which the last accepted packet has left the sender.
    sent_until: Option<Instant>,
}

impl Emulator {
    /// Makes a device of this name in both hosts, and the link between them.
    pub fn start(a: &Host, b: &Host, device: &str, settings: Settings) -> Result<Self> {
        let seed = settings.seed;
        let settings = Arc::new(Mutex::new(settings));
        let (tap_a, tap_b) = (tap(a, device)?, tap(b, device)?);
        let wires = [Wire::new(&tap_a, &tap_b)?, Wire::new(&tap_b, &tap_a)?];
        let mut threads = Vec::new();
        for (n, wire) in wires.iter().enumerate() {
            let (receiver, sender) = (Arc::clone(wire), Arc::clone(wire));
            let settings = Arc::clone(&settings);
            let dice = LossGenerator(mix(seed ^ n as u64));
            threads.push(thread::spawn(move || receiver.receive(&settings, dice)));
            threads.push(thread::spawn(move || sender.send()));
        }
        Ok(Self { settings, wires, threads })
    }

    /// Changes settings; packets that are on their way already keep their time.
    pub fn change(&self, change: impl FnOnce(&mut Settings)) {
        change(&mut lock(&self.settings));
    }

    /// Cuts one direction, or heals it. Packets on their way when it is cut vanish too.
    pub fn cut(&self, direction: Direction, cut: bool) {
        let wire = self.wire(direction);
        wire.cut.store(cut, Relaxed);
        if cut {
            let mut queue = lock(&wire.queue);
            wire.swallowed.fetch_add(queue.packets.len() as u64, Relaxed);
            *queue = Queue::default();
        }
    }

    /// Returns the counts of one direction.
    pub fn counts(&self, direction: Direction) -> PacketCounts {
        let wire = self.wire(direction);
        PacketCounts {
            delivered: wire.delivered.load(Relaxed),
            delivered_bytes: wire.delivered_bytes.load(Relaxed),
            lost: wire.lost.load(Relaxed),
            cut: wire.swallowed.load(Relaxed),
            dropped: wire.dropped.load(Relaxed),
        }
    }

    fn wire(&self, direction: Direction) -> &Wire {
        match direction {
            Direction::AToB => &self.wires[0],
            Direction::BToA => &self.wires[1],
        }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        for wire in &self.wires {
            wire.stopping.store(true, Relaxed);
            // An event counter accepts a small number at any time.
            let _ = rustix::io::write(&wire.stop, &1_u64.to_ne_bytes());
            drop(lock(&wire.queue));
            wire.changed.notify_all();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Wire")
            .field("queue", &lock(&self.queue).packets.len())
            .finish_non_exhaustive()
    }
}

impl Wire {
    fn new(from: &Arc<SyncDevice>, to: &Arc<SyncDevice>) -> Result<Arc<Self>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Arc::new(Self {
            from: Arc::clone(from),
            to: Arc::clone(to),
            stop: eventfd(0, flags).context(|| "cannot make an event descriptor")?,
            stopping: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            queue: Mutex::default(),
            changed: Condvar::new(),
            delivered: AtomicU64::new(0),
            delivered_bytes: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            swallowed: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }))
    }

    /// Receives packets from the one device until the link ends.
    fn receive(&self, settings: &Mutex<Settings>, mut dice: LossGenerator) {
        let mut buffer = vec![0; usize::from(MTU) + 64];
        while let Ok(true) = self.wait_for_packet() {
            match self.from.recv(&mut buffer) {
                Ok(length) => self.enqueue(&buffer[..length], settings, &mut dice),
                // Taken down, or removed with its namespace: no packet arrives any longer.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }

    fn wait_for_packet(&self) -> io::Result<bool> {
        let mut files = [PollFd::new(&*self.from, PollFlags::IN), PollFd::new(&self.stop, PollFlags::IN)];
        match poll(&mut files, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(!self.stopping.load(Relaxed)),
            Err(error) => Err(error.into()),
        }
    }

    /// Decides whether a packet is dropped, and otherwise when it is due.
    fn enqueue(&self, packet: &[u8], settings: &Mutex<Settings>, dice: &mut LossGenerator) {
        let settings = lock(settings).clone();
        // The dice are thrown for every packet, so that decisions depend on its number alone.
        let (loss, late) = (dice.throw(), dice.throw());
        if self.cut.load(Relaxed) {
            self.swallowed.fetch_add(1, Relaxed);
            return;
        }
        if loss < settings.loss {
            self.lost.fetch_add(1, Relaxed);
            return;
        }
        let mut queue = lock(&self.queue);
        if queue.bytes + packet.len() > settings.queue_bytes {
            self.dropped.fetch_add(1, Relaxed);
            return;
        }
        let now = Instant::now();
        let begins = queue.sent_until.map_or(now, |until| until.max(now));
        let sending = settings.rate_bytes_per_s.map_or(Duration::ZERO, |rate| {
            Duration::from_nanos((packet.len() as u64).saturating_mul(1_000_000_000) / rate.max(1))
        });
        queue.sent_until = Some(begins + sending);
        let due = begins + sending + settings.delay + settings.jitter.mul_f64(late);
        queue.bytes += packet.len();
        queue.packets.push_back((due, packet.to_vec()));
        self.changed.notify_one();
    }

    /// Hands packets to the other device when they are due.
    fn send(&self) {
        let mut queue = lock(&self.queue);
        while !self.stopping.load(Relaxed) {
            let now = Instant::now();
            match queue.packets.front() {
                None => queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some((due, _)) if *due > now => {
                    let wait = *due - now;
                    queue = self
                        .changed
                        .wait_timeout(queue, wait)
                        .map_or_else(|poisoned| poisoned.into_inner().0, |(queue, _)| queue);
                }
                Some(_) => {
                    let Some((_, packet)) = queue.packets.pop_front() else { continue };
                    queue.bytes -= packet.len();
                    drop(queue);
                    // Counted before the send: a receiver that has a packet finds it counted.
                    self.delivered.fetch_add(1, Relaxed);
                    self.delivered_bytes.fetch_add(packet.len() as u64, Relaxed);
                    if self.to.send(&packet).is_err() {
                        self.delivered.fetch_sub(1, Relaxed);
                        self.delivered_bytes.fetch_sub(packet.len() as u64, Relaxed);
                        self.dropped.fetch_add(1, Relaxed);
                    }
                    queue = lock(&self.queue);
                }
            }
        }
    }
}

/// A generator of numbers from 0 to 1.
#[derive(Debug)]
struct LossGenerator(u64);

impl LossGenerator {
    fn throw(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(1);
        (mix(self.0) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Makes a tap device in a host. It lives as long as the result.
fn tap(host: &Host, name: &str) -> Result<Arc<SyncDevice>> {
    let device = host
        .within(|| DeviceBuilder::new().layer(Layer::L2).name(name).mtu(MTU).build_sync())?
        .context(|| format!("cannot make the device {name} in {}", host.namespace()))?;
    device.set_nonblocking(true).context(|| "cannot make a device non-blocking")?;
    // Done here rather than by the builder: whatever that does with addresses, the link must be up in the end.
    host.run(&["ip", "link", "set", "dev", name, "up"])?;
    Ok(Arc::new(device))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is guarded is always whole: nothing in between panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
