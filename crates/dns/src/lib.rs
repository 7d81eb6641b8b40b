//! A VM's names follow it to another network: dynamic updates of DNS (RFC 2136), signed (TSIG, RFC 8945).
//!
//! Right before a VM moves, the TTL of its records is lowered; when it runs at the destination, they are changed to its
//! new addresses; later they get their TTL back. A VM that stays at the source gets everything back as it was. Old
//! connections do not depend on this: a server of DNS that refuses or is away costs new connections by name alone, and
//! is tried again.
//!
//! - **Only what is known is replaced.** Each update has the records that were just read as its prerequisite. A name
//!   that another client has changed is left alone, and reported.
//! - **The state is read, never remembered.** Each attempt asks the server what it has, and decides from that. So any of
//!   them may be repeated, in any order, by this agent or by the next one. Only what was found before the first change is
//!   recorded, before it is made.
//! - **A change counts when it was read back**, from all servers of the zone, with their serial numbers.
//! - **An answer counts when it is signed** with the key of the request.
//!
//! ```no_run
//! use std::{path::Path, time::Duration};
//! use dns::{AddressChange, Relocation, Updater, VmNames, Zones};
//! # use whimbrel_dns as dns;
//! # fn example(config: dns::DnsConfig, names: VmNames) -> Result<(), Box<dyn std::error::Error>> {
//! let addresses = vec![AddressChange::new("192.0.2.10".parse()?, "198.51.100.7".parse()?)];
//! let relocation = Relocation::new(&names, None, addresses);
//! for finding in dns::check(&Zones::load(&config.zones), &relocation, config.check) {
//!     println!("{}; {}", finding.what, finding.advice);
//! }
//! let updater = Updater::prepare(Zones::load(&config.zones), &relocation, Path::new("/run/web1.dns"), &[])?;
//! // The VM runs at the destination.
//! updater.switch();
//! println!("{:?}", updater.wait(Duration::from_secs(5)).progress());
//! // No connection uses an old address any longer.
//! updater.restore_ttl();
//! updater.wait(Duration::from_secs(5));
//! updater.finish()?;
//! # Ok(())
//! # }
//! ```
//!
//! | module | is |
//! |---|---|
//! | `name`, `rdata`, `wire` | domain names and records, and their bytes; pure |
//! | `message` | queries, updates and answers; pure |
//! | `tsig`, `key_file` | signatures, and the keys for them |
//! | `config` | zones, servers, and the names of VMs |
//! | `relocation` | which records change, and in which order; pure |
//! | `decide` | which update follows from the records that were read; pure |
//! | `answer` | what an answer means; pure |
//! | `retry` | when the next attempt is; pure |
//! | `client` | connections to servers |
//! | `change_set` | what was found, in a file |
//! | `attempt`, `updater` | carry out the decisions, in a thread |
//! | `check` | the pre-flight check |

mod answer;
mod attempt;
mod change;
mod change_set;
mod check;
mod client;
mod config;
mod decide;
mod failure;
mod key_file;
mod message;
mod name;
mod rdata;
mod relocation;
mod retry;
mod tsig;
mod updater;
mod wire;
mod zones;

pub use change::{ChangeState, Goal, Lag, LagReason, OriginalRrset, RdataChange, Rrset, RrsetChange};
pub use change_set::{ChangeSet, Progress};
pub use check::check;
pub use config::{
    CheckMode, DnsConfig, DnsConfigError, Server, ServerError, ServiceConfig, VmNames, ZoneConfig,
};
pub use failure::Failure;
pub use message::ResponseCode;
pub use name::{Name, NameError};
pub use rdata::{Rdata, RecordType, SrvData};
pub use relocation::{AddressChange, Relocation, RelocationError, ServiceChange, changes_of};
pub use tsig::{Algorithm, KeyRejection};
pub use updater::{PrepareError, Updater};
pub use zones::Zones;
