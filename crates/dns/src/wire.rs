//! Bytes of DNS messages (RFC 1035), read with all limits checked.

/// Error of a message that does not follow the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}, at byte {at}")]
pub(crate) struct Malformed {
    at: usize,
    what: &'static str,
}

/// Position in a message.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    message: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(message: &'a [u8]) -> Self {
        Self { message, at: 0 }
    }

    /// Returns the position, in bytes from the beginning of the message.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Returns a reader of the same message at another position.
    pub(crate) fn moved_to(&self, at: usize) -> Self {
        Self { message: self.message, at }
    }

    pub(crate) fn malformed(&self, what: &'static str) -> Malformed {
        Malformed { at: self.at, what }
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let end = self.at.saturating_add(count);
        let bytes = self.message.get(self.at..end).ok_or(self.malformed("the message ends too early"))?;
        self.at = end;
        Ok(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(u8::from_be_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }
}
