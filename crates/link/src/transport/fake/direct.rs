//! Direct placement of the fakes.

use std::io;
use std::ops::Range;

use proto::frame::FrameKind;

use super::Placement;
use super::halves::{FrameReader, FrameWriter, LateData, PLACED, Rest};
use crate::error::LinkError;
use crate::transport::{DirectReceiver, DirectSender, Part, TransportError};

/// Bytes that are moved at a time.
const PIECE_BYTES: u64 = 64 << 10;

fn unreachable_memory(error: io::Error) -> TransportError {
    TransportError::Memory(Box::new(error))
}

fn mismatch() -> TransportError {
    let text = "the layout of a frame's data does not have the frame's length";
    TransportError::Protocol(io::Error::new(io::ErrorKind::InvalidData, text).into())
}

/// Returns the pieces of a range.
fn pieces(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    (range.start..end).step_by(PIECE_BYTES as usize).map(move |at| at..end.min(at + PIECE_BYTES))
}

impl FrameWriter {
    /// Reads the data that was put into the buffer by name.
    pub(super) fn read_late(&mut self) -> Result<(), TransportError> {
        let Placement::InOrder { regions, .. } = &self.placement else { return Ok(()) };
        for LateData { at, region, bytes } in self.late.drain(..) {
            let into = &mut self.held[at..at + (bytes.end - bytes.start) as usize];
            regions.read(region, bytes.start, into).map_err(unreachable_memory)?;
        }
        Ok(())
    }

    fn hold_names(&mut self, kind: FrameKind, bytes: &[u8], layout: &[Part]) -> Result<(), TransportError> {
        self.hold_header(kind, layout.iter().map(Part::len_bytes).sum(), PLACED)?;
        let mut rest = bytes;
        for part in layout {
            match part {
                Part::Bytes(bytes) => {
                    let (now, later) = rest.split_at_checked(*bytes).ok_or_else(mismatch)?;
                    self.held.extend_from_slice(now);
                    rest = later;
                }
                Part::Memory { region, bytes } => {
                    let at = self.held.len();
                    self.held.resize(at + part.len_bytes(), 0);
                    self.late.push(LateData { at, region: *region, bytes: bytes.clone() });
                }
            }
        }
        if rest.is_empty() { Ok(()) } else { Err(mismatch()) }
    }
}

impl DirectSender for FrameWriter {
    fn reaches(&self, region: u16) -> bool {
        match &self.placement {
            Placement::None => false,
            Placement::InOrder { regions, .. } => regions.reaches(region),
            Placement::OneSided { from, to } => from.reaches(region) && to.reaches(region),
        }
    }

    fn omits_zeros(&self) -> bool {
        matches!(self.placement, Placement::InOrder { omits_zeros: true, .. })
    }

    fn send(&mut self, kind: FrameKind, bytes: &[u8], layout: &[Part]) -> Result<(), TransportError> {
        let Placement::OneSided { from, to } = &self.placement else {
            self.hold_names(kind, bytes, layout)?;
            return self.write_full();
        };
        let mut copy = vec![0; PIECE_BYTES as usize];
        for part in layout {
            let Part::Memory { region, bytes } = part else { continue };
            for piece in pieces(bytes) {
                let copy = &mut copy[..(piece.end - piece.start) as usize];
                from.read(*region, piece.start, copy).map_err(unreachable_memory)?;
                self.side.act_there(|| to.write(*region, piece.start, copy).map_err(unreachable_memory))?;
            }
        }
        self.hold_header(kind, bytes.len(), PLACED)?;
        self.held.extend_from_slice(bytes);
        self.write_full()
    }
}

impl FrameReader {
    /// Receives exactly as many bytes as `into` has.
    fn read_exactly(&self, into: &mut [u8]) -> Result<(), TransportError> {
        let mut filled = 0;
        while filled < into.len() {
            match self.side.read(&mut into[filled..], None)? {
                0 => return Err(LinkError::Truncated.into()),
                bytes => filled += bytes,
            }
        }
        Ok(())
    }

    /// Receives the rest of a frame, part by part.
    fn receive_parts(&self, layout: &[Part], into: &mut Vec<u8>) -> Result<(), TransportError> {
        let Placement::InOrder { regions, .. } = &self.placement else { return Err(mismatch()) };
        let mut copy = vec![0; PIECE_BYTES as usize];
        for part in layout {
            match part {
                Part::Bytes(bytes) => {
                    let filled = into.len();
                    into.resize(filled + bytes, 0);
                    self.read_exactly(&mut into[filled..])?;
                }
                Part::Memory { region, bytes } => {
                    for piece in pieces(bytes) {
                        let copy = &mut copy[..(piece.end - piece.start) as usize];
                        self.read_exactly(copy)?;
                        regions.write(*region, piece.start, copy).map_err(unreachable_memory)?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl DirectReceiver for FrameReader {
    fn receive(&mut self, layout: &[Part], bytes: &mut Vec<u8>) -> Result<(), TransportError> {
        let is_bytes = |part: &&Part| matches!(part, Part::Bytes(_));
        let received = match std::mem::replace(&mut self.rest, Rest::None) {
            Rest::Follows(left) if left == layout.iter().map(Part::len_bytes).sum::<usize>() => {
                self.receive_parts(layout, bytes)
            }
            Rest::Arrived(arrived)
                if arrived.len() == layout.iter().filter(is_bytes).map(Part::len_bytes).sum::<usize>() =>
            {
                bytes.extend_from_slice(&arrived);
                Ok(())
            }
            _ => Err(mismatch()),
        };
        received.inspect_err(|_| self.side.shutdown())
    }
}
