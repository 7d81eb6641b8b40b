//! Images at the destination: created before the VM's QEMU is started, filled while the guest runs at the source,
//! closed before it runs here.
//!
//! An image of any format is written through `qemu-nbd`, which is QEMU's block layer as a program of its own. It
//! bypasses the page cache where the file system permits that, and ends by itself when its last connection does: an
//! agent that dies leaves none behind. It has ended before the guest's QEMU opens the image.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::nbd::{Client, NbdError};

/// Export name of an image.
const EXPORT: &str = "disk";
/// Package with QEMU's tools.
const TOOLS: &str = "QEMU's package of tools (qemu-utils, qemu-img)";
/// Longest time for a server to start, whatever the patience of the caller is.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two checks of a server that starts or ends.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Formats of new images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// The plain bytes; sparse where the file system supports that.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

impl Format {
    /// Returns QEMU's name of the format.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }

    /// Returns the most room, in bytes, that an image needs beside the content, for a disk of `bytes` bytes of which
    /// `content_bytes` have content.
    pub fn overhead_bytes(self, bytes: u64, content_bytes: u64) -> u64 {
        match self {
            Self::Raw => 0,
            // A table of a cluster (64 KiB) for each 512 MiB that have content, two bytes of reference count for each
            // cluster; header, tables of the tables.
            Self::Qcow2 => (bytes >> 13).min(content_bytes) + (content_bytes >> 15) + (1 << 20),
        }
    }

    /// Returns the format with a name.
    pub fn of(name: &str) -> Option<Self> {
        [Self::Raw, Self::Qcow2].into_iter().find(|format| format.as_str() == name)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Error of creating, reading or writing an image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file could not be created.
    #[error("cannot create {path}", path = path.display())]
    Make {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A program could not be run.
    #[error("cannot run {tool}: is {package} installed?")]
    NoTool {
        /// The program.
        tool: &'static str,
        /// Package of the program.
        package: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// A program failed.
    #[error("{tool} failed on {path}: {message}", path = path.display())]
    Tool {
        /// The program.
        tool: &'static str,
        /// Path of the image.
        path: PathBuf,
        /// Output of the program.
        message: String,
    },
    /// The image could not be read.
    #[error("cannot read {path}", path = path.display())]
    Read {
        /// Path of the image.
        path: PathBuf,
        /// Cause.
        source: NbdError,
    },
    /// The image's server failed a request.
    #[error("cannot write {path}", path = path.display())]
    Write {
        /// Path of the image.
        path: PathBuf,
        /// Cause.
        source: NbdError,
    },
}

/// Creates an empty image of `bytes` bytes, a multiple of 512. Fails if the file exists, because it is not this
/// program's then. Nothing remains after an error.
pub fn create(path: &Path, format: Format, bytes: u64) -> Result<(), ImageError> {
    let failed = |source| ImageError::Make { path: path.to_owned(), source };
    // For root and the owner: no other user may read a disk.
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    let made = fill(&file, path, format, bytes).and_then(|()| {
        // The directory entry has to survive a crash of the host, too.
        let directory = path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all());
        match directory {
            // Some file systems cannot sync a directory.
            Err(error)
                if [io::ErrorKind::InvalidInput, io::ErrorKind::Unsupported].contains(&error.kind()) =>
            {
                Ok(())
            }
            synced => synced.map_err(failed),
        }
    });
    if made.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(path);
    }
    made
}

/// Makes sure that the first block of a raw image is no hole; its content stays the same.
///
/// QEMU detects the alignment for direct I/O by reading that block. A hole can be read with any alignment, so that
/// QEMU then assumes the largest one, and refuses to write to an image whose length is no multiple of it.
///
/// # Errors
/// Fails if the image cannot be opened, read or written.
pub fn allocate_first_block(path: &Path) -> Result<(), ImageError> {
    let failed = |source| ImageError::Make { path: path.to_owned(), source };
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
    allocate(&file).and_then(|()| file.sync_all()).map_err(failed)
}

fn allocate(file: &File) -> io::Result<()> {
    const LARGEST_BLOCK_BYTES: u64 = 4096;
    let mut block = vec![0; file.metadata()?.len().min(LARGEST_BLOCK_BYTES) as usize];
    file.read_exact_at(&mut block, 0)?;
    file.write_all_at(&block, 0)
}

fn fill(file: &File, path: &Path, format: Format, bytes: u64) -> Result<(), ImageError> {
    let failed = |source| ImageError::Make { path: path.to_owned(), source };
    if format == Format::Raw {
        file.set_len(bytes).map_err(failed)?;
        allocate(file).map_err(failed)?;
        return file.sync_all().map_err(failed);
    }
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", format.as_str()]);
    command.arg(path).arg(bytes.to_string()).stdin(Stdio::null());
    let done =
        command.output().map_err(|source| ImageError::NoTool { tool: "qemu-img", package: TOOLS, source })?;
    if done.status.success() {
        return file.sync_all().map_err(failed);
    }
    let message = String::from_utf8_lossy(&done.stderr).trim().replace('\n', "; ");
    Err(ImageError::Tool { tool: "qemu-img", path: path.to_owned(), message })
}

/// An image that a `qemu-nbd` has open, for writing or for reading.
#[derive(Debug)]
pub struct Server {
    child: Child,
    path: PathBuf,
    socket: PathBuf,
    timeout: Duration,
    /// Connection that keeps the server alive.
    keeper: Option<Client>,
}

impl Server {
    /// Serves an image for writing on a new socket, to at most `connections` connections at a time. No request takes
    /// longer than `timeout`.
    pub fn start(
        path: &Path,
        format: Format,
        socket: &Path,
        connections: u16,
        timeout: Duration,
    ) -> Result<Self, ImageError> {
        let cache = if can_use_direct_io(path, format) { "none" } else { "writeback" };
        let mut command = Command::new("qemu-nbd");
        command.args(["--format", format.as_str(), "--cache", cache, "--discard", "unmap"]);
        Self::spawn(command, &[path.as_os_str()], path, socket, u32::from(connections), timeout)
    }

    /// Serves an image of this format for reading to one connection. `named` are the arguments by which `qemu-nbd`
    /// opens it; `image` is its name in errors.
    pub(crate) fn start_reading(
        named: &[&str],
        image: &Path,
        format: &str,
        socket: &Path,
        timeout: Duration,
    ) -> Result<Self, ImageError> {
        let start = |cache| {
            let mut command = Command::new("qemu-nbd");
            command.args(["--read-only", "--cache", cache]);
            Self::spawn(command, named, image, socket, 1, timeout)
        };
        if can_use_direct_io(image, Format::of(format).unwrap_or(Format::Qcow2)) {
            match start("none") {
                // It has ended: a backing file of the image may be on a file system without direct I/O.
                Err(ImageError::Tool { .. }) => {}
                started => return started,
            }
        }
        start("writeback")
    }

    fn spawn(
        mut command: Command,
        named: &[impl AsRef<OsStr>],
        path: &Path,
        socket: &Path,
        connections: u32,
        timeout: Duration,
    ) -> Result<Self, ImageError> {
        // The keeper is one more, and so is the flusher.
        let shared = connections.saturating_add(2).to_string();
        let child = command
            .args(["--export-name", EXPORT, "--shared", &shared])
            .arg("--socket")
            .arg(socket)
            .args(named)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|source| ImageError::NoTool { tool: "qemu-nbd", package: TOOLS, source })?;
        let mut server =
            Self { child, path: path.to_owned(), socket: socket.to_owned(), timeout, keeper: None };
        let deadline = Instant::now() + timeout.min(START_TIMEOUT);
        loop {
            match server.client() {
                Ok(keeper) => {
                    server.keeper = Some(keeper);
                    return Ok(server);
                }
                // It accepts connections before it opens the image, and ends if it cannot.
                Err(ImageError::Write { source: NbdError::Connect { .. } | NbdError::Lost(_), .. })
                    if !server.has_ended() && Instant::now() < deadline => {}
                Err(_) if server.has_ended() => return Err(server.failure()),
                Err(error) => return Err(error),
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Opens a connection to write the image.
    pub fn client(&self) -> Result<Client, ImageError> {
        self.client_for(None)
    }

    /// Opens a connection that can query this context.
    pub(crate) fn client_for(&self, context: Option<&str>) -> Result<Client, ImageError> {
        let client = Client::connect(&self.socket, EXPORT, context, self.timeout);
        client.map_err(|source| ImageError::Write { path: self.path.clone(), source })
    }

    /// Returns the path of the image.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Flushes all writes to stable storage.
    pub fn flush(&self) -> Result<(), ImageError> {
        self.flusher().flush()
    }

    /// Returns a handle that can flush, and does not keep the server alive.
    pub fn flusher(&self) -> Flusher {
        Flusher { path: self.path.clone(), socket: self.socket.clone(), timeout: self.timeout }
    }

    /// Flushes all writes to stable storage and closes the image; all connections must have ended. No process has the
    /// image open afterwards.
    pub fn finish(mut self) -> Result<(), ImageError> {
        self.flush()?;
        self.keeper = None;
        let deadline = Instant::now() + self.timeout;
        while !self.has_ended() {
            if Instant::now() >= deadline {
                let message = "it does not exit: a connection is still open".to_owned();
                return Err(ImageError::Tool { tool: "qemu-nbd", path: self.path.clone(), message });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        if self.child.wait().is_ok_and(|status| status.success()) { Ok(()) } else { Err(self.failure()) }
    }

    fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Returns the error with the output of the server, which has ended.
    fn failure(&mut self) -> ImageError {
        let mut message = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            let _ = stderr.read_to_string(&mut message);
        }
        let message = message.trim().replace('\n', "; ");
        ImageError::Tool { tool: "qemu-nbd", path: self.path.clone(), message }
    }
}

/// Ends a server that waits at this socket for its first client, because the agent that started it has died: it gets a
/// client now, and loses it. A server that is in use is not affected.
pub fn end_unused_server(socket: &Path) {
    const TIMEOUT: Duration = Duration::from_secs(2);
    let deadline = Instant::now() + TIMEOUT;
    // Until no server listens: only then has it closed the image. A server that is in use continues to listen.
    while Client::connect(socket, EXPORT, None, TIMEOUT).is_ok() && Instant::now() < deadline {
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Handle that flushes writes to an image to stable storage, as long as its server runs.
#[derive(Clone, Debug)]
pub struct Flusher {
    path: PathBuf,
    socket: PathBuf,
    timeout: Duration,
}

impl Flusher {
    /// Flushes all writes to stable storage.
    pub fn flush(&self) -> Result<(), ImageError> {
        let client = Client::connect(&self.socket, EXPORT, None, self.timeout);
        let flushed = client.and_then(|mut client| client.flush());
        flushed.map_err(|source| ImageError::Write { path: self.path.clone(), source })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.keeper = None;
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}

/// Returns true if direct I/O to an image is possible. QEMU then requires a raw image to be whole blocks of the file
/// system, which not every disk is if the blocks have 4 KiB.
fn can_use_direct_io(path: &Path, format: Format) -> bool {
    const O_DIRECT: i32 = 0o40000;
    const LARGEST_BLOCK_BYTES: u64 = 4096;
    let Ok(file) = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(path) else { return false };
    format != Format::Raw
        || file.metadata().is_ok_and(|file| !file.is_file() || file.len().is_multiple_of(LARGEST_BLOCK_BYTES))
}
