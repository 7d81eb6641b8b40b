//! Templates: images of this host from which VMs were made. Content that an arriving disk shares with a template, by
//! content and not by name, is copied here and not sent.
//!
//! A thread of its own reads each template once and keeps a catalogue of its pages, for as long as the file does not
//! change ([`template_indexer`]). Leftover images of VMs serve as well ([`leftovers`]).
//!
//! A source queries some pages of its disks ([`Message::QueryTemplates`](proto::Message::QueryTemplates)); the answer
//! is the content of the templates that have such pages ([`Message::TemplatePages`](proto::Message::TemplatePages)),
//! and the source sends references to pages of those ([`AdvertisedTemplates`]). Each referenced page is read and
//! compared before it is used, so that neither a catalogue nor a template that was changed can do harm.

mod advertised_templates;
mod catalogue;
mod leftovers;
mod shared_storage;
mod template_indexer;

use std::cmp::Reverse;
use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use ::memory::{CONTENT_HASH_BYTES, ContentHash, ContentIndex};
use proto::limits::PAGE_BYTES;
use tracing::warn;

pub use self::advertised_templates::AdvertisedTemplates;
pub use self::catalogue::MAX_ADVERTISED_PAGES;
use self::catalogue::{Catalogue, Identity};
use self::leftovers::LeftoverIndex;
pub use self::leftovers::{HashedPages, LeftoverTemplate};
use self::shared_storage::SharedImageIndexer;
pub use self::shared_storage::{IndexingStats, SharedImage, shared_images};
use self::template_indexer::TemplateIndexer;
use api::{TemplateInfo, TemplateState};

/// A template is useful if it has one of this many queried pages.
const USEFUL_IF_ONE_IN: usize = 50;

/// The templates of this host.
#[derive(Debug)]
pub struct Templates {
    table: Arc<TemplateTable>,
    scan: SyncSender<()>,
    leftovers: LeftoverIndex,
    shared_storage: SharedImageIndexer,
}

/// The known templates. The lock is held only briefly, never during file system calls, because these may hang.
type TemplateTable = Mutex<Vec<Template>>;

#[derive(Clone, Debug)]
struct Template {
    path: PathBuf,
    /// Format, by its name in QEMU.
    format: String,
    identity: Identity,
    state: IndexState,
    /// True if a VM has left the image behind here, and the configuration does not name it a template.
    is_left: bool,
}

#[derive(Clone, Debug)]
enum IndexState {
    Indexing,
    Ready(Catalogue),
    /// The reason, and true if trying again is useless.
    Failed(String, bool),
}

impl Templates {
    /// Starts to scan these files and directories for templates, in a thread of its own; catalogues are kept in
    /// `directory`.
    pub fn start(places: Vec<PathBuf>, directory: PathBuf, patience: Duration) -> io::Result<Self> {
        let table: Arc<TemplateTable> = Arc::default();
        let shared_storage = SharedImageIndexer::new(directory.join("shared"), &directory, patience);
        let leftovers = LeftoverIndex::start(directory.join("left"), Arc::clone(&table))?;
        // One scan serves all requests that arrive while another scan is running.
        let (scan, scans) = mpsc::sync_channel(1);
        if !places.is_empty() {
            let template_indexer = TemplateIndexer::new(places, directory, patience, Arc::clone(&table));
            let work = move || {
                template_indexer.scan();
                while scans.recv().is_ok() {
                    template_indexer.scan();
                }
            };
            thread::Builder::new().name("templates".to_owned()).spawn(work)?;
        }
        Ok(Self { table, scan, leftovers, shared_storage })
    }

    /// Reads images that both hosts have, for a guest with `memory_bytes` of memory, for as long as `known` is in use.
    /// Returns when the images were read.
    pub fn index_shared_images(
        &self,
        images: &[SharedImage],
        memory_bytes: u64,
        known: &Weak<ContentIndex>,
    ) -> IndexingStats {
        self.shared_storage.learn(images, memory_bytes, known)
    }

    /// Records leftover images, each with its pages as far as they are known, in their order. Waits a
    /// moment until that is recorded.
    pub fn leftovers(&self, images: Vec<(LeftoverTemplate, HashedPages)>) {
        self.leftovers.keep(images);
    }

    /// Returns the number of templates, read or not, including leftover images. Starts to read new ones.
    pub fn count(&self) -> usize {
        // If the channel is full, another caller has requested a scan.
        let _ = self.scan.try_send(());
        lock(&self.table).len()
    }

    /// Returns the templates that users see: those that the configuration names.
    pub fn infos(&self) -> Vec<TemplateInfo> {
        let info = |template: &Template| {
            let (state, pages, problem) = match &template.state {
                IndexState::Indexing => (TemplateState::Indexing, None, None),
                IndexState::Ready(catalogue) => (TemplateState::Ready, Some(catalogue.pages()), None),
                IndexState::Failed(why, _) => (TemplateState::Failed, None, Some(why.clone())),
            };
            let data_bytes = pages.map(|pages| pages * PAGE_BYTES);
            TemplateInfo { path: template.path.clone(), state, data_bytes, problem }
        };
        lock(&self.table).iter().filter(|template| !template.is_left).map(info).collect()
    }

    /// Returns the templates that have queried pages, those with the most of them first. Reads all catalogues.
    fn find_matching(&self, sought: &HashSet<ContentHash>) -> Vec<(Template, Catalogue)> {
        self.leftovers.scan();
        let table = lock(&self.table).clone();
        let mut found: Vec<(usize, Template, Catalogue)> = Vec::new();
        for template in table {
            let IndexState::Ready(catalogue) = template.state.clone() else { continue };
            match hits(&catalogue, sought) {
                Ok(hits) if hits > 0 && hits * USEFUL_IF_ONE_IN >= sought.len() => {
                    found.push((hits, template, catalogue));
                }
                Ok(_) => {}
                Err(error) => {
                    warn!(template = %template.path.display(), %error, "cannot read its catalogue");
                }
            }
        }
        found.sort_by_key(|(hits, ..)| Reverse(*hits));
        found.into_iter().map(|(_, template, catalogue)| (template, catalogue)).collect()
    }
}

/// Returns the number of queried pages that are in a template.
fn hits(catalogue: &Catalogue, sought: &HashSet<ContentHash>) -> io::Result<usize> {
    let mut found = HashSet::new();
    for run in catalogue.runs()? {
        found.extend(run?.hashes.into_iter().filter(|hash| sought.contains(hash)));
    }
    Ok(found.len())
}

/// Encodes a page's content hash for messages.
pub fn to_hex(hash: ContentHash) -> String {
    let number = hash.0.iter().fold(0_u64, |number, byte| (number << 8) | u64::from(*byte));
    format!("{number:012x}")
}

/// Decodes a page's content hash from a message; returns none if it is malformed.
pub fn from_hex(digits: &str) -> Option<ContentHash> {
    let mut hash = [0; CONTENT_HASH_BYTES];
    for (byte, at) in hash.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()?;
    }
    Some(ContentHash(hash))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use ::memory::Templates as _;
    use proto::message::{HashedRun, Message};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn page(number: u64) -> Vec<u8> {
        [&number.to_le_bytes()[..], &[1; PAGE_BYTES as usize - 8]].concat()
    }

    /// Makes a raw template of these pages, one after the other from the second page on.
    fn template(directory: &Path, name: &str, pages: std::ops::Range<u64>) {
        let bytes: Vec<u8> =
            [vec![0; PAGE_BYTES as usize]].into_iter().chain(pages.map(page)).flatten().collect();
        fs::write(directory.join(name), bytes).unwrap();
    }

    /// Waits until `count` templates were found and read.
    fn read(templates: &Templates, count: usize) {
        let being_read = || templates.infos().iter().any(|info| info.state == TemplateState::Indexing);
        while templates.infos().len() != count || being_read() {
            thread::yield_now();
        }
    }

    fn hashes(pages: impl Iterator<Item = u64>) -> Vec<String> {
        pages.map(|number| to_hex(ContentHash::of(&page(number)))).collect()
    }

    #[test]
    fn templates_with_queried_pages_are_advertised() {
        let directory = tempfile::tempdir().unwrap();
        let images = directory.path().join("images");
        fs::create_dir(&images).unwrap();
        template(&images, "half", 100..300);
        template(&images, "most", 100..1000);
        template(&images, "other", 5000..5100);
        fs::write(images.join("broken.qcow2"), [7; 100]).unwrap();
        let start =
            || Templates::start(vec![images.clone()], directory.path().join("state"), PATIENCE).unwrap();
        let templates = start();
        read(&templates, 4);
        let states: Vec<_> = templates.infos().iter().map(|info| (info.state, info.data_bytes)).collect();
        let ready = |pages: u64| (TemplateState::Ready, Some(pages * PAGE_BYTES));
        assert_eq!(states, [(TemplateState::Failed, None), ready(200), ready(900), ready(100)]);

        let advertised_templates =
            AdvertisedTemplates::new(directory.path().to_owned(), PATIENCE, Vec::new());
        let messages = advertised_templates.choose(&templates, &hashes((0..1000).step_by(10)));
        let run = |pages: std::ops::Range<u64>| HashedRun { first_page: 1, hashes: hashes(pages).concat() };
        let known = |template, runs| Message::TemplatePages { template, runs, last: false };
        let last = Message::TemplatePages { template: 0, runs: Vec::new(), last: true };
        // Pages that are in both are advertised once.
        assert_eq!(messages, [known(0, vec![run(100..1000)]), last.clone()]);
        let mut two = vec![0; 2 * PAGE_BYTES as usize];
        advertised_templates.read(0, 900, &mut two[..PAGE_BYTES as usize]).unwrap();
        assert_eq!(two[..PAGE_BYTES as usize], page(999));
        advertised_templates.read(0, 1, &mut two).unwrap();
        assert_eq!(two, [page(100), page(101)].concat());
        for (template, first_page) in [(1, 0), (0, 900), (0, u64::MAX), (0, u64::MAX / PAGE_BYTES)] {
            assert!(
                advertised_templates.read(template, first_page, &mut two).is_err(),
                "{template} {first_page}"
            );
        }
        assert_eq!(advertised_templates.choose(&templates, &hashes(7000..7100)), [last]);

        // A file that is not a catalogue must not be removed.
        fs::write(directory.path().join("state/stranger.catalogue"), "mine").unwrap();
        // A second agent need not read them again, except one that was changed.
        drop(templates);
        template(&images, "other", 5000..5050);
        let restarted = start();
        read(&restarted, 4);
        assert_eq!(restarted.infos()[3].data_bytes, Some(50 * PAGE_BYTES));

        // A template that is gone is tried once, and its catalogue is removed, too.
        advertised_templates.choose(&restarted, &hashes((100..1000).step_by(10)));
        fs::remove_file(images.join("most")).unwrap();
        assert!(
            advertised_templates.read(0, 1, &mut two).is_err()
                && advertised_templates.read(0, 1, &mut two).is_err()
        );
        restarted.count();
        read(&restarted, 3);
        let catalogues = || {
            let files = fs::read_dir(directory.path().join("state")).unwrap();
            files.filter(|file| file.as_ref().is_ok_and(|file| file.path().extension().is_some())).count()
        };
        while catalogues() != 3 {
            thread::yield_now();
        }
        assert!(directory.path().join("state/stranger.catalogue").exists());
    }

    #[test]
    fn names_in_messages() {
        let name = ContentHash([0, 1, 0xab, 0xcd, 0xef, 0xff]);
        assert_eq!(to_hex(name), "0001abcdefff");
        assert_eq!(from_hex("0001abcdefff"), Some(name));
        assert!(from_hex("0001abcdef").is_none() && from_hex("0001abcdefgg").is_none());
    }

    /// A leftover image is advertised without having been read, by a later agent too, as long as it
    /// exists; users do not see it as a template.
    #[test]
    fn what_was_left_behind_is_known_until_it_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("left.img");
        template(directory.path(), "left.img", 100..300);
        let start = || Templates::start(Vec::new(), directory.path().join("state"), PATIENCE).unwrap();
        let advertised_templates = |templates: &Templates| {
            let advertised_templates =
                AdvertisedTemplates::new(directory.path().to_owned(), PATIENCE, Vec::new());
            (advertised_templates.choose(templates, &hashes(100..300)).len() - 1, advertised_templates)
        };
        let templates = start();
        assert_eq!((templates.count(), advertised_templates(&templates).0), (0, 0));
        let known = (1..=200).map(|number| (number, ContentHash::of(&page(99 + number)))).collect();
        templates
            .leftovers(vec![(LeftoverTemplate { path: image.clone(), format: "raw".to_owned() }, known)]);
        assert_eq!((templates.count(), templates.infos().len()), (1, 0));
        drop(templates);

        let templates = start();
        while templates.count() == 0 {
            thread::yield_now();
        }
        let (messages, of_left_behind) = advertised_templates(&templates);
        assert_eq!((templates.count(), messages), (1, 1));
        let mut read = vec![0; PAGE_BYTES as usize];
        of_left_behind.read(0, 7, &mut read).unwrap();
        assert_eq!(read, page(106));
        // Another file of that name is not the image that was left.
        template(directory.path(), "other.img", 100..300);
        fs::rename(directory.path().join("other.img"), &image).unwrap();
        assert_eq!((advertised_templates(&templates).0, templates.count()), (0, 0));
        assert_eq!(fs::read_dir(directory.path().join("state/left")).unwrap().count(), 0);
    }

    #[test]
    fn a_named_template_stays_one_though_a_vm_left_it_behind() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("base.img");
        template(directory.path(), "base.img", 100..300);
        let places = vec![image.clone()];
        let templates = Templates::start(places, directory.path().join("state"), PATIENCE).unwrap();
        read(&templates, 1);
        let leftovers = LeftoverTemplate { path: image, format: "raw".to_owned() };
        templates.leftovers(vec![(leftovers, vec![(1, ContentHash([7; 6]))])]);
        let infos = templates.infos();
        assert_eq!((infos.len(), infos[0].data_bytes), (1, Some(200 * PAGE_BYTES)));
        assert!(!directory.path().join("state/left").exists());
    }

    /// The catalogue of an image that is not there yet is kept, and used once it is; unfinished files of a killed agent
    /// are removed.
    #[test]
    fn an_image_that_was_left_may_be_mounted_later() {
        let directory = tempfile::tempdir().unwrap();
        let (image, away) = (directory.path().join("left.img"), directory.path().join("away.img"));
        template(directory.path(), "left.img", 100..300);
        let start = || Templates::start(Vec::new(), directory.path().join("state"), PATIENCE).unwrap();
        let advertised_templates = |templates: &Templates| {
            let advertised_templates =
                AdvertisedTemplates::new(directory.path().to_owned(), PATIENCE, Vec::new());
            advertised_templates.choose(templates, &hashes(100..300)).len() - 1
        };
        let templates = start();
        let known = (1..=200).map(|number| (number, ContentHash::of(&page(99 + number)))).collect();
        templates
            .leftovers(vec![(LeftoverTemplate { path: image.clone(), format: "raw".to_owned() }, known)]);
        assert_eq!(advertised_templates(&templates), 1);
        drop(templates);

        fs::rename(&image, &away).unwrap();
        let begun = directory.path().join("state/left/0000.unfinished");
        fs::write(&begun, "half").unwrap();
        let templates = start();
        assert_eq!(advertised_templates(&templates), 0);
        assert!(!begun.exists());
        fs::rename(&away, &image).unwrap();
        assert_eq!(advertised_templates(&templates), 1);
        // The image was there, and is gone.
        fs::remove_file(&image).unwrap();
        assert_eq!(advertised_templates(&templates), 0);
        assert_eq!(fs::read_dir(directory.path().join("state/left")).unwrap().count(), 0);
    }
}
