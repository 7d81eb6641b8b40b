//! Agents in a laboratory: their certificates, their configurations, and the daemons.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toml::{Table, Value, toml};

use crate::environment::{Environment, QemuVersion};
use crate::error::{Context, Result};
use crate::follow::DEADLINE;
use crate::host::Host;
use crate::lab::Lab;
use crate::pki::Pki;
use crate::run::Daemon;

/// The port at which agents listen.
const PORT: u16 = 7740;

/// Agents of a laboratory: on hosts `a` and `b`, and the witness with the ownership registry.
#[derive(Debug)]
pub struct Agents {
    program: PathBuf,
    hosts: [Host; 3],
    witness: bool,
    environment: Environment,
    qemu: QemuVersion,
    plain: bool,
    more: Table,
}

impl Agents {
    /// Returns agents that run the program `whimbrel`, with TLS, without an ownership registry. Starts nothing.
    pub fn new(lab: &Lab, environment: &Environment, program: &Path) -> Self {
        Self {
            program: program.to_owned(),
            hosts: [lab.a.clone(), lab.b.clone(), lab.witness.clone()],
            witness: false,
            environment: environment.clone(),
            qemu: QemuVersion::Installed,
            plain: false,
            more: Table::new(),
        }
    }

    /// Adds an ownership registry, kept by the witness.
    #[must_use]
    pub fn with_registry(mut self) -> Self {
        self.witness = true;
        self
    }

    /// Starts arriving VMs with this QEMU instead of the distribution's.
    #[must_use]
    pub fn with_qemu(mut self, version: QemuVersion) -> Self {
        self.qemu = version;
        self
    }

    /// Turns TLS off on all agents.
    #[must_use]
    pub fn plain(mut self) -> Self {
        self.plain = true;
        self
    }

    /// Adds tables to all configurations, such as `[tuning]` or `[timeouts]`. They replace the tables made here.
    #[must_use]
    pub fn with(mut self, more: Table) -> Self {
        self.more.extend(more);
        self
    }

    /// Writes every agent's certificate and configuration: `agent.toml` in its host's directory.
    pub fn write(&self) -> Result<()> {
        let directory = self.hosts[0].directory().with_file_name("pki");
        let pki = Pki::new(&directory)?;
        for host in self.all() {
            let identity = pki.issue(host.name(), &[host.address().into()])?;
            let mut config = self.config(host)?;
            let tls = if self.plain {
                toml! { plain = true }
            } else {
                let path = |path: &Path| Value::from(path.display().to_string());
                Table::from_iter([
                    ("ca".to_owned(), path(&identity.ca)),
                    ("certificate".to_owned(), path(&identity.certificate)),
                    ("key".to_owned(), path(&identity.key)),
                ])
            };
            config.insert("tls".to_owned(), tls.into());
            config.extend(self.more.clone());
            let path = config_path(host);
            fs::write(&path, config.to_string()).context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// Starts the agent of a host, by its configuration. It ends when the result is dropped.
    pub fn start(&self, host: &Host) -> Result<Daemon> {
        let mut command = host.command(&self.program);
        command.arg("agent").arg("--config").arg(config_path(host));
        Daemon::start(&mut command, &host.directory().join("agent.log"))
    }

    /// Starts all agents, and waits until they answer. They end when the results are dropped.
    pub fn start_all(&self) -> Result<Vec<Daemon>> {
        let daemons = self.all().iter().map(|host| self.start(host)).collect::<Result<Vec<_>>>()?;
        for (host, daemon) in self.all().iter().zip(&daemons) {
            daemon.follow()?.wait_for("the agent's socket", DEADLINE, |_| Self::socket(host).exists())?;
        }
        Ok(daemons)
    }

    /// Returns the path of the socket on which a host's agent serves users.
    pub fn socket(host: &Host) -> PathBuf {
        host.directory().join("run/agent.sock")
    }

    /// Returns the directory in which a host's agent makes images for arriving disks.
    pub fn pool(host: &Host) -> PathBuf {
        host.directory().join("images")
    }

    /// Returns a command that runs the program as a client of a host's agent.
    pub fn command(&self, host: &Host, words: &[&str]) -> Command {
        let mut command = host.command(&self.program);
        command.arg("--socket").arg(Self::socket(host)).args(words);
        command
    }

    /// Returns the hosts that have an agent.
    pub fn all(&self) -> &[Host] {
        let agents = if self.witness { 3 } else { 2 };
        &self.hosts[..agents]
    }

    fn config(&self, host: &Host) -> Result<Table> {
        let text = |path: &Path| Value::from(path.display().to_string());
        let mut config = Table::new();
        let mut set = |key: &str, value: Value| config.insert(key.to_owned(), value);
        set("host", host.name().into());
        set("listen", format!("{}:{PORT}", host.address()).into());
        set("state_dir", text(&host.directory().join("state")));
        set("run_dir", text(&host.directory().join("run")));
        let peers = self.all().iter().map(|peer| {
            let entry =
                Table::from_iter([("address".to_owned(), format!("{}:{PORT}", peer.address()).into())]);
            (peer.name().to_owned(), Value::Table(entry))
        });
        set("hosts", Value::Table(peers.collect()));
        if host.name() == self.hosts[2].name() {
            set("role", "witness".into());
        } else {
            if self.witness {
                let entry = Table::from_iter([("host".to_owned(), self.hosts[2].name().into())]);
                set("registry", entry.into());
            }
            set("qemu", self.qemu()?.into());
            let images = Self::pool(host);
            fs::create_dir_all(&images).context(|| format!("cannot make {}", images.display()))?;
            let pool = Table::from_iter([("directory".to_owned(), text(&images))]);
            let templates = host.directory().join("templates");
            fs::create_dir_all(&templates).context(|| format!("cannot make {}", templates.display()))?;
            let templates = Value::from(vec![text(&templates)]);
            let disks = [("pool".to_owned(), pool.into()), ("templates".to_owned(), templates)];
            set("disks", Table::from_iter(disks).into());
        }
        Ok(config)
    }

    /// Returns the configuration of the QEMU that runs arriving VMs.
    fn qemu(&self) -> Result<Table> {
        let qemu = self.environment.qemu(self.qemu)?;
        let path = |path: &PathBuf| Value::from(path.display().to_string());
        Ok(Table::from_iter([
            ("binaries".to_owned(), vec![path(&qemu.program)].into()),
            ("data_dirs".to_owned(), qemu.data_dirs.iter().map(path).collect::<Vec<_>>().into()),
        ]))
    }
}

fn config_path(host: &Host) -> PathBuf {
    host.directory().join("agent.toml")
}
