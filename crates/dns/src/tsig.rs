//! Signatures of messages by a shared key (TSIG, RFC 8945).
//!
//! An answer counts only if it is signed with the key of the request, and names the request by its signature. A server
//! that does not know the key cannot sign its refusal: such a refusal is reported, and proves nothing.

#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use aws_lc_rs::hmac;
use serde::{Deserialize, Serialize};

use crate::message::{CLASS_ANY, TYPE_TSIG};
use crate::name::Name;
use crate::wire::{Malformed, Reader};

/// Difference between the clocks of both sides that is accepted, as the RFC recommends.
const FUDGE_S: u16 = 300;
/// Shortest key, in bytes.
pub(crate) const SHORTEST_SECRET: usize = 16;
/// Position of the number of additional records in a message.
const ADDITIONAL: std::ops::Range<usize> = 10..12;

/// Algorithm of signatures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Algorithm {
    /// HMAC with SHA-256.
    #[default]
    #[serde(rename = "hmac-sha256")]
    HmacSha256,
    /// HMAC with SHA-384.
    #[serde(rename = "hmac-sha384")]
    HmacSha384,
    /// HMAC with SHA-512.
    #[serde(rename = "hmac-sha512")]
    HmacSha512,
}

impl Algorithm {
    /// Returns the name that configurations and messages have for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::HmacSha256 => "hmac-sha256",
            Self::HmacSha384 => "hmac-sha384",
            Self::HmacSha512 => "hmac-sha512",
        }
    }

    fn hmac(self) -> hmac::Algorithm {
        match self {
            Self::HmacSha256 => hmac::HMAC_SHA256,
            Self::HmacSha384 => hmac::HMAC_SHA384,
            Self::HmacSha512 => hmac::HMAC_SHA512,
        }
    }

    /// Appends its name as a domain name.
    fn write(self, message: &mut Vec<u8>) {
        message.push(self.name().len() as u8);
        message.extend(self.name().bytes());
        message.push(0);
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Rejection of a key or a signature by a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeyRejection {
    /// The signature is wrong: the secret is another one (BADSIG).
    BadSig,
    /// The server has no key of this name and algorithm (BADKEY).
    BadKey,
    /// The clocks differ by more than five minutes (BADTIME).
    BadTime {
        /// Clock of the server in seconds since 1970, if it states it.
        server_s: Option<u64>,
    },
    /// Any other code.
    Other(u16),
}

/// Reason for which an answer does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SignatureError {
    /// The server rejects the request.
    Rejected(KeyRejection),
    /// The answer is not from a server that has the key, or belongs to another request.
    Wrong,
    /// The signature cannot be read.
    Malformed(Malformed),
}

impl From<Malformed> for SignatureError {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed)
    }
}

/// Key that a host shares with the servers of a zone.
#[derive(Clone)]
pub(crate) struct Key {
    name: Name,
    algorithm: Algorithm,
    hmac: hmac::Key,
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({}, {})", self.name, self.algorithm)
    }
}

/// Record of a signature.
struct TsigRecord<'a> {
    key: Name,
    algorithm: Name,
    time_s: u64,
    mac: &'a [u8],
    original_id: [u8; 2],
    error: u16,
    other: &'a [u8],
    fudge_s: u16,
}

impl Key {
    /// Returns a key with this secret.
    pub(crate) fn new(name: Name, algorithm: Algorithm, secret: &[u8]) -> Self {
        Self { name, algorithm, hmac: hmac::Key::new(algorithm.hmac(), secret) }
    }

    /// Signs a request at a time, in seconds since 1970. Returns the code by which its answer names the request.
    pub(crate) fn sign(&self, message: &mut Vec<u8>, now_s: u64) -> Vec<u8> {
        let time = &now_s.to_be_bytes()[2..];
        let mut signed = message.clone();
        self.write_variables(&mut signed, time, FUDGE_S, 0, &[]);
        let mac = hmac::sign(&self.hmac, &signed).as_ref().to_vec();

        self.name.write(message);
        for number in [TYPE_TSIG, CLASS_ANY, 0, 0] {
            message.extend(number.to_be_bytes());
        }
        let mut data = Vec::new();
        self.algorithm.write(&mut data);
        data.extend(time);
        data.extend(FUDGE_S.to_be_bytes());
        data.extend((mac.len() as u16).to_be_bytes());
        data.extend(&mac);
        data.extend_from_slice(message.get(..2).unwrap_or_default());
        // No error, and no other data.
        data.extend([0; 4]);
        message.extend((data.len() as u16).to_be_bytes());
        message.extend(data);
        add_additional(message, 1);
        mac
    }

    /// Verifies the answer to the request with the code `request`. Its signature is at `at`.
    pub(crate) fn verify(
        &self,
        answer: &[u8],
        at: usize,
        request: &[u8],
        now_s: u64,
    ) -> Result<(), SignatureError> {
        let signature = TsigRecord::read(answer, at)?;
        let rejection = signature.rejection();
        // A server that cannot use the key cannot sign.
        if let Some(rejection @ (KeyRejection::BadKey | KeyRejection::BadSig)) = rejection {
            return Err(SignatureError::Rejected(rejection));
        }
        if signature.key != self.name
            || !signature.algorithm.to_string().eq_ignore_ascii_case(self.algorithm.name())
        {
            return Err(SignatureError::Wrong);
        }
        let mut signed = Vec::new();
        signed.extend((request.len() as u16).to_be_bytes());
        signed.extend(request);
        let start = signed.len();
        signed.extend(answer.get(..at).unwrap_or_default());
        if let Some(id) = signed.get_mut(start..start + 2) {
            id.copy_from_slice(&signature.original_id);
        }
        add_additional(&mut signed[start..], u16::MAX);
        let time = &signature.time_s.to_be_bytes()[2..];
        self.write_variables(&mut signed, time, signature.fudge_s, signature.error, signature.other);
        // Compares in constant time, and accepts no shortened code.
        hmac::verify(&self.hmac, &signed, signature.mac).map_err(|_| SignatureError::Wrong)?;
        if let Some(rejection) = rejection {
            return Err(SignatureError::Rejected(rejection));
        }
        let difference = Duration::from_secs(signature.time_s.abs_diff(now_s));
        if difference > Duration::from_secs(FUDGE_S.into()) {
            let server_s = Some(signature.time_s);
            return Err(SignatureError::Rejected(KeyRejection::BadTime { server_s }));
        }
        Ok(())
    }

    /// Appends what is signed beside the message (section 4.3.3).
    fn write_variables(&self, signed: &mut Vec<u8>, time: &[u8], fudge_s: u16, error: u16, other: &[u8]) {
        self.name.write_canonical(signed);
        for number in [CLASS_ANY, 0, 0] {
            signed.extend(number.to_be_bytes());
        }
        self.algorithm.write(signed);
        signed.extend(time);
        for number in [fudge_s, error, other.len() as u16] {
            signed.extend(number.to_be_bytes());
        }
        signed.extend(other);
    }
}

impl<'a> TsigRecord<'a> {
    fn read(message: &'a [u8], at: usize) -> Result<Self, Malformed> {
        let mut reader = Reader::new(message).moved_to(at);
        let key = Name::read(&mut reader)?;
        // Type, class, TTL and length, which the parser of answers has read.
        reader.bytes(10)?;
        let algorithm = Name::read(&mut reader)?;
        let (high, low) = (u64::from(reader.u16()?), u64::from(reader.u32()?));
        let time_s = (high << 32) | low;
        let fudge_s = reader.u16()?;
        let length = usize::from(reader.u16()?);
        let mac = reader.bytes(length)?;
        let original_id = reader.array()?;
        let error = reader.u16()?;
        let length = usize::from(reader.u16()?);
        let other = reader.bytes(length)?;
        if reader.at() != message.len() {
            return Err(reader.malformed("the signature has another length"));
        }
        Ok(Self { key, algorithm, time_s, mac, original_id, error, other, fudge_s })
    }

    fn rejection(&self) -> Option<KeyRejection> {
        Some(match self.error {
            0 => return None,
            16 => KeyRejection::BadSig,
            17 => KeyRejection::BadKey,
            18 => {
                let server = <[u8; 6]>::try_from(self.other).ok();
                let server_s =
                    server.map(|server| server.iter().fold(0, |all, byte| (all << 8) | u64::from(*byte)));
                KeyRejection::BadTime { server_s }
            }
            other => KeyRejection::Other(other),
        })
    }
}

/// Adds to the number of additional records, modulo its range.
fn add_additional(message: &mut [u8], count: u16) {
    if let Some(bytes) = message.get_mut(ADDITIONAL) {
        let number = u16::from_be_bytes([bytes[0], bytes[1]]).wrapping_add(count);
        bytes.copy_from_slice(&number.to_be_bytes());
    }
}
