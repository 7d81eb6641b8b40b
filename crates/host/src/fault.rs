//! Fault points: places where a test may damage the agent, its peer, a QEMU or the link.
//!
//! With `[faults] socket` in the configuration the agent reports each fault point that it reaches to a test harness and
//! waits for the answer; during that time the harness does the damage (it may kill this very agent). Without it, which
//! is how agents run, reaching a fault point does nothing.
//!
//! The points are generated from the engine's transition table, see [`engine::handover`]: before the effects of each
//! transition, between them, and after them. A new transition adds its fault points. Others exist outside the
//! table, because no state changes there: `source/missing-pages` and `destination/missing-pages`, at which the pages
//! for post-copy are named, and `source/NAME/STEP` and `destination/NAME/STEP`, at which a participant of a migration
//! has done a step, and the ones behind it have not.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
};

use tracing::warn;

/// Connection to the harness for fault points, if there is one.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    socket: Option<PathBuf>,
}

impl Faults {
    /// Reports fault points to the harness behind the socket, or does nothing without one.
    pub fn new(socket: Option<PathBuf>) -> Self {
        Self { socket }
    }

    /// Reports a fault point. Returns when the harness answers, at once if there is none.
    pub fn reach(&self, point: impl FnOnce() -> String) {
        let Some(socket) = &self.socket else { return };
        let point = point();
        let received = UnixStream::connect(socket).and_then(|mut stream| {
            writeln!(stream, "{point}")?;
            let mut answer = String::new();
            BufReader::new(stream).read_line(&mut answer)
        });
        if let Err(error) = received {
            warn!(%point, %error, "the test harness behind [faults] socket does not answer");
        }
    }
}

/// Listens at `socket` for an agent's fault points, and returns each with the result of `observe`, which is called while
/// the agent waits there.
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test may fail")]
pub fn observe<T: Send + 'static>(
    socket: &std::path::Path,
    observe: impl Fn() -> T + Send + 'static,
) -> std::sync::mpsc::Receiver<(String, T)> {
    let listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
    let (reached, points) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut point = String::new();
            let mut reader = BufReader::new(stream);
            reader.read_line(&mut point).unwrap();
            if reached.send((point.trim().to_owned(), observe())).is_err() {
                return;
            }
            reader.get_mut().write_all(b"go\n").unwrap();
        }
    });
    points
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use super::*;

    #[test]
    fn waits_until_the_harness_lets_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("faults.sock");
        let harness = UnixListener::bind(&path).unwrap();
        let received = thread::spawn(move || {
            let (stream, _) = harness.accept().unwrap();
            let mut reader = BufReader::new(stream);
            let mut point = String::new();
            reader.read_line(&mut point).unwrap();
            reader.get_mut().write_all(b"go\n").unwrap();
            point
        });
        Faults::new(Some(path)).reach(|| "source/stopped/ready/0".to_owned());
        assert_eq!(received.join().unwrap(), "source/stopped/ready/0\n");
    }

    #[test]
    fn costs_nothing_without_a_harness() {
        Faults::default().reach(|| unreachable!("the name is not even made"));
    }
}
