//! Destination: a QEMU that waits for a device state, and loads it.

use std::io::{self, Write as _};
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};

use super::{HEADER, machine_type, machine_type_of, state_prefix};
use crate::control;
use crate::process::log_tail;
use crate::qmp::{Qmp, QmpError};

/// Name of the descriptor from which QEMU reads the device state.
const DESCRIPTOR: &str = "whimbrel-device-state";

/// Number of bytes of the device state that are sent at once.
const SEND_BUFFER_BYTES: usize = 4 << 20;

/// Error while a device state is loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The monitor failed, or QEMU refused to prepare.
    #[error("cannot prepare QEMU for the device state")]
    Qmp(#[from] QmpError),
    /// QEMU was not started with `-S -incoming defer`.
    #[error("QEMU is {status} and cannot load a device state; it must be started with -S -incoming defer")]
    NotWaiting {
        /// Run state of QEMU.
        status: String,
    },
    /// The state could not be sent to QEMU.
    #[error("cannot pass the device state to QEMU: {log}")]
    Socket {
        /// The end of QEMU's log.
        log: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// QEMU read the state and rejected it.
    #[error("QEMU could not load the device state: {reason}")]
    Failed {
        /// QEMU's own words, or the end of its log.
        reason: String,
    },
    /// The state was loaded, but the guest's run state is not the expected one.
    #[error("after loading, the guest is {status}; it must stay paused until it is resumed")]
    NotPaused {
        /// Run state of the guest.
        status: String,
    },
}

/// A QEMU that waits for its device state.
///
/// Prepared early, before the guest is stopped on the source, so that only the transfer and the
/// loading itself are part of the downtime.
#[derive(Debug)]
pub struct Incoming {
    stream: UnixStream,
    machine_type: String,
    /// True if the machine type expects the configuration section; those up to 2.3 do not know it.
    expects_configuration: bool,
    log: Option<PathBuf>,
}

impl Incoming {
    /// Makes a QEMU that was started with `-S -incoming defer` wait for its device state, so that after loading it
    /// has run no virtual CPU, acquired no image lock and sent no packet:
    ///
    /// - capability `late-block-activate`: the images stay locked by the source until `cont`;
    /// - `-S` (asserted by [`load`](Self::load)): the saved state specifies that the guest runs; and packets that
    ///   announce the guest wait for `cont`;
    /// - parameter `announce-rounds` 1: QEMU announces the guest once. With 0 it would free the announcement timer of
    ///   each virtio card, and use it again when the guest resets the card: a guest that reboots would end QEMU.
    ///
    /// QEMU gets a descriptor to read from through the monitor, because one without privileges (`-runas`) or in a
    /// chroot could not create a socket for us.
    ///
    /// The start of the state, which names the machine type, is sent at once: QEMU initialises its loading when the
    /// first byte arrives, and that is then not part of the downtime.
    ///
    /// `log` is the file of QEMU's messages; the end of the file becomes part of errors.
    pub fn prepare(qmp: &mut Qmp, log: Option<&Path>) -> Result<Self, LoadError> {
        let status = control::status(qmp)?;
        if status.status != "inmigrate" {
            return Err(LoadError::NotWaiting { status: status.status });
        }
        let on = |name: &str| json!({ "capability": name, "state": true });
        qmp.run(
            "migrate-set-capabilities",
            json!({ "capabilities": [on("late-block-activate"), on("events")] }),
        )?;
        qmp.run("migrate-set-parameters", json!({ "announce-rounds": 1 }))?;
        let failed = |source| LoadError::Socket { log: String::new(), source };
        let (stream, theirs) = UnixStream::pair().map_err(failed)?;
        // Room for all of a usual state, so that QEMU reads it without a break. Without privileges the buffer is
        // smaller.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size_force(&stream, SEND_BUFFER_BYTES);
        qmp.execute_with_fd::<Value>("getfd", json!({ "fdname": DESCRIPTOR }), theirs.as_fd())?;
        let uri = format!("fd:{DESCRIPTOR}");
        let version = qmp.version();
        // Since 9.1 QEMU can keep running when loading fails, and report the reason.
        let arguments = if (version.major, version.minor) >= (9, 1) {
            json!({ "uri": uri, "exit-on-error": false })
        } else {
            json!({ "uri": uri })
        };
        let machine_type = machine_type(qmp)?;
        let expects_configuration = is_configuration_expected(&qmp.hmp("info migrate")?);
        qmp.discard_events("MIGRATION");
        qmp.run("migrate-incoming", arguments)?;
        let log = log.map(Path::to_owned);
        let incoming = Self { stream, machine_type, expects_configuration, log };
        incoming.send_state(&incoming.expected_prefix(), Instant::now() + qmp.timeout()).map_err(failed)?;
        Ok(incoming)
    }

    /// Sends a completed stream and waits until QEMU has loaded it. Afterwards the guest is paused
    /// and has not run.
    ///
    /// # Errors
    /// [`LoadError::Failed`] with QEMU's reason. That QEMU cannot be used again.
    pub fn load(self, qmp: &mut Qmp, stream: &[u8], deadline: Instant) -> Result<(), LoadError> {
        self.load_while(qmp, stream, deadline, || {})
    }

    /// Like [`load`](Self::load), and runs a closure while QEMU loads.
    pub fn load_while(
        self,
        qmp: &mut Qmp,
        stream: &[u8],
        deadline: Instant,
        during_load: impl FnOnce(),
    ) -> Result<(), LoadError> {
        let Some(rest) = stream.strip_prefix(&*state_prefix(&self.machine_type)) else {
            let found = machine_type_of(stream).unwrap_or("no machine type");
            let reason = format!("it is for machine type {found}, and QEMU has {}", self.machine_type);
            return Err(LoadError::Failed { reason });
        };
        let handed = self.send_state(rest, deadline).and_then(|()| self.stream.shutdown(Shutdown::Write));
        during_load();
        match &handed {
            // QEMU closes the connection as soon as it finds an error: its reason is more precise than ours.
            Err(error) if is_hang_up(error) => {}
            Err(_) => handed.map_err(|source| self.socket_error(source))?,
            Ok(()) => {}
        }
        loop {
            let event = match qmp.wait_event("MIGRATION", deadline) {
                Ok(event) => event,
                Err(QmpError::Closed { .. }) => return Err(self.failed(None)),
                Err(other) => return Err(other.into()),
            };
            match event.data.get("status").and_then(Value::as_str) {
                Some("completed") => break,
                Some("failed") => return Err(self.failed(Some(qmp))),
                _ => {}
            }
        }
        let status = control::status(qmp)?;
        if status.running || status.status != "paused" {
            return Err(LoadError::NotPaused { status: status.status });
        }
        Ok(())
    }

    /// Returns the first bytes of a state that this QEMU loads.
    fn expected_prefix(&self) -> Vec<u8> {
        if self.expects_configuration { state_prefix(&self.machine_type) } else { HEADER.to_vec() }
    }

    fn send_state(&self, stream: &[u8], deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.stream.set_write_timeout(Some(left.max(std::time::Duration::from_millis(1))))?;
        (&self.stream).write_all(stream)
    }

    fn socket_error(&self, source: io::Error) -> LoadError {
        LoadError::Socket { log: self.tail(), source }
    }

    fn failed(&self, qmp: Option<&mut Qmp>) -> LoadError {
        let qemu_error = qmp
            .and_then(|qmp| qmp.execute::<Value>("query-migrate", Value::Null).ok())
            .and_then(|answer| answer.get("error-desc")?.as_str().map(str::to_owned));
        let log = self.tail();
        let reason = match qemu_error {
            Some(qemu_error) if log.is_empty() => qemu_error,
            Some(qemu_error) => format!("{qemu_error} ({log})"),
            None => log,
        };
        LoadError::Failed { reason }
    }

    fn tail(&self) -> String {
        self.log.as_deref().map(log_tail).unwrap_or_default()
    }
}

/// Returns true if a QEMU loads a state with a configuration section, from the settings of its machine type that
/// `info migrate` prints. A version that prints none has no machine types that are so old.
fn is_configuration_expected(info: &str) -> bool {
    !info.lines().any(|line| line.trim() == "send-configuration: off")
}

fn is_hang_up(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_types_without_a_configuration_section_are_known() {
        assert!(is_configuration_expected("globals:\nstore-global-state: on\nsend-configuration: on\n"));
        assert!(!is_configuration_expected("globals:\r\nsend-configuration: off\r\n"));
        assert!(is_configuration_expected(""));
    }
}
