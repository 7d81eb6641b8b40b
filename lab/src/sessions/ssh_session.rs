//! An SSH session: a shell in the guest with a command that goes on, while others are typed and answered.

use std::io::{self, BufReader, Read as _, Write as _};
use std::net::Ipv4Addr;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Stdio};
use std::thread;

use super::arrivals::{Arrivals, Session, SessionReport};
use crate::environment::Environment;
use crate::error::{Context, Error, Result};
use crate::host::Host;

/// The command that goes on: it counts.
const COUNTING: &str = "n=0; while sleep 0.1; do echo tick $n; n=$((n+1)); done &\n";

/// A running session of the system's SSH client. It ends when this is dropped.
#[derive(Debug)]
pub struct SshSession {
    // Ends before the session would be waited for.
    client: SshClient,
    session: Session<()>,
}

/// The process of the client.
#[derive(Debug)]
struct SshClient(Child);

impl Drop for SshClient {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl SshSession {
    /// Logs in from a host to the Debian guest with this address, and begins to type commands, each one when the one
    /// before it was answered.
    pub fn start(host: &Host, environment: &Environment, address: Ipv4Addr) -> Result<Self> {
        let known = format!("UserKnownHostsFile={}", environment.debian_known_hosts()?.display());
        let mut command = host.command("ssh");
        // No configuration of this machine, and no end of the session but that of its connection.
        command.args(["-F", "none", "-T", "-i"]).arg(environment.debian_ssh_key()?);
        for option in ["BatchMode=yes", "StrictHostKeyChecking=yes", "HostKeyAlias=guest", &known] {
            command.args(["-o", option]);
        }
        command.arg(format!("root@{address}")).arg("sh");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut client = SshClient(command.spawn().context(|| "cannot run ssh")?);
        let pipes = (client.0.stdin.take(), client.0.stdout.take(), client.0.stderr.take());
        let (Some(input), Some(output), Some(errors)) = pipes else {
            return Err(Error::Config("ssh has no pipes".to_owned()));
        };
        let session = Session::start(move |record, (): &mut ()| talk(record, input, output, errors))?;
        Ok(Self { client, session })
    }

    /// Waits for `lines` more.
    ///
    /// # Errors
    /// If the connection breaks first, or is silent for two minutes.
    pub fn wait_for(&self, lines: usize) -> Result<()> {
        self.session.wait_for(lines)
    }

    /// Ends the session, and returns its observations.
    pub fn finish(self) -> SessionReport {
        let Self { client, session } = self;
        session.finish(|| drop(client)).0
    }
}

/// Types commands, and reads the session's lines.
fn talk(
    record: &mut Arrivals,
    mut input: ChildStdin,
    output: ChildStdout,
    mut errors: ChildStderr,
) -> io::Result<()> {
    // A client whose connection is broken prints the reason, and ends.
    let reason = thread::spawn(move || {
        let mut text = String::new();
        let _ = errors.read_to_string(&mut text);
        text
    });
    let talked = (|| {
        input.write_all(COUNTING.as_bytes())?;
        exchange(record, BufReader::new(output), |number| writeln!(input, "echo answer {number}"))
    })();
    match talked {
        Ok(true) => Ok(()),
        Ok(false) => Err(ended(&reason.join().unwrap_or_default())),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Err(ended(&reason.join().unwrap_or_default()))
        }
        Err(error) => Err(error),
    }
}

fn ended(reason: &str) -> io::Error {
    io::Error::other(format!("the session ended: {}", reason.trim()))
}

/// Reads lines, each of which has to be the next one of the command that goes on, or the answer to the command that was
/// typed last. Returns false if there are no more.
fn exchange(
    record: &mut Arrivals,
    mut output: impl io::BufRead,
    mut ask: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<bool> {
    let (mut ticks, mut answers, mut is_asked) = (0_u64, 0_u64, false);
    let mut line = String::new();
    while !record.is_stopped() {
        line.clear();
        if output.read_line(&mut line)? == 0 {
            return Ok(false);
        }
        if line == format!("tick {ticks}\n") {
            ticks += 1;
        } else if is_asked && line == format!("answer {answers}\n") {
            (answers, is_asked) = (answers + 1, false);
        } else {
            return Err(io::Error::other(format!("{line:?} after {ticks} ticks and {answers} answers")));
        }
        record.record();
        if !is_asked {
            ask(answers)?;
            is_asked = true;
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    #[test]
    fn lines_have_to_be_the_next_ones() {
        for (text, asked, is_good) in [
            ("tick 0\ntick 1\nanswer 0\ntick 2\nanswer 1\n", 3, true),
            ("tick 0\ntick 2\n", 1, false),
            ("tick 0\nanswer 1\n", 1, false),
            ("answer 0\n", 0, false),
            ("tick 0\nanswer 0\nanswer 0\n", 2, false),
            ("tick 0\ntick 1", 1, false),
        ] {
            let mut record = Arrivals::new(Arc::default(), mpsc::channel().0);
            let mut commands = Vec::new();
            let result = exchange(&mut record, text.as_bytes(), |number| {
                commands.push(number);
                Ok(())
            });
            assert_eq!(result.is_ok(), is_good, "{text:?} {result:?}");
            assert_eq!(commands, (0..asked).collect::<Vec<_>>(), "{text:?}");
        }
    }
}
