//! A server of DNS (BIND 9) on a host of a laboratory.

use std::fs;
use std::net::TcpStream;

use crate::error::{Context, Error, Result};
use crate::follow::DEADLINE;
use crate::host::Host;
use crate::run::Daemon;
use crate::testing::until;

/// The server, as distributions install it.
const PROGRAM: &str = "/usr/sbin/named";
/// Port of DNS.
const PORT: u16 = 53;

/// Starts BIND on a host, by the file `named.conf` in the host's directory, and waits until it listens at the host's
/// address on the network that it shares with the witness. It ends when the result is dropped.
pub fn name_server(host: &Host) -> Result<Daemon> {
    let address = host
        .control_address()
        .ok_or_else(|| Error::Config(format!("{} is not on that network", host.name())))?;
    // The program is confined to other directories under its own path.
    let program = host.directory().join("named");
    if !program.exists() {
        fs::copy(PROGRAM, &program).context(|| format!("cannot copy {PROGRAM}"))?;
    }
    let words = [program, host.directory().join("named.conf")].map(|path| path.display().to_string());
    let daemon = host.spawn("named-log", &[&words[0], "-g", "-n", "1", "-c", &words[1]])?;
    let connect = || TcpStream::connect_timeout(&(address, PORT).into(), DEADLINE).is_ok();
    until("named listens", || host.within(connect).unwrap_or(false));
    Ok(daemon)
}
