//! Redirection of connections for a guest that has moved to another network.
//!
//! A guest keeps the addresses that it has configured. In the network that it has left, its old host stands in for it:
//! a *proxy device* with the MAC address of its card answers for its address there, and what arrives is sent through a
//! tunnel to the host that has it now. There a *bypass*, a veth pair, connects the guest's tap with the host's routing
//! instead of a bridge, so that the host answers for the guest's gateway and its former neighbours, and another proxy
//! device answers for the address that the guest has in the new network, which is translated. Connections that came
//! through a tunnel bear its mark, and answers to them return through it; all others leave by the new address.
//!
//! ```text
//!   old network                     tunnel                      new network
//!  ──┬────────────             ┌──────────────┐              ────────────┬──
//!    │ bridge                  │              │                   bridge │
//!   proxy (O) ─── old host ── end            end ── new host ─── proxy (N)
//!                                                       │  N ⇄ O, if no mark
//!                                                    bypass
//!                                                       │
//!                                                      tap: guest, address O
//! ```
//!
//! A redirection is data ([`Redirection`]), the same for all hosts that take part. Each host computes a [`HostPlan`]
//! from it: the objects that its kernel needs. Decisions are pure; what touches the kernel is apart from them.
//!
//! | module | is |
//! |---|---|
//! | [`model`] | addresses, networks, legs: what a redirection consists of; pure |
//! | [`tunnel`] | kinds of tunnels, the choice among them, and what their headers take; pure |
//! | [`kernel_names`] | names and numbers of all that a redirection has in a kernel; pure |
//! | [`objects`] | objects of a kernel; pure |
//! | [`rules`] | rules of netfilter; pure |
//! | [`plan`] | the objects that a host needs; pure |
//! | [`next_move`] | the redirection of a guest that moves on or back, and who may change one; pure |
//! | [`preflight`] | what stands against a redirection before the guest is touched; pure |
//! | [`offer`] | what the hosts tell each other before the move, and the redirection that follows; pure |
//! | [`offered_end`] | a host's end of a tunnel in an offer; who may give it another end; pure |
//! | [`teardown`] | whether a redirection is still needed; pure |
//! | [`record`] | the record of a redirection, kept in a file until nothing of it is left |
//! | [`host_facts`] | reads from the kernel what `preflight` and `plan` need |
//! | [`kernel`] | makes and removes objects |
//! | [`encoding`] | rules as the kernel takes them |
//! | [`wireguard`] | keys and peers of WireGuard |
//! | [`host_kernel`] | what the keeper needs of a kernel |
//! | [`keeper`] | prepares, switches, changes, resumes and removes redirections |

pub mod encoding;
pub mod host_facts;
pub mod host_kernel;
pub mod keeper;
pub mod kernel;
pub mod kernel_names;
pub mod model;
mod neighbour_refresh;
pub mod next_move;
pub mod objects;
pub mod offer;
pub mod offered_end;
pub mod plan;
pub mod preflight;
pub mod record;
pub mod rules;
pub mod teardown;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tunnel;
pub mod wireguard;

pub use keeper::RedirectionKeeper;
pub use model::{AddressPair, Attachment, GuestPlace, Lan, Leg, NewAddressMode, Prefix, Redirection, Subnet};
pub use offer::RedirectionOffer;
pub use offered_end::OfferedEnd;
pub use plan::{HostPlan, KernelFeatures, plan};
pub use record::{RecordStage, RedirectionRecord};
pub use tunnel::{Tunnel, TunnelKind};
