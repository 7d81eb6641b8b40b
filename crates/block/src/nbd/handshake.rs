//! The handshake: from a connected socket to an open export.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use super::wire::{
    Cursor, FIXED_NEWSTYLE, GREETING, INFO_EXPORT, NO_ZEROES, OPTION, OPTION_GO, OPTION_REPLY,
    OPTION_SET_META_CONTEXT, OPTION_STRUCTURED_REPLY, REPLY_ACK, REPLY_ERROR, REPLY_INFO, REPLY_META_CONTEXT,
};
use super::{NbdError, message_suffix, read_payload};

/// Opens an export. Returns its length in bytes, and the server's number for the context.
pub(super) fn open(
    mut socket: &UnixStream,
    export: &str,
    context: Option<&str>,
) -> Result<(u64, Option<u32>), NbdError> {
    let mut greeting = [0; 18];
    socket.read_exact(&mut greeting)?;
    let mut fields = Cursor(&greeting);
    if (fields.u64(), fields.u64()) != (Some(GREETING), Some(OPTION)) {
        return Err(NbdError::Protocol("its greeting is not that of an NBD server"));
    }
    let flags = fields.u16().unwrap_or_default();
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(NbdError::Protocol("it is too old"));
    }
    socket.write_all(&u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes())?;

    let lacks = |what: &str, message: String| NbdError::Lacks { what: what.to_owned(), message };
    option(socket, OPTION_STRUCTURED_REPLY, &[], |_, _| Ok(()))?
        .map_err(|message| lacks("structured replies", message))?;
    let mut number = None;
    if let Some(context) = context {
        let mut data = sized(export);
        data.extend_from_slice(&1_u32.to_be_bytes());
        data.extend(sized(context));
        option(socket, OPTION_SET_META_CONTEXT, &data, |kind, payload| {
            if kind == REPLY_META_CONTEXT {
                number = Cursor(payload).u32();
            }
            Ok(())
        })?
        .map_err(|message| lacks(&format!("an export {export}"), message))?;
        if number.is_none() {
            return Err(lacks(&format!("{context} of {export}"), String::new()));
        }
    }
    let mut size_bytes = None;
    let mut data = sized(export);
    data.extend_from_slice(&0_u16.to_be_bytes());
    option(socket, OPTION_GO, &data, |kind, payload| {
        let mut fields = Cursor(payload);
        if kind == REPLY_INFO && fields.u16() == Some(INFO_EXPORT) {
            size_bytes = fields.u64();
        }
        Ok(())
    })?
    .map_err(|message| lacks(&format!("an export {export}"), message))?;
    Ok((size_bytes.ok_or(NbdError::Protocol("it does not report the length of the export"))?, number))
}

/// Encodes a text with its length before it.
fn sized(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

/// Sends an option and processes all replies; the inner error is the server's refusal, in its words.
fn option(
    mut socket: &UnixStream,
    option: u32,
    data: &[u8],
    mut take: impl FnMut(u32, &[u8]) -> Result<(), NbdError>,
) -> Result<Result<(), String>, NbdError> {
    let mut request = OPTION.to_be_bytes().to_vec();
    request.extend_from_slice(&option.to_be_bytes());
    request.extend_from_slice(&(data.len() as u32).to_be_bytes());
    request.extend_from_slice(data);
    socket.write_all(&request)?;
    loop {
        let mut head = [0; 20];
        socket.read_exact(&mut head)?;
        let mut fields = Cursor(&head);
        if (fields.u64(), fields.u32()) != (Some(OPTION_REPLY), Some(option)) {
            return Err(NbdError::Protocol("an answer to a different option"));
        }
        let kind = fields.u32().unwrap_or_default();
        let payload = read_payload(socket, fields.u32().unwrap_or_default())?;
        match kind {
            REPLY_ACK => return Ok(Ok(())),
            kind if kind >= REPLY_ERROR => return Ok(Err(message_suffix(&payload))),
            kind => take(kind, &payload)?,
        }
    }
}
