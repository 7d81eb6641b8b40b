//! A VM's network from outside: what the agent does with the frames of a guest's network cards.
//!
//! This crate knows taps, frames and addresses, and nothing of a migration but its name. Other hosts are known to
//! redirections alone. Decisions are pure: they take frames, facts and times, and return frames, plans and results. All
//! that touches the kernel is apart from them.
//!
//! | module | is |
//! |---|---|
//! | [`ethernet`] | frames, MAC addresses, VLAN tags; pure |
//! | [`claims`] | the addresses that a guest itself has claimed; pure |
//! | [`announcement`] | the frames that announce a guest's new place; pure |
//! | [`filter`] | programs by which the kernel selects frames; pure |
//! | [`claim_snooper`] | observes the claims of a running guest |
//! | [`announcer`] | sends announcements through a guest's tap |
//! | [`first_frames`] | measures when a guest is reached, and when it sends |
//! | [`held`] | frames that are held while a guest moves, and their order; pure |
//! | [`addresses`] | finds the addresses of a host, and those from which a guest sends |
//! | [`conntrack`] | lists, installs and removes conntrack entries, with their NAT |
//! | [`conntrack_sync`] | which entries the new host of a guest lacks; pure |
//! | [`conntrack_installer`] | installs entries until the guest is here, or does not arrive |
//! | [`datagram_sampler`] | finds flows of datagrams that connection tracking has not seen |
//! | [`netlink`] | composes and parses netlink messages, and exchanges them with the kernel |
//! | [`divert`] | sends a tap's frames to a tap of our own, until this process ends at the latest |
//! | [`holder`], [`merger`] | hold frames at the source; deliver them at the destination, in order |
//! | [`probe`] | frames that prove that two taps are in one network; pure |
//! | [`prober`] | sends and looks for these frames |
//! | [`arping`] | asks a guest that has moved, from the host where it was |
//! | [`bridge_ports`] | the place of a tap in the bridges of its host |
//! | [`redirection`] | redirects connections of a guest that has moved to another network |
//! | [`own_objects`] | lists what this program has in the kernel of a host |

pub mod addresses;
pub mod announcement;
pub mod announcer;
pub mod arping;
pub mod bridge_ports;
pub mod claim_snooper;
pub mod claims;
pub mod conntrack;
pub mod conntrack_installer;
pub mod conntrack_sync;
pub mod datagram_sampler;
pub mod divert;
pub mod ethernet;
pub mod filter;
pub mod first_frames;
pub mod held;
pub mod holder;
mod loop_thread;
pub mod merger;
pub mod netlink;
pub mod own_objects;
pub mod probe;
pub mod prober;
pub mod redirection;

pub use announcer::Announcer;
pub use arping::{Arping, ArpingTarget};
pub use claim_snooper::ClaimSnooper;
pub use claims::{Claim, Claims};
pub use conntrack_installer::ConntrackInstaller;
pub use datagram_sampler::DatagramSampler;
pub use divert::Diversion;
pub use ethernet::Mac;
pub use first_frames::{FirstFrames, FirstFramesWatch};
pub use held::HeldFrame;
pub use holder::Holder;
pub use merger::{Merger, MergerHandle};
pub use own_objects::{OwnObject, OwnObjectKind};
pub use probe::NetworkProof;
pub use prober::{ProbedTap, Prober};
