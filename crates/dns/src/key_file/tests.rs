use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;

use super::*;

const SECRET: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

/// Loads the key `whimbrel` from a file with this text and mode.
fn load_text(text: &str, mode: u32) -> Result<Key, KeyFileError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("key");
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    load(&path, &"whimbrel".parse().unwrap(), Algorithm::HmacSha256)
}

#[test]
fn the_output_of_tsig_keygen_and_a_secret_alone_are_keys() {
    let statement = format!("key \"Whimbrel.\" {{\n\talgorithm hmac-sha256;\n\tsecret \"{SECRET}\";\n}};\n");
    let (one, other) = (load_text(&statement, 0o600).unwrap(), load_text(SECRET, 0o400).unwrap());
    let commented = load_text(&format!("# for Whimbrel\n  // of example.org\n{SECRET}\n"), 0o600).unwrap();
    let code = |key: Key| key.sign(&mut vec![0; 12], 1);
    let expected =
        code(Key::new("whimbrel".parse().unwrap(), Algorithm::HmacSha256, &(0..32).collect::<Vec<u8>>()));
    assert_eq!([code(one), code(other), code(commented)], [expected.clone(), expected.clone(), expected]);
}

#[test]
fn a_file_that_others_can_read_is_refused() {
    for mode in [0o640, 0o604, 0o620, 0o601] {
        assert!(matches!(load_text(SECRET, mode), Err(KeyFileError::Readable { .. })), "{mode:o}");
    }
    let missing = load(Path::new("/nonexistent/key"), &"a".parse().unwrap(), Algorithm::HmacSha256);
    assert!(matches!(missing, Err(KeyFileError::Read { .. })));
}

#[test]
fn another_key_and_no_key_are_refused() {
    let refused = |text: &str| load_text(text, 0o600).map(|_| ()).unwrap_err();
    let statement = |name: &str, algorithm: &str| {
        format!("key \"{name}\" {{ algorithm {algorithm}; secret \"{SECRET}\"; }};")
    };
    assert!(matches!(refused(&statement("other", "hmac-sha256")), KeyFileError::Other { .. }));
    assert!(matches!(refused(&statement("whimbrel", "hmac-sha512")), KeyFileError::Other { .. }));
    assert!(matches!(refused(""), KeyFileError::NoKey { .. }));
    assert!(matches!(refused("zone \"a\" { type primary; };"), KeyFileError::NoKey { .. }));
    assert!(matches!(refused("AAECAwQFBgcICQoLDA0O"), KeyFileError::TooShort { .. }));
    let error = refused("not base 64").to_string();
    assert!(!error.contains("not base"), "an error shows nothing of the file: {error}");
}

#[test]
fn base_64_is_decoded() {
    let decoded = |text| decode_base64(text).map(|bytes| String::from_utf8(bytes).unwrap());
    assert_eq!(decoded(""), Some(String::new()));
    assert_eq!(decoded("Zg=="), Some("f".to_owned()));
    assert_eq!(decoded("Zm8="), Some("fo".to_owned()));
    assert_eq!(decoded("Zm9v"), Some("foo".to_owned()));
    assert_eq!(decoded("Zm9vYmFy"), Some("foobar".to_owned()));
    assert_eq!(decode_base64("+/8="), Some(vec![0xfb, 0xff]));
    for wrong in ["Zg", "Zg=", "Z===", "Zm9v=", "Zm!v", "Zm=v"] {
        assert_eq!(decode_base64(wrong), None, "{wrong}");
    }
}
