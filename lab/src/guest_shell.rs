//! A shell in the tiny guest, for what its load does not do.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpStream};

use crate::error::{Context as _, Result};
use crate::follow::DEADLINE;
use crate::host::Host;
use crate::spec::{Boot, GuestSpec};

/// The port of the shell.
const PORT: u16 = 9;

/// Gives a tiny guest a shell. It is there before the load runs.
pub fn with_shell(mut guest: GuestSpec) -> GuestSpec {
    if let Boot::Tiny(load) = &mut guest.boot {
        load.kernel = format!("{} guest.shell={PORT}", load.kernel);
    }
    guest
}

/// Runs a script of busybox's shell in the guest with this address, and returns its output.
///
/// # Errors
/// If the guest cannot be reached from the host, or does not end the script.
pub fn run_in_guest(host: &Host, address: Ipv4Addr, script: &str) -> Result<String> {
    let run = || -> io::Result<String> {
        let mut connection = TcpStream::connect_timeout(&(address, PORT).into(), DEADLINE)?;
        connection.set_read_timeout(Some(DEADLINE))?;
        connection.write_all(script.as_bytes())?;
        connection.shutdown(Shutdown::Write)?;
        let mut output = String::new();
        connection.read_to_string(&mut output)?;
        Ok(output)
    };
    let output: io::Result<_> = host.within(run)?;
    output.context(|| format!("no shell of the guest at {address} has answered"))
}
