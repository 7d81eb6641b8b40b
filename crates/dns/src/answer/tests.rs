use super::*;
use crate::message::AnswerRecord;
use crate::rdata::Rdata;

fn server() -> Server {
    Server::try_from("192.0.2.53".to_owned()).unwrap()
}

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn response(code: ResponseCode, answers: Vec<AnswerRecord>) -> Response {
    Response { id: 1, code, is_authoritative: true, answers, signature_at: None }
}

fn record(owner: &str, ttl: u32, content: AnswerContent) -> AnswerRecord {
    AnswerRecord { owner: name(owner), ttl, content }
}

fn address(last: u8) -> Rdata {
    Rdata::A([192, 0, 2, last].into())
}

#[test]
fn each_code_of_an_update_has_its_meaning() {
    let zone = name("example.org");
    let meaning = |code: u8| of_update(&response(ResponseCode(code), vec![]), server(), &zone);
    assert_eq!(meaning(0), Ok(UpdateResult::Made));
    for code in [3, 6, 7, 8] {
        assert_eq!(meaning(code), Ok(UpdateResult::PrerequisiteFailed(ResponseCode(code))));
    }
    assert_eq!(meaning(5), Err(Failure::Refused { server: server() }));
    for code in [9, 10] {
        assert_eq!(meaning(code), Err(Failure::NoZone { server: server(), zone: zone.clone() }));
    }
    for code in [1, 2, 4, 11, 15] {
        assert_eq!(meaning(code), Err(Failure::Code { server: server(), code: ResponseCode(code) }));
    }
}

#[test]
fn only_records_of_the_name_and_type_are_taken() {
    let answers = vec![
        record("WEB.example.org", 300, AnswerContent::Rdata(address(1))),
        record("web.example.org", 200, AnswerContent::Rdata(address(2))),
        record("other.example.org", 100, AnswerContent::Rdata(address(3))),
        record("web.example.org", 50, AnswerContent::Rdata(Rdata::Ptr(name("a")))),
        record("web.example.org", 40, AnswerContent::Other),
    ];
    let read = |response: &Response| {
        records(response, server(), &name("example.org"), &name("web.example.org"), RecordType::A)
    };
    let observed = read(&response(ResponseCode::NO_ERROR, answers.clone())).unwrap();
    assert_eq!(observed, Rrset { values: [address(1), address(2)].into(), ttl_s: 200, alias: None });
    let missing = read(&response(ResponseCode::NAME_MISSING, vec![])).unwrap();
    assert_eq!(missing, Rrset::default());
    let alias = vec![record("web.example.org", 9, AnswerContent::Alias(name("a")))];
    assert_eq!(read(&response(ResponseCode::NO_ERROR, alias)).unwrap().alias, Some(name("a")));

    let mut from_a_cache = response(ResponseCode::NO_ERROR, answers);
    from_a_cache.is_authoritative = false;
    assert!(matches!(read(&from_a_cache), Err(Failure::NoZone { .. })));
    assert!(matches!(read(&response(ResponseCode::REFUSED, vec![])), Err(Failure::Refused { .. })));
    assert!(matches!(read(&response(ResponseCode(2), vec![])), Err(Failure::Code { .. })));
}

#[test]
fn a_serial_number_is_the_zones_own() {
    let zone = name("example.org");
    let read = |answers| serial(&response(ResponseCode::NO_ERROR, answers), server(), &zone);
    assert_eq!(read(vec![record("example.org", 60, AnswerContent::Serial(7))]), Ok(7));
    assert!(read(vec![record("org", 60, AnswerContent::Serial(7))]).is_err());
    assert!(read(vec![]).is_err());
}

#[test]
fn serial_numbers_are_compared_around_their_range() {
    assert!(is_older(1, 2) && !is_older(2, 1) && !is_older(2, 2));
    assert!(is_older(u32::MAX, 0) && is_older(0xffff_fff0, 16) && !is_older(16, 0xffff_fff0));
}

#[test]
fn another_server_lags_by_its_serial_number_or_its_records() {
    let version = |serial, last, ttl_s| ZoneState {
        serial,
        records: Rrset { values: [address(last)].into(), ttl_s, alias: None },
    };
    let primary = version(10, 1, 5);
    assert_eq!(lag(&primary, &version(10, 1, 5)), None);
    assert_eq!(lag(&primary, &version(11, 1, 5)), None);
    assert_eq!(lag(&primary, &version(9, 1, 5)), Some(LagReason::Behind { serial: 9 }));
    let different = version(10, 2, 5);
    assert_eq!(lag(&primary, &different), Some(LagReason::Different { found: different.records.clone() }));
    assert!(matches!(lag(&primary, &version(12, 1, 300)), Some(LagReason::Different { .. })));
}
