//! The exact bytes of version 1. If a test here fails, programs of different releases no longer understand one
//! another: such a change needs a new version of the protocol, and this version's lines stay as they are.
//!
//! `v1.messages` holds a JSON message a line, `v1.frames` a frame a line, in hexadecimal.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod fleet;
mod messages;

use messages::{answers, greetings, messages, number};
use proto::Epoch;
use proto::delta::Delta;
use proto::frame::{FrameKind, Header};
use proto::message::{Hello, Message, Welcome};
use proto::packed::{Codec, Packed};
use proto::pages::{self, Ack, Content, PageRun, PagesHeader, decode_round_end, encode_round_end};
use proto::reference::{ContentSource, Reference, decode_missing, encode_missing};
use whimbrel_proto as proto;

const MESSAGES: &str = include_str!("v1.messages");
const FRAMES: &str = include_str!("v1.frames");

fn frame(kind: FrameKind, payload: &[u8]) -> Vec<u8> {
    [&Header::new(kind, payload.len()).unwrap().encode(), payload].concat()
}

const PAGES: PagesHeader = PagesHeader { seq: 0x0102_0304_0506_0708, round: 9, block: 1, chunk: 0x0a0b_0c0d };
const RUNS: [PageRun; 3] = [
    PageRun { first_page: 0, pages: 2, content: Content::Zero },
    PageRun { first_page: 3, pages: 1, content: Content::Hole },
    PageRun { first_page: 510, pages: 2, content: Content::Hole },
];

const REFERENCES: [Reference; 2] = [
    Reference { content_source: ContentSource::Template(3), first_page: 0x0102_0304_0506, hash: [0xaa; 16] },
    Reference { content_source: ContentSource::Block(1), first_page: 9, hash: [0xbb; 16] },
];

/// A frame with two references.
fn referring() -> Vec<u8> {
    let run = |first_page, pages| PageRun { first_page, pages, content: Content::Reference };
    let mut payload = Vec::new();
    PAGES.encode(&[run(4, 2), run(6, 1)], &mut payload);
    payload.extend(REFERENCES.iter().flat_map(Reference::encode));
    payload
}

/// A frame with the deltas of two pages, three pieces in all.
fn changed() -> Vec<u8> {
    let mut payload = Vec::new();
    PAGES.encode(&[PageRun { first_page: 4, pages: 2, content: Content::Delta { pieces: 3 } }], &mut payload);
    Delta::encode(&[0xaa; 4096], 0x0102_0304_0506_0708, 1 << 63 | 1, &mut payload);
    Delta::encode(&[0xbb; 4096], 0x090a_0b0c_0d0e_0f10, 1 << 9, &mut payload);
    payload
}

/// A frame with two runs of filled pages.
fn filled() -> Vec<u8> {
    let run = |first_page, pages| PageRun { first_page, pages, content: Content::Filled };
    let mut payload = Vec::new();
    PAGES.encode(&[run(4, 500), run(504, 1)], &mut payload);
    payload.extend_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa]);
    payload
}

const ACK: Ack = Ack { seq: 0x0102_0304_0506_0708, waited_us: 0x090a_0b0c };

/// A page of data in three bytes, which no codec could have produced; this test does not decompress.
fn packed() -> Vec<u8> {
    let mut payload = Codec::Zstd.encode().to_vec();
    PAGES.encode(&[PageRun { first_page: 3, pages: 1, content: Content::Data }], &mut payload);
    payload.extend_from_slice(&[0xaa; 3]);
    payload
}

/// One frame of each kind, in the order of the file. The page of data is checked separately: it would fill the file.
fn frames() -> Vec<Vec<u8>> {
    let mut without_data = Vec::new();
    PAGES.encode(&RUNS, &mut without_data);
    vec![
        frame(FrameKind::Message, &serde_json::to_vec(&Message::Ping).unwrap()),
        frame(FrameKind::Blob, b"QEVM"),
        frame(FrameKind::Pages, &without_data),
        frame(FrameKind::RoundEnd, &encode_round_end(0x0102_0304_0506_0708, 0x090a_0b0c)),
        frame(FrameKind::Ack, &ACK.encode()),
        frame(FrameKind::Missing, &encode_missing(0x0102_0304_0506_0708, &[1, 0, 0, 0, 0, 0, 0, 1 << 63])),
        frame(FrameKind::Pages, &referring()),
        frame(FrameKind::Packed, &packed()),
        frame(FrameKind::Pages, &changed()),
        frame(FrameKind::Pages, &filled()),
        Header::new(FrameKind::Pages, pages::MAX_PAYLOAD_BYTES).unwrap().encode().to_vec(),
    ]
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;

    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn every_message_is_on_file() {
    let mut seen: Vec<_> = messages().iter().map(number).collect();
    seen.dedup();
    assert_eq!(seen, (0..=45).collect::<Vec<_>>());
}

#[test]
fn json_is_written_and_read_as_in_version_1() {
    let mut written: Vec<String> = Vec::new();
    written.extend(greetings().iter().map(|hello| serde_json::to_string(hello).unwrap()));
    written.extend(answers().iter().map(|welcome| serde_json::to_string(welcome).unwrap()));
    written.extend(messages().iter().map(|message| serde_json::to_string(message).unwrap()));
    let lines: Vec<_> = MESSAGES.lines().collect();
    assert_eq!(written, lines, "written:\n{}", written.join("\n"));

    let mut lines = lines.into_iter();
    for hello in greetings() {
        assert_eq!(serde_json::from_str::<Hello>(lines.next().unwrap()).unwrap(), hello);
    }
    for welcome in answers() {
        assert_eq!(serde_json::from_str::<Welcome>(lines.next().unwrap()).unwrap(), welcome);
    }
    for message in messages() {
        let read: Message = serde_json::from_str(lines.next().unwrap()).unwrap();
        assert_eq!(read, message);
        assert_eq!(read.validate(), Ok(()));
    }
}

#[test]
fn frames_are_written_and_read_as_in_version_1() {
    let written: Vec<_> = frames().iter().map(|frame| hex(frame)).collect();
    let lines: Vec<_> = FRAMES.lines().collect();
    assert_eq!(written, lines, "written:\n{}", written.join("\n"));

    let read: Vec<_> = lines
        .iter()
        .map(|line| {
            let bytes = from_hex(line);
            let (header, payload) = bytes.split_first_chunk().unwrap();
            (Header::decode(*header).unwrap(), payload.to_vec())
        })
        .collect();
    let kinds: Vec<_> = read.iter().map(|(header, _)| header.kind).collect();
    let expected = [
        FrameKind::Message,
        FrameKind::Blob,
        FrameKind::Pages,
        FrameKind::RoundEnd,
        FrameKind::Ack,
        FrameKind::Missing,
    ];
    assert_eq!(
        kinds,
        [
            &expected[..],
            &[FrameKind::Pages, FrameKind::Packed, FrameKind::Pages, FrameKind::Pages, FrameKind::Pages]
        ]
        .concat()
    );
    for (header, payload) in &read[..10] {
        assert_eq!(header.payload_bytes as usize, payload.len());
    }
    let mut runs = Vec::new();
    assert_eq!(PagesHeader::decode(&read[2].1, &mut runs), Ok((PAGES, &[][..])));
    assert_eq!(runs, RUNS);
    assert_eq!(decode_round_end(&read[3].1), Ok((0x0102_0304_0506_0708, 0x090a_0b0c)));
    assert_eq!(Ack::decode(&read[4].1), Ok(ACK));
    assert_eq!(decode_missing(&read[5].1), Ok((0x0102_0304_0506_0708, [1, 0, 0, 0, 0, 0, 0, 1 << 63])));
    let (_, records) = PagesHeader::decode(&read[6].1, &mut runs).unwrap();
    let records: Vec<_> = records.chunks(32).map(|record| Reference::decode(record).unwrap()).collect();
    assert_eq!(records, REFERENCES);
    let packed = Packed::decode(&read[7].1, &mut runs).unwrap();
    assert_eq!((packed.header, packed.codec, packed.bytes), (PAGES, Codec::Zstd, &[0xaa; 3][..]));
    assert_eq!((packed.data_bytes, runs.len()), (4096, 1));
    let (_, mut changes) = PagesHeader::decode(&read[8].1, &mut runs).unwrap();
    assert_eq!(runs, [PageRun { first_page: 4, pages: 2, content: Content::Delta { pieces: 3 } }]);
    let first = Delta { hash: 0x0102_0304_0506_0708, changed: 1 << 63 | 1, pieces: &[0xaa; 128] };
    let second = Delta { hash: 0x090a_0b0c_0d0e_0f10, changed: 1 << 9, pieces: &[0xbb; 64] };
    assert_eq!([Delta::take(&mut changes), Delta::take(&mut changes)], [Ok(first), Ok(second)]);
    assert!(changes.is_empty());
    let (_, fillings) = PagesHeader::decode(&read[9].1, &mut runs).unwrap();
    assert_eq!((runs[0].content, runs[1].content, runs[0].pages), (Content::Filled, Content::Filled, 500));
    assert_eq!(fillings.as_chunks().0, [[1, 2, 3, 4, 5, 6, 7, 8], [0xaa; 8]]);
}

/// Contents follow the runs, in their order, with nothing in between.
#[test]
fn pages_of_data_stand_behind_the_runs() {
    let runs = [
        PageRun { first_page: 1, pages: 1, content: Content::Data },
        PageRun { first_page: 2, pages: 1, content: Content::Zero },
        PageRun { first_page: 7, pages: 2, content: Content::Data },
    ];
    let mut payload = Vec::new();
    PAGES.encode(&runs, &mut payload);
    let written = hex(&payload);
    assert_eq!(
        written,
        "080706050403020109000000010003000d0c0b0a00000000010001000100000002000100020000000700020001000000"
    );
    payload.extend((0..3 * 4096).map(|at| (at / 4096) as u8));
    let mut read = Vec::new();
    let (header, data) = PagesHeader::decode(&payload, &mut read).unwrap();
    assert_eq!((header, &read[..]), (PAGES, &runs[..]));
    assert_eq!((data.len(), data[0], data[4096], data[8192]), (3 * 4096, 0, 1, 2));
}

/// Later releases of this version may add optional fields; today's programs ignore them.
#[test]
fn unknown_fields_are_ignored_and_unknown_messages_are_not() {
    let read = serde_json::from_str::<Message>(r#"{"type":"ask","epoch":3,"why":{"later":[1,2]}}"#).unwrap();
    assert_eq!(read, Message::Ask { epoch: Epoch(3) });
    let read = serde_json::from_str::<Message>(r#"{"type":"ping","later":true}"#).unwrap();
    assert_eq!(read, Message::Ping);
    for unknown in [r#"{"type":"dance"}"#, r#"{"epoch":3}"#, r#"{"type":"ask"}"#, "{}", "null", "[]", ""] {
        assert!(serde_json::from_str::<Message>(unknown).is_err(), "{unknown}");
    }
}
