//! A connection between the hosts for `scp` and `rsync`: an SSH server in the destination's namespace, with keys that
//! are removed with the laboratory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::client::wait_for_service;
use crate::error::{Context, Error, Result};
use crate::follow::DEADLINE;
use crate::host::Host;
use crate::lab::Lab;
use crate::run::{Daemon, run};

const PORT: u16 = 7722;
/// Path of the server; it executes itself for each connection, by its absolute path.
const SERVER: &str = "/usr/sbin/sshd";
/// A directory that the server requires, and leaves empty.
const EMPTY: &str = "/run/sshd";

/// An SSH server, and the key to it.
#[derive(Debug)]
pub(super) struct Ssh {
    from: Host,
    to: Host,
    key: PathBuf,
    // Ends when this is dropped.
    _server: Daemon,
}

impl Ssh {
    /// Starts a server at host `b` for which host `a` has the key.
    pub(super) fn start(lab: &Lab) -> Result<Self> {
        if !Path::new(SERVER).exists() {
            return Err(Error::Missing { path: SERVER.into() });
        }
        let directory = lab.b.directory().join("ssh");
        if directory.exists() {
            // Files of an earlier server.
            fs::remove_dir_all(&directory).context(|| format!("cannot remove {}", directory.display()))?;
        }
        for needed in [&directory, Path::new(EMPTY)] {
            fs::create_dir_all(needed).context(|| format!("cannot make {}", needed.display()))?;
        }
        let (host_key, key) = (directory.join("host"), directory.join("client"));
        for key in [&host_key, &key] {
            run(Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(key))?;
        }
        let config = directory.join("config");
        let text = config_of(&lab.b, &host_key, &key.with_extension("pub"));
        fs::write(&config, text).context(|| format!("cannot write {}", config.display()))?;
        let server = lab.b.spawn("sshd", &[SERVER, "-D", "-e", "-f", &config.display().to_string()])?;
        wait_for_service(&lab.a, lab.b.address(), PORT, DEADLINE)?;
        Ok(Self { from: lab.a.clone(), to: lab.b.clone(), key, _server: server })
    }

    /// Copies files into a directory at the destination.
    pub(super) fn scp(&self, files: &[&Path], directory: &Path) -> Result<()> {
        let mut command = self.from.command("scp");
        command.args(["-q", "-P", &PORT.to_string()]).args(self.options()).args(files);
        run(command.arg(self.at_destination(directory))).map(drop)
    }

    /// Updates a file at the destination to the content here, by sending differences.
    pub(super) fn rsync(&self, file: &Path, directory: &Path) -> Result<()> {
        let shell = format!("ssh -p {PORT} {}", self.options().join(" "));
        let mut command = self.from.command("rsync");
        // All content is compared, regardless of date and length.
        command.args(["--inplace", "--no-whole-file", "--ignore-times", "-e", &shell]).arg(file);
        run(command.arg(self.at_destination(directory))).map(drop)
    }

    fn options(&self) -> Vec<String> {
        let known =
            ["BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"];
        let options = known.iter().flat_map(|option| ["-o".to_owned(), (*option).to_owned()]);
        options.chain(["-i".to_owned(), self.key.display().to_string()]).collect()
    }

    fn at_destination(&self, directory: &Path) -> String {
        format!("root@{}:{}/", self.to.address(), directory.display())
    }
}

fn config_of(host: &Host, host_key: &Path, allowed: &Path) -> String {
    let lines = [
        format!("Port {PORT}"),
        format!("ListenAddress {}", host.address()),
        format!("HostKey {}", host_key.display()),
        format!("AuthorizedKeysFile {}", allowed.display()),
        "PermitRootLogin prohibit-password".to_owned(),
        "PasswordAuthentication no".to_owned(),
        "KbdInteractiveAuthentication no".to_owned(),
        "UsePAM no".to_owned(),
        // The directories of a laboratory are readable by all users.
        "StrictModes no".to_owned(),
        "PidFile none".to_owned(),
        "Subsystem sftp internal-sftp".to_owned(),
    ];
    lines.join("\n") + "\n"
}
