//! Disks of a VM on its way in: their images, and what writes them.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ::memory::BlockWriter;
use ::memory::ram::RamError;
use block::compare::Reading;
use block::image::{self, ImageError, Server};
use block::nbd::NbdError;
use proto::MigrationId;
use proto::limits::CHUNK_BYTES;

use super::connections::Connections;
use super::{called, on_disk, whole_pages};
use crate::preflight::Planned;
use crate::verification::{self, CompareError};

/// The images of all disks that are copied, made and open for writing.
#[derive(Debug, Default)]
pub(crate) struct Images {
    images: Vec<(Planned, Arc<Server>)>,
    flushing: Flushing,
}

/// A thread that flushes, and what comes of it.
type Flushed = JoinHandle<Result<(), ImageError>>;

/// Puts images on stable storage now and then, so that little is left of that when the guest waits for it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flushing {
    images: Vec<image::Flusher>,
    /// The thread that is at it.
    thread: Arc<Mutex<Option<Flushed>>>,
    /// The first that failed. A system tells of a lost write only once, so that the next one may seem to go well.
    failed: Arc<Mutex<Option<ImageError>>>,
}

impl Flushing {
    /// Flushes all of them, in a thread of its own; if one is still at it, that has to do.
    pub(crate) fn flush(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if self.images.is_empty() || thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return;
        }
        self.take(thread.take());
        let images = self.images.clone();
        let flush = move || images.iter().try_for_each(image::Flusher::flush);
        // Without a thread all is left for the end.
        *thread = thread::Builder::new().name("flush".to_owned()).spawn(flush).ok();
    }

    /// Waits for the thread that is at it.
    ///
    /// # Errors
    /// When any flush has failed.
    fn end(&self) -> Result<(), ImageError> {
        self.take(self.thread.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }

    fn take(&self, thread: Option<Flushed>) {
        if let Some(Ok(Err(error))) = thread.map(JoinHandle::join) {
            self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }
}

impl Images {
    /// Makes them, and opens each for so many streams; `directory` is for their sockets. What was made before an error is
    /// for the caller to remove.
    pub(crate) fn make(
        planned: Vec<Planned>,
        directory: &Path,
        streams: u16,
        patience: Duration,
    ) -> Result<Self, ImageError> {
        let mut images = Vec::new();
        for (number, disk) in planned.into_iter().enumerate() {
            image::create(&disk.image, disk.format, disk.bytes, None)?;
            let socket = directory.join(format!("disk-{number}.sock"));
            let server = Server::start(&disk.image, disk.format, &socket, streams, patience)?;
            images.push((disk, Arc::new(server)));
        }
        let flushers = images.iter().map(|(_, server)| server.flusher()).collect();
        Ok(Self { images, flushing: Flushing { images: flushers, ..Flushing::default() } })
    }

    /// To be told of every round that has come.
    pub(crate) fn flushing(&self) -> Flushing {
        self.flushing.clone()
    }

    /// The chunks of the disk with this number that differ from the source's hashes; `directory` is for a socket.
    /// Nothing is being written.
    pub(crate) fn differences(
        &self,
        number: usize,
        first_chunk: u64,
        theirs: &[String],
        directory: &Path,
        patience: Duration,
    ) -> Result<Vec<u64>, CompareError> {
        let (disk, server) =
            self.images.get(number).ok_or_else(|| CompareError::NotThere(format!("disk {number}")))?;
        server.flush()?;
        let (image, socket) = (disk.image.to_string_lossy(), directory.join("compare.sock"));
        let mut reading = Reading::open(&image, disk.format.as_str(), &socket, patience)?;
        let ours =
            reading.hash_chunks(CHUNK_BYTES, first_chunk..first_chunk.saturating_add(theirs.len() as u64))?;
        verification::different(&called(&disk.name), first_chunk, &ours, theirs)
    }

    /// Writers of the disks, in their order.
    pub(crate) fn writers(&self) -> impl Iterator<Item = Box<dyn BlockWriter>> + '_ {
        self.images.iter().map(|(disk, server)| -> Box<dyn BlockWriter> {
            Box::new(CopiedDisk::new(&disk.name, disk.bytes, server))
        })
    }

    /// Puts everything on stable storage and lets go of the images; all writers are gone.
    pub(crate) fn finish(self) -> Result<(), ImageError> {
        self.flushing.end()?;
        for (disk, server) in self.images {
            let Some(server) = Arc::into_inner(server) else {
                let said = "a writer is left; please report this".to_owned();
                return Err(ImageError::Tool { tool: "qemu-nbd", path: disk.image, said });
            };
            server.finish()?;
        }
        Ok(())
    }
}

/// A disk whose image is written.
#[derive(Debug)]
pub(super) struct CopiedDisk {
    name: String,
    /// Its length; what is said of the bytes beyond, up to a whole page, is dropped.
    bytes: u64,
    connections: Connections,
}

impl CopiedDisk {
    /// A disk of that length, whose image the server has.
    pub(super) fn new(name: &str, bytes: u64, server: &Arc<Server>) -> Self {
        let server = Arc::downgrade(server);
        let gone = || NbdError::Lost(std::io::Error::from(std::io::ErrorKind::NotConnected));
        let connections = Connections::new(move || {
            let server = server.upgrade().ok_or_else(gone)?;
            server.client().map_err(|error| match error {
                ImageError::Write { source, .. } => source,
                _ => gone(),
            })
        });
        Self { name: name.to_owned(), bytes, connections }
    }
}

impl BlockWriter for CopiedDisk {
    fn name(&self) -> &str {
        &self.name
    }

    fn what(&self) -> String {
        called(&self.name)
    }

    fn bytes(&self) -> u64 {
        whole_pages(self.bytes)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        let there = on_disk(offset..offset + data.len() as u64, self.bytes);
        let data = &data[..(there.end - there.start) as usize];
        let written = self.connections.with(|client| client.write(there.start, data));
        written.map_err(|error| RamError::Disk(Box::new(error)))
    }

    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        let there = on_disk(range, self.bytes);
        let dropped = self.connections.with(|client| client.write_zeroes(there));
        dropped.map_err(|error| RamError::Disk(Box::new(error)))
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}

/// Where an image for a disk is made: a name that no other disk, VM or migration has.
pub(crate) fn image_path(
    pool: &Path,
    migration: &MigrationId,
    disk: &str,
    unique: &str,
    format: &str,
) -> PathBuf {
    let plain =
        |letter: char| if letter.is_ascii_alphanumeric() || "-_.".contains(letter) { letter } else { '_' };
    let disk: String = disk.chars().map(plain).collect();
    pool.join(format!("{}@{}-{disk}-{unique}.{format}", migration.vm, migration.epoch))
}
