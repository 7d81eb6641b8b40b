//! A running guest.

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;

use crate::environment::Environment;
use crate::error::{Context, Error, Result};
use crate::follow::DEADLINE;
use crate::host::Host;
use crate::monitor::Monitor;
use crate::run::Daemon;
use crate::serial::{Serial, Tick};
use crate::spec::{Boot, Device, GuestSpec};

/// Time that filling one MiB may need.
const FILL_PATIENCE: Duration = Duration::from_millis(100);

/// A guest that was started here. Its QEMU is killed when this is dropped, unless it was [`Guest::release`]d.
#[derive(Debug)]
pub struct Guest {
    directory: PathBuf,
    daemon: Daemon,
    serial: Serial,
}

impl Guest {
    /// Starts QEMU in a host's network namespace and waits until its monitor answers; the guest itself has not booted
    /// yet then. Its files are in a directory of its name in the host's directory: `qmp.sock`, `serial.sock`,
    /// `serial.log`, `qemu.log`.
    pub fn start(host: &Host, environment: &Environment, spec: &GuestSpec) -> Result<Self> {
        let directory = host.directory().join(&spec.name);
        fs::create_dir_all(&directory).context(|| format!("cannot make {}", directory.display()))?;
        for device in &spec.devices {
            if let Device::Net(net) = device {
                host.tap(&net.tap)?;
            }
        }
        let qemu = environment.qemu(spec.qemu)?;
        let mut command = match spec.user {
            None => host.command(&qemu.program),
            Some(user) => {
                chown(&directory, Some(user), Some(user))
                    .context(|| format!("cannot give away {}", directory.display()))?;
                let mut command = host.command("setpriv");
                command.args([format!("--reuid={user}"), format!("--regid={user}")]);
                command
                    .args(["--clear-groups", "--inh-caps=-all", "--no-new-privs", "--"])
                    .arg(&qemu.program);
                command
            }
        };
        command.args(qemu.arguments()).args(spec.arguments(environment, &directory)?);
        let daemon = Daemon::start(&mut command, &directory.join("qemu.log"))?;
        let serial =
            Serial::new(&directory.join("serial.sock"), &directory.join("serial.log"), Some(daemon.pid()));
        let mut guest = Self { directory, daemon, serial };
        guest.wait_for_monitor()?;
        Ok(guest)
    }

    /// Starts the tiny guest and waits until its memory is filled and its load runs (the first tick).
    pub fn start_and_wait(host: &Host, environment: &Environment, spec: &GuestSpec) -> Result<Self> {
        let guest = Self::start(host, environment, spec)?;
        if let Boot::Tiny(load) = &spec.boot {
            guest.wait_for_load(load.fill_mib)?;
        }
        Ok(guest)
    }

    /// Waits until the tiny guest ticks, which it does once it has filled this much memory.
    pub fn wait_for_load(&self, fill_mib: u64) -> Result<Tick> {
        // Without KVM it may fill no more than some 50 MiB in a second.
        let deadline = DEADLINE + FILL_PATIENCE * fill_mib as u32;
        self.serial.follow()?.wait_for_tick(deadline, |_| true)
    }

    /// Returns the process id of its QEMU.
    pub fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// Returns the directory with its sockets and logs.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the path of its monitor's socket.
    pub fn qmp_socket(&self) -> PathBuf {
        self.directory.join("qmp.sock")
    }

    /// Returns its serial line.
    pub fn serial(&self) -> &Serial {
        &self.serial
    }

    /// Connects to its monitor: to the second one where it has one, so that other users of the first are not in the
    /// way.
    pub fn monitor(&self) -> Result<Monitor> {
        let second = self.directory.join("lab.sock");
        Monitor::connect(&if second.exists() { second } else { self.qmp_socket() })
    }

    /// Returns true if its QEMU still runs.
    pub fn is_running(&mut self) -> bool {
        self.daemon.is_running()
    }

    /// Waits until its QEMU has ended, without reaping it, so that the kernel still reports its resource usage.
    pub fn wait_for_end(&self) -> Result<()> {
        self.daemon.wait_for_end()
    }

    /// Kills its QEMU.
    pub fn kill(&mut self) -> Result<()> {
        self.daemon.kill()
    }

    /// Keeps its QEMU running when this is dropped. Returns the process id.
    pub fn release(self) -> u32 {
        self.daemon.release()
    }

    /// Waits until the monitor answers, which it does once the machine is made; wakes when a file is made in the
    /// directory.
    fn wait_for_monitor(&mut self) -> Result<()> {
        let context = || format!("cannot watch {}", self.directory.display());
        let watch =
            inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).context(context)?;
        inotify::add_watch(&watch, &self.directory, inotify::WatchFlags::CREATE).context(context)?;
        let start = Instant::now();
        // Connects again while the monitor refuses: the socket's name exists a moment before connections are accepted,
        // and a QEMU that fails while it starts has already accepted one.
        while let Err(refused) = Monitor::connect(&self.qmp_socket()) {
            if !self.daemon.is_running() {
                let log = self.daemon.log();
                return Err(Error::Ended {
                    log: log.to_owned(),
                    awaited: "QEMU's monitor answered".to_owned(),
                    tail: fs::read_to_string(log).unwrap_or_default(),
                });
            }
            if start.elapsed() > DEADLINE {
                return Err(refused);
            }
            let soon = Timespec::try_from(Duration::from_millis(20)).ok();
            match poll(&mut [PollFd::new(&watch, PollFlags::IN)], soon.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error)).context(context),
            }
            let mut buffer = [MaybeUninit::uninit(); 1024];
            let mut events = inotify::Reader::new(&watch, &mut buffer);
            while events.next().is_ok() {}
        }
        Ok(())
    }
}
