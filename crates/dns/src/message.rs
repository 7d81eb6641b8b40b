//! Messages to servers of DNS, and their answers: queries (RFC 1035) and dynamic updates (RFC 2136).

#[cfg(test)]
mod tests;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::name::Name;
use crate::rdata::{Rdata, RecordType};
use crate::wire::{Malformed, Reader};

const CLASS_IN: u16 = 1;
const CLASS_NONE: u16 = 254;
/// Class of the records that are signatures, and of prerequisites about any data.
pub(crate) const CLASS_ANY: u16 = 255;

const TYPE_CNAME: u16 = 5;
/// Type of the record that has a zone's serial number.
pub(crate) const TYPE_SOA: u16 = 6;
/// Type of signatures.
pub(crate) const TYPE_TSIG: u16 = 250;
const TYPE_ANY: u16 = 255;

const FLAG_RESPONSE: u16 = 1 << 15;
const FLAG_AUTHORITATIVE: u16 = 1 << 10;
const OPCODE_UPDATE: u16 = 5 << 11;

/// Longest time to live; a larger value means none at all (RFC 2181, section 8).
const LONGEST_TTL: u32 = i32::MAX as u32;

/// Result of a request, as the server states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseCode(pub u8);

impl ResponseCode {
    /// Success.
    pub const NO_ERROR: Self = Self(0);
    /// There is no such name; as the answer to an update: a name that has to be in use is not.
    pub const NAME_MISSING: Self = Self(3);
    /// The server does not permit it.
    pub const REFUSED: Self = Self(5);
    /// A name is in use that must not be.
    pub const NAME_EXISTS: Self = Self(6);
    /// Records exist that must not.
    pub const RECORDS_EXIST: Self = Self(7);
    /// Records that have to exist do not.
    pub const RECORDS_MISSING: Self = Self(8);
    /// The server does not have the zone, or does not accept the signature.
    pub const NOT_AUTHORITATIVE: Self = Self(9);
    /// A name is not in the zone.
    pub const NOT_IN_ZONE: Self = Self(10);

    /// Returns true if the answer to an update says that a prerequisite of it is not met.
    pub(crate) fn is_failed_prerequisite(self) -> bool {
        [Self::NAME_MISSING, Self::NAME_EXISTS, Self::RECORDS_EXIST, Self::RECORDS_MISSING].contains(&self)
    }
}

impl fmt::Display for ResponseCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            "NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED", "YXDOMAIN", "YXRRSET",
            "NXRRSET", "NOTAUTH", "NOTZONE",
        ];
        match names.get(usize::from(self.0)) {
            Some(name) => f.write_str(name),
            None => write!(f, "code {}", self.0),
        }
    }
}

/// Prerequisite of an update (RFC 2136, section 2.4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prerequisite {
    /// The name has this record. Those of one name and type have to be all that it has.
    RrsetExists(Name, Rdata),
    /// The name has no record of this type.
    RrsetDoesNotExist(Name, RecordType),
    /// The name has no record at all.
    NameIsNotInUse(Name),
}

/// Change of a zone (RFC 2136, section 2.5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Edit {
    /// Adds a record, or sets the TTL of the one that has the same data.
    Add(Name, u32, Rdata),
    /// Removes a record, if it is there.
    Remove(Name, Rdata),
}

/// Update of a zone: all of its edits, or none if a prerequisite is not met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Update {
    pub(crate) zone: Name,
    pub(crate) prerequisites: Vec<Prerequisite>,
    pub(crate) edits: Vec<Edit>,
}

impl Update {
    /// Returns a prerequisite that is never met: a zone's own name always has records.
    pub(crate) fn impossible(zone: &Name) -> Prerequisite {
        Prerequisite::NameIsNotInUse(zone.clone())
    }

    pub(crate) fn encode(&self, id: u16) -> Vec<u8> {
        // A message with more records than that is too long for any connection.
        let counts = [1, self.prerequisites.len() as u16, self.edits.len() as u16, 0];
        let mut message = header(id, OPCODE_UPDATE, counts);
        question(&mut message, &self.zone, TYPE_SOA);
        for prerequisite in &self.prerequisites {
            match prerequisite {
                Prerequisite::RrsetExists(owner, data) => {
                    record(&mut message, owner, data.kind().code(), CLASS_IN, 0);
                    data.write(&mut message);
                }
                Prerequisite::RrsetDoesNotExist(owner, kind) => {
                    record(&mut message, owner, kind.code(), CLASS_NONE, 0);
                    message.extend([0, 0]);
                }
                Prerequisite::NameIsNotInUse(owner) => {
                    record(&mut message, owner, TYPE_ANY, CLASS_NONE, 0);
                    message.extend([0, 0]);
                }
            }
        }
        for edit in &self.edits {
            let (owner, class, ttl, data) = match edit {
                Edit::Add(owner, ttl, data) => (owner, CLASS_IN, *ttl, data),
                Edit::Remove(owner, data) => (owner, CLASS_NONE, 0, data),
            };
            record(&mut message, owner, data.kind().code(), class, ttl);
            data.write(&mut message);
        }
        message
    }
}

/// Returns a query for the records of a name.
pub(crate) fn query(id: u16, owner: &Name, type_code: u16) -> Vec<u8> {
    let mut message = header(id, 0, [1, 0, 0, 0]);
    question(&mut message, owner, type_code);
    message
}

fn header(id: u16, flags: u16, counts: [u16; 4]) -> Vec<u8> {
    [id, flags].into_iter().chain(counts).flat_map(u16::to_be_bytes).collect()
}

fn question(message: &mut Vec<u8>, owner: &Name, type_code: u16) {
    owner.write(message);
    message.extend(type_code.to_be_bytes());
    message.extend(CLASS_IN.to_be_bytes());
}

fn record(message: &mut Vec<u8>, owner: &Name, type_code: u16, class: u16, ttl: u32) {
    owner.write(message);
    message.extend(type_code.to_be_bytes());
    message.extend(class.to_be_bytes());
    message.extend(ttl.to_be_bytes());
}

/// Record of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AnswerRecord {
    pub(crate) owner: Name,
    pub(crate) ttl: u32,
    pub(crate) content: AnswerContent,
}

/// Content of a record of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AnswerContent {
    /// Data of the types that this crate changes.
    Rdata(Rdata),
    /// The name is another name's alias (CNAME).
    Alias(Name),
    /// Serial number of a zone (SOA).
    Serial(u32),
    /// Any other.
    Other,
}

/// Answer of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) id: u16,
    pub(crate) code: ResponseCode,
    /// True if the server is responsible for the name.
    pub(crate) is_authoritative: bool,
    pub(crate) answers: Vec<AnswerRecord>,
    /// Position of the signature in the message: that of its last record, if it is one.
    pub(crate) signature_at: Option<usize>,
}

impl Response {
    pub(crate) fn parse(message: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(message);
        let (id, flags) = (reader.u16()?, reader.u16()?);
        if flags & FLAG_RESPONSE == 0 {
            return Err(reader.malformed("the message is no answer"));
        }
        let [questions, answers, authorities, additional] =
            [reader.u16()?, reader.u16()?, reader.u16()?, reader.u16()?];
        for _ in 0..questions {
            Name::read(&mut reader)?;
            reader.bytes(4)?;
        }
        let mut response = Self {
            id,
            code: ResponseCode((flags & 0xf) as u8),
            is_authoritative: flags & FLAG_AUTHORITATIVE != 0,
            answers: Vec::new(),
            signature_at: None,
        };
        for _ in 0..answers {
            let (record, _) = read_record(&mut reader)?;
            response.answers.push(record);
        }
        for _ in 0..authorities {
            read_record(&mut reader)?;
        }
        for _ in 0..additional {
            let at = reader.at();
            let (_, type_code) = read_record(&mut reader)?;
            response.signature_at = (type_code == TYPE_TSIG).then_some(at);
        }
        if reader.at() != message.len() {
            return Err(reader.malformed("bytes follow the last record"));
        }
        Ok(response)
    }
}

/// Reads a record, and the number of its type.
fn read_record(reader: &mut Reader<'_>) -> Result<(AnswerRecord, u16), Malformed> {
    let owner = Name::read(reader)?;
    let (type_code, class, ttl) = (reader.u16()?, reader.u16()?, reader.u32()?);
    let length = usize::from(reader.u16()?);
    let mut data = reader.clone();
    reader.bytes(length)?;
    let content = match type_code {
        _ if class != CLASS_IN => AnswerContent::Other,
        TYPE_CNAME => AnswerContent::Alias(Name::read(&mut data)?),
        TYPE_SOA => {
            Name::read(&mut data)?;
            Name::read(&mut data)?;
            let serial = data.u32()?;
            data.bytes(16)?;
            AnswerContent::Serial(serial)
        }
        _ => Rdata::read(type_code, &mut data)?.map_or(AnswerContent::Other, AnswerContent::Rdata),
    };
    if content != AnswerContent::Other && data.at() != reader.at() {
        return Err(data.malformed("the data of a record has another length"));
    }
    let ttl = if ttl > LONGEST_TTL { 0 } else { ttl };
    Ok((AnswerRecord { owner, ttl, content }, type_code))
}
