//! What two agents say to one another: formats, limits and versions. No I/O.
//!
//! # A migration on the wire
//!
//! ```text
//! source                                                        destination
//!   control  Hello{control, generation 1}  ─────────────────►
//!            ◄───────────────────────────────────  Welcome::Accepted
//!            Propose{RAM blocks, description, facts} ────────►   pre-flight, starts its QEMU
//!            ◄───────────────────────────────────  Accept | Reject
//!   data 0…N Hello{data, generation 1, stream} ──────────────►
//!            Pages, Pages, … RoundEnd(1)  ───────────────────►   applied in order
//!            ◄───────────────────────────────────  Ack(seq)
//!            … rounds; the guest stops; the last round …
//!   control  Verify ─────────────────────────────────────────►   where asked for
//!            DeviceState, Blob … ────────────────────────────►   loads, paused
//!            Held{epoch, run} ───────────────────────────────►
//!            ◄───────────────────────────────────  Ready{epoch, incarnation}
//!            Go{epoch, incarnation} ─────────────────────────►   cont
//!            ◄───────────────────────────────────  Running{epoch}
//! ```
//!
//! Where the destination has templates of disks, the source asks for them after `Accept`: `Seek`, and some `Known` come
//! back. Pages that the destination has are then [referred to](reference); in images that both hosts have (those of disks
//! that are not copied) without asking: they are the templates from number 8 on, in the order of `disks` and their `layers`
//! in the proposal's description. Of pages that were sent before, only [what changed](delta) is sent again. Where the link
//! is slower than compressing, and at first, `Packed` frames stand in the place of some `Pages` ([`packed`]).
//!
//! Where pages come after the guest (*post-copy*), `TakeAway` says before its stop which pages of the destination's are old,
//! `Awaited` takes the place of the last round, and the data streams go on
//! until all of them are there ([`awaited`]): `Incomplete` is said when the guest runs, and `Running` at the end.
//!
//! After a cut the source opens a new set of connections with the next generation: `Hello{control, generation + 1}`,
//! `Resume`; the destination ends and joins the workers of the old generation, answers `Resumed`, and takes the new
//! data streams. Pages of frames that were not acknowledged are dirty again. A frame that cannot be read ends its stream, and
//! it is as after a cut, three times in a migration.
//!
//! After READY either side may have lost its agent. Whoever does not know asks on a connection for `Handover`: the
//! destination sends `Ask` and gets a `Verdict`; the source repeats `Go` and gets `Running`, `Incomplete`, `Refused` or
//! `Crashed`, or learns with `Inquire` what the destination has. Before COMMITTED the source may say `Abort`.
//!
//! # The envelope
//!
//! Every connection is TCP, with TLS 1.3 inside and certificates on both sides unless both configurations say plain.
//! Each side sends frames ([`frame`]): eight bytes of header, then the payload. The first frame of each side is a
//! greeting, `Hello` from the one that connects and `Welcome` from the one that answers. A frame of another kind
//! before that, or one that is longer than [`limits::GREETING_BYTES`], ends the connection. The names in the greetings
//! have to be names of the certificates.
//!
//! # Versions
//!
//! The side that connects names the oldest and the newest version that it speaks, the other picks the newest that both
//! know, or refuses and says so. Within a version nothing changes but by adding optional fields to JSON messages;
//! unknown fields are ignored, unknown messages and frames end the connection. The greetings themselves stay as they
//! are in all versions, or nobody could refuse. The bytes of each version are pinned by tests; a version that was
//! released keeps its tests for as long as a program speaks it.
//!
//! # Limits
//!
//! Every length that a peer claims is compared with [`limits`] before anything is allocated for it, and what a message
//! says is checked before anybody acts on it ([`Message::validate`]).

pub mod awaited;
pub mod delta;
pub mod frame;
pub mod ids;
pub mod limits;
pub mod message;
pub mod packed;
pub mod pages;
pub mod reference;
mod valid;
mod version;

pub use ids::{Epoch, Generation, HostId, Incarnation, MigrationId, VmName};
pub use message::{Message, Purpose};
pub use valid::Invalid;
pub use version::Versions;

/// Oldest version that this program speaks.
pub const OLDEST_VERSION: u16 = 1;

/// Newest version that this program speaks.
pub const NEWEST_VERSION: u16 = 1;
