//! Frames for a guest that arrives: those that the source held, then those that the network sends here.
//!
//! Until the guest is announced, frames that arrive here directly are copies of those that the source receives, and are
//! discarded. After the announcement they are kept until the source has sent no frame for a moment ([`Order`]):
//! otherwise frames of one connection would overtake each other.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tracing::{debug, warn};

use crate::divert::Diversion;
use crate::ethernet::Mac;
use crate::held::{HeldFrame, Order};
use crate::holder::{MOST_BYTES, UNDER_WAY, deliver, is_full};

/// Interval of the checks while frames are kept.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000 };

/// Merges the frames for one guest, in a thread. Dropping it before the guest runs ends the diversion.
#[derive(Debug)]
pub struct Merger(MergerInput);

/// Takes the frames that the source held; can be used for as long as they may arrive.
#[derive(Clone, Debug)]
pub struct MergerInput(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    diversion: Diversion,
    state: Mutex<State>,
    wake: OwnedFd,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Frames of the source that the guest's tap cannot have yet.
    waiting: VecDeque<HeldFrame>,
    waiting_bytes: usize,
    /// Frames of the source that the guest got.
    delivered: usize,
}

#[derive(Debug)]
enum Phase {
    /// Frames that arrive here directly are discarded.
    Discarding,
    /// Frames that arrive here directly are kept.
    Keeping(Order),
    /// Frames go to the guest by themselves.
    Released,
    /// The guest does not arrive.
    Ended,
}

impl Merger {
    /// Begins to discard diverted frames.
    pub fn start(diversion: Diversion) -> io::Result<Self> {
        let state =
            State { phase: Phase::Discarding, waiting: VecDeque::new(), waiting_bytes: 0, delivered: 0 };
        let wake = eventfd(0, EventfdFlags::CLOEXEC)?;
        let shared = Arc::new(Shared { diversion, state: Mutex::new(state), wake });
        let merged = Arc::clone(&shared);
        let merge = move || {
            if let Err(error) = merged.merge() {
                warn!(%error, "frames for the guest are not held any more");
                drop(merged.diversion.stop());
            }
        };
        thread::Builder::new().name("merge".to_owned()).spawn(merge)?;
        Ok(Self(MergerInput(shared)))
    }

    /// Returns the input for frames of the source.
    pub fn input(&self) -> MergerInput {
        self.0.clone()
    }

    /// Returns the interfaces to which frames are diverted, each with the address of its card.
    pub fn interfaces(&self) -> impl Iterator<Item = (&str, Mac)> {
        self.0.0.diversion.interfaces()
    }

    /// Begins to keep diverted frames, and delivers the frames that the source has sent: the state of the guest's cards is
    /// loaded, and the guest is announced a moment from now.
    pub fn announced(&self) -> io::Result<()> {
        let mut state = self.0.0.lock();
        if matches!(state.phase, Phase::Discarding) {
            self.0.0.diversion.take()?;
            let now = Instant::now();
            let mut order = Order::new(now);
            state.waiting.iter().for_each(|frame| order.from_source(now, frame));
            state.phase = Phase::Keeping(order);
            state.flush(&self.0.0.diversion)?;
        }
        Ok(())
    }

    /// Records that the guest runs, or stays paused here. The diversion ends by itself from now on.
    pub fn guest_runs(&self) {
        if let Phase::Keeping(order) = &mut self.0.0.lock().phase {
            order.runs(Instant::now());
        }
        self.0.0.wake();
    }
}

impl Drop for Merger {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        if !state.is_left_to_itself() {
            state.phase = Phase::Ended;
        }
        drop(state);
        self.0.0.wake();
    }
}

impl MergerInput {
    /// Delivers frames of the source, at once as far as the guest's tap has room for them. Until the guest is announced
    /// they wait: a QEMU whose network card is not loaded yet reads one frame, and loses it when the card is loaded.
    pub fn deliver(&self, frames: Vec<HeldFrame>) -> io::Result<()> {
        let mut state = self.0.lock();
        if let Phase::Keeping(order) = &mut state.phase {
            for frame in &frames {
                order.from_source(Instant::now(), frame);
            }
        }
        state.wait(frames);
        match state.phase {
            Phase::Discarding | Phase::Ended => Ok(()),
            Phase::Keeping(_) | Phase::Released => state.flush(&self.0.diversion),
        }
    }

    /// Returns the number of frames of the source that the guest got.
    pub fn delivered(&self) -> usize {
        self.0.lock().delivered
    }
}

impl State {
    /// Returns true if the guest is here, so that the diversion ends without further calls.
    fn is_left_to_itself(&self) -> bool {
        match &self.phase {
            Phase::Keeping(order) => order.is_running(),
            Phase::Released => true,
            Phase::Discarding | Phase::Ended => false,
        }
    }

    /// Appends frames of the source, as far as they may be kept.
    fn wait(&mut self, frames: Vec<HeldFrame>) {
        for frame in frames {
            if self.waiting_bytes + frame.encoded_bytes() <= MOST_BYTES {
                self.waiting_bytes += frame.encoded_bytes();
                self.waiting.push_back(frame);
            }
        }
    }

    /// Delivers the frames of the source as far as the guest's tap has room.
    fn flush(&mut self, diversion: &Diversion) -> io::Result<()> {
        while let Some(frame) = self.waiting.pop_front() {
            match diversion.send(&frame) {
                Ok(()) => {
                    self.waiting_bytes -= frame.encoded_bytes();
                    self.delivered += 1;
                }
                Err(error) if is_full(&error) => {
                    self.waiting.push_front(frame);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // A counter that is full wakes the thread, too.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn merge(&self) -> io::Result<()> {
        loop {
            let timeout = matches!(self.lock().phase, Phase::Keeping(_)).then_some(&TICK);
            let mut waits: Vec<_> =
                self.diversion.taps().map(|tap| PollFd::new(tap, PollFlags::IN)).collect();
            waits.push(PollFd::new(&self.wake, PollFlags::IN));
            match poll(&mut waits, timeout) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if waits.last().is_some_and(|wake| !wake.revents().is_empty()) {
                rustix::io::read(&self.wake, &mut [0; 8])?;
            }
            let mut state = self.lock();
            if matches!(state.phase, Phase::Ended) {
                return self.diversion.stop();
            }
            let direct = self.diversion.take()?;
            if !matches!(state.phase, Phase::Keeping(_)) {
                continue;
            }
            state.flush(&self.diversion)?;
            let has_waiting = !state.waiting.is_empty();
            let Phase::Keeping(order) = &mut state.phase else { continue };
            for frame in direct {
                order.direct(frame);
            }
            let now = Instant::now();
            if order.is_due(now) && !has_waiting || order.is_overdue(now) {
                let direct = order.take_direct();
                (state.waiting, state.waiting_bytes) = (VecDeque::new(), 0);
                return self.release(state, &direct);
            }
        }
    }

    /// Delivers the direct frames, and ends the diversion.
    fn release(&self, mut state: MutexGuard<'_, State>, direct: &[HeldFrame]) -> io::Result<()> {
        let count = direct.len();
        deliver(&self.diversion, direct)?;
        self.diversion.stop()?;
        // Frames that were diverted before the rules went follow; those that the guest gets by itself may overtake them.
        loop {
            thread::sleep(UNDER_WAY);
            let late = self.diversion.take()?;
            if late.is_empty() {
                break;
            }
            deliver(&self.diversion, &late)?;
        }
        state.phase = Phase::Released;
        debug!(
            from_source = state.delivered,
            direct = count,
            "frames that waited for the guest were delivered"
        );
        Ok(())
    }
}
