//! Decoder: the pages of a reference are read where it says, and count if their hash is right.

use std::sync::Arc;

use proto::pages::{BadPages, Content};
use proto::reference::{ContentSource, Reference};
use tracing::debug;

use super::{Templates, has_expected_hash};
use crate::page_set::ChunkPages;
use crate::reductions::decoding::{EncodedRun, RunDecoder};

/// Decoder of references.
pub(crate) struct ReferenceDecoder {
    templates: Option<Arc<dyn Templates>>,
}

impl ReferenceDecoder {
    pub(crate) fn new(templates: Option<Arc<dyn Templates>>) -> Self {
        Self { templates }
    }
}

impl RunDecoder for ReferenceDecoder {
    fn decodes(&self, content: Content) -> bool {
        content == Content::Reference
    }

    fn decode(&mut self, run: &EncodedRun<'_>, into: &mut [u8]) -> Result<ChunkPages, BadPages> {
        let reference = Reference::decode(run.data)?;
        let read = match (reference.content_source, &self.templates) {
            (ContentSource::Template(which), Some(templates)) => {
                templates.read(which, reference.first_page, into)
            }
            (ContentSource::Template(_), None) => return Ok(ChunkPages::EMPTY),
            (ContentSource::Block(which), _) => (run.read)(which, reference.first_page, into),
        };
        let is_there = match read {
            Ok(()) => has_expected_hash(&reference, into),
            Err(error) => {
                debug!(?reference, %error, "cannot read the referenced pages");
                false
            }
        };
        Ok(if is_there { ChunkPages::from_range(run.pages.clone()) } else { ChunkPages::EMPTY })
    }
}
