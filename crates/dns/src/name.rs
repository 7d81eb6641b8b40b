//! Domain names: compared without regard to case, and kept as they were written.

#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::wire::{Malformed, Reader};

/// Longest label, in bytes (RFC 1035, section 2.3.4).
const LONGEST_LABEL: usize = 63;
/// Longest name, in bytes of its encoding.
const LONGEST_NAME: usize = 255;

/// Domain name, always absolute: `web.example.org` and `web.example.org.` are the same.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name {
    /// Its encoding without compression. A label's length is never the code of a letter, so that the case of all bytes
    /// may be changed at once.
    wire: Vec<u8>,
}

/// Error of a text that is no domain name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Two dots in a row, a dot at the beginning, or nothing at all.
    #[error("a domain name has an empty label")]
    EmptyLabel,
    /// A label or the whole name.
    #[error("a domain name is too long: 63 characters between two dots and 253 in all are possible")]
    TooLong,
    /// A character that has to be written in another way.
    #[error(
        "a domain name has a character that is not possible; write international names in their form xn--…"
    )]
    Character,
}

impl Name {
    /// Returns the name at which the reverse zone has an address.
    pub fn reverse(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => {
                let labels = address.octets().into_iter().rev().map(|byte| byte.to_string());
                Self::from_labels(labels.chain(["in-addr".to_owned(), "arpa".to_owned()]))
            }
            IpAddr::V6(address) => {
                let nibbles = address.octets().into_iter().rev().flat_map(|byte| [byte & 0xf, byte >> 4]);
                let labels = nibbles.map(|nibble| format!("{nibble:x}"));
                Self::from_labels(labels.chain(["ip6".to_owned(), "arpa".to_owned()]))
            }
        }
    }

    /// Encodes labels, which are short.
    fn from_labels(labels: impl Iterator<Item = String>) -> Self {
        let mut wire = Vec::new();
        for label in labels {
            wire.push(label.len() as u8);
            wire.extend(label.bytes());
        }
        wire.push(0);
        Self { wire }
    }

    /// Returns true if this name is `zone`, or lies below it.
    pub fn is_within(&self, zone: &Self) -> bool {
        let mut rest = &self.wire[..];
        while let Some((length, labels)) = rest.split_first() {
            if rest.eq_ignore_ascii_case(&zone.wire) {
                return true;
            }
            rest = labels.get(usize::from(*length)..).unwrap_or_default();
        }
        false
    }

    /// Appends its encoding, without compression.
    pub(crate) fn write(&self, message: &mut Vec<u8>) {
        message.extend(&self.wire);
    }

    /// Appends its canonical encoding, in lower case, of which signatures are made.
    pub(crate) fn write_canonical(&self, message: &mut Vec<u8>) {
        message.extend(self.wire.iter().map(u8::to_ascii_lowercase));
    }

    /// Reads a name, which may refer to earlier parts of the message.
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut wire = Vec::new();
        let mut part = reader.clone();
        // Each reference leads to an earlier place than all before it, so that they end.
        let mut earliest = part.at();
        let mut is_elsewhere = false;
        loop {
            let length = part.u8()?;
            match length {
                0 => break,
                1..=63 => {
                    wire.push(length);
                    wire.extend(part.bytes(usize::from(length))?);
                }
                0xc0.. => {
                    let target = usize::from(u16::from_be_bytes([length & 0x3f, part.u8()?]));
                    if !is_elsewhere {
                        *reader = part.clone();
                        is_elsewhere = true;
                    }
                    if target >= earliest {
                        return Err(part.malformed("a name refers to a later place"));
                    }
                    earliest = target;
                    part = part.moved_to(target);
                }
                _ => return Err(part.malformed("a label has an unknown form")),
            }
            if wire.len() >= LONGEST_NAME {
                return Err(part.malformed("a name is too long"));
            }
        }
        wire.push(0);
        if !is_elsewhere {
            *reader = part;
        }
        Ok(Self { wire })
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let (mut wire, mut label) = (Vec::new(), Vec::new());
        let end_label = |wire: &mut Vec<u8>, label: &mut Vec<u8>| {
            match label.len() {
                0 => return Err(NameError::EmptyLabel),
                1..=LONGEST_LABEL => wire.push(label.len() as u8),
                _ => return Err(NameError::TooLong),
            }
            wire.append(label);
            Ok(())
        };
        let mut letters = if text == "." { "".bytes() } else { text.bytes() };
        while let Some(letter) = letters.next() {
            match letter {
                b'.' => end_label(&mut wire, &mut label)?,
                b'\\' => label.push(escaped(&mut letters)?),
                b'!'..=b'~' => label.push(letter),
                _ => return Err(NameError::Character),
            }
        }
        if !label.is_empty() {
            end_label(&mut wire, &mut label)?;
        }
        if wire.is_empty() && text != "." {
            return Err(NameError::EmptyLabel);
        }
        wire.push(0);
        if wire.len() > LONGEST_NAME { Err(NameError::TooLong) } else { Ok(Self { wire }) }
    }
}

/// Reads what follows a backslash: three decimal digits, or a character that stands for itself.
fn escaped(letters: &mut impl Iterator<Item = u8>) -> Result<u8, NameError> {
    let first = letters.next().ok_or(NameError::Character)?;
    if !first.is_ascii_digit() {
        return if first.is_ascii_graphic() { Ok(first) } else { Err(NameError::Character) };
    }
    let mut value = u32::from(first - b'0');
    for _ in 0..2 {
        let digit = letters.next().filter(u8::is_ascii_digit).ok_or(NameError::Character)?;
        value = value * 10 + u32::from(digit - b'0');
    }
    u8::try_from(value).map_err(|_| NameError::Character)
}

impl TryFrom<String> for Name {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.to_string()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = &self.wire[..];
        if rest.len() == 1 {
            return f.write_str(".");
        }
        let mut is_first = true;
        while let Some((length, labels)) = rest.split_first() {
            let Some((label, after)) = labels.split_at_checked(usize::from(*length)) else { break };
            if label.is_empty() {
                break;
            }
            if !std::mem::replace(&mut is_first, false) {
                f.write_str(".")?;
            }
            for byte in label {
                match byte {
                    b'.' | b'\\' => write!(f, "\\{}", char::from(*byte))?,
                    b'!'..=b'~' => write!(f, "{}", char::from(*byte))?,
                    _ => write!(f, "\\{byte:03}")?,
                }
            }
            rest = after;
        }
        Ok(())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        self.wire.eq_ignore_ascii_case(&other.wire)
    }
}

impl Eq for Name {}

impl Ord for Name {
    fn cmp(&self, other: &Self) -> Ordering {
        let lower = |name: &'_ Self| name.wire.to_ascii_lowercase();
        lower(self).cmp(&lower(other))
    }
}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
