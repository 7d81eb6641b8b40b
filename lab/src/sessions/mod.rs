//! Clients of the Debian guest that keep a connection open for as long as they are watched: an SSH session, a download, a
//! WebSocket, and numbered datagrams. No connection is ever opened again, so that each shows whether it outlives a
//! migration, and how long it was silent.
//!
//! The sockets are made in a host of the laboratory; the threads that use them belong to this process.

mod arrivals;
mod datagrams;
mod download;
mod ssh_session;
mod web_socket;

pub use arrivals::{Session, SessionReport};
pub use datagrams::{DatagramReport, Datagrams};
pub use download::{Download, DownloadReport};
pub use ssh_session::SshSession;
pub use web_socket::WebSocket;
