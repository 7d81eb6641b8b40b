//! Leftover images of VMs that moved away with their disks: a VM that comes back, or one that was made
//! from the same template, has much in common with them.
//!
//! They are not read. The hashes of their pages are known from the outgoing migration, which computed them for
//! references; they are stored as the image's catalogue. The catalogue need not be right: pages that were written last
//! differ from their hashes, and the image may have been changed since. Each page is compared before it is used, as
//! with any template.
//!
//! One thread does all work on them, because it calls file systems, which may hang: then no new image becomes known,
//! and callers wait for the thread no longer than [`PATIENCE`].

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use ::memory::ContentHash;
use qemu::preflight::FileIdentity;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::catalogue::{Catalogue, Identity, UNFINISHED};
use super::template_indexer::{CATALOGUE, catalogue_of};
use super::{IndexState, Template, TemplateTable, lock};

/// Extension of the file that identifies the image of a catalogue.
const LEFT: &str = "left";
/// Maximum number of known images, those that were left last: a catalogue takes up to 9 MiB.
const MAX_IMAGES: usize = 64;
/// Maximum number of tasks that are queued while the thread is busy, of up to 16 MiB each; callers with more have to
/// wait.
const QUEUE_CAPACITY: usize = 4;
/// Longest wait of a caller for its task.
const PATIENCE: Duration = Duration::from_secs(1);
/// Interval at which a caller checks for room in the queue.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A leftover image of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftoverTemplate {
    /// Path of its file.
    pub path: PathBuf,
    /// Format, by its name in QEMU.
    pub format: String,
}

/// Pages of an image, by number and content hash, in ascending order.
pub type HashedPages = Vec<(u64, ContentHash)>;

/// An image and the identity of its file, by which it is recognised after the host was rebooted.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Note {
    image: LeftoverTemplate,
    file: FileIdentity,
}

impl Note {
    /// Returns the note of an image, if it is there. Identities are only compared on this host, so the host is omitted;
    /// if the file system is local to this host, the device's name is omitted too, because another boot may change it.
    fn of(image: LeftoverTemplate) -> Option<Self> {
        let mut file = FileIdentity::of(&image.path)?;
        if file.host.take().is_some() {
            file.mounted.clear();
        }
        Some(Self { image, file })
    }

    /// Returns the identity for the catalogue: the file in any state.
    fn identity(&self) -> Identity {
        Identity::of_inode(self.file.inode)
    }
}

/// A task of the thread.
enum LeftoverTask {
    Keep(Vec<(LeftoverTemplate, HashedPages)>),
    Scan,
}

/// Handle of the thread that manages leftover images.
#[derive(Debug)]
pub(super) struct LeftoverIndex {
    tasks: SyncSender<(LeftoverTask, SyncSender<()>)>,
}

impl LeftoverIndex {
    /// Starts the thread, with the images that an earlier agent knew. The thread ends when this is dropped.
    pub(super) fn start(directory: PathBuf, table: Arc<TemplateTable>) -> io::Result<Self> {
        let (tasks, todo) = mpsc::sync_channel(QUEUE_CAPACITY);
        let store = LeftoverStore { directory, table };
        thread::Builder::new().name("left-images".to_owned()).spawn(move || store.work(&todo))?;
        Ok(Self { tasks })
    }

    /// Stores the catalogues of images.
    pub(super) fn keep(&self, images: Vec<(LeftoverTemplate, HashedPages)>) {
        if !images.is_empty() && !self.done(LeftoverTask::Keep(images)) {
            warn!(
                "the content that VMs left here was not indexed in time, and may be sent again when they \
                 return"
            );
        }
    }

    /// Checks which of the images exist, and forgets those that do not.
    pub(super) fn scan(&self) {
        self.done(LeftoverTask::Scan);
    }

    /// Runs a task. Returns true if it was done in time; otherwise it may still be done later.
    fn done(&self, task: LeftoverTask) -> bool {
        let deadline = Instant::now() + PATIENCE;
        let (done, is_done) = mpsc::sync_channel(1);
        let mut task = (task, done);
        while let Err(TrySendError::Full(unsent)) = self.tasks.try_send(task) {
            if Instant::now() >= deadline {
                return false;
            }
            task = unsent;
            thread::sleep(POLL_INTERVAL);
        }
        is_done.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok()
    }
}

/// State of the thread, which alone accesses the files.
struct LeftoverStore {
    directory: PathBuf,
    table: Arc<TemplateTable>,
}

impl LeftoverStore {
    fn work(&self, todo: &Receiver<(LeftoverTask, SyncSender<()>)>) {
        self.clean();
        self.scan();
        while let Ok((task, done)) = todo.recv() {
            match task {
                LeftoverTask::Keep(images) => {
                    for (image, pages) in images {
                        let path = image.path.clone();
                        if let Err(error) = self.keep(image, pages) {
                            warn!(
                                image = %path.display(),
                                %error,
                                "its content will be sent again when the VM returns"
                            );
                        }
                    }
                    self.forget_oldest();
                }
                LeftoverTask::Scan => self.scan(),
            }
            let _ = done.try_send(());
        }
    }

    /// Removes unfinished files of an agent that was killed.
    fn clean(&self) {
        for path in self.files(UNFINISHED) {
            remove(&path);
        }
    }

    fn files(&self, ending: &str) -> Vec<PathBuf> {
        let files = fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|entry| entry.path());
        files.filter(|path| path.extension().is_some_and(|found| found == ending)).collect()
    }

    fn keep(&self, image: LeftoverTemplate, pages: HashedPages) -> io::Result<()> {
        // Block devices are omitted, because they are reused for other VMs.
        let Some(note) = Note::of(image).filter(|note| note.image.path.is_file()) else { return Ok(()) };
        if is_named(&lock(&self.table), &note.image.path) {
            return Ok(());
        }
        fs::create_dir_all(&self.directory)?;
        let file = catalogue_of(&self.directory, &note.image.path);
        // The note is written first: a note without a catalogue is found and removed, a catalogue without a note would
        // stay.
        let kept = fs::write(file.with_extension(LEFT), serde_json::to_vec(&note)?)
            .and_then(|()| Catalogue::of_pages(pages, note.identity(), &file));
        match kept {
            Ok(catalogue) => self.put(note, catalogue),
            Err(error) => {
                remove(&file.with_extension(UNFINISHED));
                self.forget(&note.image.path);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Adds existing images to the table of templates, and forgets those that were replaced or removed. An image
    /// that has never been there may be on a file system that is mounted later; and if a file system does not answer,
    /// everything stays as it is.
    fn scan(&self) {
        for file in self.files(LEFT) {
            let Ok(bytes) = fs::read(&file) else { continue };
            let Ok(note) = serde_json::from_slice::<Note>(&bytes) else {
                remove_both(&file);
                continue;
            };
            let path = note.image.path.clone();
            let Some(catalogue) = Catalogue::kept(&file.with_extension(CATALOGUE), note.identity()) else {
                self.forget(&path);
                continue;
            };
            match Note::of(note.image.clone()) {
                Some(now) if now.file == note.file => self.put(note, catalogue),
                Some(_) => self.forget(&path),
                None if self.is_in_table(&path) && is_gone(&path) => self.forget(&path),
                None => {}
            }
        }
    }

    fn forget_oldest(&self) {
        let left_at = |file: &PathBuf| fs::metadata(file).and_then(|meta| meta.modified());
        let mut files = self.files(LEFT);
        files.sort_by_cached_key(|file| left_at(file).unwrap_or(SystemTime::UNIX_EPOCH));
        let too_many = files.len().saturating_sub(MAX_IMAGES);
        for file in files.into_iter().take(too_many) {
            match fs::read(&file).ok().and_then(|bytes| serde_json::from_slice::<Note>(&bytes).ok()) {
                Some(note) => self.forget(&note.image.path),
                None => remove_both(&file),
            }
        }
    }

    fn forget(&self, image: &Path) {
        lock(&self.table).retain(|template| !(template.is_left && template.path == image));
        remove_both(&catalogue_of(&self.directory, image).with_extension(LEFT));
    }

    fn is_in_table(&self, image: &Path) -> bool {
        lock(&self.table).iter().any(|template| template.is_left && template.path == image)
    }

    fn put(&self, note: Note, catalogue: Catalogue) {
        let identity = note.identity();
        let LeftoverTemplate { path, format } = note.image;
        let mut table = lock(&self.table);
        if is_named(&table, &path) {
            return;
        }
        table.retain(|template| template.path != path);
        table.push(Template { path, format, identity, state: IndexState::Ready(catalogue), is_left: true });
    }
}

/// True if the configuration names the image as a template, which is read anyway, and stays one.
fn is_named(table: &[Template], image: &Path) -> bool {
    table.iter().any(|template| !template.is_left && template.path == image)
}

fn is_gone(image: &Path) -> bool {
    fs::metadata(image).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Removes a note and its catalogue. The catalogue goes first: without a note it would never be found.
fn remove_both(note: &Path) {
    remove(&note.with_extension(CATALOGUE));
    remove(note);
}

fn remove(file: &Path) {
    if let Err(error) = fs::remove_file(file)
        && error.kind() != io::ErrorKind::NotFound
    {
        warn!(
            file = %file.display(),
            %error,
            "cannot remove the record of an image that does not exist any more"
        );
    }
}
