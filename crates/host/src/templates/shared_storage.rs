//! Images on storage that both hosts have: content that a guest has read from them into its memory is present at the
//! destination already, and need not be sent.
//!
//! The source reads them beside the rounds, at lower priority than all else, and records the hashes of their pages as
//! it goes; the destination reads the referenced pages from the same images. Both number the images in the order of the
//! VM's description. An image may change while it is read: each page is compared before it is used, as with any
//! template.
//!
//! A catalogue is kept of images that are not written (those below a VM's own, and those that it only reads), so that
//! they are read once, however many VMs use them.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use ::memory::{ContentHash, ContentIndex};
use block::image::ImageError;
use block::reading::ImageReader;
use proto::limits::{ADVERTISED_TEMPLATES, PAGE_BYTES, SHARED_IMAGES};
use qemu::describe::Disk;
use tracing::debug;

use super::catalogue::{Catalogue, CatalogueError, Identity, MAX_ADVERTISED_PAGES, UNFINISHED, hash_pages};
use super::template_indexer::{CATALOGUE, catalogue_of};

/// An image with more data than this many times the guest's memory is not read: too little of it would be in memory.
const MAX_MEMORY_MULTIPLE: u64 = 4;
/// Time for which an unchanging image is read on after its last user has ended.
const READ_ON_TIME: Duration = Duration::from_secs(10);
/// Interval at which a thread that waits to read checks that it is still needed.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Unit of `st_blocks`, in bytes.
const SECTOR_BYTES: u64 = 512;
/// Maximum number of stored catalogues, those that were made last.
const MAX_CATALOGUES: usize = 64;
/// Socket at which an image is served while it is read.
const SOCKET: &str = "shared.sock";

/// An image that both hosts have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedImage {
    pub(super) path: PathBuf,
    pub(super) format: String,
    /// True if the image is not written.
    is_immutable: bool,
}

/// Returns the images of a VM's disks that are not copied, in the order in which both hosts number them.
pub fn shared_images(disks: &[Disk], is_copied: impl Fn(&str) -> bool) -> Vec<SharedImage> {
    let shared = disks.iter().filter(|disk| !is_copied(&disk.name));
    let layers = shared.flat_map(|disk| {
        disk.layers.iter().enumerate().map(|(depth, layer)| SharedImage {
            path: PathBuf::from(&layer.file),
            format: layer.format.clone(),
            is_immutable: depth > 0 || disk.read_only,
        })
    });
    layers.take(SHARED_IMAGES.into()).collect()
}

/// The stored catalogues of shared images, and the lock for reading: one reader at a time.
#[derive(Debug)]
pub(super) struct SharedImageIndexer {
    directory: PathBuf,
    socket: PathBuf,
    patience: Duration,
    alone: Mutex<()>,
}

/// Statistics of the images of one VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexingStats {
    /// Number of images with known pages.
    pub images: usize,
    /// Number of their pages, without zero pages.
    pub pages: u64,
    /// Number of these pages that were read for this VM. The others were known before.
    pub read_pages: u64,
}

/// Reason for which an image was not read to its end.
#[derive(Debug, thiserror::Error)]
enum ReadError {
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    #[error("it is too large to read")]
    TooLarge,
    #[error("the lookup has ended")]
    Over,
}

impl From<ImageError> for ReadError {
    fn from(error: ImageError) -> Self {
        Self::Catalogue(error.into())
    }
}

impl SharedImageIndexer {
    /// Keeps catalogues in `directory`; serves images in `sockets`.
    pub(super) fn new(directory: PathBuf, sockets: &Path, patience: Duration) -> Self {
        let socket = sockets.join(SOCKET);
        // Left by an agent that was killed as it began to read.
        block::image::end_unused_server(&socket);
        Self { directory, socket, patience, alone: Mutex::default() }
    }

    /// Adds the pages of these images to `known`, those of images with a catalogue first. Returns when all images were
    /// read that are worth it for a guest with `memory_bytes` of memory, or when `known` is not in use any more. An
    /// unchanging image that has been begun is read on for a moment, for later VMs.
    pub(super) fn learn(
        &self,
        images: &[SharedImage],
        memory_bytes: u64,
        known: &Weak<ContentIndex>,
    ) -> IndexingStats {
        let mut learning = Indexing { known, stats: IndexingStats::default() };
        let mut unread: Vec<(u16, &SharedImage)> = Vec::new();
        for (number, image) in (ADVERTISED_TEMPLATES..).zip(images) {
            if unread.iter().any(|(_, other)| other.path == image.path) {
                continue;
            }
            match self.kept(image) {
                Some(catalogue) => learning.all_of(number, &catalogue),
                None => unread.push((number, image)),
            }
        }
        unread.sort_by_key(|(_, image)| fs::metadata(&image.path).map_or(0, |file| file.blocks()));
        let Some(_alone) = self.alone(&learning) else { return learning.stats };
        for (number, image) in unread {
            if learning.is_over() {
                break;
            }
            // Another thread may have read it in between.
            if let Some(catalogue) = self.kept(image) {
                learning.all_of(number, &catalogue);
            } else if let Err(error) = self.read(number, image, memory_bytes, &mut learning) {
                debug!(image = %image.path.display(), error = crate::chain(&error), "an image that both hosts have was not read");
            }
        }
        learning.stats
    }

    /// Acquires the right to read; returns none if the pages are not needed any more.
    fn alone(&self, learning: &Indexing<'_>) -> Option<MutexGuard<'_, ()>> {
        loop {
            match self.alone.try_lock() {
                Ok(alone) => return Some(alone),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if learning.is_over() => return None,
                Err(TryLockError::WouldBlock) => thread::sleep(POLL_INTERVAL),
            }
        }
    }

    /// Returns the catalogue of an unchanged image.
    fn kept(&self, image: &SharedImage) -> Option<Catalogue> {
        let identity = identity_of(image)?;
        Catalogue::kept(&catalogue_of(&self.directory, &image.path), identity)
    }

    fn read(
        &self,
        number: u16,
        image: &SharedImage,
        memory_bytes: u64,
        learning: &mut Indexing<'_>,
    ) -> Result<(), ReadError> {
        let most_bytes =
            memory_bytes.saturating_mul(MAX_MEMORY_MULTIPLE).min(MAX_ADVERTISED_PAGES * PAGE_BYTES);
        // To find out where its data is needs a while, too. For a block device there is no other way to learn its
        // amount of data.
        let taken =
            fs::metadata(&image.path).map_or(0, |file| if file.is_file() { file.blocks() } else { 0 });
        if taken * SECTOR_BYTES > most_bytes {
            return Err(ReadError::TooLarge);
        }
        fs::create_dir_all(&self.directory)
            .map_err(|source| CatalogueError::Keep { path: self.directory.clone(), source })?;
        let mut reading = ImageReader::open_layer(&image.path, &image.format, &self.socket, self.patience)?;
        let extents = reading.allocated(0..reading.size_bytes())?;
        let data_bytes: u64 = extents.iter().map(|extent| extent.end - extent.start).sum();
        if data_bytes > most_bytes {
            return Err(ReadError::TooLarge);
        }
        learning.begin(data_bytes / PAGE_BYTES)?;
        let Some(identity) = identity_of(image) else {
            return hash_pages(&mut reading, extents, |pages| {
                if learning.is_over() {
                    return Err(ReadError::Over);
                }
                learning.read(number, pages);
                Ok(())
            });
        };
        let file = catalogue_of(&self.directory, &image.path);
        self.tidy().map_err(|source| CatalogueError::Keep { path: file.clone(), source })?;
        let mut over_since: Option<Instant> = None;
        Catalogue::make_with(&mut reading, extents, identity, &file, |pages| {
            if learning.is_over() && over_since.get_or_insert_with(Instant::now).elapsed() > READ_ON_TIME {
                return Err(ReadError::Over);
            }
            learning.read(number, pages);
            Ok(())
        })
        .map(drop)
    }

    /// Makes room for one more catalogue, and removes unfinished catalogues.
    fn tidy(&self) -> io::Result<()> {
        let files = fs::read_dir(&self.directory)?.flatten().map(|entry| entry.path());
        let (mut kept, begun): (Vec<_>, Vec<_>) = files
            .filter(|path| path.extension().is_some_and(|ending| ending == CATALOGUE || ending == UNFINISHED))
            .partition(|path| path.extension().is_some_and(|ending| ending == CATALOGUE));
        let made = |path: &PathBuf| {
            fs::metadata(path).and_then(|file| file.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
        };
        kept.sort_by_cached_key(made);
        let too_many = (kept.len() + 1).saturating_sub(MAX_CATALOGUES);
        // A file that cannot be removed only wastes space.
        kept.drain(..too_many).chain(begun).for_each(|path| drop(fs::remove_file(path)));
        Ok(())
    }
}

/// Returns the identity of an image for its catalogue; none if no catalogue is kept: others may write to it, or it is a
/// block device, which has no record of writes.
fn identity_of(image: &SharedImage) -> Option<Identity> {
    let is_kept = image.is_immutable && image.path.is_file();
    is_kept.then(|| Identity::of(&image.path).ok()).flatten()
}

/// Collects the pages that become known, as long as they are needed.
struct Indexing<'a> {
    known: &'a Weak<ContentIndex>,
    stats: IndexingStats,
}

impl Indexing<'_> {
    fn is_over(&self) -> bool {
        self.known.upgrade().is_none_or(|known| !known.is_memory_lookup_enabled())
    }

    /// Begins an image with this many pages.
    fn begin(&mut self, pages: u64) -> Result<(), ReadError> {
        if self.stats.pages + pages > MAX_ADVERTISED_PAGES {
            return Err(ReadError::TooLarge);
        }
        self.stats.images += 1;
        if let Some(known) = self.known.upgrade() {
            known.make_room(pages as usize);
        }
        Ok(())
    }

    fn all_of(&mut self, number: u16, catalogue: &Catalogue) {
        let Ok(runs) = catalogue.runs() else { return };
        if self.is_over() || self.begin(catalogue.pages()).is_err() {
            return;
        }
        for run in runs.map_while(Result::ok) {
            self.stats.pages += run.hashes.len() as u64;
            if let Some(known) = self.known.upgrade() {
                known.learn(number, run.first_page, run.hashes);
            }
        }
    }

    fn read(&mut self, number: u16, pages: &[(u64, ContentHash)]) {
        self.stats.pages += pages.len() as u64;
        self.stats.read_pages += pages.len() as u64;
        if let Some(known) = self.known.upgrade() {
            for run in pages.chunk_by(|(page, _), (next, _)| page + 1 == *next) {
                known.learn(number, run[0].0, run.iter().map(|(_, hash)| *hash));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;
    use std::process::Command;
    use std::sync::Arc;

    use ::memory::Templates as _;
    use qemu::describe::Layer;

    use super::super::AdvertisedTemplates;
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);
    const PAGE: usize = PAGE_BYTES as usize;

    fn page(number: u64) -> Vec<u8> {
        [&number.to_le_bytes()[..], &[1; PAGE - 8]].concat()
    }

    fn known() -> Arc<ContentIndex> {
        let known = Arc::new(ContentIndex::new([8 << 20], 1, 0, 0));
        known.enable_memory_lookup();
        known
    }

    /// Makes a raw image with these pages from its beginning on.
    fn image(directory: &Path, name: &str, pages: std::ops::Range<u64>, is_immutable: bool) -> SharedImage {
        let path = directory.join(name);
        fs::write(&path, pages.flat_map(page).collect::<Vec<_>>()).unwrap();
        SharedImage { path, format: "raw".to_owned(), is_immutable }
    }

    fn disk(name: &str, layers: &[(&str, &str)], read_only: bool) -> Disk {
        let layer = |(file, format): &(&str, &str)| Layer { file: (*file).into(), format: (*format).into() };
        let layers: Vec<_> = layers.iter().map(layer).collect();
        serde_json::from_value(serde_json::json!({
            "name": name, "device": null, "file": null, "format": null, "backing_files": [], "layers": layers,
            "read_only": read_only, "direct": false, "removable": false,
        }))
        .unwrap()
    }

    #[test]
    fn images_are_numbered_as_the_disks_are_described() {
        let disks = [
            disk("one", &[("/vm/one", "qcow2"), ("/base", "raw")], false),
            disk("copied", &[("/vm/two", "raw")], false),
            disk("cd", &[("/cd", "raw")], true),
            disk("remote", &[], false),
        ];
        let images = shared_images(&disks, |name| name == "copied");
        let found: Vec<_> =
            images.iter().map(|image| (image.path.to_str().unwrap(), image.is_immutable)).collect();
        assert_eq!(found, [("/vm/one", false), ("/base", true), ("/cd", true)]);
        let many = vec![disk("one", &[("/vm/one", "qcow2"); 40], false); 2];
        assert_eq!(shared_images(&many, |_| false).len(), usize::from(SHARED_IMAGES));
    }

    #[test]
    fn what_stays_is_read_once_and_what_is_written_to_each_time() {
        let directory = tempfile::tempdir().unwrap();
        let shared = SharedImageIndexer::new(directory.path().join("catalogues"), directory.path(), PATIENCE);
        let images = [
            image(directory.path(), "own", 0..100, false),
            image(directory.path(), "base", 50..1000, true),
            SharedImage { path: "/nowhere".into(), format: "raw".to_owned(), is_immutable: true },
        ];
        let learn = |memory_bytes| {
            let known = known();
            let stats = shared.learn(&images, memory_bytes, &Arc::downgrade(&known));
            (stats.images, stats.pages, stats.read_pages)
        };
        assert_eq!(learn(8 << 20), (2, 1050, 1050));
        assert_eq!(learn(8 << 20), (2, 1050, 100));
        // This is more than is worth reading, but a catalogue is used nevertheless.
        assert_eq!(learn(50 << 12), (2, 1050, 100));
        assert_eq!(learn(20 << 12), (1, 950, 0));
        // Another file is at its path.
        image(directory.path(), "base", 0..10, true);
        assert_eq!(learn(8 << 20), (2, 110, 110));
        // The pages are not needed: nothing is begun.
        let known = known();
        known.end();
        assert_eq!(shared.learn(&images, 8 << 20, &Arc::downgrade(&known)), IndexingStats::default());
        assert_eq!(shared.learn(&images, 8 << 20, &Weak::new()), IndexingStats::default());
    }

    #[test]
    fn of_many_catalogues_the_newest_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let kept = directory.path().join("catalogues");
        fs::create_dir(&kept).unwrap();
        for number in 0..MAX_CATALOGUES {
            let file = fs::File::create(kept.join(format!("{number}.{CATALOGUE}"))).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(number as u64)).unwrap();
        }
        fs::write(kept.join(format!("begun.{UNFINISHED}")), "").unwrap();
        let shared = SharedImageIndexer::new(kept.clone(), directory.path(), PATIENCE);
        let known = known();
        let images = [image(directory.path(), "base", 0..10, true)];
        assert_eq!(shared.learn(&images, 8 << 20, &Arc::downgrade(&known)).pages, 10);
        let is_there = |name: &str| kept.join(name).exists();
        assert!(!is_there("0.catalogue") && is_there("1.catalogue") && !is_there("begun.unfinished"));
        assert_eq!(fs::read_dir(&kept).unwrap().count(), MAX_CATALOGUES);
    }

    /// The destination reads referenced pages from each image by itself, and also after it has closed them.
    #[test]
    fn what_both_have_is_read_by_its_number() {
        let directory = tempfile::tempdir().unwrap();
        let base = image(directory.path(), "base", 0..16, true);
        let own = directory.path().join("own.qcow2");
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
            .args([&base.path, &own])
            .status()
            .unwrap();
        assert!(made.success());
        let images =
            vec![SharedImage { path: own, format: "qcow2".to_owned(), is_immutable: false }, base.clone()];
        let advertised_templates = AdvertisedTemplates::new(directory.path().to_owned(), PATIENCE, images);
        let mut bytes = vec![7; PAGE];
        for _ in 0..2 {
            advertised_templates.read(ADVERTISED_TEMPLATES + 1, 3, &mut bytes).unwrap();
            assert_eq!(bytes, page(3));
            // The image above it has no data.
            advertised_templates.read(ADVERTISED_TEMPLATES, 3, &mut bytes).unwrap();
            assert_eq!(bytes, vec![0; PAGE]);
            advertised_templates.close();
        }
        for (image, first_page) in [
            (ADVERTISED_TEMPLATES, 16),
            (ADVERTISED_TEMPLATES + 1, u64::MAX),
            (ADVERTISED_TEMPLATES + 2, 0),
            (0, 0),
        ] {
            assert!(
                advertised_templates.read(image, first_page, &mut bytes).is_err(),
                "{image} {first_page}"
            );
        }
        // It is read as it is now, whatever it was.
        fs::File::options().write(true).open(&base.path).unwrap().write_all_at(&page(99), 0).unwrap();
        advertised_templates.read(ADVERTISED_TEMPLATES + 1, 0, &mut bytes).unwrap();
        assert_eq!(bytes, page(99));
    }
}
