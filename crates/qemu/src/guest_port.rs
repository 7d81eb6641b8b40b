//! A virtio-serial port, through which the agent can query a program in the guest.
//!
//! QEMU must have been started with one, with a socket on which it listens:
//!
//! ```text
//! -device virtio-serial-pci -chardev socket,id=guest,path=PATH,server=on,wait=off
//! -device virtserialport,chardev=guest,name=NAME
//! ```

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use serde::Deserialize;
use serde_json::Value;

use crate::find;
use crate::qmp::{Qmp, QmpError, connect_by};
use crate::tree::DeviceTree;

/// Error: a port cannot be used. `Display` includes advice.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// The monitor failed.
    #[error("cannot query QEMU for its ports")]
    Qmp(#[from] QmpError),
    /// The port's back end is not such a socket.
    #[error(
        "port {name} is connected to {to:?}; it needs a socket on which QEMU listens (server=on,wait=off)"
    )]
    NoSocket {
        /// Name of the port.
        name: String,
        /// Back end of the port, as QEMU reports it.
        to: String,
    },
    /// Another client is connected: QEMU accepts one client per socket.
    #[error("another client is connected to port {name}")]
    InUse {
        /// Name of the port.
        name: String,
    },
    /// No program in the guest has opened it.
    #[error("no program in the guest has opened port {name}; is whimbrel-guest running there?")]
    NotOpened {
        /// Name of the port.
        name: String,
    },
    /// The socket does not accept a connection, or not in time, or belongs to another QEMU.
    #[error("cannot connect to port {name}")]
    Connect {
        /// Name of the port.
        name: String,
        /// Cause.
        source: QmpError,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct PortChardev {
    label: String,
    filename: String,
    #[serde(default)]
    frontend_open: bool,
}

/// Returns true if the devices include a port with this name.
pub fn is_there(devices: &DeviceTree, name: &str) -> bool {
    chardev_of(devices, name).is_some()
}

/// Connects to the port with this name, within the monitor's timeout. `pid` is the process of the QEMU, `devices` are
/// its devices; returns none if there is no such port.
///
/// # Errors
/// If there is one, but no program can be reached through it.
pub fn connect(
    qmp: &mut Qmp,
    pid: u32,
    devices: &DeviceTree,
    name: &str,
) -> Result<Option<UnixStream>, PortError> {
    let Some(chardev) = chardev_of(devices, name) else { return Ok(None) };
    let chardevs: Vec<PortChardev> = qmp.execute("query-chardev", Value::Null)?;
    let Some(chardev) = chardevs.into_iter().find(|one| one.label == chardev) else { return Ok(None) };
    let name = name.to_owned();
    let Some((path, is_free)) = socket_of(&chardev.filename) else {
        return Err(PortError::NoSocket { name, to: chardev.filename });
    };
    if !is_free {
        return Err(PortError::InUse { name });
    }
    if !chardev.frontend_open {
        return Err(PortError::NotOpened { name });
    }
    let path = find::reachable_path(pid, Path::new(path));
    let connected = connect_by(&path, Instant::now() + qmp.timeout()).and_then(|stream| {
        // As with monitors: a process whose socket has replaced this QEMU's is not used.
        let listener = getsockopt(&stream, PeerCredentials)
            .map_err(|errno| QmpError::Connect { path: path.clone(), source: errno.into() })?
            .pid()
            .unsigned_abs();
        let is_ours = listener == pid || !find::is_qemu(listener);
        if is_ours { Ok(stream) } else { Err(QmpError::WrongProcess { path, pid: listener }) }
    });
    connected.map(Some).map_err(|source| PortError::Connect { name, source })
}

/// Returns the character device of the port with this name.
fn chardev_of(devices: &DeviceTree, name: &str) -> Option<String> {
    let of = |property: Option<&String>| property.map(|value| value.trim_matches('"').to_owned());
    let ports = devices.devices.iter().filter(|device| device.driver == "virtserialport");
    let mut named = ports.filter(|port| of(port.properties.get("name")).as_deref() == Some(name));
    of(named.next()?.properties.get("chardev"))
}

/// Parses the file name of `query-chardev`: returns the socket, and true if no client is connected
/// to it.
fn socket_of(filename: &str) -> Option<(&str, bool)> {
    let (rest, is_free) = match filename.strip_prefix("disconnected:") {
        Some(rest) => (rest, true),
        None => (filename, false),
    };
    let path = rest.strip_prefix("unix:")?.strip_suffix(",server=on")?;
    path.starts_with('/').then_some((path, is_free))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = r#"bus: main-system-bus
  dev: q35-pcihost, id ""
    bus: pcie.0
      dev: virtio-serial-pci, id "serial"
        bus: virtio-serial-bus.0
          dev: virtserialport, id "one"
            chardev = "a"
            nr = 1 (0x1)
            name = "com.example"
          dev: virtserialport, id ""
            chardev = "b"
            nr = 2 (0x2)
            name = "org.whimbrel.guest.0"
"#;

    #[test]
    fn a_port_is_found_by_its_name() {
        let tree = DeviceTree::parse(TREE);
        assert_eq!(chardev_of(&tree, "org.whimbrel.guest.0").as_deref(), Some("b"));
        assert_eq!(chardev_of(&tree, "com.example").as_deref(), Some("a"));
        assert_eq!(chardev_of(&tree, "other"), None);
        assert_eq!(chardev_of(&DeviceTree::default(), "other"), None);
    }

    #[test]
    fn sockets_are_parsed_as_qemu_reports_them() {
        assert_eq!(socket_of("disconnected:unix:/run/a,b.sock,server=on"), Some(("/run/a,b.sock", true)));
        assert_eq!(socket_of("unix:/run/a.sock,server=on"), Some(("/run/a.sock", false)));
        for other in
            ["null", "file", "disconnected:unix:/run/a", "disconnected:unix:a,server=on", "pty:/dev/pts/1"]
        {
            assert_eq!(socket_of(other), None, "{other}");
        }
    }
}
