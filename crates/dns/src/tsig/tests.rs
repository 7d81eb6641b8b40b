use super::*;

/// Time at which the request was signed.
const NOW_S: u64 = 1_700_000_000;

// Made with another implementation of HMAC: the secret is the numbers from 0 to 31.
const UNSIGNED: &str = "12340000000100000000000001780000060001";
const REQUEST: &str = "12340000000100000000000101780000060001034b657904546573740000fa00ff00000000003d0b686d61632d736861323\
    5360000006553f100012c00204869c62979b4a6532b524fb77dc9995329e3c29eaa3897bfc64506ad20c5d70c123400000000";
const REQUEST_CODE: &str = "4869c62979b4a6532b524fb77dc9995329e3c29eaa3897bfc64506ad20c5d70c";
/// Answer of a server whose clock is seven seconds ahead.
const ANSWER: &str = "12348400000100000000000101780000060001036b657904746573740000fa00ff00000000003d0b686d61632d7368613235\
    360000006553f107012c0020ff8e80bc92ccdeb7ac76dc7aeb941d83f273ff325fb24c37c40e82a1441fcec8123400000000";
const WRONG_TIME: &str = "12348400000100000000000101780000060001036b657904746573740000fa00ff0000000000430b686d61632d7368613\
    235360000006553f100012c00205030b7a40f686e81994c8008cf3a8e7e4f250186b360a66de21317f26138a3b512340012000600006553f4e8";
const UNKNOWN_KEY: &str = "12348400000100000000000101780000060001036b657904746573740000fa00ff00000000001d0b686d61632d7368613\
    235360000006553f100012c0000123400110000";
const WRONG_SIGNATURE: &str = "12348400000100000000000101780000060001036b657904746573740000fa00ff00000000001d0b686d61632d73\
    68613235360000006553f100012c0000123400100000";
/// Position of the signature in each of them.
const AT: usize = 19;

fn bytes(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn key(name: &str, algorithm: Algorithm) -> Key {
    let secret: Vec<u8> = (0..32).collect();
    Key::new(name.parse().unwrap(), algorithm, &secret)
}

fn verify(answer: &[u8], now_s: u64) -> Result<(), SignatureError> {
    key("Key.Test", Algorithm::HmacSha256).verify(answer, AT, &bytes(REQUEST_CODE), now_s)
}

fn rejected(rejection: KeyRejection) -> Result<(), SignatureError> {
    Err(SignatureError::Rejected(rejection))
}

#[test]
fn a_request_is_signed_as_by_another_implementation() {
    let mut message = bytes(UNSIGNED);
    let code = key("Key.Test", Algorithm::HmacSha256).sign(&mut message, NOW_S);
    assert_eq!((code, message), (bytes(REQUEST_CODE), bytes(REQUEST)));
}

#[test]
fn the_answer_of_a_server_with_the_key_is_verified() {
    assert_eq!(verify(&bytes(ANSWER), NOW_S), Ok(()));
    assert_eq!(verify(&bytes(ANSWER), NOW_S + 307), Ok(()));
    let late = KeyRejection::BadTime { server_s: Some(NOW_S + 7) };
    assert_eq!(verify(&bytes(ANSWER), NOW_S + 308), rejected(late));
}

#[test]
fn no_byte_of_an_answer_can_be_changed() {
    let answer = bytes(ANSWER);
    // Of the signature's own record its type, class, TTL and length are not signed, and are read before.
    let unsigned = AT + 10..AT + 20;
    for at in (0..answer.len()).filter(|at| !unsigned.contains(at)) {
        let mut changed = answer.clone();
        changed[at] ^= 1;
        // The number of the message in transit is not signed: the original one is.
        assert_eq!(verify(&changed, NOW_S).is_ok(), at < 2, "byte {at}");
    }
    let other = key("Key.Test", Algorithm::HmacSha256).verify(&answer, AT, &[0; 32], NOW_S);
    assert_eq!(other, Err(SignatureError::Wrong), "the answer to another request");
    let other = key("key", Algorithm::HmacSha256).verify(&answer, AT, &bytes(REQUEST_CODE), NOW_S);
    assert_eq!(other, Err(SignatureError::Wrong), "another key");
    let other = key("key.test", Algorithm::HmacSha512).verify(&answer, AT, &bytes(REQUEST_CODE), NOW_S);
    assert_eq!(other, Err(SignatureError::Wrong), "another algorithm");
}

#[test]
fn rejections_are_told_apart() {
    assert_eq!(verify(&bytes(UNKNOWN_KEY), NOW_S), rejected(KeyRejection::BadKey));
    assert_eq!(verify(&bytes(WRONG_SIGNATURE), NOW_S), rejected(KeyRejection::BadSig));
    let time = KeyRejection::BadTime { server_s: Some(NOW_S + 1000) };
    assert_eq!(verify(&bytes(WRONG_TIME), NOW_S), rejected(time));
    let mut forged = bytes(WRONG_TIME);
    *forged.last_mut().unwrap() ^= 1;
    assert_eq!(verify(&forged, NOW_S), Err(SignatureError::Wrong), "the server's time is signed");
}

#[test]
fn longer_codes_are_made_as_by_another_implementation() {
    let sha384 =
        "7bf8e7a22955859af96240e27b987db784cd343b87352e16f62eeb25a6a1dabe09a1fa03569d0943fe0a3de50dadbffe";
    let sha512 = "04f6c0e6e0c11a18d3521978542318079593fac47f1a049a325fdcf77bb3db3c\
        018e37e6cdec3063875bc20e9469d207348506da520e4650d1fda3a5fb274b03";
    for (algorithm, expected) in [(Algorithm::HmacSha384, sha384), (Algorithm::HmacSha512, sha512)] {
        let code = key("key.test", algorithm).sign(&mut bytes(UNSIGNED), NOW_S);
        assert_eq!(code, bytes(expected), "{algorithm}");
    }
}

#[test]
fn a_damaged_signature_is_refused() {
    let answer = bytes(ANSWER);
    for length in AT..answer.len() {
        assert!(
            matches!(verify(&answer[..length], NOW_S), Err(SignatureError::Malformed(_))),
            "{length} bytes"
        );
    }
}
