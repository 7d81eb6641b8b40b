//! A data stream of arbitrary bytes: headers and payloads are good or errors, and what is good comes back as it was.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::delta::Delta;
use proto::frame::{Header, FrameKind};
use proto::limits::CHUNK_PAGES;
use proto::packed::Packed;
use proto::pages::{Ack, Content, PagesHeader, decode_round_end, encode_round_end};
use proto::reference::{Reference, decode_missing, encode_missing};

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    let mut runs = Vec::new();
    while let Some((header, after)) = rest.split_first_chunk() {
        let Ok(decoded) = Header::decode(*header) else { return };
        assert_eq!(decoded.encode(), *header);
        let length = decoded.payload_bytes as usize;
        assert!(length <= decoded.kind.max_payload_bytes());
        let Some((payload, after)) = after.split_at_checked(length) else { return };
        rest = after;
        match decoded.kind {
            FrameKind::Pages => {
                let Ok((pages, data)) = PagesHeader::decode(payload, &mut runs) else { continue };
                assert_eq!(data.len(), runs.iter().map(|run| run.data_bytes()).sum::<usize>());
                let mut rest = data;
                for run in &runs {
                    let (mine, behind) = rest.split_at(run.data_bytes());
                    rest = behind;
                    match run.content {
                        Content::Reference => {
                            if let Ok(reference) = Reference::decode(mine) {
                                assert_eq!(reference.encode(), mine);
                            }
                        }
                        Content::Delta { .. } => {
                            let mut deltas = mine;
                            while let Ok(delta) = Delta::take(&mut deltas) {
                                delta.apply_to(&mut [0; 4096]);
                            }
                        }
                        Content::Data | Content::Zero | Content::Hole | Content::Filled => {}
                    }
                }
                assert!(
                    runs.iter().all(|run| u64::from(run.first_page) + u64::from(run.pages) <= CHUNK_PAGES)
                );
                let mut encoded = Vec::new();
                pages.encode(&runs, &mut encoded);
                encoded.extend_from_slice(data);
                assert_eq!(encoded, payload);
            }
            FrameKind::RoundEnd => {
                if let Ok((seq, round)) = decode_round_end(payload) {
                    assert_eq!(encode_round_end(seq, round), payload);
                }
            }
            FrameKind::Ack => {
                if let Ok(ack) = Ack::decode(payload) {
                    assert_eq!(ack.encode(), payload);
                }
            }
            FrameKind::Missing => {
                if let Ok((seq, pages)) = decode_missing(payload) {
                    assert_eq!(encode_missing(seq, &pages), payload);
                }
            }
            FrameKind::Packed => {
                let Ok(packed) = Packed::decode(payload, &mut runs) else { continue };
                assert!(packed.bytes.len() < packed.data_bytes);
                let mut encoded = packed.codec.encode().to_vec();
                packed.header.encode(&runs, &mut encoded);
                encoded.extend_from_slice(packed.bytes);
                assert_eq!(encoded, payload);
            }
            FrameKind::Message | FrameKind::Blob => {}
        }
    }
});
