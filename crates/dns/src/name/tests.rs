use proptest::prelude::*;

use super::*;

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn read(message: &[u8], at: usize) -> Result<(Name, usize), Malformed> {
    let mut reader = Reader::new(message).moved_to(at);
    Name::read(&mut reader).map(|name| (name, reader.at()))
}

#[test]
fn case_and_the_last_dot_make_no_difference() {
    assert_eq!(name("Web.Example.org"), name("web.example.ORG."));
    assert_eq!(name("Web.Example.org").cmp(&name("web.example.ORG.")), Ordering::Equal);
    assert_ne!(name("web.example.org"), name("web.example.net"));
    assert_eq!(name("Web.Example.org").to_string(), "Web.Example.org");
    assert_eq!(name(".").to_string(), ".");
}

#[test]
fn impossible_names_are_refused() {
    assert_eq!("".parse::<Name>(), Err(NameError::EmptyLabel));
    assert_eq!("web..org".parse::<Name>(), Err(NameError::EmptyLabel));
    assert_eq!(".org".parse::<Name>(), Err(NameError::EmptyLabel));
    assert_eq!("bücher.example".parse::<Name>(), Err(NameError::Character));
    assert_eq!("two words".parse::<Name>(), Err(NameError::Character));
    assert_eq!(r"web\25".parse::<Name>(), Err(NameError::Character));
    assert_eq!(r"web\256".parse::<Name>(), Err(NameError::Character));
    assert_eq!("a".repeat(64).parse::<Name>(), Err(NameError::TooLong));
    assert!("a".repeat(63).parse::<Name>().is_ok());
    let longest = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "b".repeat(61));
    assert_eq!(longest.len(), 253);
    assert!(longest.parse::<Name>().is_ok());
    assert_eq!(format!("{longest}b").parse::<Name>(), Err(NameError::TooLong));
}

#[test]
fn a_zone_has_itself_and_what_is_below_it() {
    let zone = name("example.org");
    assert!(zone.is_within(&zone) && name("a.b.Example.org").is_within(&zone));
    assert!(!name("org").is_within(&zone) && !name("badexample.org").is_within(&zone));
    assert!(name("org").is_within(&name(".")));
}

#[test]
fn reverse_names_are_those_of_the_rfcs() {
    assert_eq!(Name::reverse([192, 0, 2, 10].into()), name("10.2.0.192.in-addr.arpa"));
    let address: std::net::Ipv6Addr = "4321:0:1:2:3:4:567:89ab".parse().unwrap();
    let expected = "b.a.9.8.7.6.5.0.4.0.0.0.3.0.0.0.2.0.0.0.1.0.0.0.0.0.0.0.1.2.3.4.ip6.arpa";
    assert_eq!(Name::reverse(address.into()), name(expected));
}

#[test]
fn references_lead_backwards_only() {
    let mut message = vec![0xff; 3];
    name("example.org").write(&mut message);
    let second = message.len();
    message.extend(b"\x03web\xc0\x03");
    let third = message.len();
    message.extend([0xc0, second as u8, 0xaa]);
    assert_eq!(read(&message, 3).unwrap(), (name("example.org"), second));
    assert_eq!(read(&message, second).unwrap(), (name("web.example.org"), third));
    assert_eq!(read(&message, third).unwrap(), (name("web.example.org"), third + 2));

    assert!(read(&[0xc0, 0], 0).is_err(), "to itself");
    assert!(read(&[0xc0, 2, 0xc0, 0], 0).is_err(), "to a later one");
    assert!(read(&[1, b'a', 0xc0, 0], 0).is_err(), "in a circle");
    assert!(read(&[0x40, 0], 0).is_err(), "another form");
    assert!(read(&[3, b'a'], 0).is_err(), "too short");
    let long: Vec<u8> = std::iter::repeat_n([1, b'a'], 127).flatten().chain([0]).collect();
    assert_eq!(read(&long, 0).unwrap().1, 255);
    let longer: Vec<u8> = std::iter::repeat_n([1, b'a'], 128).flatten().chain([0]).collect();
    assert!(read(&longer, 0).is_err());
}

proptest! {
    #[test]
    fn text_and_bytes_of_any_name_give_it_back(
        labels in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..20), 0..8),
    ) {
        let mut wire = Vec::new();
        for label in &labels {
            wire.push(label.len() as u8);
            wire.extend(label);
        }
        wire.push(0);
        let (name, end) = read(&wire, 0).unwrap();
        prop_assert_eq!(end, wire.len());
        let again: Name = name.to_string().parse().unwrap();
        prop_assert_eq!(&again.wire, &wire);
    }

    #[test]
    fn any_bytes_are_read_or_refused(message in proptest::collection::vec(any::<u8>(), 0..300), at in 0_usize..300) {
        if let Ok((name, _)) = read(&message, at) {
            prop_assert!(name.wire.len() <= LONGEST_NAME);
        }
    }
}
