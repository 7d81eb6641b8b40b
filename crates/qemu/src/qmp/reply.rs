//! Classification of lines: answers, errors and events.

use serde::Deserialize;
use serde_json::Value;

use super::{Event, QmpError, Version};

/// Meaning of one line from QEMU.
pub(super) enum Reply {
    /// The answer to the command that waits: its result, or class and text of the error.
    Matched(Result<Value, (String, String)>),
    /// The answer to a command whose deadline has passed.
    Stale,
    /// An event.
    Event(Event),
}

impl Reply {
    /// Parses a line; `id` is the id of the command that waits.
    pub(super) fn of(mut message: Value, id: u64) -> Result<Self, QmpError> {
        if let Some(name) = message.get("event").and_then(Value::as_str) {
            let at = |key| message.pointer(key).and_then(Value::as_u64).unwrap_or(0);
            let timestamp_us = at("/timestamp/seconds")
                .saturating_mul(1_000_000)
                .saturating_add(at("/timestamp/microseconds"));
            let name = name.to_owned();
            return Ok(Self::Event(Event { name, data: message["data"].take(), timestamp_us }));
        }
        let theirs = message.get("id").and_then(Value::as_u64);
        let error = message.get("error").map(|error| {
            let text = |key| error.get(key).and_then(Value::as_str).unwrap_or("?").to_owned();
            (text("class"), text("desc"))
        });
        match (theirs, error, message.get_mut("return")) {
            (Some(number), _, _) if number != id => Ok(Self::Stale),
            // Without an id: QEMU could not even parse the command.
            (None, Some((_, desc)), _) => Err(QmpError::Protocol { what: desc }),
            (Some(_), Some(error), _) => Ok(Self::Matched(Err(error))),
            (Some(_), None, Some(value)) => Ok(Self::Matched(Ok(value.take()))),
            _ => Err(QmpError::Protocol { what: "neither a reply, an error nor an event".to_owned() }),
        }
    }
}

/// Parses the version in the greeting.
pub(super) fn parse_greeting(greeting: &Value) -> Result<Version, QmpError> {
    #[derive(Deserialize)]
    struct Numbers {
        major: u64,
        minor: u64,
        micro: u64,
    }
    let version = greeting.pointer("/QMP/version").ok_or_else(|| QmpError::Protocol {
        what: "no greeting; is this a human monitor (-monitor)? a QMP monitor (-qmp) is needed".to_owned(),
    })?;
    let numbers: Numbers = serde_json::from_value(version["qemu"].clone())
        .map_err(|source| QmpError::Answer { command: "the greeting".to_owned(), source })?;
    Ok(Version {
        major: numbers.major,
        minor: numbers.minor,
        micro: numbers.micro,
        package: version.get("package").and_then(Value::as_str).unwrap_or_default().to_owned(),
    })
}
