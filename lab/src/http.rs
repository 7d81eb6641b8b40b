//! The part of HTTP/1.1 that the laboratory's clients need: one connection that carries one request after another.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Longest head of an answer.
const HEAD_BYTES: u64 = 64 << 10;
/// Status of an answer after which the connection has another protocol: it has no body.
pub(crate) const SWITCHING_PROTOCOLS: u16 = 101;
/// Bytes of a body read at once.
const PIECE_BYTES: usize = 64 << 10;

/// A connection that is kept, and never opened again.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: BufReader<TcpStream>,
}

/// The head of an answer; its body has to be read next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) body_bytes: u64,
    /// The target of a redirection.
    pub(crate) location: Option<String>,
}

impl Connection {
    /// Connects. Silence of the service for longer than `patience` is an error, now and later.
    pub(crate) fn open(service: SocketAddr, patience: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&service, patience)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Returns the socket.
    pub(crate) fn socket(&self) -> &TcpStream {
        self.stream.get_ref()
    }

    /// Sends a request, with additional `headers` (lines that end with CRLF), and reads the head of the answer.
    pub(crate) fn ask(&mut self, method: &str, path: &str, headers: &str, body: &str) -> io::Result<Head> {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: lab\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        read_head(&mut self.stream)
    }

    /// Reads a body, and passes each piece to `piece` on arrival.
    pub(crate) fn read_body(&mut self, head: &Head, mut piece: impl FnMut(&[u8])) -> io::Result<()> {
        let mut buffer = vec![0; PIECE_BYTES];
        let mut left = head.body_bytes;
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            match self.stream.read(&mut buffer[..most]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    piece(&buffer[..read]);
                    left -= read as u64;
                }
                // A read of a socket with a time limit is not repeated by itself.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads bytes of a body until `bytes` is full.
    pub(crate) fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.stream.read_exact(bytes)
    }

    /// Sends a request and reads the answer's body, up to a limit in bytes. Any status but success is an error.
    pub(crate) fn request(
        &mut self,
        method: &str,
        path: &str,
        body: &str,
        most_bytes: u64,
    ) -> io::Result<Vec<u8>> {
        let head = self.ask(method, path, "", body)?;
        if !(200..300).contains(&head.status) {
            return Err(io::Error::other(format!("{method} {path}: {}", head.status)));
        }
        if head.body_bytes > most_bytes {
            return Err(io::Error::other(format!("{method} {path}: an answer of {} bytes", head.body_bytes)));
        }
        let mut answer = Vec::new();
        self.read_body(&head, |piece| answer.extend_from_slice(piece))?;
        Ok(answer)
    }
}

fn read_head(stream: &mut impl BufRead) -> io::Result<Head> {
    let mut stream = stream.take(HEAD_BYTES);
    let first = line(&mut stream)?;
    let status = first.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
    let status = status.ok_or_else(|| io::Error::other(format!("no answer of HTTP/1.1: {first}")))?;
    let (mut length, mut location) = (None, None);
    loop {
        let line = line(&mut stream)?;
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().ok(),
            "location" => location = Some(value.to_owned()),
            "connection" if value.eq_ignore_ascii_case("close") => {
                return Err(io::Error::other("the service wants to close the connection"));
            }
            _ => {}
        }
    }
    let length = length.or((status == SWITCHING_PROTOCOLS).then_some(0));
    let body_bytes = length.ok_or_else(|| io::Error::other("the answer has no length"))?;
    Ok(Head { status, body_bytes, location })
}

fn line(stream: &mut impl BufRead) -> io::Result<String> {
    let mut line = Vec::new();
    stream.read_until(b'\n', &mut line)?;
    if line.pop() != Some(b'\n') {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read() {
        let head = |text: &str| read_head(&mut BufReader::new(text.as_bytes()));
        let found = head("HTTP/1.1 302 Found\r\nLocation: /x\r\ncontent-length: 7\r\n\r\nrest").unwrap();
        assert_eq!(found, Head { status: 302, body_bytes: 7, location: Some("/x".to_owned()) });
        let changed = head("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n").unwrap();
        assert_eq!(changed, Head { status: SWITCHING_PROTOCOLS, body_bytes: 0, location: None });
        for wrong in [
            "",
            "HTTP/1.1 200 OK\r\n",
            "HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n",
            "HTTP/1.1 2\r\n\r\n",
            "HTTP/1.1 200 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: Close\r\n\r\n",
        ] {
            assert!(head(wrong).is_err(), "{wrong}");
        }
        assert!(head(&format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\n", "x".repeat(1 << 17))).is_err());
    }
}
