//! Following a file that grows, line by line; the kernel (inotify) wakes the follower after each write.
//!
//! Tests wait for lines, never for time; the deadline is only there so that a broken run ends.

use std::fs::{self, File};
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::error::{Context, Error, Result};

/// The deadline where a test has no better one: far longer than anything but a hang, also on a loaded machine.
pub const DEADLINE: Duration = Duration::from_mins(2);

/// Longest wait for an answer while lines report that work on it continues.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_mins(5);

/// A growing file, read line by line.
#[derive(Debug)]
pub struct LogFollower {
    path: PathBuf,
    file: File,
    watch: OwnedFd,
    /// The process that writes the file, when known.
    writer: Option<OwnedFd>,
    partial: Vec<u8>,
    lines: std::collections::VecDeque<String>,
    tail: std::collections::VecDeque<String>,
}

impl LogFollower {
    /// Follows a file from its beginning. A missing file is made. With `writer`, waiting fails as soon as that process
    /// has ended and all of its output was read.
    pub fn start(path: &Path, writer: Option<u32>) -> Result<Self> {
        let context = || format!("cannot follow {}", path.display());
        fs::OpenOptions::new().create(true).append(true).open(path).context(context)?;
        let watch =
            inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK).context(context)?;
        inotify::add_watch(&watch, path, inotify::WatchFlags::MODIFY).context(context)?;
        let writer = match writer.and_then(|pid| Pid::from_raw(pid as i32)) {
            Some(pid) => Some(pidfd_open(pid, PidfdFlags::empty()).context(context)?),
            None => None,
        };
        Ok(Self {
            path: path.to_owned(),
            file: File::open(path).context(context)?,
            watch,
            writer,
            partial: Vec::new(),
            lines: std::collections::VecDeque::new(),
            tail: std::collections::VecDeque::new(),
        })
    }

    /// Skips everything that is in the file now.
    pub fn skip(&mut self) -> Result<()> {
        self.read()?;
        self.lines.clear();
        Ok(())
    }

    /// Returns the next line, if it is there already.
    pub fn next_now(&mut self) -> Result<Option<String>> {
        if self.lines.is_empty() {
            self.read()?;
        }
        Ok(self.lines.pop_front())
    }

    /// Returns the next line for which `wanted` holds; lines before it are skipped. `awaited` names it in errors.
    pub fn wait_for(
        &mut self,
        awaited: &str,
        deadline: Duration,
        wanted: impl FnMut(&str) -> bool,
    ) -> Result<String> {
        self.wait_while_working(awaited, deadline, |_| false, wanted)
    }

    /// Waits like [`LogFollower::wait_for`] for a writer that may need long and reports so: the deadline is counted
    /// from the last line for which `is_working` holds, and ends after [`LONGEST_WAIT`] at the latest.
    pub fn wait_while_working(
        &mut self,
        awaited: &str,
        deadline: Duration,
        mut is_working: impl FnMut(&str) -> bool,
        mut wanted: impl FnMut(&str) -> bool,
    ) -> Result<String> {
        let start = Instant::now();
        let mut until = deadline;
        loop {
            // Before reading: the output of a process that has ended must still be found.
            let ended = self.writer.as_ref().is_some_and(is_readable);
            while let Some(line) = self.next_now()? {
                if wanted(&line) {
                    return Ok(line);
                }
                if is_working(&line) {
                    until = (start.elapsed() + deadline).min(LONGEST_WAIT);
                }
            }
            let awaited = || awaited.to_owned();
            if ended {
                return Err(Error::Ended {
                    log: self.path.clone(),
                    awaited: format!("{} came", awaited()),
                    tail: self.tail(),
                });
            }
            let Some(left) = until.checked_sub(start.elapsed()) else {
                return Err(Error::Timeout {
                    log: self.path.clone(),
                    waited_ms: start.elapsed().as_millis(),
                    awaited: awaited(),
                    tail: self.tail(),
                });
            };
            self.sleep(left).context(|| format!("cannot follow {}", self.path.display()))?;
        }
    }

    /// Returns the next line that contains `text`.
    pub fn wait_for_text(&mut self, text: &str) -> Result<String> {
        self.wait_for(&format!("\"{text}\""), DEADLINE, |line| line.contains(text))
    }

    fn tail(&self) -> String {
        let mut tail: Vec<&str> = self.tail.iter().map(String::as_str).collect();
        let partial = String::from_utf8_lossy(&self.partial);
        tail.push(&partial);
        tail.join("\n")
    }

    /// Reads new content.
    fn read(&mut self) -> Result<()> {
        self.file
            .read_to_end(&mut self.partial)
            .context(|| format!("cannot read {}", self.path.display()))?;
        while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if self.tail.len() == 10 {
                self.tail.pop_front();
            }
            self.tail.push_back(line.clone());
            self.lines.push_back(line);
        }
        Ok(())
    }

    /// Sleeps until the file was written, the writer ended, or the time is over.
    fn sleep(&self, at_most: Duration) -> io::Result<()> {
        let mut files = vec![PollFd::new(&self.watch, PollFlags::IN)];
        files.extend(self.writer.as_ref().map(|writer| PollFd::new(writer, PollFlags::IN)));
        poll_for(&mut files, Some(at_most))?;
        // The kinds of events do not matter: all new content is read.
        let mut buffer = [MaybeUninit::uninit(); 1024];
        let mut events = inotify::Reader::new(&self.watch, &mut buffer);
        while events.next().is_ok() {}
        Ok(())
    }
}

fn poll_for(files: &mut [PollFd<'_>], at_most: Option<Duration>) -> io::Result<()> {
    let timeout = at_most.and_then(|time| Timespec::try_from(time).ok());
    match poll(files, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn is_readable(file: impl AsFd) -> bool {
    let mut files = [PollFd::new(&file, PollFlags::IN)];
    poll_for(&mut files, Some(Duration::ZERO)).is_ok() && !files[0].revents().is_empty()
}

/// Waits until a process (named by its descriptor) has ended.
pub(crate) fn wait_for_end(process: impl AsFd) -> io::Result<()> {
    while !is_readable(&process) {
        poll_for(&mut [PollFd::new(&process, PollFlags::IN)], None)?;
    }
    Ok(())
}
