use proptest::prelude::*;

use super::*;
use crate::rdata::SrvData;

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn bytes(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn an_update_is_encoded_as_the_rfc_says() {
    let owner = name("w.x");
    let update = Update {
        zone: name("x"),
        prerequisites: vec![
            Prerequisite::RrsetExists(owner.clone(), Rdata::A([192, 0, 2, 1].into())),
            Prerequisite::RrsetDoesNotExist(owner.clone(), RecordType::Aaaa),
            Update::impossible(&name("x")),
        ],
        edits: vec![
            Edit::Remove(owner.clone(), Rdata::A([192, 0, 2, 1].into())),
            Edit::Add(owner, 5, Rdata::A([198, 51, 100, 7].into())),
        ],
    };
    let expected = bytes(
        "1234 2800 0001 0003 0002 0000
         0178 00 0006 0001
         0177 0178 00 0001 0001 00000000 0004 c0000201
         0177 0178 00 001c 00fe 00000000 0000
         0178 00 00ff 00fe 00000000 0000
         0177 0178 00 0001 00fe 00000000 0004 c0000201
         0177 0178 00 0001 0001 00000005 0004 c6336407",
    );
    assert_eq!(update.encode(0x1234), expected);
}

#[test]
fn services_and_names_are_encoded_with_their_length() {
    let place = SrvData { priority: 1, weight: 2, port: 80, target: name("a.b") };
    let mut message = Vec::new();
    Rdata::Srv(place).write(&mut message);
    assert_eq!(message, bytes("000b 0001 0002 0050 0161 0162 00"));
    message.clear();
    Rdata::Ptr(name("a.b")).write(&mut message);
    assert_eq!(message, bytes("0005 0161 0162 00"));
}

/// An answer with a CNAME, a service, an SOA and a signature; names are compressed.
const ANSWER: &str = "0007 8405 0001 0002 0001 0002
     0177 0178 00 0021 0001
     c00c 0005 0001 0000003c 0004 0162 c00e
     0162 c00e 0021 0001 ffffffff 000a 0001 0002 0050 0163 c00e
     c00e 0006 0001 00000e10 0018 c00c c00c 7fffffff 00000001 00000002 00000003 00000004
     00 0029 1000 00000000 0000
     016b 00 00fa 00ff 00000000 0002 abcd";

#[test]
fn answers_are_read_with_compressed_names() {
    let message = bytes(ANSWER);
    let response = Response::parse(&message).unwrap();
    assert_eq!((response.id, response.code, response.is_authoritative), (7, ResponseCode::REFUSED, true));
    let place = SrvData { priority: 1, weight: 2, port: 80, target: name("c.x") };
    let expected = vec![
        AnswerRecord { owner: name("w.x"), ttl: 60, content: AnswerContent::Alias(name("b.x")) },
        AnswerRecord { owner: name("b.x"), ttl: 0, content: AnswerContent::Rdata(Rdata::Srv(place)) },
    ];
    assert_eq!(response.answers, expected);
    assert_eq!(response.signature_at, Some(message.len() - 15));
    for length in 0..message.len() {
        assert!(Response::parse(&message[..length]).is_err(), "{length} bytes");
    }
    let mut request = message;
    request[2] = 0;
    assert!(Response::parse(&request).is_err(), "a request is no answer");
}

#[test]
fn data_of_another_length_is_refused() {
    let answer = |length: &str, data: &str| {
        bytes(&format!("0007 8400 0000 0001 0000 0000 00 0001 0001 00000000 {length} {data}"))
    };
    assert!(Response::parse(&answer("0004", "01020304")).is_ok());
    assert!(Response::parse(&answer("0003", "010203")).is_err());
    assert!(Response::parse(&answer("0005", "0102030405")).is_err());
    assert!(Response::parse(&answer("0004", "0102030405")).is_err(), "bytes after the end");
}

#[test]
fn a_signature_is_the_last_record_or_none() {
    let with = |last: &str| {
        let text = format!("0007 8400 0000 0000 0000 0002 00 00fa 00ff 00000000 0000 {last}");
        Response::parse(&bytes(&text)).unwrap().signature_at
    };
    assert_eq!(with("00 0029 0200 00000000 0000"), None);
    assert_eq!(with("00 00fa 00ff 00000000 0000"), Some(23));
}

proptest! {
    #[test]
    fn any_answer_is_read_or_refused(message in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Response::parse(&message);
    }

    #[test]
    fn a_damaged_answer_is_read_or_refused(at in 0_usize..110, value in any::<u8>()) {
        let mut message = bytes(ANSWER);
        if let Some(byte) = message.get_mut(at) {
            *byte = value;
        }
        let _ = Response::parse(&message);
    }
}
