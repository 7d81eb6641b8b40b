//! The protocol between two agents: formats, limits and versions. No I/O.
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
//!            … rounds …
//!   control  Claims ─────────────────────────────────────────►   addresses to announce
//!   frames   Hello{frames}, Blob … ──────────────────────────►   where accepted: frames for the stopped guest
//!   flows    Hello{flows}, Flows, Blob … ────────────────────►   where accepted: tracked connections are installed
//!            ◄───────────────────────────────────  FlowsInstalled
//!   data     … the guest stops; the last round …
//!   control  Verify ─────────────────────────────────────────►   where asked for
//!            DeviceState, Blob … ────────────────────────────►   loads, paused
//!            Frozen{epoch, run} ─────────────────────────────►
//!            ◄───────────────────────────────────  Ready{epoch, incarnation}
//!            Go{epoch, incarnation} ─────────────────────────►   cont
//!            ◄───────────────────────────────────  Running{epoch}
//!            ◄───────────────────────────────────  FirstFrames{epoch}
//! ```
//!
//! If the destination has templates of disks, the source queries them after `Accept` with `QueryTemplates`; the
//! destination answers with one or more `TemplatePages`. Pages that the destination has are then
//! [referred to](reference). Images that both hosts have (those of disks that are not copied) need no query: they are the
//! templates from number 8 on, in the order of `disks` and their `layers` in the proposal's description.
//!
//! If an earlier version of a page was sent, a [delta](delta) replaces the page. Where the link is slower than
//! compression, and at first, `Packed` frames replace some `Pages` ([`packed`]).
//!
//! In *post-copy*, where pages arrive after the guest, the source lists outdated pages of the destination with
//! `Discard` before the stop. `MissingPages` replaces the last round, and the data streams go on until all missing
//! pages have arrived ([`missing_pages`]): the destination sends `Incomplete` when the guest runs, and `Running` at the end.
//!
//! For a VM that moves to another network, `Propose` offers a redirection of its connections, and `Accept` contains the
//! one that both hosts make. It outlives the migration: each host asks the other one, on a connection for that, whether it
//! stands (`AskRedirection`, `RedirectionStands`). When the VM moves on, the source asks the hosts that it has left before
//! for tunnels to the destination (`AskTunnelEnd`, `TunnelEnd`), and orders them to make and to use these (`Repoint`).
//!
//! After a cut the source opens a new set of connections with the next generation: `Hello{control, generation + 1}`,
//! `Resume`. The destination stops and joins the workers of the old generation, answers `Resumed`, and accepts the new
//! data streams. Pages of frames that were not acknowledged are dirty again. A frame that cannot be decoded ends its
//! stream; the agents handle this like a cut, three times in a migration.
//!
//! After READY either host may have lost its agent. An agent that does not know the outcome asks on a connection for
//! `Handover`: the destination sends `Ask` and receives a `Verdict`; the source repeats `Go` and receives `Running`,
//! `Incomplete`, `Refused` or `Crashed`, or learns with `Inquire` what the destination has. Before COMMITTED the
//! source may send `Abort`.
//!
//! An agent that has a controller connects to it, reports its VMs, and receives commands. No migration depends on that
//! connection.
//!
//! A source that forecasts a migration measures the link on a connection for `Measurement`, which belongs to no migration:
//! `Ping` and `Pong` show the round trip, `MeasureLink` with data in `Blob` frames, answered with `LinkMeasured`, the rate.
//!
//! # The envelope
//!
//! Every connection is TCP, with TLS 1.3 inside and certificates on both sides unless both configurations specify
//! plain. Each side sends frames ([`frame`]): eight bytes of header, then the payload. The first frame of each side is
//! a greeting, `Hello` from the connecting agent and `Welcome` from the accepting one. A frame of another kind before
//! that, or one that is longer than [`limits::GREETING_BYTES`], ends the connection. The names in the greetings have
//! to be names of the certificates.
//!
//! # Versions
//!
//! The connecting agent names the oldest and the newest version that it supports. The accepting agent picks the newest
//! version that both support, or refuses and reports the reason. Within a version nothing changes except that optional
//! fields are added to JSON messages; unknown fields are ignored, unknown messages and frames end the connection.
//!
//! The greetings themselves stay the same in all versions, because otherwise no agent could refuse a version. Tests
//! pin the bytes of each version; a version that was released keeps its tests for as long as a program supports it.
//!
//! # Limits
//!
//! Every length that a peer claims is compared with [`limits`] before anything is allocated for it, and the contents
//! of a message are checked before an agent acts on them ([`Message::validate`]).

mod decode;
pub mod delta;
pub mod frame;
pub mod ids;
pub mod limits;
pub mod message;
pub mod missing_pages;
pub mod packed;
pub mod pages;
pub mod reference;
mod valid;
mod version;

pub use ids::{CommandId, Epoch, Generation, HostId, Incarnation, MigrationId, VmName};
pub use message::{Message, Purpose};
pub use valid::Invalid;
pub use version::Versions;

/// Oldest version that this program supports.
pub const OLDEST_VERSION: u16 = 1;

/// Newest version that this program supports.
pub const NEWEST_VERSION: u16 = 1;
