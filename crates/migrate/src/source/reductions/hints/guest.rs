//! Requests for free page hints to the program in the guest. A separate thread asks, because an answer may need long,
//! or never arrive: only callers that choose to wait do so.

use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ::guest::protocol::{BadLine, Cache, Kind, LINE_BYTES, Line, Pages, Request, VERSION};
use ::memory::HintedPages;
use proto::limits::PAGE_BYTES;
use qemu::ram::GuestMapping;

/// Maximum length of an answer, in lines: more ranges than a guest of some TiB has.
const MAX_LINES: u64 = 1 << 22;
/// Maximum number of the guest's notes that are kept.
const MAX_NOTES: usize = 4;
const NOTE_CHARS: usize = 300;

/// Connection to the program in the guest. Dropping it ends the connection, and with it the thread.
#[derive(Debug)]
pub(super) struct Guest {
    queue: Arc<QuestionQueue>,
    connection: UnixStream,
    hinted: Arc<HintedPages>,
    cache: Cache,
}

/// Statistics of the guest's answers, for the report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GuestAnswers {
    /// Number of complete answers.
    pub(super) answers: u64,
    /// Duration of the longest answer.
    pub(super) longest: Duration,
    /// True if the guest's kernel checks the content of free pages.
    pub(super) poisoned: bool,
    /// Notes of the guest, and errors of the connection.
    pub(super) notes: Vec<String>,
}

impl GuestAnswers {
    fn note(&mut self, text: &str) {
        let text: String = text.chars().filter(|one| !one.is_control()).take(NOTE_CHARS).collect();
        if self.notes.len() < MAX_NOTES && !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }
}

/// Queue of one question for the thread that asks.
#[derive(Debug, Default)]
struct QuestionQueue {
    queue_state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: Option<(Request, mpsc::Sender<()>)>,
    /// True while the answer to a question is not complete.
    is_answering: bool,
    /// True if no further questions follow.
    is_closed: bool,
    /// True if the guest answers no further questions.
    is_silent: bool,
    answer_statistics: GuestAnswers,
    /// Duration of the last answer to a question that did not ask the guest to give back pages.
    last_report: Duration,
}

impl QuestionQueue {
    fn queue_state(&self) -> MutexGuard<'_, QueueState> {
        self.queue_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next question; returns none if no further questions follow.
    fn next(&self) -> Option<(Request, mpsc::Sender<()>)> {
        let mut queue_state = self.queue_state();
        loop {
            if queue_state.is_closed {
                return None;
            }
            match queue_state.waiting.take() {
                Some(question) => {
                    queue_state.is_answering = true;
                    return Some(question);
                }
                None => queue_state = self.changed.wait(queue_state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

impl Guest {
    /// Starts the thread that asks over `connection`; `seen` are the guest addresses of the memory blocks. No part of
    /// an answer is waited for longer than `patience`.
    pub(super) fn new(
        connection: UnixStream,
        seen: Vec<GuestMapping>,
        hinted: Arc<HintedPages>,
        cache: Cache,
        patience: Duration,
    ) -> io::Result<Self> {
        let (queue, mine) = (Arc::new(QuestionQueue::default()), connection.try_clone()?);
        let lines = BufReader::with_capacity(1 << 16, connection.try_clone()?);
        let asking = GuestRequester {
            connection,
            lines,
            seen,
            hinted: Arc::clone(&hinted),
            queue: Arc::clone(&queue),
            patience,
        };
        thread::Builder::new().name("guest".to_owned()).spawn(move || asking.run())?;
        Ok(Self { queue, connection: mine, hinted, cache })
    }

    /// Sends a question as soon as the earlier answer is complete, unless the guest does not answer at all. The caller
    /// has cleared the dirty marks right before. The rest of the earlier answer does not count, and a question that
    /// waits for it is dropped. Returns a channel that is closed when the answer is complete, or never will be.
    pub(super) fn ask(&self, give_back: bool) -> Option<Receiver<()>> {
        let (done, ended) = mpsc::channel();
        let question = Request { id: self.hinted.begin(), give_back, cache: self.cache };
        let mut queue_state = self.queue.queue_state();
        if queue_state.is_silent {
            return None;
        }
        queue_state.waiting = Some((question, done));
        self.queue.changed.notify_one();
        Some(ended)
    }

    /// Withdraws a question that still waits.
    pub(super) fn withdraw(&self) {
        self.queue.queue_state().waiting = None;
    }

    /// Returns true if an answer is pending that may still arrive.
    pub(super) fn has_pending_answer(&self) -> bool {
        let queue_state = self.queue.queue_state();
        queue_state.waiting.is_some() || queue_state.is_answering
    }

    /// Returns the number of valid answers, and how long the guest needs to report its free memory.
    pub(super) fn answers(&self) -> (u64, Duration) {
        let queue_state = self.queue.queue_state();
        (queue_state.answer_statistics.answers, queue_state.last_report)
    }

    pub(super) fn answer_statistics(&self) -> GuestAnswers {
        self.queue.queue_state().answer_statistics.clone()
    }
}

impl Drop for Guest {
    /// Frees the port for the next program, even while an answer is pending.
    fn drop(&mut self) {
        self.queue.queue_state().is_closed = true;
        self.queue.changed.notify_one();
        // If this fails, the connection is already gone.
        let _ = self.connection.shutdown(Shutdown::Both);
    }
}

/// Error after which the guest is asked no further questions.
#[derive(Debug, thiserror::Error)]
enum AnswerError {
    #[error("it does not answer in time")]
    Late,
    #[error("the port was closed")]
    Gone,
    #[error("it uses version {0} of the protocol, not {VERSION}")]
    Version(u32),
    #[error("its answer cannot be read: {0}")]
    Line(#[from] BadLine),
    #[error("its answer cannot be read: {0}")]
    Disorder(&'static str),
    #[error("its port cannot be used: {0}")]
    Port(#[from] io::Error),
}

/// State of the thread that asks.
struct GuestRequester {
    connection: UnixStream,
    lines: BufReader<UnixStream>,
    seen: Vec<GuestMapping>,
    hinted: Arc<HintedPages>,
    queue: Arc<QuestionQueue>,
    patience: Duration,
}

impl GuestRequester {
    /// Asks until no further questions follow, or the guest violates the protocol: data after that belongs to no
    /// question.
    fn run(mut self) {
        while let Some((question, done)) = self.queue.next() {
            let began = Instant::now();
            let answered = self.ask(question);
            let mut queue_state = self.queue.queue_state();
            queue_state.is_answering = false;
            match &answered {
                Ok(()) => {
                    let took = began.elapsed();
                    queue_state.answer_statistics.answers += u64::from(self.hinted.end_answer(question.id));
                    queue_state.answer_statistics.longest = queue_state.answer_statistics.longest.max(took);
                    if !question.give_back {
                        queue_state.last_report = took;
                    }
                }
                Err(error) => {
                    queue_state.is_silent = true;
                    queue_state.waiting = None;
                    queue_state.answer_statistics.note(&format!("the guest is no longer queried: {error}"));
                }
            }
            drop(queue_state);
            if answered.is_err() {
                self.hinted.forget();
            }
            drop(done);
            if answered.is_err() {
                return;
            }
        }
    }

    fn ask(&mut self, question: Request) -> Result<(), AnswerError> {
        self.connection.set_write_timeout(Some(self.patience))?;
        self.connection.write_all(format!("{question}\n").as_bytes()).map_err(late)?;
        let (mut bytes, mut has_begun, mut is_poisoned) = (Vec::new(), false, false);
        // Minimum start of the next range of each kind.
        let mut next = [0; Kind::COUNT];
        for _ in 0..MAX_LINES {
            self.read_line(&mut bytes, Instant::now() + self.patience)?;
            let text = String::from_utf8_lossy(&bytes);
            let line = text.trim_end().parse::<Line>();
            if !has_begun {
                // Lines before it belong to an answer for an earlier client that closed the port, and may begin
                // anywhere in it.
                if let Ok(Line::Begin { id, version }) = line
                    && id == question.id
                {
                    has_begun = version == VERSION;
                    if !has_begun {
                        return Err(AnswerError::Version(version));
                    }
                }
                continue;
            }
            match line? {
                Line::Begin { .. } => return Err(AnswerError::Disorder("an answer within another one")),
                Line::End { id } if id == question.id => return Ok(()),
                Line::End { .. } => return Err(AnswerError::Disorder("the end of another answer")),
                Line::Note(text) => {
                    self.queue.queue_state().answer_statistics.note(&format!("in the guest: {text}"));
                }
                Line::Poisoned => {
                    is_poisoned = true;
                    self.queue.queue_state().answer_statistics.poisoned = true;
                }
                Line::Pages(kind, ranges) => {
                    for range in &ranges {
                        // This also limits the work that the guest can cause.
                        if range.start < next[kind as usize] {
                            return Err(AnswerError::Disorder("pages that are not in ascending order"));
                        }
                        next[kind as usize] = range.end;
                        if !(is_poisoned && kind == Kind::Free) {
                            self.record_hint(question.id, kind, range);
                        }
                    }
                }
            }
        }
        Err(AnswerError::Disorder("it never ends"))
    }

    /// Records the guest's page numbers as pages of the blocks.
    fn record_hint(&self, answer: u64, kind: Kind, pages: &Pages) {
        for (block, pages) in block_ranges(&self.seen, pages) {
            match kind {
                Kind::Free => self.hinted.add_free(answer, block, pages),
                Kind::Cache => self.hinted.add_cache(answer, block, pages),
                Kind::Memory => {}
            }
        }
    }

    /// Reads a line, its end included.
    fn read_line(&mut self, line: &mut Vec<u8>, deadline: Instant) -> Result<(), AnswerError> {
        line.clear();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(AnswerError::Late);
            }
            if self.lines.buffer().is_empty() {
                self.lines.get_ref().set_read_timeout(Some(left))?;
            }
            let there = match self.lines.fill_buf() {
                Ok([]) => return Err(AnswerError::Gone),
                Ok(there) => there,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(late(error)),
            };
            let end = there.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
            let taken = end.unwrap_or(there.len());
            if line.len() + taken > LINE_BYTES {
                return Err(AnswerError::Disorder("a line that is too long"));
            }
            line.extend_from_slice(&there[..taken]);
            self.lines.consume(taken);
            if end.is_some() {
                return Ok(());
            }
        }
    }
}

fn late(error: io::Error) -> AnswerError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => AnswerError::Late,
        _ => AnswerError::Port(error),
    }
}

/// Returns the blocks, and the pages in them, that the guest sees at these pages.
fn block_ranges<'a>(
    seen: &'a [GuestMapping],
    pages: &'a Pages,
) -> impl Iterator<Item = (usize, Range<u64>)> + 'a {
    seen.iter().filter_map(|seen| {
        let first = seen.guest_address.div_ceil(PAGE_BYTES);
        let end = (seen.guest_address.checked_add(seen.bytes)?) / PAGE_BYTES;
        let (start, end) = (pages.start.max(first), pages.end.min(end));
        // A piece that does not consist of whole pages of the block has no page that could be recorded.
        let is_whole = seen.guest_address % PAGE_BYTES == seen.offset_bytes % PAGE_BYTES;
        (is_whole && start < end).then(|| {
            let at = |page: u64| (page * PAGE_BYTES - seen.guest_address + seen.offset_bytes) / PAGE_BYTES;
            (seen.block, at(start)..at(end))
        })
    })
}

#[cfg(test)]
mod tests;
