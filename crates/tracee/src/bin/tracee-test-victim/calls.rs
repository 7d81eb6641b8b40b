//! Threads that wait in system calls and check the results.
//!
//! None of these calls may show a trace of the injection: no early end, no `EINTR`. The exception
//! is `epoll_wait`, for which the kernel itself returns `EINTR` after every stop.

use std::io::{Error, ErrorKind, Read, Write, pipe};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc;

use super::{Prepare, Round};

pub(super) const WORKERS: &[(&str, Prepare)] = &[
    ("poll", poll),
    ("ppoll", ppoll),
    ("select", select),
    ("nanosleep", nanosleep),
    ("clock-nanosleep-until", clock_nanosleep_until),
    ("futex-timeout", futex_timeout),
    ("futex-wake", futex_wake),
    ("pipe", read_pipe),
    ("full-pipe", write_full_pipe),
    ("socket", read_socket),
    ("epoll", epoll),
    ("threads", threads),
    ("plain-calls", plain_calls),
];

const WAIT: Duration = Duration::from_millis(2);
static WAIT_SPEC: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// Checks that a wait lasted for the requested time, and ended without an error.
fn full_wait(began: Instant, result: i64, expected: i64) -> Result<(), String> {
    let error = Error::last_os_error();
    if result != expected {
        return Err(format!("returned {result}, {error}"));
    }
    let took = began.elapsed();
    if took < WAIT { Err(format!("ended after {took:?}")) } else { Ok(()) }
}

fn poll() -> Round {
    let (reader, writer) = pipe().expect("pipe");
    Box::new(move || {
        let _ = &writer;
        let mut wanted = libc::pollfd { fd: reader.as_raw_fd(), events: libc::POLLIN, revents: 0x55 };
        let began = Instant::now();
        // SAFETY: one entry.
        let result = unsafe { libc::poll(&raw mut wanted, 1, 2) };
        full_wait(began, i64::from(result), 0)
    })
}

fn ppoll() -> Round {
    let (reader, writer) = pipe().expect("pipe");
    Box::new(move || {
        let _ = &writer;
        let mut wanted = libc::pollfd { fd: reader.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let set = super::signals::all_but(libc::SIGUSR2);
        let began = Instant::now();
        // SAFETY: one entry, a valid time and a valid set.
        let result = unsafe { libc::ppoll(&raw mut wanted, 1, &raw const WAIT_SPEC, &raw const set) };
        full_wait(began, i64::from(result), 0)
    })
}

fn select() -> Round {
    Box::new(|| {
        let mut time = libc::timeval { tv_sec: 0, tv_usec: 2000 };
        let began = Instant::now();
        // SAFETY: no sets, a valid time.
        let result = unsafe { libc::select(0, null_mut(), null_mut(), null_mut(), &raw mut time) };
        full_wait(began, i64::from(result), 0)
    })
}

fn nanosleep() -> Round {
    Box::new(|| {
        let began = Instant::now();
        // SAFETY: a valid time.
        let result = unsafe { libc::nanosleep(&raw const WAIT_SPEC, null_mut()) };
        full_wait(began, i64::from(result), 0)
    })
}

fn clock_nanosleep_until() -> Round {
    Box::new(|| {
        let mut until = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let began = Instant::now();
        // SAFETY: writable for one timespec.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut until) };
        until.tv_nsec += WAIT_SPEC.tv_nsec;
        until.tv_sec += until.tv_nsec / 1_000_000_000;
        until.tv_nsec %= 1_000_000_000;
        // SAFETY: a valid time.
        let result = unsafe {
            libc::clock_nanosleep(libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME, &raw const until, null_mut())
        };
        full_wait(began, i64::from(result), 0)
    })
}

/// Calls `futex` as C libraries do: the number right before the instruction, not through a function
/// that has it as an argument.
fn futex(word: &AtomicU32, operation: i32, value: u32, time: *const libc::timespec) -> Result<i64, i32> {
    let result: i64;
    // SAFETY: the word lives as long as its borrow; `time` is null or valid.
    unsafe {
        std::arch::asm!(
            "mov eax, 202", "syscall",
            in("rdi") word.as_ptr(), in("rsi") operation, in("rdx") value, in("r10") time,
            lateout("rax") result, out("rcx") _, out("r11") _,
        );
    }
    if result < 0 { Err(-result as i32) } else { Ok(result) }
}

fn futex_timeout() -> Round {
    Box::new(|| {
        let word = AtomicU32::new(7);
        let began = Instant::now();
        match futex(&word, libc::FUTEX_WAIT, 7, &raw const WAIT_SPEC) {
            Err(libc::ETIMEDOUT) => full_wait(began, 0, 0),
            other => Err(format!("returned {other:?}")),
        }
    })
}

/// Returns two threads that wake each other in turns.
fn futex_wake() -> Round {
    static TURN: AtomicU32 = AtomicU32::new(0);
    fn wait_for(turn: u32) -> Result<(), String> {
        while TURN.load(Ordering::Acquire) != turn {
            match futex(&TURN, libc::FUTEX_WAIT, 1 - turn, null()) {
                // EAGAIN: the turn changed before the wait.
                Ok(0) | Err(libc::EAGAIN) => {}
                other => return Err(format!("returned {other:?}")),
            }
        }
        Ok(())
    }
    fn pass_to(turn: u32) {
        TURN.store(turn, Ordering::Release);
        let _ = futex(&TURN, libc::FUTEX_WAKE, 1, null());
    }
    thread::spawn(|| {
        loop {
            if let Err(problem) = wait_for(1) {
                super::fail(&problem);
            }
            thread::sleep(Duration::from_micros(200));
            pass_to(0);
        }
    });
    Box::new(|| {
        pass_to(1);
        wait_for(0)
    })
}

/// Sends consecutive numbers, with pauses, for ever.
fn count_into(mut sink: impl Write + Send + 'static) {
    thread::spawn(move || {
        for number in 0u64.. {
            if sink.write_all(&number.to_le_bytes()).is_err() {
                return;
            }
            if number % 16 == 0 {
                thread::sleep(Duration::from_micros(300));
            }
        }
    });
}

/// Reads consecutive numbers with bare `read`s, which must not return `EINTR`.
fn expect_numbers(mut source: impl Read + 'static) -> Round {
    let mut expected = 0u64;
    Box::new(move || {
        let mut bytes = [0; 8];
        let mut have = 0;
        while have < 8 {
            match source.read(&mut bytes[have..]) {
                Ok(0) => return Err("end of file".into()),
                Ok(some) => have += some,
                Err(error) => return Err(format!("read: {error}")),
            }
        }
        let number = u64::from_le_bytes(bytes);
        if number != expected {
            return Err(format!("read {number}, expected {expected}"));
        }
        expected += 1;
        Ok(())
    })
}

fn read_pipe() -> Round {
    let (reader, writer) = pipe().expect("pipe");
    count_into(writer);
    expect_numbers(reader)
}

fn read_socket() -> Round {
    let (reader, writer) = UnixStream::pair().expect("socketpair");
    count_into(writer);
    expect_numbers(reader)
}

/// Fills a pipe that is read slowly, so that the write waits.
fn write_full_pipe() -> Round {
    let (reader, mut writer) = pipe().expect("pipe");
    thread::spawn(move || {
        let mut next = expect_numbers(reader);
        for round in 0u64.. {
            match next() {
                Ok(()) => {}
                // The program ends.
                Err(problem) if problem == "end of file" => return,
                Err(problem) => super::fail(&problem),
            }
            if round % 512 == 0 {
                thread::sleep(Duration::from_micros(500));
            }
        }
    });
    let mut number = 0u64;
    Box::new(move || {
        match writer.write(&number.to_le_bytes()) {
            Ok(8) => {}
            other => return Err(format!("write: {other:?}")),
        }
        number += 1;
        Ok(())
    })
}

fn epoll() -> Round {
    let (reader, writer) = pipe().expect("pipe");
    // SAFETY: the only argument is a flag.
    let epoll: RawFd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 4711 };
    // SAFETY: a valid event.
    unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, reader.as_raw_fd(), &raw mut event) };
    count_into(writer);
    let mut next = expect_numbers(reader);
    Box::new(move || {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event.
        let count = unsafe { libc::epoll_wait(epoll, &raw mut event, 1, 1000) };
        let error = Error::last_os_error();
        let data = event.u64;
        match count {
            1 if data == 4711 => next(),
            -1 if error.kind() == ErrorKind::Interrupted => Ok(()),
            _ => Err(format!("epoll_wait returned {count}, {error}, data {data}")),
        }
    })
}

/// Starts threads that end soon.
fn threads() -> Round {
    Box::new(|| {
        let sum: u64 = (0..4).map(|i| thread::spawn(move || i * i)).map(|one| one.join().unwrap_or(0)).sum();
        if sum == 14 { Ok(()) } else { Err(format!("{sum} from four threads")) }
    })
}

/// Makes calls that do not wait, so that a stop is between them or at their edges.
fn plain_calls() -> Round {
    let me = std::process::id() as i32;
    Box::new(move || {
        for _ in 0..200 {
            // SAFETY: the call has no arguments.
            let pid = unsafe { libc::syscall(libc::SYS_getpid) };
            if pid != i64::from(me) {
                return Err(format!("getpid returned {pid}"));
            }
            // SAFETY: all arguments are integers; there is no such descriptor.
            let closed = unsafe { libc::syscall(libc::SYS_close, -1) };
            let error = Error::last_os_error().raw_os_error();
            if closed != -1 || error != Some(libc::EBADF) {
                return Err(format!("close(-1) returned {closed}, {error:?}"));
            }
        }
        Ok(())
    })
}
