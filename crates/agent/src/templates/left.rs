//! Images that VMs left behind here when they moved away with their disks: a VM that comes back, or one that was made
//! from the same template, has much in common with them.
//!
//! Nothing is read for it. What went away is known by name, page by page, because references were looked for; that is
//! kept as the image's catalogue. It need not be right: what was written last has another content than its name says,
//! and the image may have been changed since. Each page is compared before it is used, as with any template.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

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

/// Keeps what is in an image that was left behind.
pub(super) fn keep(
    image: LeftImage,
    pages: Vec<(u64, PageName)>,
    directory: &Path,
    shelf: &Shelf,
) -> io::Result<()> {
    if is_named(shelf, &image.path) {
        return Ok(());
    }
    let identity = Identity::of_file(&image.path)?;
    fs::create_dir_all(directory)?;
    let file = catalogue_of(directory, &image.path);
    // The note first: one without a catalogue is found and removed, a catalogue without a note would stay.
    fs::write(file.with_extension(LEFT), serde_json::to_vec(&image)?)?;
    let catalogue = Catalogue::of_pages(pages, identity, &file)?;
    put(shelf, image, identity, catalogue);
    Ok(())
}

/// Puts those on the shelf of which an earlier agent knew and that are still there, and forgets the others.
pub(super) fn find(directory: &Path, shelf: &Shelf) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let note = entry.path();
        if note.extension().is_some_and(|ending| ending == UNFINISHED) {
            remove(&note);
        }
        if note.extension().is_none_or(|ending| ending != LEFT) {
            continue;
        }
        let image = fs::read(&note).ok().and_then(|text| serde_json::from_slice::<LeftImage>(&text).ok());
        let known = image.and_then(|image| {
            let file = catalogue_of(directory, &image.path);
            let identity = Identity::of_file(&image.path).ok()?;
            Some((Catalogue::kept(&file, identity)?, image, identity))
        });
        match known {
            Some((catalogue, image, identity)) => put(shelf, image, identity, catalogue),
            // It is only a waste of room.
            None => remove(&note),
        }
    }
}

/// Forgets those that are not there any more, or are other files.
pub(super) fn forget_lost(directory: &Path, shelf: &Shelf) {
    let known = lock(shelf).clone();
    for Template { path, identity, .. } in known.into_iter().filter(|template| template.is_left) {
        if Identity::of_file(&path).is_ok_and(|now| now == identity) {
            continue;
        }
        remove(&catalogue_of(directory, &path).with_extension(LEFT));
        lock(shelf).retain(|template| !(template.is_left && template.path == path));
    }
}

fn put(shelf: &Shelf, LeftImage { path, format }: LeftImage, identity: Identity, catalogue: Catalogue) {
    let mut shelf = lock(shelf);
    shelf.retain(|template| template.path != path);
    shelf.push(Template { path, format, identity, state: State::Ready(catalogue), is_left: true });
}

/// One that is named as a template has been read, or will be: no more is known of it.
fn is_named(shelf: &Shelf, path: &Path) -> bool {
    lock(shelf).iter().any(|template| template.path == path && !template.is_left)
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
