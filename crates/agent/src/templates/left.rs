//! Images that VMs left behind here when they moved away with their disks: a VM that comes back, or one that was made
//! from the same template, has much in common with them.
//!
//! Nothing is read for it. What went away is known by name, page by page, because references were looked for; that is
//! kept as the image's catalogue. It need not be right: what was written last has another content than its name says,
//! and the image may have been changed since. Each page is compared before it is used, as with any template.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use ::memory::PageName;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::catalogue::{Catalogue, Identity, UNFINISHED};
use super::librarian::{CATALOGUE, catalogue_of};
use super::{Shelf, State, Template, lock};

/// Ending of the name of a file that says of which image a catalogue is.
const LEFT: &str = "left";

/// An image that a VM has left behind here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeftImage {
    /// Its file.
    pub(crate) path: PathBuf,
    /// Its format, as QEMU calls it.
    pub(crate) format: String,
}

/// What is known of them.
#[derive(Debug)]
pub(super) struct Left {
    shelf: Arc<Shelf>,
    /// Where it is kept. Locked while somebody is at it, who may take long where file systems hang.
    directory: Mutex<PathBuf>,
}

impl Left {
    pub(super) fn new(directory: PathBuf, shelf: Arc<Shelf>) -> Self {
        Self { shelf, directory: Mutex::new(directory) }
    }

    /// Keeps what is in an image.
    pub(super) fn keep(&self, image: LeftImage, pages: Vec<(u64, PageName)>) -> io::Result<()> {
        let directory = lock(&self.directory);
        let identity = Identity::of_file(&image.path)?;
        fs::create_dir_all(&*directory)?;
        let file = catalogue_of(&directory, &image.path);
        // The note first: one without a catalogue is found and removed, a catalogue without a note would stay.
        fs::write(file.with_extension(LEFT), serde_json::to_vec(&image)?)?;
        let catalogue = Catalogue::of_pages(pages, identity, &file)?;
        self.put(image, identity, catalogue);
        Ok(())
    }

    /// Puts those on the shelf of which an earlier agent knew and that are still there, and forgets the others.
    pub(super) fn find(&self) {
        let directory = lock(&self.directory);
        for entry in fs::read_dir(&*directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let ending = path.extension().unwrap_or_default();
            if ending == UNFINISHED {
                remove(&path);
            } else if ending == LEFT {
                match known(&directory, &path) {
                    Some((image, identity, catalogue)) => self.put(image, identity, catalogue),
                    // It is only a waste of room.
                    None => remove(&path),
                }
            }
        }
    }

    /// Forgets those that are not there any more, or are other files.
    pub(super) fn forget_lost(&self) {
        let directory = lock(&self.directory);
        let shelf = lock(&self.shelf).clone();
        for Template { path, identity, .. } in shelf.into_iter().filter(|template| template.is_left) {
            if Identity::of_file(&path).is_ok_and(|now| now == identity) {
                continue;
            }
            remove(&catalogue_of(&directory, &path).with_extension(LEFT));
            lock(&self.shelf).retain(|template| !(template.is_left && template.path == path));
        }
    }

    /// One that is named as a template is read anyway, and stays what it is.
    fn put(&self, LeftImage { path, format }: LeftImage, identity: Identity, catalogue: Catalogue) {
        let mut shelf = lock(&self.shelf);
        if shelf.iter().any(|template| template.path == path && !template.is_left) {
            return;
        }
        shelf.retain(|template| template.path != path);
        shelf.push(Template { path, format, identity, state: State::Ready(catalogue), is_left: true });
    }
}

/// The image of which a note is, if it is still there.
fn known(directory: &Path, note: &Path) -> Option<(LeftImage, Identity, Catalogue)> {
    let image: LeftImage = serde_json::from_slice(&fs::read(note).ok()?).ok()?;
    let identity = Identity::of_file(&image.path).ok()?;
    let catalogue = Catalogue::kept(&catalogue_of(directory, &image.path), identity)?;
    Some((image, identity, catalogue))
}

/// A note and its catalogue.
fn remove(note: &Path) {
    for file in [note.to_owned(), note.with_extension(CATALOGUE)] {
        if let Err(error) = fs::remove_file(&file)
            && error.kind() != io::ErrorKind::NotFound
        {
            warn!(file = %file.display(), %error, "what is known of an image that is gone cannot be removed");
        }
    }
}
