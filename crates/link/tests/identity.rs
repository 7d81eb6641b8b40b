//! Files of keys and certificates that cannot be used, and the errors that name them.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{Authority, error_chain, host};
use whimbrel_link::{Identity, IdentityError, TlsFiles};

#[test]
fn files_are_named_when_they_are_no_good() {
    let (authority, other) = (Authority::default(), Authority::default());
    let at = tempfile::tempdir().unwrap();
    let good = authority.files(at.path(), &["host-a"], |_| ());
    let second = authority.files(at.path(), &["host-a"], |_| ());
    let write = |name: &str, text: &str| {
        let path = at.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let missing = at.path().join("missing.pem");
    let (empty, garbage) =
        (write("empty.pem", ""), write("garbage.pem", "-----BEGIN CERTIFICATE-----\n%%%\n"));

    let files = |change: &dyn Fn(&mut TlsFiles)| {
        let mut files = good.clone();
        change(&mut files);
        error_chain(&Identity::load(&files).unwrap_err())
    };
    for bad in [&missing, &empty, &garbage] {
        for text in [
            files(&|files| files.ca = bad.clone()),
            files(&|files| files.certificate = bad.clone()),
            files(&|files| files.key = bad.clone()),
        ] {
            assert!(text.contains(bad.to_str().unwrap()), "{text}");
        }
    }
    let text = files(&|files| files.key.clone_from(&second.key));
    assert!(
        text.contains(good.certificate.to_str().unwrap()) && text.contains(second.key.to_str().unwrap()),
        "{text}"
    );

    // Files that can be read, but an agent's check at its start finds that no peer will accept them.
    assert!(Identity::load(&good).unwrap().check(&host("host-a")).is_ok());
    let check = |identity: Identity, name: &str| identity.check(&host(name)).unwrap_err();
    let error = check(Identity::load(&good).unwrap(), "host-b");
    assert!(matches!(error, IdentityError::Name { .. }), "{error:?}");
    assert!(
        error_chain(&error).contains("'host-a'") && error_chain(&error).contains("'host-b'"),
        "{}",
        error_chain(&error)
    );
    let error = check(Identity::load(&good).unwrap(), "host_");
    assert!(matches!(error, IdentityError::Name { .. }), "{error:?}");
    let foreign = TlsFiles { ca: other.files(at.path(), &["host-a"], |_| ()).ca, ..good.clone() };
    let error = check(Identity::load(&foreign).unwrap(), "host-a");
    assert!(error_chain(&error).contains("not signed"), "{}", error_chain(&error));
    let expired = authority.spoilt_identity(&["host-a"], |params| {
        params.not_before = rcgen::date_time_ymd(2001, 1, 1);
        params.not_after = rcgen::date_time_ymd(2002, 1, 1);
    });
    assert!(error_chain(&check(expired, "host-a")).contains("expired"));
}
