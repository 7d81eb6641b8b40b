//! Processes in special situations, each with one thread. They print `ready` and then stay.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use linux_raw_sys::general as raw;
use nix::libc;

/// Function of a mode; its arguments are those after the mode's name.
type Mode = fn(&[String]);

/// Names and functions of the modes.
pub(super) const MODES: &[(&str, Mode)] = &[
    ("mode-memory", super::memory::serve),
    ("mode-quiet", quiet),
    ("mode-seccomp", seccomp),
    ("mode-userfaultfd", userfaultfd),
    ("mode-uninterruptible", uninterruptible),
    ("mode-dispatch", dispatch),
    ("mode-rseq", rseq),
    ("mode-sleep", sleep),
    ("mode-linger", linger),
];

/// Prints `ready`, and stays until the input ends.
pub(super) fn stay() {
    println!("ready");
    let _ = std::io::stdout().flush();
    let _ = std::io::stdin().read(&mut [0]);
}

fn quiet(_: &[String]) {
    stay();
}

/// Installs a seccomp filter that answers the calls with numbers `arguments[1..]` with
/// `arguments[0]`, and permits all others.
fn seccomp(arguments: &[String]) {
    let numbers: Vec<u32> = arguments.iter().filter_map(|one| one.parse().ok()).collect();
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = vec![op(0x20, 0, 0, 0)];
    for &number in &numbers[1..] {
        filter.push(op(0x15, 0, 1, number));
        filter.push(op(0x06, 0, 0, numbers[0]));
    }
    filter.push(op(0x06, 0, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: all arguments are integers.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: a valid program that outlives the call.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, 2, &raw const program) };
    assert_eq!(result, 0, "no seccomp");
    stay();
}

/// Creates a userfaultfd of its own and uses it.
fn userfaultfd(_: &[String]) {
    // SAFETY: the only argument is a set of flags.
    let fd =
        unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | raw::UFFD_USER_MODE_ONLY as i32) };
    // SAFETY: the kernel has just made it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut api = raw::uffdio_api { api: u64::from(raw::UFFD_API), features: 0, ioctls: 0 };
    // SAFETY: the structure of this request.
    let result = unsafe {
        libc::ioctl(fd.as_raw_fd(), libc::c_ulong::from(linux_raw_sys::ioctl::UFFDIO_API), &raw mut api)
    };
    assert_eq!(result, 0, "no userfaultfd");
    stay();
}

/// Waits in `vfork` for a child that does not return until the input ends.
fn uninterruptible(_: &[String]) {
    extern "C" fn child(_: *mut libc::c_void) -> libc::c_int {
        stay();
        // SAFETY: ends this process at once.
        unsafe { libc::_exit(0) }
    }
    let mut stack = vec![0u8; 256 * 1024];
    let top = (stack.as_mut_ptr_range().end as usize & !63) as *mut libc::c_void;
    // SAFETY: the child has a stack of its own, and this process waits until it has ended.
    unsafe {
        libc::clone(child, top, libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD, std::ptr::null_mut())
    };
}

/// Dispatches its system calls to a handler of its own, except for those in all of its memory.
fn dispatch(_: &[String]) {
    const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
    let selector = Box::leak(Box::new(0u8));
    // SAFETY: the selector byte lives for ever and its value means "allow".
    let result =
        unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, 1, 0usize, 0usize, std::ptr::from_mut(selector)) };
    assert_eq!(result, 0, "no user dispatch");
    stay();
}

/// Always runs a restartable sequence: an endless one, which the kernel restarts after every
/// interruption.
fn rseq(_: &[String]) {
    unsafe extern "C" {
        /// Offset of glibc's `struct rseq` of this thread from the thread pointer.
        static __rseq_offset: isize;
    }
    let thread: usize;
    // SAFETY: reads the thread pointer, which the ABI keeps at its own address.
    unsafe { std::arch::asm!("mov {}, fs:[0]", out(reg) thread) };
    // SAFETY: a constant of the C library.
    let area = thread.wrapping_add_signed(unsafe { __rseq_offset });
    println!("ready");
    let _ = std::io::stdout().flush();
    // Version and flags, start, length, abort handler.
    let mut sequence = [0u64; 4];
    // SAFETY: never leaves; the kernel jumps to 4, which the agreed signature precedes.
    unsafe {
        std::arch::asm!(
            "lea {scratch}, [rip + 2f]", "mov [{sequence} + 8], {scratch}",
            "lea {scratch}, [rip + 3f]", "sub {scratch}, [{sequence} + 8]", "mov [{sequence} + 16], {scratch}",
            "lea {scratch}, [rip + 4f]", "mov [{sequence} + 24], {scratch}",
            "jmp 4f",
            ".byte 0x0f, 0xb9, 0x3d", ".long 0x53053053",
            "4:", "mov [{area} + 8], {sequence}",
            "2:", "pause", "jmp 2b",
            "3:", "ud2",
            area = in(reg) area,
            sequence = in(reg) sequence.as_mut_ptr(),
            scratch = in(reg) 0usize,
            options(noreturn),
        );
    }
}

/// Sleeps once, for two seconds, which must not be cut short.
fn sleep(_: &[String]) {
    println!("ready");
    let _ = std::io::stdout().flush();
    let time = libc::timespec { tv_sec: 2, tv_nsec: 0 };
    let began = std::time::Instant::now();
    // SAFETY: a valid time.
    let result = unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
    assert_eq!(result, 0, "cut short");
    assert!(began.elapsed().as_secs() >= 2, "too short");
}

/// Runs a thread that computes, and a socket whose `close` returns only when its other end is read, which the line
/// `drain` requests. Reports the socket's descriptor as if it were a thread, and prints `goes on` if the thread has
/// computed since.
fn linger(_: &[String]) {
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::{AtomicU64, Ordering};

    static ROUNDS: AtomicU64 = AtomicU64::new(0);
    let listener = TcpListener::bind("127.0.0.1:0").expect("no listener");
    let mut full = TcpStream::connect(listener.local_addr().expect("no address")).expect("no connection");
    let (mut other, _) = listener.accept().expect("no connection");
    full.set_nonblocking(true).expect("a socket");
    let kind = loop {
        if let Err(error) = full.write(&[7; 1 << 13]) {
            break error.kind();
        }
    };
    assert_eq!(kind, ErrorKind::WouldBlock);
    full.set_nonblocking(false).expect("a socket");
    let for_an_hour = libc::linger { l_onoff: 1, l_linger: 3600 };
    // SAFETY: the structure of this option.
    let result = unsafe {
        let len = size_of::<libc::linger>() as libc::socklen_t;
        libc::setsockopt(
            full.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const for_an_hour).cast(),
            len,
        )
    };
    assert_eq!(result, 0, "no lingering");
    let (notify, thread_id) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = notify.send(nix::unistd::gettid());
        let mut round = super::registers::WORKERS[0].1();
        loop {
            if let Err(problem) = round() {
                super::fail(&problem);
            }
            ROUNDS.fetch_add(1, Ordering::Release);
        }
    });
    println!("thread worker {}", thread_id.recv().expect("a thread"));
    println!("thread socket {}", full.as_raw_fd());
    // The injector closes it.
    std::mem::forget(full);
    println!("ready");
    for line in std::io::stdin().lines() {
        if line.is_ok_and(|line| line == "drain") {
            let before = ROUNDS.load(Ordering::Acquire);
            other.read_to_end(&mut Vec::new()).expect("the end");
            while ROUNDS.load(Ordering::Acquire) < before + 2 {
                std::thread::yield_now();
            }
            println!("goes on");
        }
    }
}
