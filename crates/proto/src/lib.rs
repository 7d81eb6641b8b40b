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
//!            ◄───────────────────────────────────  Ready{epoch, incarnation}
//!            Go{epoch, incarnation} ─────────────────────────►   cont
//!            ◄───────────────────────────────────  Running{epoch}
//! ```
//!
//! After a cut the source opens a new set of connections with the next generation: `Hello{control, generation + 1}`,
//! `Resume`; the destination ends and joins the workers of the old generation, answers `Resumed`, and takes the new
//! data streams. Pages of frames that were not acknowledged are dirty again.
//!
//! After READY either side may have lost its agent. Whoever does not know asks on a connection for `Handover`: the
//! destination sends `Ask` and gets a `Verdict`, the source repeats `Go` and gets `Running` or `Refused`.
//!
//! # Versions
//!
//! The side that connects names the oldest and the newest version that it speaks, the other picks the newest that both
//! know, or refuses and says so. Within a version nothing changes but by adding optional fields to JSON messages;
//! unknown fields are ignored, unknown messages and frames end the connection.
//!
//! # Limits
//!
//! Every length that a peer claims is compared with [`limits`] before anything is allocated for it.

pub mod frame;
pub mod ids;
pub mod limits;
pub mod message;
pub mod pages;
mod version;

pub use ids::{Epoch, Generation, HostId, Incarnation, MigrationId, VmName};
pub use message::{Message, Purpose};
pub use version::Versions;

/// Oldest version that this program speaks.
pub const OLDEST_VERSION: u16 = 1;

/// Newest version that this program speaks.
pub const NEWEST_VERSION: u16 = 1;
