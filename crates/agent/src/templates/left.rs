//! Images that VMs left behind here when they moved away with their disks: a VM that comes back, or one that was made
//! from the same template, has much in common with them.
//!
//! They are not read. The names of their pages are known from the outgoing migration, which computed them for
//! references; they are stored as the image's catalogue. The catalogue need not be right: pages that were written last
//! differ from their names, and the image may have been changed since. Each page is compared before it is used, as with
//! any template.
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

use ::memory::PageName;
use qemu::preflight::FileIdentity;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::catalogue::{Catalogue, Identity, UNFINISHED};
use super::librarian::{CATALOGUE, catalogue_of};
use super::{Shelf, State, Template, lock};

/// Extension of the file that identifies the image of a catalogue.
const LEFT: &str = "left";
/// Maximum number of known images, those that were left last: a catalogue takes up to 9 MiB.
const MOST: usize = 64;
/// Maximum number of tasks that are queued while the thread is busy, of up to 16 MiB each; callers with more have to
/// wait.
const MOST_WAITING: usize = 4;
/// Longest wait of a caller for its task.
const PATIENCE: Duration = Duration::from_secs(1);
/// Interval at which a caller checks for room in the queue.
const LOOK: Duration = Duration::from_millis(10);

/// An image that a VM has left behind here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeftImage {
    /// Path of its file.
    pub(crate) path: PathBuf,
    /// Format, by its name in QEMU.
    pub(crate) format: String,
}

/// Pages of an image, by number and name, in ascending order.
pub(crate) type NamedPages = Vec<(u64, PageName)>;

/// An image and the identity of its file, by which it is recognised after the host was rebooted.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Note {
    image: LeftImage,
    file: FileIdentity,
}

impl Note {
    /// Returns the note of an image, if it is there. Identities are only compared on this host, so the host is omitted;
    /// if the file system is local to this host, the device's name is omitted too, because another boot may change it.
    fn of(image: LeftImage) -> Option<Self> {
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
enum Task {
    Keep(Vec<(LeftImage, NamedPages)>),
    Look,
}

/// Handle of the thread that manages images that were left behind.
#[derive(Debug)]
pub(super) struct Left {
    tasks: SyncSender<(Task, SyncSender<()>)>,
}

impl Left {
    /// Starts the thread, with the images that an earlier agent knew. The thread ends when this is dropped.
    pub(super) fn start(directory: PathBuf, shelf: Arc<Shelf>) -> io::Result<Self> {
        let (tasks, todo) = mpsc::sync_channel(MOST_WAITING);
        let keeper = Keeper { directory, shelf };
        thread::Builder::new().name("left-images".to_owned()).spawn(move || keeper.work(&todo))?;
        Ok(Self { tasks })
    }

    /// Stores the catalogues of images.
    pub(super) fn keep(&self, images: Vec<(LeftImage, NamedPages)>) {
        if !images.is_empty() && !self.done(Task::Keep(images)) {
            warn!(
                "what VMs left behind here is not noted in time, and may be sent again when they come back"
            );
        }
    }

    /// Checks which of the images exist, and forgets those that do not.
    pub(super) fn look(&self) {
        self.done(Task::Look);
    }

    /// Runs a task. Returns true if it was done in time; otherwise it may still be done later.
    fn done(&self, task: Task) -> bool {
        let deadline = Instant::now() + PATIENCE;
        let (done, is_done) = mpsc::sync_channel(1);
        let mut task = (task, done);
        while let Err(TrySendError::Full(again)) = self.tasks.try_send(task) {
            if Instant::now() >= deadline {
                return false;
            }
            task = again;
            thread::sleep(LOOK);
        }
        is_done.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok()
    }
}

/// State of the thread, which alone accesses the files.
struct Keeper {
    directory: PathBuf,
    shelf: Arc<Shelf>,
}

impl Keeper {
    fn work(&self, todo: &Receiver<(Task, SyncSender<()>)>) {
        self.clean();
        self.look();
        while let Ok((task, done)) = todo.recv() {
            match task {
                Task::Keep(images) => {
                    for (image, pages) in images {
                        let path = image.path.clone();
                        if let Err(error) = self.keep(image, pages) {
                            warn!(image = %path.display(), %error, "what is in it will be sent again to whoever comes back");
                        }
                    }
                    self.forget_eldest();
                }
                Task::Look => self.look(),
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

    fn keep(&self, image: LeftImage, pages: NamedPages) -> io::Result<()> {
        // Block devices are omitted, because they are reused for other VMs.
        let Some(note) = Note::of(image).filter(|note| note.image.path.is_file()) else { return Ok(()) };
        if is_named(&lock(&self.shelf), &note.image.path) {
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

    /// Puts existing images on the shelf, and forgets those that are other files now, or existed and are gone. An image
    /// that has never been there may be on a file system that is mounted later; and if a file system does not answer,
    /// everything stays as it is.
    fn look(&self) {
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
                None if self.is_shelved(&path) && is_gone(&path) => self.forget(&path),
                None => {}
            }
        }
    }

    fn forget_eldest(&self) {
        let left_at = |file: &PathBuf| fs::metadata(file).and_then(|meta| meta.modified());
        let mut files = self.files(LEFT);
        files.sort_by_cached_key(|file| left_at(file).unwrap_or(SystemTime::UNIX_EPOCH));
        let too_many = files.len().saturating_sub(MOST);
        for file in files.into_iter().take(too_many) {
            match fs::read(&file).ok().and_then(|bytes| serde_json::from_slice::<Note>(&bytes).ok()) {
                Some(note) => self.forget(&note.image.path),
                None => remove_both(&file),
            }
        }
    }

    fn forget(&self, image: &Path) {
        lock(&self.shelf).retain(|template| !(template.is_left && template.path == image));
        remove_both(&catalogue_of(&self.directory, image).with_extension(LEFT));
    }

    fn is_shelved(&self, image: &Path) -> bool {
        lock(&self.shelf).iter().any(|template| template.is_left && template.path == image)
    }

    fn put(&self, note: Note, catalogue: Catalogue) {
        let identity = note.identity();
        let LeftImage { path, format } = note.image;
        let mut shelf = lock(&self.shelf);
        if is_named(&shelf, &path) {
            return;
        }
        shelf.retain(|template| template.path != path);
        shelf.push(Template { path, format, identity, state: State::Ready(catalogue), is_left: true });
    }
}

/// True if the configuration names the image as a template, which is read anyway, and stays one.
fn is_named(shelf: &[Template], image: &Path) -> bool {
    shelf.iter().any(|template| !template.is_left && template.path == image)
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
        warn!(file = %file.display(), %error, "what is known of an image that is gone cannot be removed");
    }
}
