//! The thread that finds and reads templates.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use block::image::ImageError;
use block::reading::ImageReader;
use tracing::{info, warn};

use super::catalogue::{Catalogue, CatalogueError, Identity, UNFINISHED};
use super::{IndexState, Template, TemplateTable, lock};

/// Extension of a catalogue's name, and the number of digits before it.
pub(super) const CATALOGUE: &str = "catalogue";
const NAME_DIGITS: usize = 32;
/// Socket at which a template is served while it is read.
const READING: &str = "reading.sock";
/// Extension of qcow2 images; QEMU opens all others as raw. The first bytes of an image do not decide: a guest may have
/// written them.
const QCOW2: &str = "qcow2";

/// State of the thread that finds and reads templates.
pub(super) struct TemplateIndexer {
    places: Vec<PathBuf>,
    directory: PathBuf,
    patience: Duration,
    table: Arc<TemplateTable>,
}

/// Reason for which a template cannot be used.
#[derive(Debug, thiserror::Error)]
enum TemplateError {
    /// The template cannot be read, or its catalogue cannot be stored.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// Part of its content is in other files.
    #[error(
        "it is qcow2 with a backing file or a data file; make it one complete image with `qemu-img convert`"
    )]
    NotWhole,
}

impl TemplateIndexer {
    pub(super) fn new(
        places: Vec<PathBuf>,
        directory: PathBuf,
        patience: Duration,
        table: Arc<TemplateTable>,
    ) -> Self {
        for place in places.iter().filter(|place| !place.exists()) {
            warn!(
                place = %place.display(),
                "there are no templates: check `templates` under [disks] in the configuration"
            );
        }
        // Left by an agent that was killed as it began to read.
        block::image::end_unused_server(&directory.join(READING));
        Self { places, directory, patience, table }
    }

    /// Scans for templates, and reads those that have no catalogue yet.
    pub(super) fn scan(&self) {
        self.update_table();
        self.remove_stale_catalogues();
        self.read();
    }

    /// Updates the table of templates; unchanged templates keep their state.
    fn update_table(&self) {
        let before: BTreeMap<PathBuf, Template> =
            lock(&self.table).iter().map(|template| (template.path.clone(), template.clone())).collect();
        let mut now = Vec::new();
        for path in self.files() {
            let Ok(identity) = Identity::of(&path) else { continue };
            let known = before.get(&path).filter(|old| old.identity == identity).map(|old| &old.state);
            let state = match known {
                Some(state @ (IndexState::Ready(_) | IndexState::Failed(_, true))) => state.clone(),
                _ => Catalogue::kept(&catalogue_of(&self.directory, &path), identity)
                    .map_or(IndexState::Indexing, IndexState::Ready),
            };
            let format = format_of(&path).to_owned();
            now.push(Template { path, format, identity, state, is_left: false });
        }
        let mut table = lock(&self.table);
        // A VM may have left an image behind in between.
        let named: BTreeSet<PathBuf> = now.iter().map(|template| template.path.clone()).collect();
        table.retain(|template| template.is_left && !named.contains(&template.path));
        table.extend(now);
    }

    /// Removes catalogues of templates that are gone, and unfinished catalogues; only files with names of this
    /// directory's format are removed.
    fn remove_stale_catalogues(&self) {
        let wanted: HashSet<PathBuf> =
            lock(&self.table).iter().map(|template| catalogue_of(&self.directory, &template.path)).collect();
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if is_catalogue_name(&path) && !wanted.contains(&path) {
                // The file only wastes space.
                let _ = fs::remove_file(path);
            }
        }
    }

    fn read(&self) {
        let unread: Vec<_> = {
            let table = lock(&self.table);
            table.iter().filter(|template| matches!(template.state, IndexState::Indexing)).cloned().collect()
        };
        for Template { path, identity, .. } in unread {
            let state = match self.catalogue(&path, identity) {
                Ok(catalogue) => {
                    info!(template = %path.display(), pages = catalogue.pages(), "its catalogue was created");
                    IndexState::Ready(catalogue)
                }
                Err(error) => {
                    let why = crate::chain(&error);
                    warn!(template = %path.display(), error = why, "this template will not be used");
                    let for_good = matches!(
                        error,
                        TemplateError::NotWhole
                            | TemplateError::Catalogue(CatalogueError::Image(ImageError::Tool { .. }))
                    );
                    IndexState::Failed(why, for_good)
                }
            };
            let mut table = lock(&self.table);
            let same = |template: &&mut Template| template.path == path && template.identity == identity;
            if let Some(template) = table.iter_mut().find(same) {
                template.state = state;
            }
        }
    }

    fn catalogue(&self, path: &Path, identity: Identity) -> Result<Catalogue, TemplateError> {
        if !is_whole(path) {
            return Err(TemplateError::NotWhole);
        }
        let file = catalogue_of(&self.directory, path);
        let keep = |source| CatalogueError::Keep { path: file.clone(), source };
        fs::create_dir_all(&self.directory).map_err(keep)?;
        let socket = self.directory.join(READING);
        let mut reading =
            open(path, format_of(path), &socket, self.patience).map_err(CatalogueError::from)?;
        Ok(Catalogue::make(&mut reading, identity, &file)?)
    }

    /// Returns all configured files: those that are named, and those in directories that are named.
    fn files(&self) -> BTreeSet<PathBuf> {
        let mut files = BTreeSet::new();
        for place in &self.places {
            let inside = fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.path());
            files.extend(inside.chain([place.clone()]).filter(|path| path.is_file()));
        }
        files
    }
}

/// Returns the path of the catalogue of an image.
pub(super) fn catalogue_of(directory: &Path, image: &Path) -> PathBuf {
    let name = blake3::hash(image.as_os_str().as_encoded_bytes()).to_hex();
    directory.join(format!("{}.{CATALOGUE}", &name[..NAME_DIGITS]))
}

/// True if a file has the name of a catalogue, finished or not.
fn is_catalogue_name(path: &Path) -> bool {
    let ending = path.extension().is_some_and(|ending| ending == CATALOGUE || ending == UNFINISHED);
    let name = path.file_stem().map(std::ffi::OsStr::as_encoded_bytes).unwrap_or_default();
    ending && name.len() == NAME_DIGITS && name.iter().all(u8::is_ascii_hexdigit)
}

/// Opens a template for reading.
pub(super) fn open(
    template: &Path,
    format: &str,
    socket: &Path,
    patience: Duration,
) -> Result<ImageReader, ImageError> {
    ImageReader::open(&template.to_string_lossy(), format, None, socket, patience)
}

/// Returns the format of a template, by its name.
fn format_of(template: &Path) -> &'static str {
    if is_qcow2(template) { QCOW2 } else { "raw" }
}

fn is_qcow2(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == QCOW2)
}

/// True if all of an image's content is in its own file: for a qcow2 image its header decides (QEMU's
/// docs/interop/qcow2, bytes 8 to 15 and bit 2 of the incompatible features).
pub(super) fn is_whole(path: &Path) -> bool {
    const EXTERNAL_DATA: u8 = 1 << 2;
    if !is_qcow2(path) {
        return true;
    }
    let mut header = [0; 80];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut header));
    let version = header[7];
    // If the header cannot be read, QEMU reports a better error.
    read.is_err() || (header[8..16] == [0; 8] && (version < 3 || header[79] & EXTERNAL_DATA == 0))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn an_image_over_another_is_not_whole() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let create = |words: &[&str]| {
            let mut command = Command::new("qemu-img");
            command.current_dir(directory.path()).args(["create", "-q"]).args(words);
            let made = command.arg("1M").status().unwrap();
            assert!(made.success(), "{words:?}");
        };
        create(&["-f", "qcow2", "base.qcow2"]);
        create(&["-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2", "over.qcow2"]);
        create(&["-f", "qcow2", "-o", "data_file=data.raw", "apart.qcow2"]);
        assert!(is_whole(&at("base.qcow2")) && !is_whole(&at("over.qcow2")) && !is_whole(&at("apart.qcow2")));
        // By another name it is raw, whatever its header has.
        fs::copy(at("over.qcow2"), at("over.img")).unwrap();
        assert!(is_whole(&at("over.img")));
    }
}
