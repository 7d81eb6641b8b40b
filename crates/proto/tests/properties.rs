//! Properties for arbitrary bytes: encoded values are decoded again, and other bytes at most return an error.

use proptest::prelude::*;
use proto::frame::{BadHeader, FrameKind, HEADER_BYTES, Header};
use proto::message::{Hello, Message, Welcome};
use proto::packed::{self, Codec, Packed};
use proto::pages::{self, Ack, BadPages, Content, PageRun, PagesHeader, decode_round_end, encode_round_end};
use proto::reference::{
    CHUNK_WORDS, ContentSource, MISSING_BYTES, Reference, decode_missing, encode_missing,
};
use proto::{VmName, limits};
use whimbrel_proto as proto;

const KINDS: [FrameKind; 7] = [
    FrameKind::Message,
    FrameKind::Blob,
    FrameKind::Pages,
    FrameKind::RoundEnd,
    FrameKind::Ack,
    FrameKind::Missing,
    FrameKind::Packed,
];

fn content(kind: u8, pages: u16, pieces: u16) -> Content {
    match kind {
        0 => Content::Data,
        1 => Content::Zero,
        2 => Content::Hole,
        3 => Content::Reference,
        4 => Content::Filled,
        _ => Content::Delta { pieces: pieces % (pages * 63 + 1) },
    }
}

/// Runs in order within a chunk. Few pages of data, so that the tests stay quick.
fn runs() -> impl Strategy<Value = Vec<PageRun>> {
    prop::collection::vec((0_u16..20, 1_u16..12, 0..6_u8, any::<u16>()), 0..40).prop_map(|steps| {
        let mut next = 0;
        let mut runs = Vec::new();
        for (gap, pages, kind, pieces) in steps {
            let first_page = next + gap;
            next = first_page + pages;
            if u64::from(next) <= limits::CHUNK_PAGES {
                runs.push(PageRun { first_page, pages, content: content(kind, pages, pieces) });
            }
        }
        runs
    })
}

fn data_bytes(runs: &[PageRun]) -> usize {
    runs.iter().map(|run| run.data_bytes()).sum()
}

prop_compose! {
    fn frame()(
        (seq, round, block, chunk) in any::<(u64, u32, u16, u64)>(),
        runs in runs(),
        fill: u8,
    ) -> (PagesHeader, Vec<PageRun>, Vec<u8>) {
        let header = PagesHeader { seq, round, block, chunk };
        let mut payload = Vec::new();
        header.encode(&runs, &mut payload);
        payload.resize(payload.len() + data_bytes(&runs), fill);
        (header, runs, payload)
    }
}

/// Eight bytes that are nearly a header: lengths around the limit, one reserved byte that is not zero.
fn nearly_a_header() -> impl Strategy<Value = [u8; HEADER_BYTES]> {
    let length = prop_oneof![
        any::<u32>(),
        (0..6_usize, 0..20_u32)
            .prop_map(|(kind, over)| { (KINDS[kind].max_payload_bytes() as u32 + over).saturating_sub(10) })
    ];
    let reserved = prop_oneof![3 => Just([0; 3]), 1 => (0..3_usize, any::<u8>()).prop_map(|(at, byte)| {
        let mut reserved = [0; 3];
        reserved[at] = byte;
        reserved
    })];
    (0..8_u8, reserved, length).prop_map(|(kind, [z1, z2, z3], length)| {
        let [l0, l1, l2, l3] = length.to_le_bytes();
        [kind, z1, z2, z3, l0, l1, l2, l3]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn headers_come_back(kind in 0..6_usize, share in 0.0..=1.0) {
        let kind = KINDS[kind];
        let bytes = (kind.max_payload_bytes() as f64 * share) as usize;
        let header = Header::new(kind, bytes).unwrap();
        prop_assert_eq!(Header::decode(header.encode()), Ok(header));
        prop_assert!(Header::new(kind, kind.max_payload_bytes() + 1).is_err());
    }

    #[test]
    fn eight_bytes_are_a_good_header_or_an_error(bytes in prop_oneof![any::<[u8; HEADER_BYTES]>(), nearly_a_header()]) {
        match Header::decode(bytes) {
            Ok(header) => {
                prop_assert!(header.payload_bytes as usize <= header.kind.max_payload_bytes());
                prop_assert_eq!(header.encode(), bytes);
            }
            Err(BadHeader::FrameKind(kind)) => {
                prop_assert_eq!(kind, bytes[0]);
                prop_assert!(KINDS.iter().all(|known| *known as u8 != kind));
            }
            Err(BadHeader::Reserved) => prop_assert_ne!(&bytes[1..4], &[0; 3]),
            Err(BadHeader::TooLong { kind, bytes }) => prop_assert!(bytes as usize > kind.max_payload_bytes()),
        }
    }

    #[test]
    fn pages_come_back((header, runs, payload) in frame()) {
        prop_assert!(payload.len() <= pages::MAX_PAYLOAD_BYTES);
        // The runs of an earlier frame are removed.
        let mut read = vec![PageRun { first_page: 9, pages: 9, content: Content::Hole }];
        let (decoded, data) = PagesHeader::decode(&payload, &mut read).unwrap();
        prop_assert_eq!((decoded, &read), (header, &runs));
        prop_assert_eq!(data, &payload[payload.len() - data_bytes(&runs)..]);
    }

    #[test]
    fn truncated_and_surplus_pages_are_refused((_, _, mut payload) in frame(), cut: prop::sample::Index, more in 1..100_usize) {
        let cut = cut.index(payload.len());
        prop_assert_eq!(PagesHeader::decode(&payload[..cut], &mut Vec::new()), Err(BadPages::Truncated));
        payload.resize(payload.len() + more, 0);
        prop_assert_eq!(PagesHeader::decode(&payload, &mut Vec::new()), Err(BadPages::Surplus(more)));
    }

    /// Bytes close to a good frame, where the mistakes are.
    #[test]
    fn changed_pages_are_in_order_or_refused(
        (_, _, mut payload) in frame(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let structured = payload.len().min(pages::FIXED_BYTES + 40 * pages::RUN_BYTES);
        for (at, byte) in changes {
            payload[at.index(structured)] = byte;
        }
        let mut read = Vec::new();
        if let Ok((_, data)) = PagesHeader::decode(&payload, &mut read) {
            prop_assert_eq!(data.len(), data_bytes(&read));
            let mut next = 0;
            for run in read {
                prop_assert!(run.pages > 0 && u64::from(run.first_page) >= next);
                next = u64::from(run.first_page) + u64::from(run.pages);
                prop_assert!(next <= limits::CHUNK_PAGES);
            }
        }
    }

    /// A count of runs allocates no memory before the runs are there: 8 bytes each, and so at most the payload's
    /// length.
    #[test]
    fn arbitrary_bytes_as_pages(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut read = Vec::new();
        let _ = PagesHeader::decode(&bytes, &mut read);
        prop_assert!(read.len() <= bytes.len() / pages::RUN_BYTES);
    }

    /// Compressed data is shorter than the data that it replaces, and not empty; anything else is refused.
    #[test]
    fn packed_pages_come_back((header, runs, _) in frame(), lz4: bool, bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let codec = if lz4 { Codec::Lz4 } else { Codec::Zstd };
        let mut payload = codec.encode().to_vec();
        header.encode(&runs, &mut payload);
        payload.extend_from_slice(&bytes);
        let mut read = Vec::new();
        let data_bytes = data_bytes(&runs);
        match Packed::decode(&payload, &mut read) {
            Ok(packed) => {
                prop_assert_eq!((packed.header, packed.codec, packed.bytes), (header, codec, &bytes[..]));
                prop_assert_eq!((packed.data_bytes, &read), (data_bytes, &runs));
                prop_assert!(!bytes.is_empty() && bytes.len() < data_bytes);
            }
            Err(error) => {
                prop_assert_eq!(error, BadPages::Packed);
                prop_assert!(bytes.is_empty() || bytes.len() >= data_bytes);
            }
        }
        payload[0] = 77;
        prop_assert_eq!(Packed::decode(&payload, &mut read).map(drop), Err(BadPages::Codec(77)));
        prop_assert_eq!(Packed::decode(&payload[..packed::HEAD_BYTES - 1], &mut read).map(drop), Err(BadPages::Truncated));
    }

    #[test]
    fn arbitrary_bytes_as_packed_pages(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut read = Vec::new();
        let _ = Packed::decode(&bytes, &mut read);
        prop_assert!(read.len() <= bytes.len() / pages::RUN_BYTES);
    }

    #[test]
    fn round_ends_and_acks_come_back(seq: u64, round: u32, other in prop::collection::vec(any::<u8>(), 0..80)) {
        prop_assert_eq!(decode_round_end(&encode_round_end(seq, round)), Ok((seq, round)));
        let ack = Ack { seq, waited_us: round };
        prop_assert_eq!(Ack::decode(&ack.encode()), Ok(ack));
        let expected = |len: usize| match other.len().checked_sub(len) {
            None => Err(BadPages::Truncated),
            Some(0) => Ok(()),
            Some(surplus) => Err(BadPages::Surplus(surplus)),
        };
        prop_assert_eq!(decode_missing(&other).map(drop), expected(MISSING_BYTES));
        prop_assert_eq!(decode_round_end(&other).map(drop), expected(pages::ROUND_END_BYTES));
        prop_assert_eq!(Ack::decode(&other).map(drop), expected(pages::ACK_BYTES));
    }

    #[test]
    fn references_come_back(
        (which, first_page, hash, pages) in any::<(u16, u64, [u8; 16], [u64; CHUNK_WORDS])>(),
        record in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        for content_source in [ContentSource::Template(which), ContentSource::Block(which)] {
            let reference = Reference { content_source, first_page, hash };
            prop_assert_eq!(Reference::decode(&reference.encode()), Ok(reference));
        }
        prop_assert_eq!(decode_missing(&encode_missing(first_page, &pages)), Ok((first_page, pages)));
        if let Ok(read) = Reference::decode(&record) {
            prop_assert_eq!(&read.encode()[..], record);
        }
    }

    #[test]
    fn arbitrary_bytes_as_json(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = serde_json::from_slice::<Message>(&bytes);
        let _ = serde_json::from_slice::<Hello>(&bytes);
        let _ = serde_json::from_slice::<Welcome>(&bytes);
    }

    /// Messages of the golden file with a few bytes changed are decoded and validated without a panic, and a message
    /// that is decoded survives being encoded.
    #[test]
    fn changed_json(
        line: prop::sample::Index,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let lines: Vec<_> = include_str!("golden/v1.messages").lines().collect();
        let mut json = lines[line.index(lines.len())].as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(json.len());
            json[at] = byte;
        }
        if let Ok(message) = serde_json::from_slice::<Message>(&json) {
            let _ = message.validate();
            let encoded = serde_json::to_vec(&message).unwrap();
            prop_assert_eq!(serde_json::from_slice::<Message>(&encoded).unwrap(), message);
        }
    }

    #[test]
    fn names_are_what_they_may_be(name in "\\PC{0,70}") {
        if let Ok(good) = VmName::new(name.clone()) {
            prop_assert!(!name.is_empty() && name.len() <= limits::NAME_BYTES && !name.contains('/'));
            prop_assert_eq!(good.as_str(), name);
        }
    }
}

#[test]
fn the_limit_of_each_kind_is_exact() {
    for kind in KINDS {
        let max = kind.max_payload_bytes();
        let mut bytes = Header::new(kind, max).unwrap().encode();
        assert!(Header::decode(bytes).is_ok());
        bytes[4..].copy_from_slice(&(max as u32 + 1).to_le_bytes());
        assert_eq!(Header::decode(bytes), Err(BadHeader::TooLong { kind, bytes: max as u32 + 1 }));
    }
}

/// The parser refuses deeply nested JSON before the stack overflows.
#[test]
fn deep_json_is_refused() {
    let deep = format!(r#"{{"type":"propose","facts":{}"#, "[".repeat(1 << 20));
    assert!(serde_json::from_str::<Message>(&deep).is_err());
}

/// The largest frame of pages: a chunk in which every page is a run of its own.
#[test]
fn the_largest_frame_fits_its_limit() {
    let runs: Vec<_> = (0..limits::CHUNK_PAGES as u16)
        .map(|first_page| PageRun { first_page, pages: 1, content: Content::Data })
        .collect();
    let mut payload = Vec::new();
    PagesHeader { seq: 1, round: 1, block: 0, chunk: 0 }.encode(&runs, &mut payload);
    payload.resize(payload.len() + data_bytes(&runs), 0);
    assert_eq!(payload.len(), pages::MAX_PAYLOAD_BYTES);
    assert!(Header::new(FrameKind::Pages, payload.len()).is_ok());
    assert!(PagesHeader::decode(&payload, &mut Vec::new()).is_ok());
}
