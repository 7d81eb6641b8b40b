//! The little of QEMU's monitor protocol that the laboratory itself needs. It waits for each answer and ignores events.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::{Context, Error, Result};

/// A connection to QEMU's monitor. QEMU takes one at a time on a socket.
#[derive(Debug)]
pub struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects and waits for QEMU's greeting.
    pub fn connect(path: &Path) -> Result<Self> {
        let context = || format!("cannot use the monitor {}", path.display());
        let stream = UnixStream::connect(path).context(context)?;
        // A safety net: somebody else may hold the monitor for ever.
        stream.set_read_timeout(Some(Duration::from_mins(1))).context(context)?;
        let mut monitor = Self { stream: BufReader::new(stream) };
        monitor.read().context(context)?;
        monitor.command("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Runs a command and returns its result.
    pub fn command(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let context = || format!("QMP command {command}");
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).context(context)?;
        loop {
            let mut answer = self.read().context(context)?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                return Err(Error::Monitor { command: command.to_owned(), answer: error.to_string() });
            }
        }
    }

    fn read(&mut self) -> std::io::Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}
