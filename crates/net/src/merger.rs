//! Frames for a guest that arrives: those that the source held, then those that the network sends here.
//!
//! Until the guest is announced, frames that arrive here directly are copies of those that the source receives, and are
//! discarded. After the announcement they are kept until the source has sent no frame for a moment ([`FrameReorderer`]):
//! otherwise frames of one connection would overtake each other.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tracing::{debug, warn};

use crate::divert::Diversion;
use crate::ethernet::Mac;
use crate::held::{FrameReorderer, HeldFrame, MOST_BYTES};
use crate::holder::{UNDER_WAY, is_full};

/// Longest wait for room in the tap of a guest that runs, since it had some: the guest's user may have paused it.
const OVERDUE: Duration = Duration::from_secs(1);

/// Pause before a full tap is tried again.
const ROOM_PAUSE: Duration = Duration::from_millis(1);

/// Merges the frames for one guest, in a thread. Dropping it before the guest runs ends the diversion.
#[derive(Debug)]
pub struct Merger(MergerHandle);

/// Takes the frames that the source held; can be used for as long as they may arrive.
#[derive(Clone, Debug)]
pub struct MergerHandle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    diversion: Diversion,
    state: Mutex<State>,
    wake: OwnedFd,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// True while the thread delivers what waits.
    is_merging: bool,
    /// Frames that the guest is to get, in this order, as far as its tap cannot have them yet.
    waiting: VecDeque<HeldFrame>,
    waiting_bytes: usize,
    /// Time at which the guest's tap had room for the last time, or at which the guest began to run.
    had_room: Instant,
    /// Frames that the guest got.
    delivered: usize,
}

#[derive(Debug)]
enum Phase {
    /// Frames that arrive here directly are discarded.
    Discarding,
    /// Frames that arrive here directly are kept.
    Keeping(FrameReorderer),
    /// Frames that arrive here directly follow those that wait; the rules go when nothing waits, or at this time.
    Following(Instant),
    /// Frames go to the guest by themselves.
    Released,
    /// The guest does not arrive.
    Ended,
}

impl Merger {
    /// Begins to discard diverted frames.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(diversion: Diversion) -> io::Result<Self> {
        let state = State {
            phase: Phase::Discarding,
            is_merging: true,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            had_room: Instant::now(),
            delivered: 0,
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC)?;
        let shared = Arc::new(Shared { diversion, state: Mutex::new(state), wake });
        let merged = Arc::clone(&shared);
        let merge = move || {
            if let Err(error) = merged.merge() {
                warn!(%error, "frames for the guest are not held any more");
                drop(merged.diversion.stop());
            }
            merged.lock().thread_ends();
        };
        thread::Builder::new().name("merge".to_owned()).spawn(merge)?;
        Ok(Self(MergerHandle(shared)))
    }

    /// Returns the input for frames of the source.
    pub fn handle(&self) -> MergerHandle {
        self.0.clone()
    }

    /// Returns the interfaces to which frames are diverted, each with the address of its card.
    pub fn interfaces(&self) -> impl Iterator<Item = (&str, Mac)> {
        self.0.0.diversion.interfaces()
    }

    /// Begins to keep diverted frames, and delivers the frames that the source has sent: the state of the guest's cards
    /// is loaded, and the guest is announced a moment from now.
    ///
    /// # Errors
    /// If one of our taps is gone.
    pub fn announced(&self) -> io::Result<()> {
        let mut state = self.0.0.lock();
        if matches!(state.phase, Phase::Discarding) {
            self.0.0.diversion.take()?;
            state.announced(Instant::now());
            state.flush(&self.0.0.diversion);
        }
        Ok(())
    }

    /// Records that the guest runs, or stays paused here. The diversion ends by itself from now on, and this returns at
    /// once.
    pub fn guest_runs(self) {
        let now = Instant::now();
        let mut state = self.0.0.lock();
        state.had_room = now;
        if let Phase::Keeping(order) = &mut state.phase {
            order.runs(now);
        }
    }
}

impl Drop for Merger {
    fn drop(&mut self) {
        self.0.0.lock().end_unless_here();
        self.0.0.wake();
    }
}

impl MergerHandle {
    /// Delivers frames of the source, at once as far as the guest's tap has room for them. Until the guest is announced
    /// they wait: a QEMU whose network card is not loaded yet reads one frame, and loses it when the card is loaded.
    /// When the diversion has ended, this waits for room.
    pub fn deliver(&self, frames: Vec<HeldFrame>) {
        let mut state = self.0.lock();
        state.take_from_source(frames, Instant::now());
        state.flush(&self.0.diversion);
        while !state.is_merging && matches!(state.phase, Phase::Released) && !state.waiting.is_empty() {
            drop(state);
            thread::sleep(ROOM_PAUSE);
            state = self.0.lock();
            state.flush(&self.0.diversion);
        }
    }

    /// Returns the number of frames that the guest got, of the source and of those that arrived here directly.
    pub fn delivered(&self) -> usize {
        self.0.lock().delivered
    }
}

impl State {
    fn announced(&mut self, now: Instant) {
        if !self.is_merging {
            self.phase = Phase::Released;
            return;
        }
        let mut order = FrameReorderer::new(now);
        self.waiting.iter().for_each(|frame| order.record_from_source(now, frame));
        self.phase = Phase::Keeping(order);
    }

    /// Ends, unless the guest is here, so that the diversion ends without further calls.
    fn end_unless_here(&mut self) {
        if !self.is_here() {
            self.phase = Phase::Ended;
            self.clear();
        }
    }

    /// Returns true if the guest is here to stay.
    fn is_here(&self) -> bool {
        match &self.phase {
            Phase::Keeping(order) => order.is_running(),
            Phase::Following(_) | Phase::Released => true,
            Phase::Discarding | Phase::Ended => false,
        }
    }

    /// Records that nothing is diverted any more.
    fn thread_ends(&mut self) {
        self.is_merging = false;
        // Cards that are not loaded yet get nothing either way.
        if !matches!(self.phase, Phase::Discarding | Phase::Ended) {
            self.phase = Phase::Released;
        }
    }

    /// Takes frames of the source.
    fn take_from_source(&mut self, frames: Vec<HeldFrame>, now: Instant) {
        match &mut self.phase {
            Phase::Ended => return,
            Phase::Keeping(order) => frames.iter().for_each(|frame| order.record_from_source(now, frame)),
            Phase::Discarding | Phase::Following(_) | Phase::Released => {}
        }
        self.wait(frames, now);
    }

    /// Takes frames that arrived here directly.
    fn direct(&mut self, frames: Vec<HeldFrame>, now: Instant) {
        match &mut self.phase {
            Phase::Discarding | Phase::Ended => {}
            Phase::Keeping(order) => {
                for frame in frames {
                    order.direct(frame);
                }
                if order.is_due(now) {
                    let direct = order.take_direct();
                    let (from_source, count) = (self.delivered, direct.len());
                    debug!(from_source, direct = count, "delivers the frames that arrived here directly");
                    self.phase = Phase::Following(now + OVERDUE);
                    self.wait(direct, now);
                }
            }
            Phase::Following(_) | Phase::Released => self.wait(frames, now),
        }
    }

    /// Appends frames, as far as they may be kept.
    fn wait(&mut self, frames: Vec<HeldFrame>, now: Instant) {
        if self.waiting.is_empty() {
            self.had_room = now;
        }
        for frame in frames {
            if self.waiting_bytes + frame.encoded_bytes() <= MOST_BYTES {
                self.waiting_bytes += frame.encoded_bytes();
                self.waiting.push_back(frame);
            }
        }
    }

    /// Delivers the frames that wait, as far as the guest's tap has room. Frames that cannot be sent are lost, and all
    /// of them if a guest that runs leaves no room for long.
    fn flush(&mut self, diversion: &Diversion) {
        if matches!(self.phase, Phase::Discarding) {
            return;
        }
        while let Some(frame) = self.waiting.pop_front() {
            match diversion.send(&frame) {
                Ok(()) => {
                    self.delivered += 1;
                    self.had_room = Instant::now();
                }
                Err(error) if is_full(&error) => {
                    self.waiting.push_front(frame);
                    break;
                }
                Err(error) => debug!(%error, "a frame for the guest is lost"),
            }
            self.waiting_bytes -= frame.encoded_bytes();
        }
        if !self.waiting.is_empty() && self.is_here() && self.had_room.elapsed() >= OVERDUE {
            debug!(frames = self.waiting.len(), "the guest does not read its frames; they are lost");
            self.clear();
        }
    }

    fn clear(&mut self) {
        (self.waiting, self.waiting_bytes) = (VecDeque::new(), 0);
    }

    /// Returns the time at which the thread has to act without further events, if there is one.
    fn acts_at(&self, now: Instant) -> Option<Instant> {
        let due = match &self.phase {
            Phase::Keeping(order) => order.due_at(),
            Phase::Following(until) => Some(*until),
            Phase::Discarding | Phase::Released | Phase::Ended => return None,
        };
        // Room in the guest's tap is no event. A guest that does not run makes none.
        let room = (!self.waiting.is_empty() && self.is_here()).then(|| now + ROOM_PAUSE);
        [due, room].into_iter().flatten().min()
    }

    /// Returns true if the rules are to go.
    fn is_delivered(&self, now: Instant) -> bool {
        matches!(self.phase, Phase::Following(until) if self.waiting.is_empty() || now >= until)
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

    /// Merges until the rules are gone and nothing waits. Nothing sleeps while the state is locked.
    fn merge(&self) -> io::Result<()> {
        loop {
            self.wait()?;
            let mut state = self.lock();
            if matches!(state.phase, Phase::Ended) {
                drop(state);
                return self.diversion.stop();
            }
            let direct = self.diversion.take()?;
            let now = Instant::now();
            state.direct(direct, now);
            state.flush(&self.diversion);
            if state.is_delivered(now) {
                drop(state);
                return self.release();
            }
        }
    }

    /// Waits until frames arrive, or until it is time to act.
    fn wait(&self) -> io::Result<()> {
        let now = Instant::now();
        let timeout = self.lock().acts_at(now).map(|at| at.saturating_duration_since(now));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut waits: Vec<_> = self.diversion.taps().map(|tap| PollFd::new(tap, PollFlags::IN)).collect();
        waits.push(PollFd::new(&self.wake, PollFlags::IN));
        match poll(&mut waits, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if waits.last().is_some_and(|wake| !wake.revents().is_empty()) {
            // Another thread may have woken this one again: there is nothing to learn from the number.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
        Ok(())
    }

    /// Ends the diversion, and delivers the frames that wait. Frames that were diverted before the rules went follow;
    /// those that the guest gets by itself may overtake them.
    fn release(&self) -> io::Result<()> {
        self.diversion.stop()?;
        loop {
            thread::sleep(UNDER_WAY);
            let mut state = self.lock();
            let late = self.diversion.take()?;
            let is_last = late.is_empty();
            state.direct(late, Instant::now());
            state.flush(&self.diversion);
            if is_last && state.waiting.is_empty() {
                // Under the same lock, so that frames of the source do not wait for a thread that is gone.
                state.thread_ends();
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ethernet::compose;

    fn frame(number: u8) -> HeldFrame {
        let card = Mac([0x52, 0x54, 0, 0, 0, 1]);
        let frame = compose(card, Mac([2; 6]), None, 0x0800, &[number; 40]);
        HeldFrame { card, header: [0; 10], frame }
    }

    #[test]
    fn direct_frames_wait_until_the_source_is_silent() {
        let now = Instant::now();
        let mut state = State {
            phase: Phase::Discarding,
            is_merging: true,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            had_room: now,
            delivered: 0,
        };
        state.announced(now);
        state.direct(vec![frame(20)], now);
        state.take_from_source(vec![frame(11)], now);
        if let Phase::Keeping(order) = &mut state.phase {
            order.runs(now);
        }
        state.direct(vec![frame(21)], now);
        assert_eq!(state.waiting, [frame(11)]);
        state.direct(Vec::new(), now + OVERDUE);
        assert_eq!(state.waiting, [frame(11), frame(20), frame(21)]);
        state.take_from_source(vec![frame(12)], now + OVERDUE);
        assert_eq!(state.waiting.len(), 4, "a late one is not lost");
    }
}
