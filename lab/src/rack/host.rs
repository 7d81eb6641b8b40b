//! A running host of a rack: commands and files in and out, power, cable and clock.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::json;

use super::machine::{Begin, HostSpec, LINK, MONITOR, Parts, Start, ssh_port};
use super::snapshot::Snapshot;
use crate::error::{Context, Error, Result};
use crate::follow::{DEADLINE, LONGEST_WAIT, LogFollower};
use crate::host::Host;
use crate::monitor::Monitor;
use crate::run::{Daemon, run};
use crate::serial::Serial;

/// The line on the console of a machine that has booted.
const UP: &str = "RACK UP";

/// A whole machine. Its power fails when this is dropped.
#[derive(Debug)]
pub struct RackHost {
    spec: HostSpec,
    number: u8,
    directory: PathBuf,
    tools: PathBuf,
    parts: Parts,
    /// The namespace in which QEMU runs, with the switch.
    switch: Host,
    qemu: Option<Daemon>,
    /// The SSH connection that all commands share.
    connection: Option<Daemon>,
}

/// The serial line of a guest on a host of a rack. The line is followed until this is dropped.
#[derive(Debug)]
pub struct RackSerial {
    serial: Serial,
    /// Copies the guest's log from the host.
    _copy: Daemon,
}

impl std::ops::Deref for RackSerial {
    type Target = Serial;

    fn deref(&self) -> &Serial {
        &self.serial
    }
}

impl RackHost {
    /// Returns a host whose power is off, with its files in a directory of its name.
    pub(super) fn new(spec: &HostSpec, number: u8, switch: &Host, tools: &Path, parts: &Parts) -> Self {
        Self {
            spec: spec.clone(),
            number,
            directory: switch.directory().join(&spec.name),
            tools: tools.to_owned(),
            parts: parts.clone(),
            switch: switch.clone(),
            qemu: None,
            connection: None,
        }
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns its specification.
    pub fn spec(&self) -> &HostSpec {
        &self.spec
    }

    /// Returns its address in the hosts' network.
    pub fn address(&self) -> std::net::Ipv4Addr {
        std::net::Ipv4Addr::new(10, 93, 0, self.number)
    }

    /// Returns the directory on this machine with its console, its disk and what was copied from it.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns a command that runs a program in this host as root.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = self.ssh();
        command.arg("--").args(words.iter().map(|word| quote(word)));
        command
    }

    /// Returns the command line with which a person runs commands in this host.
    pub fn describe_shell(&self) -> String {
        let command = self.ssh();
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    /// Runs a program to its end in this host, and returns its output.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        run(&mut self.command(words))
    }

    /// Runs a script of `sh` in this host, which ends at the first command that fails, and returns its output.
    pub fn shell(&self, script: &str) -> Result<String> {
        self.run(&["sh", "-ec", script])
    }

    /// Copies a file of this machine into the host, with its permissions.
    pub fn put(&self, from: &Path, to: &str) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let context = || format!("cannot read {}", from.display());
        let file = File::open(from).context(context)?;
        let mode = file.metadata().context(context)?.permissions().mode() & 0o7777;
        let script = format!("mkdir -p \"$(dirname \"$0\")\" && cat >\"$0\" && chmod {mode:o} \"$0\"");
        let mut command = self.command(&["sh", "-ec", &script, to]);
        let status = command.stdin(file).status().context(|| "cannot run ssh")?;
        if status.success() {
            return Ok(());
        }
        Err(Error::Config(format!("{}: could not write {to}", self.spec.name)))
    }

    /// Writes a file in the host.
    pub fn write(&self, path: &str, text: &str) -> Result<()> {
        let script = "mkdir -p \"$(dirname \"$0\")\" && printf %s \"$1\" >\"$0\"";
        self.run(&["sh", "-ec", script, path, text]).map(drop)
    }

    /// Copies a file of the host to this machine.
    pub fn get(&self, from: &str, to: &Path) -> Result<()> {
        let file = File::create(to).context(|| format!("cannot write {}", to.display()))?;
        let status = self.command(&["cat", from]).stdin(Stdio::null()).stdout(file).status();
        if status.context(|| "cannot run ssh")?.success() {
            return Ok(());
        }
        Err(Error::Config(format!("{}: could not read {from}", self.spec.name)))
    }

    /// Returns the serial line of a guest by the host's directory with `serial.sock` and `serial.log`.
    pub fn serial(&self, directory: &str) -> Result<RackSerial> {
        self.serial_line(&format!("{directory}/serial.sock"), &format!("{directory}/serial.log"))
    }

    /// Returns the serial line of a guest by the host's socket for its input and file with its output.
    pub fn serial_line(&self, socket: &str, log: &str) -> Result<RackSerial> {
        let here = self.forward(socket)?;
        let mut tail = self.command(&["tail", "--lines=+1", "--follow=name", "--retry", log]);
        let copy = Daemon::start(&mut tail, &here.with_extension("log"))?;
        let serial = Serial::new(&here, &here.with_extension("log"), Some(copy.pid()));
        Ok(RackSerial { serial, _copy: copy })
    }

    /// Returns a socket on this machine whose connections go on to a socket in the host.
    pub fn forward(&self, socket: &str) -> Result<PathBuf> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let here = self.directory.join(format!("socket-{}", NUMBER.fetch_add(1, Relaxed)));
        run(self.ssh().args(["-O", "forward", "-L", &format!("{}:{socket}", here.display())]))?;
        Ok(here)
    }

    /// Pulls its cable, or puts it back.
    pub fn set_cable(&self, is_in: bool) -> Result<()> {
        let arguments = json!({ "name": LINK, "up": is_in });
        self.monitor()?.command("set_link", &arguments).map(drop)
    }

    /// Sets its clock.
    pub fn set_clock(&self, time: SystemTime) -> Result<()> {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let date = format!("@{}.{:09}", since.as_secs(), since.subsec_nanos());
        self.run(&["date", "--set", &date]).map(drop)
    }

    /// Returns its clock.
    pub fn clock(&self) -> Result<SystemTime> {
        let date = self.run(&["date", "+%s%N"])?;
        let nanos = date.trim().parse().map_err(|_| Error::Config(format!("no date: {date}")))?;
        Ok(UNIX_EPOCH + Duration::from_nanos(nanos))
    }

    /// Lets its power fail: what it had not flushed to its disk is lost.
    pub fn fail_power(&mut self) -> Result<()> {
        self.connection = None;
        self.qemu.take().map_or(Ok(()), |mut qemu| qemu.kill())
    }

    /// Ends the connection that all commands share.
    pub(super) fn disconnect(&mut self) {
        self.connection = None;
    }

    /// Waits until its QEMU has ended by itself.
    pub(super) fn wait_for_end(&self) -> Result<()> {
        self.qemu.as_ref().map_or(Ok(()), Daemon::wait_for_end)
    }

    /// Returns true if its power is on.
    pub fn has_power(&mut self) -> bool {
        self.qemu.as_mut().is_some_and(Daemon::is_running)
    }

    /// Returns true if its QEMU has ended by itself: the emulated machine was reset.
    pub(super) fn has_ended(&mut self) -> bool {
        self.qemu.as_mut().is_some_and(|qemu| !qemu.is_running())
    }

    /// Turns its power on: it boots from its disk. Returns once commands can be run.
    pub fn boot(&mut self) -> Result<()> {
        let console = self.directory.join("console.log");
        let mut follow = LogFollower::start(&console, None)?;
        follow.skip()?;
        self.start(Begin::Boot)?;
        follow.wait_for("a booted host", LONGEST_WAIT, |line| line.contains(UP))?;
        self.connect()
    }

    /// Starts it from a state, and makes it a host of its own.
    pub(super) fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        fs::create_dir_all(&self.directory)
            .context(|| format!("cannot make {}", self.directory.display()))?;
        self.make_disk(&snapshot.disk())?;
        self.start(Begin::State)?;
        snapshot.load(&mut self.monitor()?)?;
        self.connect()?;
        self.set_clock(SystemTime::now())?;
        // Hosts of one state would draw the same random numbers.
        self.shell(RESEED)?;
        self.run(&["rack-host", self.name(), &self.number.to_string()]).map(drop)
    }

    /// Starts it from the state that [`RackHost::preserve`] wrote. Its disk stays as it is.
    pub(super) fn resume(&mut self) -> Result<()> {
        self.start(Begin::StateAndOldDisk)?;
        Snapshot::load_file(&mut self.monitor()?, &self.directory.join(STATE))?;
        self.connect()
    }

    /// Makes its disk, which begins with the content of another one.
    pub(super) fn make_disk(&self, backing: &Path) -> Result<()> {
        let disk = self.directory.join("disk.qcow2");
        let mut command = Command::new(&self.parts.qemu.img);
        command.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(backing).arg(&disk);
        run(&mut command).map(drop)
    }

    /// Connects to QEMU's monitor.
    pub(super) fn monitor(&self) -> Result<Monitor> {
        Monitor::connect(&self.directory.join(MONITOR))
    }

    /// Copies its logs to its directory, and writes its state there, from which a person can start it again. It is off
    /// then. What cannot be had is left out: the host may be broken.
    pub(super) fn preserve(&mut self) {
        if !self.has_power() {
            return;
        }
        let collect = "d=$(mktemp -d); journalctl >$d/journal 2>&1; dmesg >$d/kernel 2>&1; ps faux >$d/processes; \
            whimbrel vm list >$d/vms 2>&1; cp -r /var/lib/whimbrel/logs $d/ 2>/dev/null; \
            for log in /srv/vms/*/*.log /run/whimbrel/vms/*/*.log; do \
                [ ! -f $log ] || cp $log $d/$(echo $log | tr / _); done; tar -C $d -c .";
        let mut command = self.command(&["timeout", "20", "sh", "-c", collect]);
        if let Ok(output) = command.stdin(Stdio::null()).output() {
            let archive = self.directory.join("logs.tar");
            let _ = fs::write(&archive, output.stdout);
            let unpacked =
                Command::new("tar").arg("-C").arg(&self.directory).arg("-xf").arg(&archive).status();
            if unpacked.is_ok_and(|status| status.success()) {
                let _ = fs::remove_file(&archive);
            }
        }
        let state = self.directory.join(STATE);
        let _ = self.monitor().and_then(|mut monitor| Snapshot::write(&mut monitor, &state));
        let _ = serde_json::to_string(&(self.number, &self.spec))
            .map_err(std::io::Error::from)
            .and_then(|spec| fs::write(self.directory.join(SPEC), spec));
        let _ = self.fail_power();
    }

    /// Starts QEMU, with its tap on the switch.
    fn start(&mut self, from: Begin) -> Result<()> {
        let tap = format!("port{}", self.number);
        if self.switch.run(&["ip", "link", "show", "dev", &tap]).is_err() {
            self.switch.run(&["ip", "tuntap", "add", "dev", &tap, "mode", "tap"])?;
            self.switch.run(&["ip", "link", "set", "dev", &tap, "master", super::SWITCH, "up"])?;
        }
        let start = self.start_of(&tap, from);
        let mut command = self.switch.command(&self.parts.qemu.program);
        command.args(start.arguments(&self.parts));
        // A QEMU that has ended leaves its socket, to which nobody answers.
        let monitor = self.directory.join(MONITOR);
        let _ = fs::remove_file(&monitor);
        let mut qemu = Daemon::start(&mut command, &self.directory.join("qemu.log"))?;
        let begin = Instant::now();
        while Monitor::connect(&monitor).is_err() {
            if !qemu.is_running() || begin.elapsed() > DEADLINE {
                let log = qemu.log().to_owned();
                let tail = fs::read_to_string(&log).unwrap_or_default();
                return Err(Error::Ended { log, awaited: "QEMU's monitor answered".to_owned(), tail });
            }
            thread::sleep(Duration::from_millis(20));
        }
        self.qemu = Some(qemu);
        Ok(())
    }

    /// Returns the start of this machine.
    pub(super) fn start_of<'a>(&'a self, tap: &'a str, from: Begin) -> Start<'a> {
        let (spec, directory, tools) = (&self.spec, &self.directory, &self.tools);
        Start { spec, number: self.number, directory, tools, tap, from }
    }

    /// Makes the connection that all commands share.
    pub(super) fn connect(&mut self) -> Result<()> {
        let socket = self.directory.join("ssh");
        let begin = Instant::now();
        loop {
            let _ = fs::remove_file(&socket);
            let mut command = self.ssh();
            command.args(["-o", "ControlMaster=yes", "-N"]);
            let mut connection = Daemon::start(&mut command, &self.directory.join("ssh.log"))?;
            // It ends where the host does not answer yet.
            while connection.is_running() {
                if socket.exists() {
                    self.connection = Some(connection);
                    return Ok(());
                }
                thread::sleep(Duration::from_millis(20));
            }
            if begin.elapsed() > DEADLINE {
                let what = format!("{} does not answer: see {}", self.name(), self.directory.display());
                return Err(Error::Config(what));
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// Returns SSH's command, without the words that the host runs.
    fn ssh(&self) -> Command {
        let mut command = self.switch.command("ssh");
        command.args(["-q", "-F", "none", "-i"]).arg(self.parts.ssh_key());
        for option in [
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "ConnectTimeout=15",
            "ServerAliveInterval=15",
            "ServerAliveCountMax=8",
            "ExitOnForwardFailure=yes",
        ] {
            command.args(["-o", option]);
        }
        command.arg("-o").arg(format!("ControlPath={}", self.directory.join("ssh").display()));
        command.args(["-p", &ssh_port(self.number).to_string(), "root@127.0.0.1"]);
        command
    }
}

/// The state of a preserved host, and its number and specification, in its directory.
const STATE: &str = "state";
pub(super) const SPEC: &str = "host.json";

/// Draws from the emulated source of random numbers, and makes the kernel use it at once.
const RESEED: &str = "head -c 64 /dev/hwrng >/dev/urandom
    python3 -c 'import fcntl, os; fcntl.ioctl(os.open(\"/dev/urandom\", os.O_WRONLY), 0x5207)'";

/// Quotes a word for the host's shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_pass_a_shell_unchanged() {
        for word in ["", "plain", "two words", "it's", "$HOME `id` \"x\" \\ * ;", "line\nline"] {
            let script = format!("printf %s {}", quote(word));
            assert_eq!(run(Command::new("sh").args(["-c", &script])).unwrap(), word);
        }
    }
}
