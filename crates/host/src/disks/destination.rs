//! Disks of an arriving VM: their images, and the writers of these.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ::memory::BlockWriter;
use ::memory::ram::RamError;
use block::image::{self, Format, ImageError, Server};
use block::nbd::{Client, NbdError};
use block::reading::ImageReader;
use block::thin::NewVolume;
use proto::limits::CHUNK_BYTES;

use super::planned::PlannedDisk;
use super::served::{Connections, ServedDisk, failed};
use super::{display_name, whole_pages};
use crate::pool::MadeImage;
use crate::verification::{self, CompareError};

/// The images of all copied disks, made and open for writing.
#[derive(Debug, Default)]
pub struct CopiedImages {
    images: Vec<Image>,
    flushing: BackgroundFlush,
}

/// The image of one disk.
#[derive(Debug)]
struct Image {
    disk: PlannedDisk,
    server: Arc<Server>,
    /// State of a thin volume; none for any other image.
    thin: Option<Arc<NewVolume>>,
}

/// A thread that flushes, and its result.
type FlushThread = JoinHandle<Result<(), ImageError>>;

/// Background flushes of images to stable storage, so that the last flush, for which the guest waits, is short.
#[derive(Clone, Debug, Default)]
pub struct BackgroundFlush {
    images: Vec<image::Flusher>,
    /// The thread that flushes now.
    thread: Arc<Mutex<Option<FlushThread>>>,
    /// The first error. The kernel reports a lost write only once, so that the next flush may seem to succeed.
    failed: Arc<Mutex<Option<ImageError>>>,
}

impl BackgroundFlush {
    /// Flushes all images, in a thread of its own; does nothing if one is still flushing. Calls `fails` with an error
    /// at once, with all its causes; [`BackgroundFlush::end`] returns the error, too.
    pub fn flush(&self, fails: impl FnOnce(String) + Send + 'static) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if self.images.is_empty() || thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return;
        }
        self.take(thread.take());
        let images = self.images.clone();
        let flush = move || {
            let flushed = images.iter().try_for_each(image::Flusher::flush);
            if let Err(error) = &flushed {
                fails(crate::chain(error));
            }
            flushed
        };
        // Without a thread everything is flushed at the end.
        *thread = thread::Builder::new().name("flush".to_owned()).spawn(flush).ok();
    }

    /// Waits for the thread that flushes.
    ///
    /// # Errors
    /// When any flush has failed.
    fn end(&self) -> Result<(), ImageError> {
        self.take(self.thread.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
    }

    fn take(&self, thread: Option<FlushThread>) {
        if let Some(Ok(Err(error))) = thread.map(JoinHandle::join) {
            self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }
}

impl CopiedImages {
    /// Makes the images, and opens each for `streams` streams; `directory` is for their sockets. After an error the
    /// caller has to remove the images that were made.
    pub fn make(
        planned: Vec<PlannedDisk>,
        directory: &Path,
        streams: u16,
        patience: Duration,
    ) -> Result<Self, ImageError> {
        let mut images = Vec::new();
        for (number, disk) in planned.into_iter().enumerate() {
            let thin = disk.location.make(disk.bytes)?.map(Arc::new);
            let socket = directory.join(format!("disk-{number}.sock"));
            let server =
                Server::start(&disk.location.path, disk.location.format, &socket, streams, patience)?;
            if let Some(volume) = &thin {
                let path = disk.location.path.clone();
                let failed = |source| ImageError::Write { path, source };
                volume.begin(&mut server.client()?).map_err(failed)?;
            }
            images.push(Image { disk, server: Arc::new(server), thin });
        }
        let flushers = images.iter().map(|image| image.server.flusher()).collect();
        Ok(Self { images, flushing: BackgroundFlush { images: flushers, ..BackgroundFlush::default() } })
    }

    /// Returns the identity of those images that are files, as they were made.
    pub fn made(&self) -> Vec<MadeImage> {
        let made = |image: &Image| MadeImage::at(&image.disk.location.path, &image.disk.name);
        self.images.iter().filter_map(made).collect()
    }

    /// True if no disk is copied.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Returns the handle that flushes the images after each received round.
    pub fn flushing(&self) -> BackgroundFlush {
        self.flushing.clone()
    }

    /// Returns the chunks of disk `number` that differ from the source's hashes; `directory` is for a socket. No writer
    /// may be active.
    pub fn differences(
        &self,
        number: usize,
        first_chunk: u64,
        theirs: &[String],
        directory: &Path,
        patience: Duration,
    ) -> Result<Vec<u64>, CompareError> {
        let Image { disk, server, .. } =
            self.images.get(number).ok_or_else(|| CompareError::NotThere(format!("disk {number}")))?;
        server.flush()?;
        let (location, socket) = (&disk.location, directory.join("compare.sock"));
        let disk_bytes = location.is_device().then_some(disk.bytes);
        let (image, format) = (location.path.to_string_lossy(), location.format.as_str());
        let mut reading =
            ImageReader::open(&image, format, disk_bytes.map(|bytes| 0..bytes), &socket, patience)?;
        let ours =
            reading.hash_chunks(CHUNK_BYTES, first_chunk..first_chunk.saturating_add(theirs.len() as u64))?;
        verification::different(&display_name(&disk.name), first_chunk, &ours, theirs)
    }

    /// Returns the writers of the disks, in their order.
    pub fn writers(&self) -> impl Iterator<Item = Box<dyn BlockWriter>> + '_ {
        self.images.iter().map(|Image { disk, server, thin }| -> Box<dyn BlockWriter> {
            Box::new(CopiedDisk { thin: thin.clone(), ..CopiedDisk::new(&disk.name, disk.bytes, server) })
        })
    }

    /// Puts everything on stable storage and closes the images; all writers must be gone.
    pub fn finish(self) -> Result<(), ImageError> {
        self.flushing.end()?;
        for Image { disk, server, .. } in self.images {
            let Some(server) = Arc::into_inner(server) else {
                let message = "a writer is left; please report this".to_owned();
                return Err(ImageError::Tool { tool: "qemu-nbd", path: disk.location.path, message });
            };
            server.finish()?;
            if disk.location.format == Format::Raw && !disk.location.is_device() {
                // The guest may have discarded that block.
                image::allocate_first_block(&disk.location.path)?;
            }
        }
        Ok(())
    }
}

/// A copied disk, whose image is written.
#[derive(Debug)]
pub(super) struct CopiedDisk {
    served: ServedDisk,
    thin: Option<Arc<NewVolume>>,
}

impl CopiedDisk {
    /// Creates a disk of `bytes` bytes, whose image `server` serves.
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
        Self { served: ServedDisk::new(name, bytes, connections), thin: None }
    }
}

impl BlockWriter for CopiedDisk {
    fn name(&self) -> &str {
        &self.served.name
    }

    fn description(&self) -> String {
        display_name(&self.served.name)
    }

    fn bytes(&self) -> u64 {
        whole_pages(self.served.bytes)
    }

    fn is_ram(&self) -> bool {
        false
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), RamError> {
        self.served.read(offset, into)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), RamError> {
        let there = self.served.on_disk(offset..offset + data.len() as u64);
        let data = &data[..(there.end - there.start) as usize];
        let write = |client: &mut Client| match &self.thin {
            Some(volume) => volume.write(there.start, data, client),
            None => client.write(there.start, data),
        };
        self.served.with(write).map_err(failed)
    }

    /// A disk is written by its server.
    fn allow_direct_placement(&self, _: Range<u64>) -> bool {
        false
    }

    fn drop_pages(&self, range: Range<u64>) -> Result<(), RamError> {
        let there = self.served.on_disk(range);
        let write = |client: &mut Client| match &self.thin {
            Some(volume) => volume.write_zeroes(there, client),
            None => client.write_zeroes(there),
        };
        self.served.with(write).map_err(failed)
    }

    fn end(&self) {
        self.served.end();
    }

    fn take_discardable(&self) -> Vec<Range<u64>> {
        Vec::new()
    }
}
