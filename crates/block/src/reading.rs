//! An image that is open for reading, by a server of its own, while other programs have it open.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::image::{Format, ImageError, Server};
use crate::nbd::{ALLOCATION, Client, NbdError, ZERO};

/// An image that is open for reading.
#[derive(Debug)]
pub struct ImageReader {
    server: Server,
    client: Client,
}

impl ImageReader {
    /// Opens an image in any format that QEMU knows by this name, through a server on a new socket. A program that
    /// writes it must have flushed it, and must not write any more. Of a raw image that is longer than its disk (a
    /// block device, a part of a larger file) only `part` is read, in bytes.
    pub fn open(
        image: &str,
        format: &str,
        part: Option<Range<u64>>,
        socket: &Path,
        timeout: Duration,
    ) -> Result<Self, ImageError> {
        let file = image.replace(',', ",,");
        let part = part.map_or_else(String::new, |part| {
            format!(",offset={},size={}", part.start, part.end.saturating_sub(part.start))
        });
        let options = format!("driver={format}{part},file.filename={file},force-share=on");
        let named = ["--image-opts", &options];
        Self::of(Server::start_reading(&named, Path::new(image), format, socket, timeout)?)
    }

    /// Opens the content of one image itself; content of its backing files reads as zeros. A program may continue to
    /// write to it: the data that is read may then be neither the present nor any former content.
    pub fn open_layer(
        image: &Path,
        format: &str,
        socket: &Path,
        timeout: Duration,
    ) -> Result<Self, ImageError> {
        let file = image.to_string_lossy();
        let mut options = json!({ "driver": format, "file": { "filename": file }, "force-share": true });
        if format == Format::Qcow2.as_str() {
            // Without it QEMU would open the backing files.
            options["backing"] = Value::Null;
        }
        let named = format!("json:{options}");
        Self::of(Server::start_reading(&[&named], image, format, socket, timeout)?)
    }

    fn of(server: Server) -> Result<Self, ImageError> {
        let client = server.client_for(Some(ALLOCATION))?;
        Ok(Self { server, client })
    }

    /// Returns the length of the image's content, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.client.size_bytes()
    }

    /// Returns the parts of a range that do not read as zeros, ascending, in bytes.
    pub fn allocated(&mut self, range: Range<u64>) -> Result<Vec<Range<u64>>, ImageError> {
        let extents = self.ask(|client| client.status(range))?;
        Ok(extents
            .into_iter()
            .filter(|extent| extent.status & ZERO == 0)
            .map(|extent| extent.bytes)
            .collect())
    }

    /// Reads bytes.
    pub fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), ImageError> {
        self.ask(|client| client.read(offset, into))
    }

    pub(crate) fn ask<T>(
        &mut self,
        ask: impl FnOnce(&mut Client) -> Result<T, NbdError>,
    ) -> Result<T, ImageError> {
        ask(&mut self.client)
            .map_err(|source| ImageError::Read { path: self.server.path().to_owned(), source })
    }
}
