//! A WebSocket (RFC 6455) over which numbered messages are echoed.

use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Duration;

use super::arrivals::{Arrivals, PATIENCE, Session, SessionReport};
use crate::error::{Context, Result};
use crate::host::Host;
use crate::http::{Connection, SWITCHING_PROTOCOLS};

const PORT: u16 = 8080;
/// Time from an answer to the next message.
const PAUSE: Duration = Duration::from_millis(10);
/// Headers of the request, with the nonce of the RFC's example: nothing here depends on a secret one.
const UPGRADE: &str = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
                       Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
/// First byte of a frame: a whole message of text.
const TEXT: u8 = 0x81;
/// Bit of a frame's second byte: the content is masked, as that of a client has to be.
const MASKED: u8 = 0x80;
/// Longest content whose length is in the second byte.
const MOST_BYTES: usize = 125;
/// Mask of our frames. Any value is allowed.
const MASK: [u8; 4] = *b"mask";

/// A client with an open WebSocket.
#[derive(Debug)]
pub struct WebSocket(Session<()>);

impl WebSocket {
    /// Connects from a host to the Debian guest with this address, and begins to send messages, each one when the one
    /// before it was echoed.
    pub fn start(host: &Host, address: Ipv4Addr) -> Result<Self> {
        let service = SocketAddr::from((address, PORT));
        let connection = host.within(|| open(service))?.context(|| format!("no WebSocket at {service}"))?;
        Session::start(move |record, (): &mut ()| echo(record, connection)).map(Self)
    }

    /// Waits until `messages` more were echoed.
    ///
    /// # Errors
    /// If the connection breaks first, or is silent for two minutes.
    pub fn wait_for(&self, messages: usize) -> Result<()> {
        self.0.wait_for(messages)
    }

    /// Ends the client, and returns its observations.
    pub fn finish(self) -> SessionReport {
        // Its socket has the same patience.
        self.0.finish(|| {}).0
    }
}

fn open(service: SocketAddr) -> io::Result<Connection> {
    let mut connection = Connection::open(service, PATIENCE)?;
    let head = connection.ask("GET", "/", UPGRADE, "")?;
    if head.status == SWITCHING_PROTOCOLS {
        Ok(connection)
    } else {
        Err(io::Error::other(format!("the answer has the status {}", head.status)))
    }
}

fn echo(record: &mut Arrivals, mut connection: Connection) -> io::Result<()> {
    for number in 0_u64.. {
        if record.is_stopped() {
            break;
        }
        let message = format!("message {number}");
        connection.socket().write_all(&frame(message.as_bytes())?)?;
        let mut head = [0; 2];
        connection.read_exact(&mut head)?;
        let mut answer = vec![0; usize::from(head[1])];
        connection.read_exact(&mut answer)?;
        if head[0] != TEXT || answer != message.as_bytes() {
            let answer = String::from_utf8_lossy(&answer);
            return Err(io::Error::other(format!("{message:?} was answered by {answer:?} ({:#x})", head[0])));
        }
        record.record();
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Composes the frame of a short message.
fn frame(message: &[u8]) -> io::Result<Vec<u8>> {
    let length = u8::try_from(message.len()).ok().filter(|length| usize::from(*length) <= MOST_BYTES);
    let length = length.ok_or(io::ErrorKind::InvalidInput)?;
    let mut frame = vec![TEXT, MASKED | length];
    frame.extend(MASK);
    frame.extend(message.iter().zip(MASK.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_its_length_and_is_masked() {
        assert_eq!(frame(b"mask!").unwrap(), [0x81, 0x85, b'm', b'a', b's', b'k', 0, 0, 0, 0, b'!' ^ b'm']);
        assert!(frame(&[0; 125]).is_ok() && frame(&[0; 126]).is_err() && frame(&[0; 300]).is_err());
    }
}
