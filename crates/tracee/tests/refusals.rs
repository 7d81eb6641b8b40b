//! Processes that cannot be worked on get a clear error and are left as they were; stopped ones
//! stay stopped.

#![allow(clippy::panic, clippy::unwrap_used, reason = "tests")]

mod common;

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command};
use std::time::Duration;

use common::{Victim, injector};
use nix::libc;
use nix::sys::ptrace;
use nix::unistd::Pid;
use whimbrel_tracee::{AddressRange, InjectError, Injector, Process, ProcessError, RemoteMemory, Signal};

#[test]
fn a_debugger_is_named() {
    let victim = Victim::start(&["mode-quiet"]);
    let pid = Pid::from_raw(victim.process.pid() as i32);
    ptrace::seize(pid, ptrace::Options::empty()).unwrap();
    let error = injector().create_userfaultfd(&victim.process).unwrap_err();
    let me = std::process::id();
    assert!(matches!(error, InjectError::Traced { tracer, .. } if tracer == me), "{error:?}");
    assert!(error.to_string().contains(&format!("traced by process {me} (refusals-")), "{error}");
}

#[test]
fn a_process_that_has_ended_is_gone() {
    let mut victim = Victim::start(&["mode-quiet"]);
    victim.child.kill().unwrap();
    victim.child.wait().unwrap();
    let error = injector().create_userfaultfd(&victim.process).unwrap_err();
    assert!(matches!(error, InjectError::Process(ProcessError::Gone { .. })), "{error:?}");
}

#[test]
fn another_user_may_not() {
    let victim = Victim::start(&["mode-quiet"]);
    // The injector in a directory that every user can reach.
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let program = directory.path().join("injector");
    std::fs::copy(env!("CARGO_BIN_EXE_tracee-test-injector"), &program).unwrap();
    let arguments = ["--reuid=65534", "--regid=65534", "--clear-groups"].map(OsString::from);
    let arguments = arguments.into_iter().chain([program.into()]).collect();
    let error = Injector::new("/usr/bin/setpriv".into(), arguments).create_userfaultfd(&victim.process);
    assert!(matches!(error, Err(InjectError::NotPermitted { .. })), "{error:?}");
    injector().create_userfaultfd(&victim.process).unwrap();
}

#[test]
fn a_process_in_an_uninterruptible_call_is_let_go() {
    let mut victim = Victim::start(&["mode-uninterruptible"]);
    assert_eq!(victim.process.status().unwrap().state, 'D');
    let injector = injector();
    let error = injector.create_userfaultfd(&victim.process).unwrap_err();
    assert!(matches!(error, InjectError::Uninterruptible { .. }), "{error:?}");
    // The injector had to end to release it.
    assert_eq!(victim.process.status().unwrap().tracer, None);
    victim.tell("");
    assert!(victim.process.wait_exit(Some(Duration::from_mins(1))).unwrap());
    victim.assert_well();
}

fn with_filter(answer: u32, calls: &[i64]) -> Victim {
    let mut arguments = vec!["mode-seccomp".to_owned(), answer.to_string()];
    arguments.extend(calls.iter().map(ToString::to_string));
    Victim::start(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn a_filter_that_would_refuse_or_kill_is_asked_before() {
    let injector = injector();
    for (answer, text) in [
        (libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, "responds to the call with Operation not permitted"),
        (libc::SECCOMP_RET_KILL_PROCESS, "responds to the call with \"kill the process\""),
        (libc::SECCOMP_RET_KILL_THREAD, "responds to the call with \"kill the thread\""),
        (libc::SECCOMP_RET_TRAP, "responds to the call with SIGSYS"),
    ] {
        for call in [libc::SYS_userfaultfd, libc::SYS_rt_sigreturn] {
            let victim = with_filter(answer, &[call]);
            let error = injector.create_userfaultfd(&victim.process).unwrap_err();
            assert!(matches!(error, InjectError::Seccomp { .. }), "{error:?}");
            assert!(error.to_string().contains(text), "{error}");
            victim.assert_well();
        }
    }
    // A filter that allows these calls, like QEMU's own.
    let victim = with_filter(libc::SECCOMP_RET_KILL_PROCESS, &[libc::SYS_execve, libc::SYS_fork]);
    injector.create_userfaultfd(&victim.process).unwrap();
    victim.assert_well();
}

#[test]
fn a_call_that_the_kernel_refuses_is_reported() {
    let victim = Victim::start(&["mode-quiet"]);
    let injector = injector();
    let error = injector.discard(&victim.process, &[AddressRange::new(0x1001, 0x2000)]).unwrap_err();
    let InjectError::Call { call: "madvise", source, .. } = error else { panic!("{error:?}") };
    assert_eq!(source.raw_os_error(), Some(libc::EINVAL));
    victim.assert_well();
}

#[test]
fn a_process_that_dispatches_its_calls_is_refused() {
    let victim = Victim::start(&["mode-dispatch"]);
    let error = injector().create_userfaultfd(&victim.process).unwrap_err();
    assert!(matches!(error, InjectError::Dispatched { .. }), "{error:?}");
    victim.assert_well();
}

#[test]
fn a_thread_in_a_restartable_sequence_is_not_diverted() {
    let victim = Victim::start(&["mode-rseq"]);
    let injector = injector();
    // Often the thread is at the start of the sequence: the kernel has just sent it there.
    let refused = (0..2000).any(|_| match injector.create_userfaultfd(&victim.process) {
        Ok(_) => false,
        Err(InjectError::Changed { .. }) => true,
        Err(error) => panic!("{error:?}"),
    });
    assert!(refused, "never met in its sequence");
    assert!(victim.process.is_alive());
}

/// Starts a program of one page: these instructions, for this class of ELF. Returns when it is in
/// the call with number `call`; `None` if the kernel does not run such programs.
fn program(class: u8, code: &[u8], call: u32) -> Option<(Child, Process)> {
    let directory = tempfile::tempdir().unwrap();
    let mut elf = vec![0x7f, b'E', b'L', b'F', class, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let base = 0x40_0000u32;
    let wide = class == 2;
    let head = if wide { 64 + 56 } else { 52 + 32 };
    let word = |out: &mut Vec<u8>, value: u32| {
        out.extend(value.to_le_bytes());
        if wide {
            out.extend([0; 4]);
        }
    };
    elf.extend(2u16.to_le_bytes());
    elf.extend(if wide { 62u16 } else { 3 }.to_le_bytes());
    elf.extend(1u32.to_le_bytes());
    word(&mut elf, base + head);
    word(&mut elf, if wide { 64 } else { 52 });
    word(&mut elf, 0);
    elf.extend([0; 4]);
    for half in if wide { [64u16, 56, 1, 0, 0, 0] } else { [52, 32, 1, 0, 0, 0] } {
        elf.extend(half.to_le_bytes());
    }
    let len = head + code.len() as u32;
    elf.extend(1u32.to_le_bytes());
    if wide {
        elf.extend(5u32.to_le_bytes());
    }
    for value in [0, base, base, len, len] {
        word(&mut elf, value);
    }
    if !wide {
        elf.extend(5u32.to_le_bytes());
    }
    word(&mut elf, 0x1000);
    elf.extend(code);
    let path = directory.path().join(format!("program-{class}"));
    std::fs::write(&path, elf).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    let child = loop {
        match Command::new(&path).spawn() {
            Err(error) if error.raw_os_error() == Some(libc::ENOEXEC) => return None,
            // Another test has just forked, with the file still open for writing.
            Err(error) if error.raw_os_error() == Some(libc::ETXTBSY) => std::thread::yield_now(),
            child => break child.unwrap(),
        }
    };
    let process = Process::open(child.id()).unwrap();
    while !process.read("syscall").unwrap().starts_with(&format!("{call} ")) {
        std::thread::yield_now();
    }
    Some((child, process))
}

#[test]
fn a_32_bit_program_is_refused() {
    // mov $29, %eax (pause); int $0x80; jmp back
    let Some((mut child, process)) = program(1, &[0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7], 29) else {
        return;
    };
    let error = injector().create_userfaultfd(&process).unwrap_err();
    // Its vDSO may lack even the instruction.
    assert!(matches!(error, InjectError::Not64Bit { .. } | InjectError::NoGadget { .. }), "{error:?}");
    assert!(process.is_alive());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_program_without_a_c_library_is_restored() {
    // mov $34, %eax (pause); syscall; jmp back
    let (mut child, process) = program(2, &[0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7], 34).unwrap();
    let injector = injector();
    for _ in 0..100 {
        injector.create_userfaultfd(&process).unwrap();
    }
    let descriptors = process.descriptors().unwrap();
    assert!(!descriptors.iter().any(|(_, target)| target.to_string_lossy().contains("userfaultfd")));
    while !process.read("syscall").unwrap().starts_with("34 ") {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_stopped_process_stays_stopped() {
    let mut victim = Victim::start(&["poll", "signals", "sigsuspend"]);
    let injector = injector();
    let state = |victim: &Victim| victim.process.status().unwrap().state;
    let wait_for = |victim: &Victim, wanted: char| {
        while state(victim) != wanted {
            std::thread::yield_now();
        }
    };
    for thread in victim.threads.values().copied().collect::<Vec<_>>() {
        injector.use_only_thread(thread);
        victim.process.signal(Signal::STOP).unwrap();
        wait_for(&victim, 'T');
        for _ in 0..20 {
            injector.create_userfaultfd(&victim.process).unwrap();
            wait_for(&victim, 'T');
        }
        // Also if the injector dies.
        for step in 1..=injector.steps_taken() {
            injector.die_at_step(step);
            match injector.create_userfaultfd(&victim.process) {
                // A stopped thread stops once more on its way, or not.
                Ok(_) | Err(InjectError::Killed { .. }) => {}
                other => panic!("step {step}: {other:?}"),
            }
            wait_for(&victim, 'T');
        }
        injector.die_at_step(0);
        // Closes existing ones, and cancels the one that would be created after SIGCONT.
        injector.close_leftovers(&victim.process, &[]).unwrap();
        victim.process.signal(Signal::CONT).unwrap();
        victim.assert_goes_on();
        assert_eq!(victim.userfaultfds(), 0);
    }
    victim.assert_well();
}

#[test]
fn stops_that_come_in_the_middle_are_not_lost() {
    let mut victim = Victim::start(&["poll", "pipe", "general-registers"]);
    let injector = injector();
    for round in 0..100u32 {
        let process = victim.process.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..round % 7 {
                    std::thread::yield_now();
                }
                process.signal(Signal::STOP).unwrap();
            });
            for _ in 0..3 {
                injector.create_userfaultfd(&victim.process).unwrap();
            }
        });
        while victim.process.status().unwrap().state != 'T' {
            std::thread::yield_now();
        }
        victim.process.signal(Signal::CONT).unwrap();
    }
    victim.assert_goes_on();
    assert_eq!(victim.userfaultfds(), 0);
    victim.assert_well();
}

#[test]
fn a_userfaultfd_of_the_program_itself_is_not_closed() {
    let victim = Victim::start(&["mode-userfaultfd"]);
    let injector = injector();
    assert_eq!(victim.userfaultfds(), 1);
    // Some that an injector could not close. Each is created when the thread gets to run.
    injector.create_userfaultfd(&victim.process).unwrap();
    injector.die_at_step(injector.steps_taken() / 2);
    injector.create_userfaultfd(&victim.process).unwrap_err();
    injector.die_at_step(0);
    while victim.userfaultfds() < 2 {
        std::thread::yield_now();
    }
    let all = victim.process.descriptors().unwrap();
    let mut userfaultfds = all.iter().filter(|(_, target)| target.to_string_lossy().contains("userfaultfd"));
    let last = userfaultfds.next_back().unwrap().0;
    assert_eq!(injector.close_leftovers(&victim.process, &[last]).unwrap(), 0);
    assert_eq!(victim.userfaultfds(), 2);
    assert_eq!(injector.close_leftovers(&victim.process, &[]).unwrap(), 1);
    assert_eq!(victim.userfaultfds(), 1);
    victim.assert_well();
}

#[test]
fn anonymous_memory_is_discarded() {
    let mut victim = Victim::start(&["mode-memory"]);
    let range = victim.map("anonymous", 4 << 20);
    victim.ask(&format!("write 0 {} 1", range.len()));
    let memory = RemoteMemory::new(&victim.process).unwrap();
    let mut before = vec![0; range.len() as usize];
    memory.read(range.start, &mut before).unwrap();
    // Every second page: more ranges than one message can contain.
    let pages: Vec<AddressRange> =
        (0..512).map(|page| AddressRange::with_len(range.start + page * 8192, 4096)).collect();
    let twice: Vec<AddressRange> = pages.iter().chain(&pages).copied().collect();
    injector().discard(&victim.process, &twice).unwrap();
    let mut after = vec![0; range.len() as usize];
    memory.read(range.start, &mut after).unwrap();
    for (page, (old, new)) in before.chunks(4096).zip(after.chunks(4096)).enumerate() {
        if page % 2 == 0 {
            assert!(new.iter().all(|&byte| byte == 0));
        } else {
            assert!(old == new && new.iter().any(|&byte| byte != 0));
        }
    }
    victim.assert_well();
}

#[test]
fn a_program_that_is_no_injector_is_reported() {
    let victim = Victim::start(&["mode-quiet"]);
    let error = Injector::new("/nonexistent/injector".into(), Vec::new()).create_userfaultfd(&victim.process);
    assert!(matches!(error, Err(InjectError::Injector { action: "start", .. })), "{error:?}");
    let error = Injector::new("/bin/true".into(), Vec::new()).create_userfaultfd(&victim.process);
    assert!(matches!(error, Err(InjectError::Killed { .. })), "{error:?}");
}
