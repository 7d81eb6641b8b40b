//! Post-copy: the guest runs at the destination already, and some of its pages are still missing there.
//!
//! At the destination [`MissingPages`] has the set of missing pages. A thread that touches a missing page waits
//! ([`tracee::PageFaultHandler`]). Such a wait is either for a page that will arrive, which is requested, or for one
//! that the source will not send, because it is empty: that is filled with zeros at once. Pages arrive as in any round,
//! and are placed instead of written.
//!
//! At the source, where the guest is stopped for good, [`RemainingPages`] has the pages still to be sent: requested
//! pages first, then those behind them, then those that the guest wrote last.
//!
//! | module | content |
//! |---|---|
//! | `missing_pages` | the destination's missing pages |
//! | `missing_pages_file` | the file that records them for the next agent |
//! | `page_requests` | the destination's requests, and the pages that arrive on them |
//! | `page_answers` | the source's answers |
//! | `remaining` | the source's remaining pages |
//! | `set` | encoding of sets of pages, for messages and files |
//! | `switched` | blocks that are written first, and in which pages are placed later |
//!
//! # Why no page is lost
//!
//! A page is placed once, while it is missing: a second copy changes nothing, so it does not matter how often a page is
//! sent, on which stream, or in which order. A late copy does not restore a page that the guest has given back since.
//! And no thread reads the set of missing pages while one is placed, so no thread mistakes that page for one that will
//! not arrive.

mod missing_pages;
mod missing_pages_file;
mod page_answers;
mod page_requests;
mod remaining;
mod set;
mod switched;

pub use missing_pages::{MissingPages, Placer};
pub use missing_pages_file::MissingPagesFile;
pub use page_answers::{RequestsEnd, answer_page_requests, receive_missing_pages};
pub use page_requests::{FaultReader, PageArrivalError, PageRequests};
pub use remaining::{RecentWrites, RemainingPages};
pub use set::{BadPageSet, decode_chunks, decode_set, encode_set};
pub use switched::WriterSwitch;
