//! Two servers of the same zones: the first accepts updates, the second gets the zones from it.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use dns::{AddressChange, ChangeSet, DnsConfig, Relocation, Updater, VmNames, Zones};
use lab::{Daemon, Host, Lab, LabConfig};
use whimbrel_dns as dns;

pub(crate) const SECRET: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

/// Zone with names, and reverse zones of both sites.
pub(crate) const ZONES: [&str; 3] = ["example.org", "2.0.192.in-addr.arpa", "100.51.198.in-addr.arpa"];

const EXAMPLE: &str = "
ns        A     10.91.0.3
web       A     192.0.2.10
web       AAAA  2001:db8::10
pool 60   A     192.0.2.10
pool 60   A     192.0.2.99
other     A     192.0.2.77
alias     CNAME web
*.wild    A     192.0.2.10
_http._tcp SRV  0 5 80 web
";

pub(crate) struct Servers {
    pub(crate) lab: Lab,
    pub(crate) first: Option<Daemon>,
    pub(crate) second: Option<Daemon>,
}

impl Servers {
    /// Starts both servers.
    pub(crate) fn start() -> Self {
        let lab = Lab::up(&LabConfig::for_test()).unwrap();
        let keys = format!(
            "key \"whimbrel\" {{ algorithm hmac-sha256; secret \"{SECRET}\"; }};\n\
             key \"stranger\" {{ algorithm hmac-sha256; secret \"{SECRET}\"; }};\n"
        );
        let mut first = format!("{keys}{}", options(&lab.witness, "notify explicit; notify-delay 0;"));
        let mut second = options(&lab.b, "notify no;");
        let second_address = lab.b.control_address().unwrap();
        for zone in ZONES {
            let _ = writeln!(
                first,
                "zone \"{zone}\" {{ type primary; file \"{zone}\"; allow-update {{ key whimbrel; }}; \
                 also-notify {{ {second_address}; }}; }};"
            );
            let _ = writeln!(
                second,
                "zone \"{zone}\" {{ type secondary; file \"{zone}\"; primaries {{ {}; }}; }};",
                lab.witness.address()
            );
        }
        first += "zone \"closed.example\" { type primary; file \"closed.example\"; \
                  update-policy { grant whimbrel name open.closed.example A; }; };\n\
                  zone \"strict.example\" { type primary; file \"strict.example\"; \
                  allow-update { key stranger; }; };\n";
        fs::write(lab.witness.directory().join("named.conf"), first).unwrap();
        fs::write(lab.b.directory().join("named.conf"), second).unwrap();
        let records = [
            (ZONES[0], EXAMPLE),
            (ZONES[1], "10 PTR web.example.org.\n"),
            (ZONES[2], ""),
            ("closed.example", "open A 192.0.2.10\nweb A 192.0.2.10\n"),
            ("strict.example", "web A 192.0.2.10\n"),
        ];
        for (zone, records) in records {
            let head = "$TTL 300\n@ SOA ns.example.org. admin.example.org. 1 3600 600 86400 60\n@ NS ns.example.org.\n";
            fs::write(lab.witness.directory().join(zone), format!("{head}{records}")).unwrap();
        }
        let mut this = Self { lab, first: None, second: None };
        this.start_first();
        this.start_second();
        this
    }

    pub(crate) fn start_first(&mut self) {
        self.first = Some(lab::name_server(&self.lab.witness).unwrap());
    }

    /// Starts the second server, and waits until it has the zones. It gets them anew: with old ones it would wait for
    /// the first server's next change.
    pub(crate) fn start_second(&mut self) {
        for zone in ZONES {
            for name in [zone.to_owned(), format!("{zone}.jnl")] {
                // Most are not there.
                let _ = fs::remove_file(self.lab.b.directory().join(name));
            }
        }
        let second = lab::name_server(&self.lab.b).unwrap();
        lab::until("the second server has the zones", || {
            ZONES.iter().all(|zone| !self.dig(self.second_address(), &[*zone, "SOA"]).is_empty())
        });
        self.second = Some(second);
    }

    pub(crate) fn first_address(&self) -> Ipv4Addr {
        self.lab.witness.address()
    }

    pub(crate) fn second_address(&self) -> Ipv4Addr {
        self.lab.b.control_address().unwrap()
    }

    /// Returns a configuration for all zones, with one VM at the source.
    pub(crate) fn config(&self) -> DnsConfig {
        self.config_with(&[self.first_address().to_string(), self.second_address().to_string()], SECRET)
    }

    pub(crate) fn config_with(&self, servers: &[String], secret: &str) -> DnsConfig {
        let key = self.lab.a.directory().join("key");
        write_key(&key, secret);
        let zones = ZONES.into_iter().chain(["closed.example", "strict.example"]).map(|zone| {
            format!("[[zones]]\nzone = \"{zone}\"\nservers = {servers:?}\nkey_name = \"whimbrel\"\nkey_file = \"{}\"\n", key.display())
        });
        let vm = "[vms.web1]\nnames = [\"web.example.org\", \"pool.example.org\"]\n\
                  [[vms.web1.services]]\nname = \"_http._tcp.example.org\"\nweight = 5\nport = 80\n\
                  target = \"web.example.org\"\n";
        let config: DnsConfig = toml::from_str(&(zones.collect::<String>() + vm)).unwrap();
        config.check().unwrap();
        config
    }

    pub(crate) fn record_path(&self) -> PathBuf {
        self.lab.a.directory().join("web1.dns")
    }

    /// Prepares the change of a VM's names, as the agent of host a does.
    pub(crate) fn prepare(&self, config: &DnsConfig) -> Updater {
        self.prepare_move(config, &relocation(config), &self.record_path(), &[])
    }

    /// Prepares a change, after others that are not finished.
    pub(crate) fn prepare_move(
        &self,
        config: &DnsConfig,
        relocation: &Relocation,
        path: &Path,
        unfinished: &[ChangeSet],
    ) -> Updater {
        let prepare = || Updater::prepare(Zones::load(&config.zones), relocation, path, unfinished);
        self.lab.a.within(prepare).unwrap().unwrap()
    }

    /// Continues what the record has, as the next agent does.
    pub(crate) fn resume(&self, config: &DnsConfig) -> Updater {
        let path = self.record_path();
        let resume = || Updater::resume(Zones::load(&config.zones), &path);
        self.lab.a.within(resume).unwrap().unwrap().unwrap()
    }

    /// Asks a server by another program. Returns the records, without their class.
    pub(crate) fn dig(&self, server: Ipv4Addr, question: &[&str]) -> Vec<String> {
        let at = format!("@{server}");
        let options = ["dig", &at, "+noall", "+answer", "+norecurse", "+tries=1", "+timeout=10", "+onesoa"];
        let Ok(answer) = self.lab.a.run(&[&options[..], question].concat()) else { return Vec::new() };
        let lines = answer.lines().filter(|line| !line.starts_with(';') && !line.is_empty());
        let line =
            |line: &str| line.split_whitespace().filter(|word| *word != "IN").collect::<Vec<_>>().join(" ");
        let mut records: Vec<_> = lines.map(line).collect();
        records.sort();
        records
    }

    /// Returns all records of all zones at a server, but for their serial numbers.
    pub(crate) fn content(&self, server: Ipv4Addr) -> Vec<String> {
        let records = ZONES.iter().flat_map(|zone| self.dig(server, &[*zone, "AXFR"]));
        records.filter(|record| !record.contains(" SOA ")).collect()
    }

    /// Returns the serial number of a zone at the first server.
    pub(crate) fn serial(&self, zone: &str) -> u32 {
        let record = self.dig(self.first_address(), &[zone, "SOA"]).concat();
        record.split(' ').nth(5).unwrap().parse().unwrap()
    }

    /// Changes a zone by another program: another hand.
    pub(crate) fn nsupdate(&self, commands: &str) {
        let key = self.lab.a.directory().join("nsupdate.key");
        write_key(&key, &format!("key \"whimbrel\" {{ algorithm hmac-sha256; secret \"{SECRET}\"; }};"));
        let script = self.lab.a.directory().join("nsupdate");
        fs::write(&script, format!("server {}\n{commands}\nsend\n", self.first_address())).unwrap();
        let files = [&key, &script].map(|path| path.display().to_string());
        self.lab.a.run(&["nsupdate", "-k", &files[0], &files[1]]).unwrap();
    }
}

/// Returns the change of the VM's place: its web server has another port there.
pub(crate) fn relocation(config: &DnsConfig) -> Relocation {
    let source = &config.vms["web1"];
    let mut destination = source.clone();
    destination.services[0].port = 8080;
    let moved =
        |before: &str, after: &str| AddressChange::new(before.parse().unwrap(), after.parse().unwrap());
    let addresses = vec![moved("192.0.2.10", "198.51.100.7"), moved("2001:db8::10", "2001:db8:1::7")];
    Relocation::new(source, Some(&destination), addresses)
}

/// Returns the change of a name whose VM has one address.
pub(crate) fn relocation_of(name: &str) -> Relocation {
    let names = VmNames { names: vec![name.parse().unwrap()], services: vec![] };
    let addresses = vec![AddressChange::new([192, 0, 2, 10].into(), [198, 51, 100, 7].into())];
    Relocation::new(&names, None, addresses)
}

pub(crate) fn write_key(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
}

fn options(host: &Host, more: &str) -> String {
    format!(
        "options {{ directory \"{}\"; pid-file none; session-keyfile none; listen-on {{ {}; }}; \
         listen-on-v6 {{ none; }}; recursion no; dnssec-validation no; allow-transfer {{ any; }}; {more} }};\n\
         controls {{ }};\n",
        host.directory().display(),
        host.control_address().unwrap(),
    )
}
