//! Connections of one generation over which pages are sent.

use ::memory::Sender;
use link::transport::{Channel, DataStream};
use proto::Generation;

/// Connections of a generation that were just opened.
pub(super) struct OpenedStreams {
    /// Data streams, in the order of their numbers.
    pub(super) data: Vec<DataStream>,
    /// Connection for page requests; present if post-copy is possible.
    pub(super) page_stream: Option<Channel>,
}

/// Sender over the data streams of a generation, with the generation's connection for page requests.
pub(super) struct Streams {
    pub(super) generation: Generation,
    pub(super) sender: Sender,
    /// Connection for page requests, until the post-copy server uses it; present if post-copy is possible.
    pub(super) page_stream: Option<Channel>,
}
