//! Messages between the agent and the injector: one message of words each way, over a socket pair
//! of type `SOCK_SEQPACKET` between two processes of one program.

use nix::libc;

/// Maximum number of threads to try, and of arguments, in one request.
pub(super) const MAX_THREADS: usize = 32;
pub(super) const MAX_ARGUMENTS: usize = 1024;

const HEAD: usize = 9;
pub(super) const MAX_WORDS: usize = HEAD + MAX_THREADS + MAX_ARGUMENTS;
/// "whimbre1": identifies an injector, so that no other program is mistaken for one.
const MAGIC: u64 = 0x3165_7262_6d69_6877;

/// Operation in the other process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// Create a userfaultfd, duplicate it here, close it there. Argument: flags of the call.
    CreateUserfaultfd = 1,
    /// Close descriptors. Arguments: their numbers.
    Close = 2,
    /// `madvise(MADV_DONTNEED)`. Arguments: address and length, in turns.
    Discard = 3,
    /// Resume threads that an earlier injector diverted, and that did not make their call yet,
    /// without that call. Checks all threads of the request.
    Cancel = 4,
    /// Create a userfaultfd, duplicate it here, and leave it open there. The answer's number is that of the descriptor
    /// there.
    CreateLastingUserfaultfd = 5,
}

impl Operation {
    const ALL: [Self; 5] =
        [Self::CreateUserfaultfd, Self::Close, Self::Discard, Self::Cancel, Self::CreateLastingUserfaultfd];
}

/// A request of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) operation: Operation,
    pub(super) pid: i32,
    pub(super) start_time: u64,
    /// Address of `syscall; ret`, or of `syscall` alone if `sigreturn` is 0.
    pub(super) gadget: u64,
    /// Address of a sequence that calls `rt_sigreturn`; 0 if none was found.
    pub(super) sigreturn: u64,
    /// For tests: the injector kills itself at this step, counted from 1.
    pub(super) die_at: u64,
    /// Threads to try, best first.
    pub(super) threads: Vec<i32>,
    pub(super) arguments: Vec<u64>,
}

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut words = vec![
            MAGIC,
            self.operation as u64,
            self.pid as u64,
            self.start_time,
            self.gadget,
            self.sigreturn,
            self.die_at,
            self.threads.len() as u64,
            self.arguments.len() as u64,
        ];
        words.extend(self.threads.iter().map(|&thread| thread as u64));
        words.extend(&self.arguments);
        to_bytes(&words)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let words = from_bytes(bytes)?;
        let (head, rest) = words.split_at_checked(HEAD)?;
        let &[MAGIC, operation, pid, start_time, gadget, sigreturn, die_at, threads, arguments] = head else {
            return None;
        };
        let operation = Operation::ALL.into_iter().find(|&known| known as u64 == operation)?;
        let (threads, rest) = rest.split_at_checked(usize::try_from(threads).ok()?)?;
        if rest.len() as u64 != arguments || threads.len() > MAX_THREADS || rest.len() > MAX_ARGUMENTS {
            return None;
        }
        Some(Self {
            operation,
            pid: i32::try_from(pid).ok()?,
            start_time,
            gadget,
            sigreturn,
            die_at,
            threads: threads.iter().map(|&thread| i32::try_from(thread)).collect::<Result<_, _>>().ok()?,
            arguments: rest.to_vec(),
        })
    }
}

/// Failure of an operation. The second word of a reply explains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The process has ended, or is another one.
    Gone,
    /// Another process (its number) traces it.
    Traced(u64),
    /// The kernel does not permit to trace it.
    NotPermitted,
    /// No thread could be stopped.
    Uninterruptible,
    /// A seccomp filter would answer with this action.
    Seccomp(u64),
    /// There is a seccomp filter, and the kernel (this error) does not show it.
    SeccompUnknown(u64),
    /// The process runs 32-bit code.
    Not64Bit,
    /// The process dispatches its system calls to a handler of its own.
    Dispatched,
    /// The instructions are no longer where they were found.
    Moved,
    /// Every thread was at a place where it must not be diverted.
    Busy,
    /// The injected call returned this error.
    Call(u64),
    /// The injected call ended in this signal.
    Signal(u64),
    /// A call of the injector itself returned this error.
    Kernel(u64),
    /// The request could not be parsed.
    Request,
    /// The injected call has not returned yet.
    Late,
}

impl Failure {
    fn words(self) -> [u64; 2] {
        match self {
            Self::Gone => [1, 0],
            Self::Traced(by) => [2, by],
            Self::NotPermitted => [3, 0],
            Self::Uninterruptible => [4, 0],
            Self::Seccomp(action) => [5, action],
            Self::SeccompUnknown(error) => [6, error],
            Self::Not64Bit => [7, 0],
            Self::Dispatched => [8, 0],
            Self::Moved => [9, 0],
            Self::Busy => [10, 0],
            Self::Call(error) => [11, error],
            Self::Signal(signal) => [12, signal],
            Self::Kernel(error) => [13, error],
            Self::Request => [14, 0],
            Self::Late => [15, 0],
        }
    }

    fn from_words(kind: u64, detail: u64) -> Option<Self> {
        Some(match kind {
            1 => Self::Gone,
            2 => Self::Traced(detail),
            3 => Self::NotPermitted,
            4 => Self::Uninterruptible,
            5 => Self::Seccomp(detail),
            6 => Self::SeccompUnknown(detail),
            7 => Self::Not64Bit,
            8 => Self::Dispatched,
            9 => Self::Moved,
            10 => Self::Busy,
            11 => Self::Call(detail),
            12 => Self::Signal(detail),
            13 => Self::Kernel(detail),
            14 => Self::Request,
            15 => Self::Late,
            _ => return None,
        })
    }
}

/// The answer of the injector; the descriptor of a userfaultfd goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) result: Result<(), Failure>,
    /// Number of arguments that were processed.
    pub(super) done: u64,
    /// Number of steps, for tests that die at each.
    pub(super) steps: u64,
    /// The thread that was used.
    pub(super) thread: i32,
    /// True if the thread would have restored itself.
    pub(super) self_restoring: bool,
    /// True if the injector ends now: it is the only way to release a thread that did not stop in time.
    pub(super) ends: bool,
}

pub(super) const REPLY_BYTES: usize = 8 * 8;

impl Reply {
    pub(super) fn encode(&self) -> Vec<u8> {
        let [kind, detail] = self.result.err().map_or([0, 0], Failure::words);
        let rest = [self.done, self.steps, self.thread as u64, self.self_restoring.into(), self.ends.into()];
        to_bytes(&[&[MAGIC, kind, detail], &rest[..]].concat())
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let [MAGIC, kind, detail, done, steps, thread, self_restoring, ends] = from_bytes(bytes)?[..] else {
            return None;
        };
        let result = if kind == 0 { Ok(()) } else { Err(Failure::from_words(kind, detail)?) };
        let thread = i32::try_from(thread).ok()?;
        let (self_restoring, ends) = (self_restoring != 0, ends != 0);
        Some(Self { result, done, steps, thread, self_restoring, ends })
    }
}

fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn from_bytes(bytes: &[u8]) -> Option<Vec<u64>> {
    let (words, []) = bytes.as_chunks::<8>() else { return None };
    Some(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

/// Flags of the injected `userfaultfd`: only faults of user code are ever reported, which is enough
/// for write protection that no thread waits for, and every process may use them.
pub(super) const USERFAULTFD_FLAGS: u64 =
    (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64 | linux_raw_sys::general::UFFD_USER_MODE_ONLY as u64;
/// Flags if threads have to wait: the kernel touches a guest's memory for them, too (KVM, system calls). Not every
/// process may use them (docs/traps.md, trap 9).
pub(super) const LASTING_USERFAULTFD_FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_come_back_as_they_were() {
        let request = Request {
            operation: Operation::Discard,
            pid: 7,
            start_time: 8,
            gadget: 9,
            sigreturn: 10,
            die_at: 11,
            threads: vec![12, 13],
            arguments: vec![14, 15, 16],
        };
        assert_eq!(Request::decode(&request.encode()), Some(request.clone()));
        let mut foreign = request.encode();
        foreign[0] ^= 1;
        assert_eq!(Request::decode(&foreign), None);
        assert_eq!(Request::decode(&request.encode()[..80]), None);
        let all = (1..16).map(|kind| Failure::from_words(kind, 3).unwrap());
        for result in all.map(Err).chain([Ok(())]) {
            let reply = Reply { result, done: 1, steps: 2, thread: 3, self_restoring: true, ends: true };
            let bytes = reply.encode();
            assert_eq!(bytes.len(), REPLY_BYTES);
            assert_eq!(Reply::decode(&bytes).map(|back| back.encode()), Some(bytes));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_understood(bytes in prop::collection::vec(any::<u8>(), 0..200), fix: bool) {
            let mut bytes = bytes;
            if fix && bytes.len() >= 8 {
                bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
            }
            let _ = Request::decode(&bytes);
            let _ = Reply::decode(&bytes);
        }
    }
}
