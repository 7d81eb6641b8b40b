//! Catalogue of a template: the hashes of its pages, made once, kept beside the journal, and read from there when a VM
//! arrives.
//!
//! ```text
//! WHCATAL1 | identity 40 bytes | pages u64 | run ... | run of no pages
//! run: first page u64 | pages u32 | hash 6 bytes ...
//! ```
//!
//! A wrong catalogue costs bytes but never corrupts a page: each page is compared with the template before it is used.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek as _, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use ::memory::{CONTENT_HASH_BYTES, ContentHash};
use block::image::ImageError;
use block::reading::ImageReader;
use proto::limits::{PAGE_BYTES, TEMPLATE_PAGES};

/// Maximum number of pages of templates that are advertised to a source: 4 GiB, for which it needs 18 MiB.
pub const MAX_ADVERTISED_PAGES: u64 = 1 << 20;
/// Extension of an unfinished catalogue.
pub(super) const UNFINISHED: &str = "unfinished";

const MAGIC: &[u8; 8] = b"WHCATAL1";
const HEAD_BYTES: usize = 8 + Identity::BYTES + 8;
/// Size of one read.
const PIECE_BYTES: u64 = 256 << 10;

/// Identity of a file in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity([u64; 5]);

impl Identity {
    const BYTES: usize = 40;

    pub(super) fn of(path: &Path) -> io::Result<Self> {
        let file = fs::metadata(path)?;
        // The value distinguishes states; it is not compared with a clock.
        let nanoseconds = |s: i64, ns: i64| (s as u64).wrapping_mul(1_000_000_000).wrapping_add(ns as u64);
        Ok(Self([
            file.dev(),
            file.ino(),
            file.len(),
            nanoseconds(file.mtime(), file.mtime_nsec()),
            nanoseconds(file.ctime(), file.ctime_nsec()),
        ]))
    }

    /// Returns the identity of a file in any state: for images that may change, and whose file system is identified
    /// otherwise.
    pub(super) fn of_inode(inode: u64) -> Self {
        Self([0, inode, 0, 0, 0])
    }

    fn bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes
            .chunks_exact_mut(8)
            .zip(self.0)
            .for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        bytes
    }
}

/// Neighbouring pages of a template, by their hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageRun {
    pub(super) first_page: u64,
    pub(super) hashes: Vec<ContentHash>,
}

/// Reason for which a template has no catalogue.
#[derive(Debug, thiserror::Error)]
pub(super) enum CatalogueError {
    #[error("the template cannot be read")]
    Image(#[from] ImageError),
    #[error("its catalogue cannot be stored in {path}", path = path.display())]
    Keep { path: PathBuf, source: io::Error },
}

/// A stored catalogue.
#[derive(Clone, Debug)]
pub(super) struct Catalogue {
    file: PathBuf,
    pages: u64,
}

impl Catalogue {
    /// Returns the number of pages with hashes: those that are not all zeros.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// Opens the catalogue in `file`, if it belongs to this state of its template.
    pub(super) fn kept(file: &Path, identity: Identity) -> Option<Self> {
        let mut head = [0; HEAD_BYTES];
        File::open(file).ok()?.read_exact(&mut head).ok()?;
        let (magic, rest) = head.split_first_chunk::<8>()?;
        let (found, pages) = rest.split_first_chunk::<{ Identity::BYTES }>()?;
        let pages = u64::from_le_bytes(pages.try_into().ok()?);
        (magic == MAGIC && *found == identity.bytes()).then(|| Self { file: file.to_owned(), pages })
    }

    /// Reads a whole template, and stores its catalogue in a file. After an error something may be left beside that
    /// file.
    pub(super) fn make(
        template: &mut ImageReader,
        identity: Identity,
        file: &Path,
    ) -> Result<Self, CatalogueError> {
        let extents = template.allocated(0..template.size_bytes())?;
        Self::make_with(template, extents, identity, file, |_| Ok(()))
    }

    /// Reads these extents, which are all data of the template, and stores their catalogue; `each` receives the hashes
    /// as they are found, and may end the reading.
    pub(super) fn make_with<E: From<CatalogueError>>(
        template: &mut ImageReader,
        extents: Vec<Range<u64>>,
        identity: Identity,
        file: &Path,
        mut each: impl FnMut(&[(u64, ContentHash)]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let keep = |source| CatalogueError::Keep { path: file.to_owned(), source };
        let mut writing = CatalogueWriter::begin(file).map_err(keep)?;
        hash_pages(template, extents, |pages| {
            each(pages)?;
            Ok::<_, E>(pages.iter().try_for_each(|(page, hash)| writing.add(*page, *hash)).map_err(keep)?)
        })?;
        Ok(writing.finish(identity, file).map_err(keep)?)
    }

    /// Stores the known pages of an image as its catalogue, without reading the image; the pages are in ascending
    /// order.
    pub(super) fn of_pages(
        pages: impl IntoIterator<Item = (u64, ContentHash)>,
        identity: Identity,
        file: &Path,
    ) -> io::Result<Self> {
        let mut writing = CatalogueWriter::begin(file)?;
        pages.into_iter().try_for_each(|(page, hash)| writing.add(page, hash))?;
        writing.finish(identity, file)
    }

    /// Returns all runs; each has at least one hash and at most as many as one message holds.
    pub(super) fn runs(&self) -> io::Result<impl Iterator<Item = io::Result<PageRun>> + use<>> {
        let mut file = BufReader::new(File::open(&self.file)?);
        file.seek(SeekFrom::Start(HEAD_BYTES as u64))?;
        let mut ended = false;
        Ok(std::iter::from_fn(move || {
            if ended {
                return None;
            }
            let run = PageRun::read(&mut file);
            // An error ends the iteration.
            ended = !matches!(&run, Ok(Some(_)));
            run.transpose()
        }))
    }
}

/// Reads these extents of a template, and passes the hashes of their pages, in ascending order and some at a time, to
/// `each`; zero pages are omitted.
pub(super) fn hash_pages<E: From<CatalogueError>>(
    template: &mut ImageReader,
    extents: Vec<Range<u64>>,
    mut each: impl FnMut(&[(u64, ContentHash)]) -> Result<(), E>,
) -> Result<(), E> {
    // Only whole pages: a disk's last one may be shorter, and can be ignored.
    let whole_bytes = template.size_bytes() / PAGE_BYTES * PAGE_BYTES;
    let (mut bytes, mut hashes) = (Vec::new(), Vec::new());
    // Two extents may share a page.
    let mut next = 0;
    for extent in extents {
        let extent = (extent.start / PAGE_BYTES * PAGE_BYTES).max(next)
            ..extent.end.next_multiple_of(PAGE_BYTES).min(whole_bytes);
        next = extent.end.max(next);
        for_pieces(&extent, |piece| {
            bytes.resize((piece.end - piece.start) as usize, 0);
            template.read(piece.start, &mut bytes).map_err(CatalogueError::from)?;
            let pages = (piece.start / PAGE_BYTES..).zip(bytes.chunks_exact(PAGE_BYTES as usize));
            let pages = pages.filter(|(_, bytes)| bytes.iter().any(|byte| *byte != 0));
            hashes.clear();
            hashes.extend(pages.map(|(page, bytes)| (page, ContentHash::of(bytes))));
            each(&hashes)
        })?;
    }
    Ok(())
}

/// A catalogue that is being written.
struct CatalogueWriter {
    unfinished: PathBuf,
    out: BufWriter<File>,
    run: PageRun,
    pages: u64,
}

impl CatalogueWriter {
    fn begin(file: &Path) -> io::Result<Self> {
        let unfinished = file.with_extension(UNFINISHED);
        let mut out = BufWriter::new(File::create(&unfinished)?);
        out.write_all(&[0; HEAD_BYTES])?;
        Ok(Self { unfinished, out, run: PageRun { first_page: 0, hashes: Vec::new() }, pages: 0 })
    }

    /// Adds the next page; pages must be added in ascending order.
    fn add(&mut self, page: u64, hash: ContentHash) -> io::Result<()> {
        let run = &mut self.run;
        if page != run.first_page + run.hashes.len() as u64 || run.hashes.len() == TEMPLATE_PAGES {
            run.write(&mut self.out)?;
            *run = PageRun { first_page: page, hashes: Vec::new() };
        }
        run.hashes.push(hash);
        self.pages += 1;
        Ok(())
    }

    fn finish(mut self, identity: Identity, file: &Path) -> io::Result<Catalogue> {
        self.run.write(&mut self.out)?;
        PageRun { first_page: 0, hashes: Vec::new() }.write_even_if_empty(&mut self.out)?;
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(&[&MAGIC[..], &identity.bytes(), &u64::to_le_bytes(self.pages)].concat())?;
        self.out.flush()?;
        // Otherwise a power failure may leave a name without content.
        self.out.get_ref().sync_all()?;
        fs::rename(&self.unfinished, file)?;
        Ok(Catalogue { file: file.to_owned(), pages: self.pages })
    }
}

impl PageRun {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        if self.hashes.is_empty() { Ok(()) } else { self.write_even_if_empty(out) }
    }

    fn write_even_if_empty(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&self.first_page.to_le_bytes())?;
        out.write_all(&(self.hashes.len() as u32).to_le_bytes())?;
        self.hashes.iter().try_for_each(|hash| out.write_all(&hash.0))
    }

    /// Reads the next run; returns none at the end.
    fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let (mut first_page, mut pages) = ([0; 8], [0; 4]);
        from.read_exact(&mut first_page)?;
        from.read_exact(&mut pages)?;
        let pages = u32::from_le_bytes(pages) as usize;
        if pages > TEMPLATE_PAGES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut hashes = vec![0; pages * CONTENT_HASH_BYTES];
        from.read_exact(&mut hashes)?;
        let hashes: Vec<_> = hashes.as_chunks().0.iter().copied().map(ContentHash).collect();
        Ok((!hashes.is_empty()).then(|| Self { first_page: u64::from_le_bytes(first_page), hashes }))
    }
}

fn for_pieces<E>(range: &Range<u64>, mut each: impl FnMut(Range<u64>) -> Result<(), E>) -> Result<(), E> {
    let mut at = range.start;
    while at < range.end {
        let end = (at + PIECE_BYTES).min(range.end);
        each(at..end)?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u64) -> Vec<u8> {
        [&number.to_le_bytes()[..], &[1; PAGE_BYTES as usize - 8]].concat()
    }

    /// Makes a raw image of 40 MiB: pages 3 and 4, all from 4096 on to 8196, and half a page at the end.
    fn template(directory: &Path) -> PathBuf {
        use std::os::unix::fs::FileExt as _;

        let path = directory.join("template.raw");
        let file = File::create(&path).unwrap();
        file.set_len((40 << 20) + 2048).unwrap();
        for number in [3, 4].into_iter().chain(4096..8196) {
            file.write_all_at(&page(number), number * PAGE_BYTES).unwrap();
        }
        file.write_all_at(&[7; 2048], 40 << 20).unwrap();
        path
    }

    fn reading(path: &Path) -> ImageReader {
        let socket = path.with_extension("sock");
        ImageReader::open(&path.to_string_lossy(), "raw", None, &socket, std::time::Duration::from_secs(30))
            .unwrap()
    }

    #[test]
    fn a_catalogue_has_the_name_of_every_page() {
        let directory = tempfile::tempdir().unwrap();
        let path = template(directory.path());
        let file = directory.path().join("catalogue");
        let identity = Identity::of(&path).unwrap();
        let made = Catalogue::make(&mut reading(&path), identity, &file).unwrap();
        assert_eq!(made.pages(), 2 + 4100);
        let kept = Catalogue::kept(&file, identity).unwrap();
        assert_eq!(kept.pages(), made.pages());
        let runs: Vec<PageRun> = kept.runs().unwrap().map(Result::unwrap).collect();
        assert_eq!(
            runs.iter().map(|run| (run.first_page, run.hashes.len())).collect::<Vec<_>>(),
            [(3, 2), (4096, 4100)]
        );
        for run in &runs {
            for (number, hash) in (run.first_page..).zip(&run.hashes) {
                assert_eq!(*hash, ContentHash::of(&page(number)));
            }
        }
        // No unfinished file remains.
        assert!(!file.with_extension(UNFINISHED).exists());
    }

    #[test]
    fn a_template_that_was_changed_has_no_catalogue() {
        let directory = tempfile::tempdir().unwrap();
        let path = template(directory.path());
        let file = directory.path().join("catalogue");
        let before = Identity::of(&path).unwrap();
        Catalogue::make(&mut reading(&path), before, &file).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(41 << 20).unwrap();
        let after = Identity::of(&path).unwrap();
        assert_ne!(before, after);
        assert!(Catalogue::kept(&file, after).is_none() && Catalogue::kept(&file, before).is_some());
        assert!(Catalogue::kept(&directory.path().join("none"), before).is_none());
    }

    #[test]
    fn a_catalogue_that_was_cut_off_ends_with_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = template(directory.path());
        let file = directory.path().join("catalogue");
        let identity = Identity::of(&path).unwrap();
        Catalogue::make(&mut reading(&path), identity, &file).unwrap();
        File::options().write(true).open(&file).unwrap().set_len(300).unwrap();
        let runs: Vec<_> = Catalogue::kept(&file, identity).unwrap().runs().unwrap().collect();
        assert_eq!(runs.len(), 2);
        assert!(runs[0].is_ok() && runs[1].is_err());
    }
}
