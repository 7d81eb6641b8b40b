//! A download over one connection of HTTP that is kept: the guest's large file, again and again.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use aws_lc_rs::digest::{Context as Hasher, SHA256};
use serde::Serialize;

use super::arrivals::{Arrivals, PATIENCE, Session, SessionReport};
use crate::environment::Environment;
use crate::error::{Context, Result};
use crate::host::Host;
use crate::http::Connection;

const PORT: u16 = 80;
/// The file, which the guest sends slowly.
const PATH: &str = "/large";

/// Observations on a download.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DownloadReport {
    /// The connection, with the pieces of the file that arrived.
    pub connection: SessionReport,
    /// Number of files that arrived whole, each with the right checksum.
    pub files: u64,
    /// Bytes of all files.
    pub bytes: u64,
}

/// Result of a download's thread.
#[derive(Debug, Default)]
struct Counts {
    files: u64,
    bytes: u64,
}

/// A client that downloads.
#[derive(Debug)]
pub struct Download(Session<Counts>);

impl Download {
    /// Connects from a host to the Debian guest with this address, and begins to download its large file.
    pub fn start(host: &Host, environment: &Environment, address: Ipv4Addr) -> Result<Self> {
        let path = environment.debian_large_digest()?;
        let expected = fs::read_to_string(&path).context(|| format!("cannot read {}", path.display()))?;
        let service = SocketAddr::from((address, PORT));
        let connection = host
            .within(|| Connection::open(service, PATIENCE))?
            .context(|| format!("cannot reach {service}"))?;
        let work = move |record: &mut Arrivals, counts: &mut Counts| {
            download(record, counts, connection, expected.trim())
        };
        Session::start(work).map(Self)
    }

    /// Waits until `pieces` more have arrived.
    ///
    /// # Errors
    /// If the connection breaks first, or is silent for two minutes.
    pub fn wait_for(&self, pieces: usize) -> Result<()> {
        self.0.wait_for(pieces)
    }

    /// Ends the client when the file that arrives at this moment is whole, and returns its observations.
    pub fn finish(self) -> DownloadReport {
        // Its socket has the same patience.
        let (connection, Counts { files, bytes }) = self.0.finish(|| {});
        DownloadReport { connection, files, bytes }
    }
}

fn download(
    record: &mut Arrivals,
    counts: &mut Counts,
    mut connection: Connection,
    expected: &str,
) -> io::Result<()> {
    while !record.is_stopped() {
        let head = connection.ask("GET", PATH, "", "")?;
        if head.status != 200 {
            return Err(io::Error::other(format!("{PATH}: {}", head.status)));
        }
        let mut hasher = Hasher::new(&SHA256);
        connection.read_body(&head, |piece| {
            hasher.update(piece);
            counts.bytes += piece.len() as u64;
            record.record();
        })?;
        let digest = hasher.finish();
        let hex = digest.as_ref().iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
        if hex != expected {
            return Err(io::Error::other(format!("{PATH} arrived with the checksum {hex}")));
        }
        counts.files += 1;
    }
    Ok(())
}
