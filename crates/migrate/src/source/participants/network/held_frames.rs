//! Held frames on their way to the destination.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use link::transport::{ConnectionHandle, MessageSender};
use net::{Diversion, HeldFrame, Holder};
use proto::Purpose;
use tracing::info;

use super::pieces;
use crate::source::participants::participant::Environment;
use host::peers;

/// Longest wait for a destination that reads no frames.
const SEND_PATIENCE: Duration = Duration::from_secs(5);
/// Time for which frames are passed on after the guest runs at the destination: switches know its new place by then.
const LATE_FRAMES: Duration = Duration::from_millis(300);

/// Connection for held frames. It is opened while the guest runs, so that its stop does not wait for that.
pub(super) struct FramesConnection {
    sender: Box<dyn MessageSender>,
    end: EndOnDrop,
    is_lost: Arc<AtomicBool>,
}

/// Ends a connection: the thread that watches it keeps one of its halves.
struct EndOnDrop(Arc<dyn ConnectionHandle>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.shutdown();
    }
}

impl FramesConnection {
    /// Connects to the destination.
    pub(super) fn open(environment: &Environment) -> Result<Self, String> {
        let Environment { context, terms, .. } = environment;
        let purpose = Purpose::Frames { migration: terms.migration.clone() };
        let connection = peers::connect(context, &terms.destination, None, purpose)
            .map_err(|error| crate::chain(&error))?;
        let end = EndOnDrop(connection.handle());
        let (mut receiver, sender) = connection.split();
        let is_lost = Arc::<AtomicBool>::default();
        let lost = Arc::clone(&is_lost);
        // The destination sends nothing here.
        let watch = move || {
            while receiver.recv(None).is_ok() {}
            lost.store(true, Ordering::Relaxed);
        };
        let watch = thread::Builder::new().name("frames".to_owned()).spawn(watch);
        watch.map_err(|error| crate::chain(&error))?;
        Ok(Self { sender, end, is_lost })
    }

    /// Returns true if the connection was lost: it does not outlive a cut of the link.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }

    /// Begins to hold frames, and to send them.
    pub(super) fn hold(self, diversion: Diversion) -> io::Result<HoldingConnection> {
        let Self { mut sender, end, .. } = self;
        let send = move |frames: &[HeldFrame]| {
            pieces(frames).iter().all(|piece| {
                sender.set_deadline(Some(Instant::now() + SEND_PATIENCE));
                let sent = sender.send_blob(piece);
                if let Err(error) = &sent {
                    info!(error = crate::chain(error), "no more held frames are sent to the destination");
                }
                sent.is_ok()
            })
        };
        Ok(HoldingConnection { holder: Holder::start(diversion, send)?, end })
    }
}

/// Frames that are held, and the connection on which they are sent. Dropping it sends the frames that have arrived, and
/// then ends the connection: the order of the fields.
pub(super) struct HoldingConnection {
    holder: Holder,
    end: EndOnDrop,
}

impl HoldingConnection {
    /// Returns the number of frames that were sent so far.
    pub(super) fn sent(&self) -> usize {
        self.holder.passed_on()
    }

    /// Delivers the frames to the guest, which runs here again. Returns their number.
    pub(super) fn deliver_back(self) -> io::Result<usize> {
        // A send that waits for the destination would keep the guest waiting.
        drop(self.end);
        self.holder.deliver_back()
    }

    /// Sends the frames that arrive in the next moments, too, and then ends the hold.
    pub(super) fn pass_on_late_frames(self) {
        thread::sleep(LATE_FRAMES);
        drop(self);
    }
}
