//! Connection to a monitor's socket with a deadline.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{QmpError, remaining};

/// Connects without ever blocking past the deadline: when the backlog of a held monitor is full, a
/// blocking `connect` would wait for ever.
pub(crate) fn connect_by(path: &Path, deadline: Instant) -> Result<UnixStream, QmpError> {
    let failed = |source: io::Error| QmpError::Connect { path: path.to_owned(), source };
    let address = SocketAddrUnix::new(path).map_err(|errno| failed(errno.into()))?;
    loop {
        let socket: OwnedFd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(|errno| failed(errno.into()))?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false).map_err(failed)?;
                return Ok(stream);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => {
                if remaining(deadline).is_none() {
                    return Err(QmpError::Busy { path: path.to_owned() });
                }
                // There is no event to wait for: the kernel does not report that a backlog has
                // emptied.
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(errno) => return Err(failed(errno.into())),
        }
    }
}
