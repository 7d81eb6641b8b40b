//! Post-copy: the guest runs at the destination already, and some of its pages are still to come.
//!
//! At the destination [`Awaited`] knows which. Whoever touches a page that is not there waits ([`tracee::MissingPages`]);
//! such a wait is either for a page that is to come, which is asked for, or for one that nobody will send, because there
//! is nothing in it: that is zeros at once. Pages come as in any round, and are placed instead of written.
//!
//! At the source, where the guest stands still for good, [`Remaining`] has what is left to be sent: what was asked for
//! goes first, then what lies behind it, then what the guest wrote last.
//!
//! | module | is |
//! |---|---|
//! | `awaited` | the destination's pages that are to come |
//! | `ledger` | the file that remembers them for the next agent |
//! | `remaining` | what the source has left to send |
//! | `set` | sets of pages as they are said and kept |
//! | `switched` | blocks that are written to first, and in which pages are placed later |
//!
//! # Why no page is lost
//!
//! A page is placed once, when it is awaited: a second copy of it changes nothing, so it does not matter how often a page
//! is sent, on which stream, or in which order; nor does it come back where the guest has given it back since. And nobody
//! looks at the set of those that are awaited while one is placed, so nobody takes it for one that will not come.

mod awaited;
mod ledger;
mod remaining;
mod set;
mod switched;

pub use awaited::{Awaited, Placer};
pub use ledger::Ledger;
pub use remaining::{Recency, Remaining};
pub use set::{BadSet, decode_chunks, decode_set, encode_set};
pub use switched::Switch;
