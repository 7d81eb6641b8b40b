//! Disks of a VM on its way in: their images, and what writes them.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ::memory::BlockWriter;
use ::memory::ram::RamError;
use block::image::{self, Format, ImageError, Server};
use block::nbd::{Client, NbdError};
use block::reading::Reading;
use block::thin::NewVolume;
use proto::limits::CHUNK_BYTES;

use super::served::{Connections, ServedDisk, failed};
use super::{called, whole_pages};
use crate::pool::MadeImage;
use crate::preflight::Planned;
use crate::verification::{self, CompareError};

/// The images of all disks that are copied, made and open for writing.
#[derive(Debug, Default)]
pub(crate) struct Images {
    images: Vec<Image>,
    flushing: Flushing,
}

/// The image of one disk.
#[derive(Debug)]
struct Image {
    disk: Planned,
    server: Arc<Server>,
    /// The state of a thin volume; none for any other image.
    thin: Option<Arc<NewVolume>>,
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
    /// Flushes all of them, in a thread of its own; if one is still at it, that has to do. `fails` is told of an
    /// error at once, with all its causes; it is left for [`Flushing::end`], too.
    pub(crate) fn flush(&self, fails: impl FnOnce(String) + Send + 'static) {
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
    /// Makes them, and opens each for so many streams; `directory` is for their sockets. What was made before an error
    /// is for the caller to remove.
    pub(crate) fn make(
        planned: Vec<Planned>,
        directory: &Path,
        streams: u16,
        patience: Duration,
    ) -> Result<Self, ImageError> {
        let mut images = Vec::new();
        for (number, disk) in planned.into_iter().enumerate() {
            let thin = disk.place.make(disk.bytes)?.map(Arc::new);
            let socket = directory.join(format!("disk-{number}.sock"));
            let server = Server::start(&disk.place.path, disk.place.format, &socket, streams, patience)?;
            if let Some(volume) = &thin {
                let path = disk.place.path.clone();
                let failed = |source| ImageError::Write { path, source };
                volume.begin(&mut server.client()?).map_err(failed)?;
            }
            images.push(Image { disk, server: Arc::new(server), thin });
        }
        let flushers = images.iter().map(|image| image.server.flusher()).collect();
        Ok(Self { images, flushing: Flushing { images: flushers, ..Flushing::default() } })
    }

    /// Those that are files, as they were made.
    pub(crate) fn made(&self) -> Vec<MadeImage> {
        let made = |image: &Image| MadeImage::at(&image.disk.place.path, &image.disk.name);
        self.images.iter().filter_map(made).collect()
    }

    /// True if no disk is copied.
    pub(crate) fn is_empty(&self) -> bool {
        self.images.is_empty()
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
        let Image { disk, server, .. } =
            self.images.get(number).ok_or_else(|| CompareError::NotThere(format!("disk {number}")))?;
        server.flush()?;
        let (place, socket) = (&disk.place, directory.join("compare.sock"));
        let disk_bytes = place.is_device().then_some(disk.bytes);
        let (image, format) = (place.path.to_string_lossy(), place.format.as_str());
        let mut reading = Reading::open(&image, format, disk_bytes.map(|bytes| 0..bytes), &socket, patience)?;
        let ours =
            reading.hash_chunks(CHUNK_BYTES, first_chunk..first_chunk.saturating_add(theirs.len() as u64))?;
        verification::different(&called(&disk.name), first_chunk, &ours, theirs)
    }

    /// Writers of the disks, in their order.
    pub(crate) fn writers(&self) -> impl Iterator<Item = Box<dyn BlockWriter>> + '_ {
        self.images.iter().map(|Image { disk, server, thin }| -> Box<dyn BlockWriter> {
            Box::new(CopiedDisk { thin: thin.clone(), ..CopiedDisk::new(&disk.name, disk.bytes, server) })
        })
    }

    /// Puts everything on stable storage and lets go of the images; all writers are gone.
    pub(crate) fn finish(self) -> Result<(), ImageError> {
        self.flushing.end()?;
        for Image { disk, server, .. } in self.images {
            let Some(server) = Arc::into_inner(server) else {
                let said = "a writer is left; please report this".to_owned();
                return Err(ImageError::Tool { tool: "qemu-nbd", path: disk.place.path, said });
            };
            server.finish()?;
            if disk.place.format == Format::Raw && !disk.place.is_device() {
                // The guest may have discarded it.
                image::allocate_first_block(&disk.place.path)?;
            }
        }
        Ok(())
    }
}

/// A disk whose image is written.
#[derive(Debug)]
pub(super) struct CopiedDisk {
    served: ServedDisk,
    thin: Option<Arc<NewVolume>>,
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
        Self { served: ServedDisk::new(name, bytes, connections), thin: None }
    }
}

impl BlockWriter for CopiedDisk {
    fn name(&self) -> &str {
        &self.served.name
    }

    fn what(&self) -> String {
        called(&self.served.name)
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
