//! Meaning of a server's answers. Pure.

#[cfg(test)]
mod tests;

use crate::change::{LagReason, Rrset};
use crate::config::Server;
use crate::failure::Failure;
use crate::message::{AnswerContent, Response, ResponseCode};
use crate::name::Name;
use crate::rdata::RecordType;

/// Result of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateResult {
    /// The server has made all of it.
    Made,
    /// The server has made nothing, because of the prerequisite that this code is for.
    PrerequisiteFailed(ResponseCode),
}

/// Returns what the answer to an update means. Whatever its signature says has been checked before.
pub(crate) fn of_update(response: &Response, server: Server, zone: &Name) -> Result<UpdateResult, Failure> {
    match response.code {
        ResponseCode::NO_ERROR => Ok(UpdateResult::Made),
        code if code.is_failed_prerequisite() => Ok(UpdateResult::PrerequisiteFailed(code)),
        ResponseCode::REFUSED => Err(Failure::Refused { server }),
        ResponseCode::NOT_AUTHORITATIVE | ResponseCode::NOT_IN_ZONE => {
            Err(Failure::NoZone { server, zone: zone.clone() })
        }
        code => Err(Failure::Code { server, code }),
    }
}

/// Checks that a server answers a query for a name of its own zone.
fn check_query(response: &Response, server: Server, zone: &Name) -> Result<(), Failure> {
    match response.code {
        ResponseCode::NO_ERROR | ResponseCode::NAME_MISSING if response.is_authoritative => Ok(()),
        ResponseCode::NO_ERROR | ResponseCode::NAME_MISSING | ResponseCode::NOT_AUTHORITATIVE => {
            Err(Failure::NoZone { server, zone: zone.clone() })
        }
        ResponseCode::REFUSED => Err(Failure::Refused { server }),
        code => Err(Failure::Code { server, code }),
    }
}

/// Returns the records of a name from the answer to a query for them.
pub(crate) fn records(
    response: &Response,
    server: Server,
    zone: &Name,
    owner: &Name,
    kind: RecordType,
) -> Result<Rrset, Failure> {
    check_query(response, server, zone)?;
    let mut observed = Rrset::default();
    let mut ttl_s = None::<u32>;
    for record in response.answers.iter().filter(|record| record.owner == *owner) {
        match &record.content {
            AnswerContent::Rdata(data) if data.kind() == kind => {
                observed.values.insert(data.clone());
                ttl_s = Some(ttl_s.map_or(record.ttl, |ttl_s| ttl_s.min(record.ttl)));
            }
            AnswerContent::Alias(name) => observed.alias = Some(name.clone()),
            _ => {}
        }
    }
    observed.ttl_s = ttl_s.unwrap_or(0);
    Ok(observed)
}

/// Returns the serial number of a zone from the answer to a query for it.
pub(crate) fn serial(response: &Response, server: Server, zone: &Name) -> Result<u32, Failure> {
    check_query(response, server, zone)?;
    let mut of_zone = response.answers.iter().filter(|record| record.owner == *zone);
    let serial = of_zone.find_map(|record| match record.content {
        AnswerContent::Serial(serial) => Some(serial),
        _ => None,
    });
    serial.ok_or_else(|| Failure::NoZone { server, zone: zone.clone() })
}

/// Returns true if a serial number is older than another (RFC 1982).
pub(crate) fn is_older(serial: u32, other: u32) -> bool {
    let distance = other.wrapping_sub(serial);
    distance != 0 && distance < 1 << 31
}

/// Zone and records as a server has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ZoneState {
    pub(crate) serial: u32,
    pub(crate) records: Rrset,
}

/// Returns what another server lacks, compared with the one that accepts updates.
pub(crate) fn lag(primary: &ZoneState, other: &ZoneState) -> Option<LagReason> {
    if is_older(other.serial, primary.serial) {
        return Some(LagReason::Behind { serial: other.serial });
    }
    (other.records != primary.records).then(|| LagReason::Different { found: other.records.clone() })
}
