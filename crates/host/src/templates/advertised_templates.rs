//! The templates that were advertised to the source of one VM, and the references to them.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ::memory::ContentHash;
use ::memory::ram::RamError;
use block::image::ImageError;
use block::nbd::NbdError;
use block::reading::ImageReader;
use proto::limits::{ADVERTISED_TEMPLATES, PAGE_BYTES, TEMPLATE_PAGES};
use proto::message::{HashedRun, Message};
use tracing::{info, warn};

use super::catalogue::{Catalogue, MAX_ADVERTISED_PAGES, PageRun};
use super::shared_storage::SharedImage;
use super::template_indexer::{is_whole, open};
use super::{Template, Templates, from_hex, lock, to_hex};

/// The templates that were advertised to the source of one VM.
#[derive(Debug)]
pub struct AdvertisedTemplates {
    /// Directory for sockets.
    directory: PathBuf,
    patience: Duration,
    asked: AtomicBool,
    /// Number of templates that were opened.
    opened: AtomicU64,
    templates: Mutex<Vec<Arc<Mutex<OpenTemplate>>>>,
    /// Images that both hosts have. They need not be advertised.
    shared_storage: Vec<(SharedImage, Arc<Mutex<OpenTemplate>>)>,
}

/// An advertised template.
#[derive(Debug)]
enum OpenTemplate {
    /// The agent has not read it yet.
    Unopened(TemplateSource),
    ImageReader(ImageReader),
    /// It cannot be opened, or answered late, so that the next bytes on the connection are undefined. It is not tried
    /// again, because each try takes time.
    Unusable,
}

/// A template or image that is to be opened.
#[derive(Debug)]
enum TemplateSource {
    Template(Template),
    Shared(SharedImage),
}

impl AdvertisedTemplates {
    /// Creates the set; the source may refer to the images in `shared_storage`, too, without asking.
    pub fn new(directory: PathBuf, patience: Duration, shared_storage: Vec<SharedImage>) -> Self {
        let unopened = |image: SharedImage| {
            let open = OpenTemplate::Unopened(TemplateSource::Shared(image.clone()));
            (image, Arc::new(Mutex::new(open)))
        };
        let shared_storage = shared_storage.into_iter().map(unopened).collect();
        Self {
            directory,
            patience,
            asked: AtomicBool::new(false),
            opened: AtomicU64::new(0),
            templates: Mutex::default(),
            shared_storage,
        }
    }

    /// True if the source asks for the first time; it may ask only once. Records the request.
    pub fn is_first(&self) -> bool {
        !self.asked.swap(true, Ordering::AcqRel)
    }

    /// Chooses the templates that have queried pages, and returns messages with their contents. Takes a while, because
    /// all catalogues are read.
    pub fn choose(&self, templates: &Templates, sought: &[String]) -> Vec<Message> {
        let sought: HashSet<ContentHash> = sought.iter().filter_map(|hash| from_hex(hash)).collect();
        let (mut messages, mut chosen) = (Vec::new(), Vec::new());
        let mut advertised = HashSet::new();
        for (template, catalogue) in
            templates.find_matching(&sought).into_iter().take(ADVERTISED_TEMPLATES.into())
        {
            match known(chosen.len() as u16, &catalogue, &mut advertised) {
                Ok(known) if known.is_empty() => {}
                Ok(known) => {
                    info!(template = %template.path.display(), "contains pages of an arriving disk");
                    messages.extend(known);
                    chosen.push(Arc::new(Mutex::new(OpenTemplate::Unopened(TemplateSource::Template(
                        template,
                    )))));
                }
                Err(error) => {
                    warn!(template = %template.path.display(), %error, "cannot read its catalogue");
                }
            }
        }
        *lock(&self.templates) = chosen;
        messages.push(Message::TemplatePages { template: 0, runs: Vec::new(), last: true });
        messages
    }

    /// Closes all templates, because nothing refers to them at present. The source may not have read the shared images
    /// yet; they are opened again when it refers to them.
    pub fn close(&self) {
        let mut closed = std::mem::take(&mut *lock(&self.templates));
        for (image, open) in &self.shared_storage {
            let mut open = lock(open);
            if matches!(*open, OpenTemplate::ImageReader(_)) {
                let reading = std::mem::replace(
                    &mut *open,
                    OpenTemplate::Unopened(TemplateSource::Shared(image.clone())),
                );
                closed.push(Arc::new(Mutex::new(reading)));
            }
        }
        // The guest may be stopped: their servers end in a thread of their own.
        if !closed.is_empty() {
            let _ = thread::Builder::new().name("close".to_owned()).spawn(move || drop(closed));
        }
    }

    fn find(&self, template: u16) -> Option<Arc<Mutex<OpenTemplate>>> {
        match template.checked_sub(ADVERTISED_TEMPLATES) {
            Some(shared_storage) => {
                self.shared_storage.get(usize::from(shared_storage)).map(|(_, open)| Arc::clone(open))
            }
            None => lock(&self.templates).get(usize::from(template)).map(Arc::clone),
        }
    }

    /// Opens a template; returns none if it must not be opened.
    fn open(&self, source: &TemplateSource, template: u16) -> Option<Result<ImageReader, ImageError>> {
        // The server of a closed one may not have ended yet.
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let socket = self.directory.join(format!("template-{template}-{number}.sock"));
        match source {
            // A leftover image may have backing images.
            TemplateSource::Template(Template { path, format, is_left, .. }) => {
                (*is_left || is_whole(path)).then(|| open(path, format, &socket, self.patience))
            }
            TemplateSource::Shared(SharedImage { path, format, .. }) => {
                Some(ImageReader::open_layer(path, format, &socket, self.patience))
            }
        }
    }
}

/// Returns the pages that are in a template and not in those before it, as full messages, up to the limit of pages in
/// total.
fn known(
    template: u16,
    catalogue: &Catalogue,
    advertised: &mut HashSet<ContentHash>,
) -> io::Result<Vec<Message>> {
    let mut messages = Vec::new();
    let (mut runs, mut pages) = (Vec::new(), 0);
    for run in catalogue.runs()? {
        let PageRun { first_page, hashes } = run?;
        for (page, hash) in (first_page..).zip(hashes) {
            if advertised.len() as u64 >= MAX_ADVERTISED_PAGES || !advertised.insert(hash) {
                continue;
            }
            if pages == TEMPLATE_PAGES {
                messages.push(Message::TemplatePages {
                    template,
                    runs: std::mem::take(&mut runs),
                    last: false,
                });
                pages = 0;
            }
            pages += 1;
            add(&mut runs, page, hash);
        }
    }
    if !runs.is_empty() {
        messages.push(Message::TemplatePages { template, runs, last: false });
    }
    Ok(messages)
}

/// Adds a page to the last run, or begins another.
fn add(runs: &mut Vec<HashedRun>, page: u64, hash: ContentHash) {
    let digits = to_hex(hash);
    match runs.last_mut() {
        Some(last) if last.first_page + (last.hashes.len() / digits.len()) as u64 == page => {
            last.hashes.push_str(&digits);
        }
        _ => runs.push(HashedRun { first_page: page, hashes: digits }),
    }
}

impl ::memory::Templates for AdvertisedTemplates {
    fn read(&self, template: u16, first_page: u64, into: &mut [u8]) -> Result<(), RamError> {
        let failed = |error: ImageError| RamError::Other(Box::new(error));
        let nowhere =
            || RamError::Other(format!("there is no page {first_page} in template {template}").into());
        let open = self.find(template).ok_or_else(nowhere)?;
        let mut open = lock(&open);
        if let OpenTemplate::Unopened(source) = &*open {
            let opened = self.open(source, template);
            *open = OpenTemplate::Unusable;
            *open = OpenTemplate::ImageReader(opened.ok_or_else(nowhere)?.map_err(failed)?);
        }
        let OpenTemplate::ImageReader(reading) = &mut *open else { return Err(nowhere()) };
        let end = first_page.checked_mul(PAGE_BYTES).and_then(|offset| offset.checked_add(into.len() as u64));
        end.filter(|end| *end <= reading.size_bytes()).ok_or_else(nowhere)?;
        let read = reading.read(first_page * PAGE_BYTES, into);
        if matches!(&read, Err(error) if !matches!(error, ImageError::Read { source: NbdError::Failed { .. }, .. }))
        {
            *open = OpenTemplate::Unusable;
        }
        read.map_err(failed)
    }
}
