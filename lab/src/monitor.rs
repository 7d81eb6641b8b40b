//! The subset of QEMU's monitor protocol that the laboratory needs. Each command waits for its answer; events that
//! arrive in the meantime are kept.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::{Context, Error, Result};

/// A connection to QEMU's monitor. QEMU accepts one at a time on a socket.
#[derive(Debug)]
pub struct Monitor {
    stream: BufReader<UnixStream>,
    events: VecDeque<Event>,
}

/// An asynchronous event of QEMU.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Its name, in capitals.
    pub name: String,
    /// Its time by the host's calendar, in microseconds since 1970.
    pub at_unix_us: u64,
    /// Its data.
    pub data: Value,
}

impl Monitor {
    /// Connects and waits for QEMU's greeting.
    pub fn connect(path: &Path) -> Result<Self> {
        let context = || format!("cannot use the monitor {}", path.display());
        let stream = UnixStream::connect(path).context(context)?;
        // A safety net: another client may hold the monitor for ever.
        stream.set_read_timeout(Some(Duration::from_mins(1))).context(context)?;
        let mut monitor = Self { stream: BufReader::new(stream), events: VecDeque::new() };
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
            self.events.extend(Event::parse(&answer));
        }
    }

    /// Returns the next event for which `wanted` holds, or the first one that has arrived already; events before it are
    /// skipped.
    pub fn wait_for_event(&mut self, mut wanted: impl FnMut(&Event) -> bool) -> Result<Event> {
        loop {
            let event = match self.events.pop_front() {
                Some(event) => Some(event),
                None => Event::parse(&self.read().context(|| "cannot read QEMU's events")?),
            };
            if let Some(event) = event.filter(&mut wanted) {
                return Ok(event);
            }
        }
    }

    /// Sets the time limit for QEMU's next message.
    pub fn set_patience(&mut self, patience: Duration) -> Result<()> {
        self.stream.get_ref().set_read_timeout(Some(patience)).context(|| "cannot set a timeout")
    }

    fn read(&mut self) -> std::io::Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}

impl Event {
    fn parse(message: &Value) -> Option<Self> {
        let number = |key: &str| message["timestamp"][key].as_u64().unwrap_or(0);
        Some(Self {
            name: message.get("event")?.as_str()?.to_owned(),
            at_unix_us: number("seconds") * 1_000_000 + number("microseconds"),
            data: message["data"].clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_told_from_answers() {
        let event = json!({"event": "STOP", "timestamp": {"seconds": 3, "microseconds": 5}});
        let event = Event::parse(&event).unwrap();
        assert_eq!((event.name.as_str(), event.at_unix_us), ("STOP", 3_000_005));
        assert_eq!(Event::parse(&json!({"return": {}})), None);
    }
}
