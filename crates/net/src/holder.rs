//! Frames for a guest that is about to be stopped: they are held, passed on, and delivered here if the guest stays.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tracing::{debug, warn};

use crate::divert::Diversion;
use crate::held::{HeldFrame, MOST_BYTES};

/// Longest wait for room in the tap of a guest that runs.
const ROOM_PATIENCE: Duration = Duration::from_secs(1);
/// Pause before a full tap is tried again.
const ROOM_PAUSE: Duration = Duration::from_micros(200);
/// Pause after which a diversion that was removed has no frames under way.
pub(crate) const UNDER_WAY: Duration = Duration::from_millis(2);

/// Holds the frames of a guest, in a thread.
#[derive(Debug)]
pub struct Holder {
    diversion: Arc<Diversion>,
    kept: Arc<Mutex<Kept>>,
    end: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Kept {
    frames: Vec<HeldFrame>,
    bytes: usize,
    /// Number of frames that were passed on.
    passed_on: usize,
}

impl Holder {
    /// Begins to hold, and passes the frames to `send` as they arrive; it returns false if it can send no more. If that
    /// fails, frames go to the guest by themselves again.
    pub fn start(
        diversion: Diversion,
        mut send: impl FnMut(&[HeldFrame]) -> bool + Send + 'static,
    ) -> io::Result<Self> {
        let (diversion, kept) = (Arc::new(diversion), Arc::<Mutex<Kept>>::default());
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let (from, into, until) = (Arc::clone(&diversion), Arc::clone(&kept), Arc::clone(&end));
        let hold = move || {
            if let Err(error) = hold(&from, &into, &until, &mut send) {
                warn!(%error, "frames for the guest are not held any more");
                drop(from.stop());
            }
        };
        let thread = Some(thread::Builder::new().name("hold".to_owned()).spawn(hold)?);
        Ok(Self { diversion, kept, end, thread })
    }

    /// Returns the number of frames that are kept.
    pub fn count(&self) -> usize {
        lock(&self.kept).frames.len()
    }

    /// Returns the number of frames that were passed on.
    pub fn passed_on(&self) -> usize {
        lock(&self.kept).passed_on
    }

    /// Ends the hold of a guest that runs here again: delivers all frames in their order, and then those that arrived
    /// in between. Returns the number of those that the guest got.
    ///
    /// # Errors
    /// If one of our taps is gone, or the rules cannot be removed: frames that were not delivered are lost.
    pub fn deliver_back(mut self) -> io::Result<usize> {
        self.end();
        let kept = std::mem::take(&mut *lock(&self.kept));
        let mut count = deliver(&self.diversion, &kept.frames);
        // Frames that arrive now follow those that were held: the rules go only when ours have been read.
        count += deliver(&self.diversion, &self.diversion.take()?);
        self.diversion.stop()?;
        loop {
            thread::sleep(UNDER_WAY);
            let late = self.diversion.take()?;
            if late.is_empty() {
                return Ok(count);
            }
            count += deliver(&self.diversion, &late);
        }
    }

    fn end(&mut self) {
        // The counter of a new descriptor has room.
        let _ = rustix::io::write(&*self.end, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.end();
    }
}

fn hold(
    diversion: &Diversion,
    kept: &Mutex<Kept>,
    end: &OwnedFd,
    send: &mut dyn FnMut(&[HeldFrame]) -> bool,
) -> io::Result<()> {
    let mut can_send = true;
    loop {
        let mut waits: Vec<_> = diversion.taps().map(|tap| PollFd::new(tap, PollFlags::IN)).collect();
        waits.push(PollFd::new(end, PollFlags::IN));
        match poll(&mut waits, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ended = waits.last().is_some_and(|end| !end.revents().is_empty());
        let frames = diversion.take()?;
        can_send = can_send && (frames.is_empty() || send(&frames));
        let mut kept = lock(kept);
        kept.passed_on += if can_send { frames.len() } else { 0 };
        for frame in frames {
            if kept.bytes + frame.encoded_bytes() <= MOST_BYTES {
                kept.bytes += frame.encoded_bytes();
                kept.frames.push(frame);
            }
        }
        if is_ended {
            return Ok(());
        }
    }
}

fn lock(kept: &Mutex<Kept>) -> MutexGuard<'_, Kept> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends frames to a guest that runs, and waits for room in its tap. Frames that cannot be sent are lost, and those for
/// which a guest that reads nothing has no room. Returns the number of the others.
fn deliver(diversion: &Diversion, frames: &[HeldFrame]) -> usize {
    let (mut sent, mut until) = (0, Instant::now() + ROOM_PATIENCE);
    for frame in frames {
        let mut result = diversion.send(frame);
        while result.as_ref().is_err_and(is_full) && Instant::now() < until {
            thread::sleep(ROOM_PAUSE);
            result = diversion.send(frame);
        }
        match result {
            Ok(()) => {
                sent += 1;
                until = Instant::now() + ROOM_PATIENCE;
            }
            Err(error) => debug!(%error, "a frame for the guest is lost"),
        }
    }
    sent
}

/// Returns true if the guest's tap has no room at the moment.
pub(crate) fn is_full(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::NOBUFS.raw_os_error())
        || error.kind() == io::ErrorKind::WouldBlock
}
