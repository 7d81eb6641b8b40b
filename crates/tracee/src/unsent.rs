//! Number of unsent bytes of a socket, for which there is no safe call.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::libc::{self, SIOCOUTQNSD};

/// Returns the number of bytes of a TCP socket that its kernel has not sent yet, not even once.
///
/// # Errors
/// If it is not a TCP socket.
pub fn unsent_bytes(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one int, to a place that outlives the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCOUTQNSD as _, std::ptr::from_mut(&mut bytes)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(bytes.max(0) as u64) }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn bytes_that_a_peer_does_not_read_are_unsent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(unsent_bytes(near.as_fd()).unwrap(), 0);
        near.set_nonblocking(true).unwrap();
        let far = listener.accept().unwrap();
        let bytes = vec![1; 64 << 10];
        while near.write(&bytes).is_ok() {}
        assert!(unsent_bytes(near.as_fd()).unwrap() > 0);
        drop(far);
        let no_socket = std::fs::File::open("/dev/null").unwrap();
        assert!(unsent_bytes(no_socket.as_fd()).is_err());
    }
}
