use super::*;

const TEXT: &str = r#"
    check = "warn"
    restore_after_s = 60

    [[zones]]
    zone = "example.org"
    servers = ["192.0.2.53", "[2001:db8::53]:5353"]
    key_name = "whimbrel"
    key_file = "/etc/whimbrel/dns.key"

    [[zones]]
    zone = "vms.example.org."
    servers = ["2001:db8::53"]
    key_name = "whimbrel"
    algorithm = "hmac-sha512"
    key_file = "/etc/whimbrel/dns.key"
    lowered_ttl_s = 1
    new_ttl_s = 60

    [vms.web1]
    names = ["web.example.org"]

    [[vms.web1.services]]
    name = "_http._tcp.example.org"
    port = 80
    target = "web.example.org"
"#;

fn config(text: &str) -> DnsConfig {
    toml::from_str(text).unwrap()
}

#[test]
fn a_configuration_is_read() {
    let config = config(TEXT);
    assert_eq!(config.check(), Ok(()));
    assert_eq!((config.check, config.restore_after_s), (CheckMode::Warn, 60));
    let usual = DnsConfig::default();
    assert_eq!((usual.check, usual.restore_after_s), (CheckMode::Require, 3600));
    let [one, other] = &config.zones[..] else { panic!("{:?}", config.zones) };
    assert_eq!((one.lowered_ttl_s, one.new_ttl_s, one.algorithm), (5, 300, Algorithm::HmacSha256));
    assert_eq!((other.lowered_ttl_s, other.new_ttl_s, other.algorithm), (1, 60, Algorithm::HmacSha512));
    let servers: Vec<_> = one.servers.iter().chain(&other.servers).map(|server| server.0).collect();
    let expected = ["192.0.2.53:53", "[2001:db8::53]:5353", "[2001:db8::53]:53"];
    assert_eq!(servers, expected.map(|text| text.parse().unwrap()));
    let service = &config.vms["web1"].services[0];
    assert_eq!((service.priority, service.weight, service.port), (0, 0, 80));
    let unknown = TEXT.replace("port = 80", "port = 80\nprotocol = 6");
    assert!(toml::from_str::<DnsConfig>(&unknown).is_err());
}

#[test]
fn the_nearest_zone_has_a_name() {
    let config = config(TEXT);
    let zone = |name: &str| zone_of(&config.zones, &name.parse().unwrap()).map(|zone| zone.zone.to_string());
    assert_eq!(zone("web.example.org").unwrap(), "example.org");
    assert_eq!(zone("web.vms.example.org").unwrap(), "vms.example.org");
    assert_eq!(zone("example.net"), None);
}

#[test]
fn what_is_of_no_use_is_refused() {
    let error = |from: &str, to: &str| {
        let text = TEXT.replacen(from, to, 1);
        assert_ne!(text, TEXT);
        config(&text).check().unwrap_err()
    };
    let zone = |text: &str| text.parse::<Name>().unwrap();
    let no_server = error(r#"servers = ["2001:db8::53"]"#, "servers = []");
    assert_eq!(no_server, DnsConfigError::NoServer(zone("vms.example.org")));
    let twice = error(r#"zone = "vms.example.org.""#, r#"zone = "Example.org""#);
    assert_eq!(twice, DnsConfigError::SameZone(zone("example.org")));
    for ttl_s in [0, 3601] {
        let error = error("lowered_ttl_s = 1", &format!("lowered_ttl_s = {ttl_s}"));
        assert_eq!(error, DnsConfigError::LoweredTtl { zone: zone("vms.example.org"), ttl_s });
    }
    let service = error("_http._tcp.example.org", "_http._tcp.example.net");
    assert!(service.to_string().contains("_http._tcp.example.net of the VM web1"), "{service}");
    let name = error(r#"names = ["web.example.org"]"#, r#"names = ["web.example.net"]"#);
    assert!(matches!(name, DnsConfigError::NoZone { .. }));
}

#[test]
fn servers_are_addresses() {
    for wrong in
        ["ns.example.org", "192.0.2.53:0", "192.0.2.53:", "[2001:db8::53]:", "", "2001:db8::53:99999"]
    {
        assert!(Server::try_from(wrong.to_owned()).is_err(), "{wrong}");
    }
    for text in ["192.0.2.53", "192.0.2.53:5353", "2001:db8::53", "[2001:db8::53]:5353"] {
        assert_eq!(Server::try_from(text.to_owned()).unwrap().to_string(), text);
    }
}

#[test]
fn a_service_may_differ_by_host() {
    let service = |port: u16, hosts: &str| {
        format!(
            "[[services]]\nname = \"_http._tcp.example.org\"\nport = {port}\ntarget = \"web.example.org\"\n{hosts}\n"
        )
    };
    let names: VmNames = toml::from_str(
        &(service(80, "") + &service(8080, "hosts = [\"beta\"]") + &service(8081, "hosts = [\"gamma\"]")),
    )
    .unwrap();
    let ports = |host: &str| {
        let at = names.at(&HostId::new(host).unwrap());
        at.services.iter().map(|service| service.port).collect::<Vec<_>>()
    };
    assert_eq!(["alpha", "beta", "gamma"].map(ports), [[80], [8080], [8081]]);
    let error = |hosts: &str| {
        let more = format!(
            "\n[[vms.web1.services]]\nname = \"_http._tcp.example.org\"\nport = 81\ntarget = \"w\"\n{hosts}"
        );
        config(&(TEXT.to_owned() + &more)).check()
    };
    assert!(matches!(error(""), Err(DnsConfigError::SameService { .. })));
    assert_eq!(error("hosts = [\"beta\"]"), Ok(()));
}
